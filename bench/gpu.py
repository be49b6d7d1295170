"""Models and measures attention on a GPU: `python bench/gpu.py --help`.

`--device cpu --shrink 1024` tests a command on a machine without a GPU.
"""

from __future__ import annotations

import gc
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Annotated, Any

import torch
import typer
from case import Case
from clock import in_turns, start
from contestants import Call, bare_kernels
from gpu_model import model
from launch_times import launches
from ranks import DIRECTIONS
from replay import OF_RINGS, ON_ONE_GPU, flops, replay
from report import Integers, Repeats, Row, Shrink, add_command, integers, new_app

from ring_backends import Ring, dilated_attention
from ring_backends.comparison.rank import record_spans
from ring_backends.cost.machine import peak_memory_bytes, reset_peak_memory, synchronize

app = new_app(__doc__)


def _device(name: str) -> str:
    if name == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("torch finds no GPU; --device cpu --shrink 1024 tests the command.")
    return name


Device = Annotated[str, typer.Option(metavar="cuda|cpu", callback=_device, help="cpu: only to test the command.")]


def one_device(
    kernels: Annotated[str, typer.Option(help="The kernels for all branches, one after the other.")] = (
        "auto,aten_cuda_cudnn,aten_cuda_flash,triton_dilated"
    ),
    device: Device = "cuda",
    repeats: Repeats = 5,
    shrink: Shrink = 1,
) -> Iterator[Row]:
    """Measure `dilated_attention` relative to its bare kernel calls: 131,072 and 1,048,576 tokens."""
    cases = [case.shortened(shrink) for case in ON_ONE_GPU.values()]
    on, known = torch.device(device), dict[Case, Row]()
    for kernel, case in itertools.product(kernels.split(","), cases):
        ours = or_note(lambda case=case, kernel=kernel: measured(replay(case, on, kernel), on, repeats))
        if case not in known:
            known[case] = or_note(lambda case=case: measured(bare_kernels(case, Ring(), on), on, repeats))
        bare = known[case]
        row: Row = {"tokens": case.seq_len, "heads": case.num_heads, "kv_heads": case.kv_heads}
        row |= {"head_dim": case.head_dim, "kernel": kernel}
        for direction in DIRECTIONS:
            row[f"{direction}_ms"] = mine = ours.get(f"{direction}_ms")
            row[f"bare_kernels_{direction}_ms"] = theirs = bare.get(f"{direction}_ms")
            row[f"{direction}_ratio"] = mine / theirs if mine and theirs else None
        peaks = {"peak_bytes": ours.get("peak_bytes"), "bare_kernels_peak_bytes": bare.get("peak_bytes")}
        notes = [f"{who}: {x['note']}" for who, x in (("ours", ours), ("bare_kernels", bare)) if "note" in x]
        yield row | peaks | {"note": "; ".join(notes)}


