"""What one rank does in ``compare``: one contestant's calls, measured and held against the fp64 numbers.

Inputs are drawn in small chunks, each from a seed of its own. So every contestant has the same, whatever its ranks hold
of them, and no rank ever holds the whole: the peak that is measured is that of the call.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ring_backends import available_adapters, dilated_attention
from ring_backends.cli.all_gather import AllGatherExecutor, all_gather_attention
from ring_backends.cli.compare_options import ALL_GATHER, ONE_RANK, TENSORS, CompareOptions
from ring_backends.cli.exact import exact_attention
from ring_backends.cli.machine import Device, peak_memory_bytes, versions
from ring_backends.cli.measuring import finish, forget_peak, meet
from ring_backends.cli.timeline import Span, record_spans
from ring_backends.engine.inputs import AttentionInputs
from ring_backends.kernels import resolve_dtype
from ring_backends.registry import load_adapter
from ring_backends.ring.ring import Ring

CHUNK = 1024
_WARM_UP_TOKENS = 64  # per rank

Attend = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""(query, key, value, length of the global sequence) -> out."""


def prepare(options: CompareOptions, directory: Path) -> dict[str, Any]:
    """Write the fp64 numbers into ``directory``, and find out what the options mean on this machine.

    Returns:
        ``options`` with device and dtype decided, ``adapters`` as available_adapters() has them, ``versions``, and
        the ``device`` that computed.

    Raises:
        ValueError: fewer GPUs than ranks where CUDA is asked for.
    """
    enough = 0 < options.nproc_per_node <= torch.cuda.device_count()
    if options.device == "cuda" and not enough:
        raise ValueError(
            f"device = 'cuda': torch sees {torch.cuda.device_count()} GPU(s) for {options.nproc_per_node} rank(s); use "
            "--device cpu, or fewer ranks."
        )
    wanted = ("cuda" if enough else "cpu") if options.device == "auto" else options.device
    device = Device.of_this_rank(wanted)
    dtype = str(resolve_dtype(options.dtype, device.torch)).removeprefix("torch.")
    options = dataclasses.replace(options, device=wanted, dtype=dtype)
    query, key, value, grad_out = (x.detach()[0] for x in local_inputs(options, Ring(), device))
    results = exact_attention(query, key, value, grad_out, *options.branches, is_causal=options.causal)
    for name, tensor in zip(TENSORS, results, strict=True):
        torch.save(tensor.cpu(), directory / f"{name}.pt")
    return {"options": options, "adapters": available_adapters(), "versions": versions(), "device": device.name}


def measure(options: CompareOptions, name: str, directory: Path) -> dict[str, Any]:
    """Run one contestant, as the rank that the environment names.

    A first call gives memory, bytes and error; those after it give the times.

    Args:
        options: from :func:`prepare`.
        name: an adapter's name, ``ALL_GATHER`` or ``ONE_RANK``.
        directory: where the fp64 numbers are.
    """
    device = Device.of_this_rank(options.device)
    module = load_adapter("native" if name in (ALL_GATHER, ONE_RANK) else name)
    ring: Ring = module.initialize(layout=options.layout)
    attend = _contestant(options, name, ring, module)
    # What a process does once, such as loading libraries and opening connections, is no cost of the call.
    small = dataclasses.replace(options, seq_len=_WARM_UP_TOKENS * ring.size)
    _timed(attend, *local_inputs(small, ring, device), small.seq_len, device)

    query, key, value, grad_out = inputs = local_inputs(options, ring, device)
    meet(device)
    forget_peak(device)
    held = peak_memory_bytes(device)
    ring.traffic.reset()
    out = attend(query, key, value, options.seq_len)
    forward_bytes = ring.traffic.bytes
    results = [out.detach(), *torch.autograd.grad(out, (query, key, value), grad_out)]
    meet(device)
    peak = peak_memory_bytes(device) - held
    bytes_sent = {"forward": forward_bytes, "backward": ring.traffic.bytes - forward_bytes}
    if name == ALL_GATHER:
        call = AttentionInputs(query, key, key, is_causal=options.causal, seq_len=options.seq_len)
        all_gather = AllGatherExecutor.of(call, options.pattern(), ring)
        bytes_sent = all_gather.wire_bytes(key)
    largest_error, largest = _hold_against_exact(directory, results, ring, options.seq_len)
    del out, results

    seconds = [_timed(attend, *inputs, options.seq_len, device) for _ in range(options.repeats)]
    hops = options.plot is not None and name not in (ALL_GATHER, ONE_RANK)
    spans = _spans(attend, *inputs, options.seq_len, device) if hops else []
    if dist.is_initialized():
        dist.destroy_process_group()
    return {
        "device": device.name,
        "forward_seconds": [forward for forward, _ in seconds],
        "backward_seconds": [backward for _, backward in seconds],
        "peak_memory_bytes": peak,
        "bytes_sent": bytes_sent,
        "bytes_are_computed": name == ALL_GATHER,
        "largest_error": largest_error,
        "largest": largest,
        "spans": spans,
    }


