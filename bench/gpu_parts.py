"""The parts that gpu.py measures on one device. Each yields rows, and leaves out what its budget has no time for.

With a CPU device and shortened calls the parts run for tests. Their times then mean nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from bare_kernels import BareKernels
from case import Case
from flex_method import flex_method
from gpu_cases import ONE_GPU, RINGS
from gpu_clock import Budget, Clock, or_note
from gpu_replay import Replay, busiest_rank, local_copies
from longnet_method import longnet_method
from report import Row
from setups import shortened
from torch import Tensor

from ring_backends import dilated_attention
from ring_backends.kernels import Kernel, KernelInputs, TileInputs, kernels, resolve_dtype

ROWS = tuple(256 << doubling for doubling in range(8))
ROWS_IN_ALL, HEADS, RATE = 32_768, 16, 4
HEAD_DIMS = (64, 128)
SIZES = {64: {"num_heads": 16, "kv_heads": 16}, 128: {"num_heads": 32, "kv_heads": 8}}
RIVAL_LENGTHS = (16_384, 65_536, 131_072)
RING_SIZES = (2, 4, 8, 16, 32, 64)


def fused_kernels(device: torch.device, head_dim: int) -> list[Kernel]:
    """The kernels that run bf16 calls on ``device``, without the math kernel."""
    inputs = KernelInputs(device, torch.bfloat16, head_dim)
    return [kernel for kernel in kernels() if kernel.name != "math" and not kernel.not_supported_reasons(inputs)]


def kernels_alone(clock: Clock, budget: Budget, shrink: int) -> Iterator[Row]:
    """Each kernel on causal tiles of 256 to 32,768 rows: contiguous, and with rows 4 positions apart."""
    for length, head_dim, is_strided in itertools.product(ROWS, HEAD_DIMS, (False, True)):
        length, in_all = max(1, length // shrink), max(1, ROWS_IN_ALL // shrink)
        flops = 4 * in_all * HEADS * head_dim * (length + 1) / 2
        for kernel in fused_kernels(clock.device, head_dim):
            if budget.is_spent:
                return
            tile = [_tile(clock.device, in_all // length, length, head_dim, is_strided) for _ in range(4)]
            found = or_note(lambda kernel=kernel, tile=tile: _kernel_seconds(clock, kernel, tile))
            row: Row = {"kernel": kernel.name, "head_dim": head_dim, "rows": length}
            row["layout"] = "rows 4 apart" if is_strided else "contiguous"
            for direction, products in (("forward", 1.0), ("backward", 2.5)):
                row[f"{direction}_ms"] = ms(found, direction)
                row[f"{direction}_TFLOPs"] = products * flops / found[direction] / 1e12 if direction in found else None
            yield row | {"note": found.get("note", "")}


def ms(found: dict[str, Any], direction: str) -> float | None:
    """The milliseconds of a direction; None if it did not run."""
    return found[direction] * 1e3 if direction in found else None


def _tile(device: torch.device, segments: int, length: int, head_dim: int, is_strided: bool) -> Tensor:
    """[segments, heads, rows, head_dim]."""
    if not is_strided:
        return torch.randn(segments, HEADS, length, head_dim, device=device, dtype=torch.bfloat16)
    whole = torch.randn(segments, length * RATE, HEADS, head_dim, device=device, dtype=torch.bfloat16)
    return whole[:, ::RATE].transpose(1, 2)


def _kernel_seconds(clock: Clock, kernel: Kernel, tile: Sequence[Tensor]) -> dict[str, float]:
    query, key, value, grad_out = tile
    inputs = TileInputs(query, key, value, query.shape[-1] ** -0.5, is_causal=True)
    out, lse = kernel.forward(inputs)
    return {
        "forward": clock.seconds(lambda: kernel.forward(inputs)),
        "backward": clock.seconds(lambda: kernel.backward(inputs, grad_out, out, lse)),
    }


def one_device(clock: Clock, budget: Budget, shrink: int) -> Iterator[Row]:
    """``dilated_attention`` against its bare kernel calls: the calls of the modelled table, and 1M tokens with d 64.

    First with the kernels that ``"auto"`` takes, then with each kernel for all branches.
    """
    cases = [given.case for given in ONE_GPU]
    cases.append(dataclasses.replace(cases[0], seq_len=cases[2].seq_len, branches=cases[2].branches))
    cases = [shortened(case, shrink) for case in cases]
    names = ["auto", *(kernel.name for kernel in fused_kernels(clock.device, max(HEAD_DIMS)))]
    bare: dict[Case, dict[str, Any]] = {}
    for name, case in itertools.product(names, cases):
        if budget.is_spent:
            return
        ours = or_note(lambda case=case, name=name: _ours(clock, case, name))
        if case not in bare:
            bare[case] = or_note(lambda case=case: _bare(clock, case))
        yield _described(case) | {"kernel": name} | _compared(ours, bare[case], "bare_kernels")


def _ours(clock: Clock, case: Case, kernel: str = "auto") -> dict[str, Any]:
    replay = Replay.of(case, clock.device, rank=busiest_rank(case), kernel=kernel, ring_pass=local_copies)
    return _measured(clock, replay.forward, replay.backward)


def _bare(clock: Clock, case: Case) -> dict[str, Any]:
    bare = BareKernels.of(case, resolve_dtype(case.dtype, clock.device), clock.device)
    return _measured(clock, bare.forward, bare.backward)


def _measured(clock: Clock, forward: Callable[[], Any], backward: Callable[[Any], Any]) -> dict[str, Any]:
    found: dict[str, Any] = _by_direction(clock.seconds, forward, backward)
    return found | {"peak_bytes": clock.peak_bytes(lambda: backward(forward()))}


def _by_direction(
    seconds: Callable[..., float], forward: Callable[[], Any], backward: Callable[[Any], Any]
) -> dict[str, float]:
    return {"forward": seconds(forward), "backward": seconds(backward, forward)}


def _described(case: Case) -> Row:
    return {"tokens": case.seq_len, "heads": case.num_heads, "kv_heads": case.kv_heads, "head_dim": case.head_dim}


def _compared(ours: dict[str, Any], other: dict[str, Any], name: str) -> Row:
    """A row with the times of both, and how many times as long ``ours`` takes."""
    row: Row = {}
    for direction in ("forward", "backward"):
        row[f"{direction}_ms"] = mine = ms(ours, direction)
        row[f"{name}_{direction}_ms"] = theirs = ms(other, direction)
        row[f"{direction}_ratio"] = mine / theirs if mine and theirs else None
    notes = [f"{who}: {found['note']}" for who, found in (("ours", ours), (name, other)) if found.get("note")]
    peaks = {"peak_bytes": ours.get("peak_bytes"), f"{name}_peak_bytes": other.get("peak_bytes")}
    return row | peaks | {"note": "; ".join(notes)}


def rivals(clock: Clock, budget: Budget, shrink: int) -> Iterator[Row]:
    """``dilated_attention`` against flex_attention and LongNet's method, on the same pattern."""
    for length, head_dim in itertools.product(RIVAL_LENGTHS, HEAD_DIMS):
        branches = ((2048, 1), (8192, 4), (length, 16))
        case = Case("", length, branches=branches, head_dim=head_dim, dtype="bf16", **SIZES[head_dim])
        case = shortened(case, shrink)
        ours = or_note(lambda case=case: _ours(clock, case))
        for name, measure in (("LongNet's method", _longnet), ("flex_attention", _flex)):
            if budget.is_spent:
                return
            other = or_note(lambda measure=measure, case=case: measure(clock, case))
            yield _described(case) | {"rival": name} | _compared(ours, other, "rival")