def measured(call: Call, device: torch.device, repeats: int, *, on_host: bool = False) -> Row:
    """The median times of a call in ms, and the peak memory with its inputs."""
    starts = [
        partial(start, call.forward, device, on_host=on_host),
        partial(start, call.backward, device, call.forward, on_host=on_host),
    ]
    row: Row = {}
    for direction, begin in zip(DIRECTIONS, starts, strict=True):
        (seconds,) = in_turns([begin], repeats, warm_up=2)
        row[f"{direction}_ms"] = sorted(seconds)[repeats // 2] * 1e3
    reset_peak_memory(device)
    call.backward(call.forward())
    synchronize(device)
    return row | {"peak_bytes": peak_memory_bytes(device)}


def or_note(measure: Callable[[], Row]) -> Row:
    """Return what ``measure`` returns, or only a note on why it failed, so that the cases after it still run."""
    try:
        return measure()
    except Exception as error:  # of a compiler or an allocation, for example
        return {"note": f"{type(error).__name__}: {error}".splitlines()[0]}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def ring(
    ring_sizes: Integers = "8,16,32,64", device: Device = "cuda", repeats: Repeats = 5, shrink: Shrink = 1
) -> Iterator[Row]:
    """Measure the rank with most work of a ring whose hops are copies on the device: time, gaps and memory.

    A tile is one call of a kernel. `host ms` is the time until Python has launched everything.
    """
    on = torch.device(device)
    for given, size in itertools.product(OF_RINGS.values(), integers(ring_sizes)):
        case = given.but(ring_size=size).shortened(shrink)
        found = or_note(lambda case=case: of_rank(case, on, repeats))
        for direction in DIRECTIONS:
            row: Row = {"tokens": case.seq_len, "ranks": size, "pass": direction, **found.get(direction, {})}
            yield row | {"peak_bytes": found.get("peak_bytes"), "note": found.get("note", "")}


def of_rank(case: Case, device: torch.device, repeats: int) -> Row:
    call = replay(case, device)
    found, host = measured(call, device, repeats), measured(call, device, repeats, on_host=True)
    spans = record_spans(call.forward, call.backward, device)
    out = call.forward()
    calls = {"forward": call.forward, "backward": lambda: call.backward(out)}
    row: Row = {"peak_bytes": found["peak_bytes"]}
    for direction in DIRECTIONS:
        ms = found[f"{direction}_ms"]
        tiles = sum(part == direction and what == "tile" for part, what, *_ in spans)
        row[direction] = {
            "ms": ms,
            "host_ms": host[f"{direction}_ms"],
            "tiles": tiles,
            "us_per_tile": ms / tiles * 1e3,
            "TFLOPs": flops(case, backward=direction == "backward") / ms / 1e9,
            "idle_share": idle_share(calls[direction], device),
        }
    return row


def idle_share(call: Callable[[], Any], device: torch.device) -> float | None:
    """The share of a call's time in which no kernel runs on the GPU. None on the CPU."""
    if device.type != "cuda":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        synchronize(device)
    return gaps_share(
        (event.time_range.start, event.time_range.end)
        for event in profile.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    )


def gaps_share(spans: Iterable[tuple[float, float]]) -> float | None:
    """The share of the time from the first span's start to the last one's end that lies in no span.

    None without spans.
    """
    ordered = sorted(spans)
    if not ordered:
        return None
    first = reached = ordered[0][0]
    busy = 0.0
    for begin, end in ordered:
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return 1 - busy / (reached - first)


def syncs(device: Device = "cuda", shrink: Shrink = 1) -> Iterator[Row]:
    """Count how often the second of two equal calls waits for the GPU (torch.cuda.set_sync_debug_mode)."""
    on, case = torch.device(device), OF_RINGS["131k"].shortened(shrink)
    alone = replay(case.but(ring_size=1, kv_heads=8), on)
    lengths, rates = zip(*case.branches, strict=True)
    mask = torch.zeros(1, case.seq_len, dtype=torch.bool, device=on)
    mask[:, -case.seq_len // 8 :] = True
    documents = torch.arange(case.seq_len, device=on)[None] * 4 // case.seq_len
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "key_padding_mask": {"key_padding_mask": mask},
        "document_ids": {"document_ids": documents},
        "dropout": {"dropout_p": 0.1, "dropout_seed": 1},
    }

    def call(option: dict[str, Any]) -> None:
        alone.backward(dilated_attention(*alone.tensors, lengths, rates, is_causal=True, **option))

    calls: dict[str, Callable[[], Any]] = {name: partial(call, option) for name, option in options.items()}
    of_ring = replay(case, on)
    calls["one rank of 8"] = lambda: of_ring.backward(of_ring.forward())
    for name, given in calls.items():
        given()
        found = sync_warnings(given)
        yield {"call": name, "waits": len(found), "where": sorted(set(found))}


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


for measure in (one_device, ring, syncs, launches):
    add_command(app, measure, prefix="gpu")
app.command()(model)


if __name__ == "__main__":
    app()
