"""One rank of a comparison: runs the calls of one method, measures them, and compares the results with fp64 values.

Inputs are drawn in small chunks, each with its own seed. So all methods get the same inputs, whatever their sharding.
No rank holds the inputs of the whole sequence, which would count as peak memory.

The ranks of all methods run at the same time, but only those of one method compute. The others wait, and hold no
inputs.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from ring_backends.attention import dilated_attention
from ring_backends.comparison.all_gather import AllGatherExecutor, all_gather_attention
from ring_backends.comparison.exact import exact_attention
from ring_backends.comparison.setup import ALL_GATHER, ONE_RANK, TENSORS, Setup
from ring_backends.cost.machine import (
    device_name,
    peak_memory_bytes,
    reset_peak_memory,
    select_device,
    synchronize,
    synchronize_ranks,
)
from ring_backends.engine.call import AttentionInputs
from ring_backends.engine.wire import POST_SPAN, WAIT_SPAN
from ring_backends.kernels import resolve_dtype
from ring_backends.kernels.base import TILE_SPAN
from ring_backends.registry import available_adapters, load_adapter, without_warnings
from ring_backends.releases import versions
from ring_backends.ring.launch import environment_variables
from ring_backends.ring.ring import Ring

CHUNK = 1024
_WARM_UP_TOKENS = 64  # per rank

Span = tuple[str, str, float, float]
"""(part of the call, kind of span, start, end). Times are seconds of the monotonic clock of the host."""

_Measured = TypeVar("_Measured")

_WHAT = {TILE_SPAN: "tile", POST_SPAN: "post", WAIT_SPAN: "wait"}
_PROFILER_LOG = "KINETO_LOG_LEVEL"
_START = "ring_backends::start"
_PART = "ring_backends::part "


def prepare(setup: Setup, directory: Path) -> dict[str, Any]:
    """Compute the fp64 values, and write them into ``directory``.

    Returns:
        A dict. ``setup`` is the setup, with ``"auto"`` replaced by the device and dtype to use. ``adapters`` is the
        result of :func:`~ring_backends.available_adapters`. ``versions`` and ``device`` describe this machine.

    Raises:
        ValueError: the device is ``"cuda"``, and the machine has fewer GPUs than ranks.
    """
    device = select_device(setup.device, setup.ring_size)
    dtype = resolve_dtype(setup.dtype, device)
    setup = dataclasses.replace(setup, device=device.type, dtype=str(dtype).removeprefix("torch."))
    query, key, value, grad_out = (x.detach()[0] for x in _inputs(setup, Ring(), device))
    pattern = setup.pattern
    branches = pattern.segment_lengths, pattern.dilation_rates, pattern.window_lengths
    results = exact_attention(query, key, value, grad_out, *branches, is_causal=setup.is_causal)
    for name, tensor in zip(TENSORS, results, strict=True):
        torch.save(tensor.cpu(), directory / f"{name}.pt")
    return {"setup": setup, "adapters": available_adapters(), "versions": versions(), "device": device_name(device)}


def measure(setup: Setup, name: str, directory: Path) -> Iterator[Any]:
    """Measure one method on this rank, in steps. All ranks of the method take the same steps.

    The first step measures memory, bytes and error, and yields a dict. Each of the next ``setup.repeats`` steps yields
    the seconds of a forward and of a backward. With ``setup.timeline``, the last step yields the spans of an adapter.

    Args:
        setup: from :func:`prepare`.
        name: name of an adapter, ``ALL_GATHER`` or ``ONE_RANK``.
        directory: the directory with the fp64 values.
    """
    device = select_device(setup.device)
    is_adapter = name not in (ALL_GATHER, ONE_RANK)
    with without_warnings():
        module = load_adapter(name if is_adapter else "native")
    groups = setup.ulysses_size if is_adapter else 1
    ring: Ring = module.initialize(layout=setup.layout, buffer_bytes=setup.buffer_bytes, ulysses_size=groups)
    # A small call first, so that loading libraries and opening connections are not measured.
    small = dataclasses.replace(setup, seq_len=_WARM_UP_TOKENS * ring.size)
    _Call(small, _method(small, name, ring, module), ring, device).seconds()

    attend = _method(setup, name, ring, module)
    call = _Call(setup, attend, ring, device)
    synchronize_ranks(device)
    reset_peak_memory(device)
    before = peak_memory_bytes(device)
    ring.traffic.reset()
    out = call.forward()
    forward_bytes = ring.traffic.bytes
    results = [out.detach(), *call.backward(out)]
    synchronize_ranks(device)
    peak = peak_memory_bytes(device) - before
    bytes_sent = {"forward": forward_bytes, "backward": ring.traffic.bytes - forward_bytes}
    if name == ALL_GATHER:
        inputs = AttentionInputs(*call.inputs, is_causal=setup.is_causal, seq_len=setup.seq_len)
        bytes_sent = AllGatherExecutor(inputs, setup.pattern, ring).wire_bytes(inputs.key)
    largest_error, largest = _compare_with_exact(directory, results, ring, setup.seq_len)
    del call, out, results
    _release_memory(device)
    yield {
        "device": device_name(device),
        "peak_memory_bytes": peak,
        "bytes_sent": bytes_sent,
        "bytes_are_computed": name == ALL_GATHER,
        "largest_error": largest_error,
        "largest": largest,
    }
    for _ in range(setup.repeats):
        yield _one_turn(setup, attend, ring, device, _Call.seconds)
    if setup.timeline and is_adapter:
        yield _one_turn(setup, attend, ring, device, _Call.spans)
    if dist.is_initialized():
        dist.destroy_process_group()


def _one_turn(
    setup: Setup, attend: Callable[..., Tensor], ring: Ring, device: torch.device, measure: Callable[[_Call], _Measured]
) -> _Measured:
    """Draw the inputs, measure one call, and release the memory for the other methods."""
    call = _Call(setup, attend, ring, device)
    if device.type == "cuda":
        call.seconds()  # torch allocates again what it has released
    measured = measure(call)
    del call
    _release_memory(device)
    return measured


def _release_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


class _Call:
    """A method with this rank's inputs."""

    def __init__(self, setup: Setup, attend: Callable[..., Tensor], ring: Ring, device: torch.device) -> None:
        query, key, value, self.grad_out = _inputs(setup, ring, device)
        self.inputs, self.device, self.attend = (query, key, value), device, attend

    def forward(self) -> Tensor:
        return self.attend(*self.inputs)

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, self.inputs, self.grad_out)

    def seconds(self) -> tuple[float, float]:
        """Measure the seconds of forward and of backward. All ranks begin each of the two together."""
        synchronize_ranks(self.device)
        started = time.perf_counter()
        out = self.forward()
        synchronize(self.device)
        forward = time.perf_counter() - started
        synchronize_ranks(self.device)
        started = time.perf_counter()
        self.backward(out)
        synchronize(self.device)
        return forward, time.perf_counter() - started

    def spans(self) -> list[Span]:
        return record_spans(self.forward, self.backward, self.device)