def _longnet(clock: Clock, case: Case) -> dict[str, Any]:
    replay = Replay.of(case, clock.device)  # for its inputs
    attend = partial(longnet_method, *replay.tensors, case.branches, is_causal=case.causal)
    return _measured(clock, attend, replay.backward)


def _flex(clock: Clock, case: Case) -> dict[str, Any]:
    replay, on_gpu = Replay.of(case, clock.device), clock.device.type == "cuda"
    options: dict[str, Any] = {"is_causal": case.causal, "device": clock.device, "is_compiled": on_gpu}
    attend = flex_method(case.branches, case.num_heads, case.seq_len, **options)
    if on_gpu:
        return _measured(clock, lambda: attend(*replay.tensors), replay.backward)
    tensors = [x.detach() for x in replay.tensors]
    return {"forward": clock.seconds(lambda: attend(*tensors)), "note": "no backward on the CPU"}


def ring_ranks(clock: Clock, budget: Budget, shrink: int) -> Iterator[Row]:
    """The rank with most work of rings of 2 to 64: hops are copies on the device."""
    for given, size in itertools.product(RINGS, RING_SIZES):
        if budget.is_spent:
            return
        case = shortened(dataclasses.replace(given.case, ring_size=size), shrink)
        rank = busiest_rank(case)
        found = or_note(lambda case=case, rank=rank: _replayed(clock, case, rank))
        for direction in ("forward", "backward"):
            yield (
                {"tokens": case.seq_len, "ranks": size, "rank": rank, "pass": direction, **found.get(direction, {})}
                | {"peak_bytes": found.get("peak_bytes"), "note": found.get("note", "")}
            )