def local_inputs(options: CompareOptions, ring: Ring, device: Device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """This rank's rows of query, key, value (leaves that want gradients) and of the gradient of out.

    [1, local seq, heads, head_dim] each: normal numbers, rounded to the dtype of the options.
    """
    heads = (options.num_heads, options.kv_heads, options.kv_heads, options.num_heads)
    dtype = resolve_dtype(options.dtype, device.torch)
    tensors = []
    for index, num_heads in enumerate(heads):
        shape = (1, ring.layout(options.seq_len).local_len(ring.rank), num_heads, options.head_dim)
        tensor = torch.empty(shape, dtype=dtype, device=device.torch)
        for local, rows in _chunks(ring, options.seq_len):
            chunk, first = divmod(rows.start, CHUNK)
            generator = torch.Generator().manual_seed(len(heads) * chunk + index)
            drawn = torch.randn(CHUNK, num_heads, options.head_dim, generator=generator)
            tensor[0, local] = drawn[first : first + len(rows)].to(device.torch, dtype)
        tensors.append(tensor)
    query, key, value, grad_out = tensors
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_(), grad_out


def _chunks(ring: Ring, seq_len: int) -> Iterator[tuple[slice, range]]:
    """This rank's rows chunk by chunk: where they lie in its tensors, and which positions they are."""
    local = 0
    for piece in ring.layout(seq_len).pieces(ring.rank):
        start = piece.start
        while start < piece.stop:
            stop = min(piece.stop, start // CHUNK * CHUNK + CHUNK)
            yield slice(local, local + stop - start), range(start, stop)
            local, start = local + stop - start, stop


def _contestant(options: CompareOptions, name: str, ring: Ring, module: Any) -> Attend:
    if name == ONE_RANK:
        return lambda query, key, value, seq_len: cast(
            Tensor, dilated_attention(query, key, value, *options.branches, is_causal=options.causal)
        )
    if name == ALL_GATHER:
        return lambda query, key, value, seq_len: all_gather_attention(
            query, key, value, options.pattern(), ring, is_causal=options.causal, seq_len=seq_len
        )
    attention = module.RingDilatedAttention(*options.branches, ring=ring)
    return lambda query, key, value, seq_len: cast(
        Tensor, attention(query, key, value, is_causal=options.causal, seq_len=seq_len)
    )


def _timed(
    attend: Attend, query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, seq_len: int, device: Device
) -> tuple[float, float]:
    """Seconds of forward and of backward, each begun by all ranks together."""
    meet(device)
    started = time.perf_counter()
    out = attend(query, key, value, seq_len)
    finish(device)
    forward = time.perf_counter() - started
    meet(device)
    started = time.perf_counter()
    torch.autograd.grad(out, (query, key, value), grad_out)
    finish(device)
    return forward, time.perf_counter() - started


def _spans(
    attend: Attend, query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, seq_len: int, device: Device
) -> list[Span]:
    """What this rank did when, in one more call."""
    outs = []

    def forward() -> None:
        outs.append(attend(query, key, value, seq_len))
        finish(device)

    def backward() -> None:
        torch.autograd.grad(outs.pop(), (query, key, value), grad_out)
        finish(device)

    return record_spans({"forward": forward, "backward": backward}, lambda: meet(device))


def _hold_against_exact(
    directory: Path, results: list[Tensor], ring: Ring, seq_len: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Of each result on this rank's rows: the largest error, and the largest value that should be there."""
    largest_error, largest = dict.fromkeys(TENSORS, 0.0), dict.fromkeys(TENSORS, 0.0)
    for name, result in zip(TENSORS, results, strict=True):
        exact = torch.load(directory / f"{name}.pt", mmap=True)
        for local, rows in _chunks(ring, seq_len):
            wanted = exact[rows.start : rows.stop]
            error = (result[0, local].cpu().double() - wanted).abs().nan_to_num(nan=math.inf, posinf=math.inf)
            largest_error[name] = max(largest_error[name], error.max().item())
            largest[name] = max(largest[name], wanted.abs().max().item())
    return largest_error, largest