def _method(setup: Setup, name: str, ring: Ring, module: Any) -> Callable[..., Tensor]:
    pattern = dataclasses.asdict(setup.pattern)
    sharded: Any = {"is_causal": setup.is_causal, "seq_len": setup.seq_len}
    if name == ONE_RANK:
        return lambda *inputs: cast(Tensor, dilated_attention(*inputs, **pattern, is_causal=setup.is_causal))
    if name == ALL_GATHER:
        return lambda query, key, value: all_gather_attention(query, key, value, setup.pattern, ring, **sharded)
    attention = module.RingDilatedAttention(**pattern, ring=ring)
    return lambda *inputs: cast(Tensor, attention(*inputs, **sharded))


def _inputs(setup: Setup, ring: Ring, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = resolve_dtype(setup.dtype, device)
    return local_inputs(ring, setup.seq_len, setup.num_heads, setup.num_kv_heads, setup.head_dim, dtype, device)


def local_inputs(
    ring: Ring, seq_len: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw this rank's rows of random inputs from a normal distribution.

    The global tensors do not depend on the ring or its layout.

    Returns:
        query, key and value, which require gradients, and the gradient of out: [1, local seq, heads, head_dim] each.
    """
    heads = (num_heads, num_kv_heads, num_kv_heads, num_heads)
    tensors = []
    for index, heads_here in enumerate(heads):
        shape = (1, ring.layout(seq_len).local_len(ring.rank), heads_here, head_dim)
        tensor = torch.empty(shape, dtype=dtype, device=device)
        for local, rows in _chunks(ring, seq_len):
            chunk, first = divmod(rows.start, CHUNK)
            generator = torch.Generator().manual_seed(len(heads) * chunk + index)
            drawn = torch.randn(CHUNK, heads_here, head_dim, generator=generator)
            tensor[0, local] = drawn[first : first + len(rows)].to(device, dtype)
        tensors.append(tensor)
    query, key, value, grad_out = tensors
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_(), grad_out


def _chunks(ring: Ring, seq_len: int) -> Iterator[tuple[slice, range]]:
    """Yield this rank's rows in chunks: their slice of the local tensors, and their global positions."""
    local = 0
    for piece in ring.layout(seq_len).pieces(ring.rank):
        start = piece.start
        while start < piece.stop:
            stop = min(piece.stop, start // CHUNK * CHUNK + CHUNK)
            yield slice(local, local + stop - start), range(start, stop)
            local, start = local + stop - start, stop


def _compare_with_exact(
    directory: Path, results: list[Tensor], ring: Ring, seq_len: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the largest error and the largest fp64 value of each result, over this rank's rows."""
    largest_error, largest = dict.fromkeys(TENSORS, 0.0), dict.fromkeys(TENSORS, 0.0)
    for name, result in zip(TENSORS, results, strict=True):
        exact = torch.load(directory / f"{name}.pt", mmap=True)
        for local, rows in _chunks(ring, seq_len):
            wanted = exact[rows.start : rows.stop]
            error = (result[0, local].cpu().double() - wanted).abs().nan_to_num(nan=math.inf, posinf=math.inf)
            largest_error[name] = max(largest_error[name], error.max().item())
            largest[name] = max(largest[name], wanted.abs().max().item())
    return largest_error, largest


def record_spans(forward: Callable[[], Any], backward: Callable[[Any], object], device: torch.device) -> list[Span]:
    """Run the forward and the backward of a call under torch.profiler. All ranks begin each of the two together.

    Args:
        backward: takes the result of ``forward``.
        device: the device of this rank.

    Returns:
        Spans in order of time. The part of a span is ``"forward"`` or ``"backward"``. Its kind is ``"call"`` for a
        whole part, ``"tile"`` for computing a tile, ``"post"`` for posting a hop, and ``"wait"`` for waiting for a hop.
        On a GPU, the spans show when the host enqueued the work.
    """
    log_level = {} if _PROFILER_LOG in os.environ else {_PROFILER_LOG: "99"}  # nothing; else it prints to stderr
    with environment_variables(log_level), profile(activities=[ProfilerActivity.CPU]) as profiler:
        started = time.monotonic()
        with record_function(_START):
            pass
        synchronize_ranks(device)
        with record_function(f"{_PART}forward"):
            result = forward()
            synchronize(device)
        synchronize_ranks(device)
        with record_function(f"{_PART}backward"):
            backward(result)
            synchronize(device)
    events = profiler.events() or []
    (start,) = (event for event in events if event.name == _START)

    def seconds(microseconds: float) -> float:
        return started + (microseconds - float(start.time_range.start)) / 1e6

    found = []
    for part in (event for event in events if event.name.startswith(_PART)):
        for event in events:
            what = "call" if event is part else _WHAT.get(event.name)
            span = event.time_range
            if what is not None and part.time_range.start <= span.start < part.time_range.end:
                found.append((part.name.removeprefix(_PART), what, seconds(span.start), seconds(span.end)))
    return sorted(found, key=lambda span: span[2:])