def _replayed(clock: Clock, case: Case, rank: int) -> dict[str, Any]:
    replay = Replay.of(case, clock.device, rank=rank, ring_pass=local_copies)
    found = _measured(clock, replay.forward, replay.backward)
    out = replay.forward()
    calls = {"forward": replay.forward, "backward": lambda: replay.backward(out)}
    host = _by_direction(clock.host_seconds, replay.forward, replay.backward)
    rows: dict[str, Any] = {"peak_bytes": found["peak_bytes"]}
    for direction, call in calls.items():
        tiles = replay.num_tiles(backward=direction == "backward")
        flops, seconds = replay.flops(backward=direction == "backward"), found[direction]
        rows[direction] = {
            "ms": seconds * 1e3,
            "host_ms": host[direction] * 1e3,
            "tiles": tiles,
            "us_per_tile": seconds / tiles * 1e6,
            "TFLOPs": flops / seconds / 1e12,
            "idle_share": clock.idle_share(call),
        }
    return rows


def synchronizations(clock: Clock, budget: Budget, shrink: int) -> Iterator[Row]:
    """How often the second of two equal calls waits for the GPU, by torch.cuda.set_sync_debug_mode("warn")."""
    for name, call in _calls_by_option(clock.device, shrink):
        if budget.is_spent:
            return
        call()
        found = sync_warnings(call)
        yield {"call": name, "waits": len(found), "where": sorted(set(found))}


def _calls_by_option(device: torch.device, shrink: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    case = shortened(RINGS[0].case, shrink)
    alone = Replay.of(dataclasses.replace(case, ring_size=1, kv_heads=8), device)
    lengths, rates = zip(*case.branches, strict=True)
    mask = torch.zeros(1, case.seq_len, dtype=torch.bool, device=device)
    mask[:, -case.seq_len // 8 :] = True
    documents = torch.arange(case.seq_len, device=device)[None] * 4 // case.seq_len
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "key_padding_mask": {"key_padding_mask": mask},
        "document_ids": {"document_ids": documents},
        "dropout": {"dropout_p": 0.1, "dropout_seed": 1},
    }
    for name, option in options.items():

        def call(option: dict[str, Any] = option) -> Any:
            return alone.backward(dilated_attention(*alone.tensors, lengths, rates, is_causal=True, **option))

        yield name, call
    replay = Replay.of(case, device, rank=busiest_rank(case), ring_pass=local_copies)
    yield f"one rank of {case.ring_size}", lambda: replay.backward(replay.forward())


def sync_warnings(call: Callable[[], Any]) -> list[str]:
    """Run ``call``, and return where each warning of a synchronization came from. Always empty on the CPU."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            if torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode("default")
    return [f"{w.filename}:{w.lineno}" for w in caught if "synchronizing CUDA" in str(w.message)]
