"""The modelled table: what a call would cost on a GPU, from counts on tensors of device "meta".

The time of a call's kernels is their FLOPs, divided by a rate. All other launches take the bytes that they move,
divided by a bandwidth. The host takes the same time for every launch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from case import Case
from gpu_cases import GpuCase
from gpu_counts import LaunchCounter, row_launches, triton_launches
from gpu_replay import Replay, busiest_rank, no_pass
from report import Row, table
from rich.console import Console
from torch import Tensor

from ring_backends.engine.call import kernels_of_call
from ring_backends.kernels import Kernel, KernelInputs
from ring_backends.kernels.aten_cudnn import AtenCudaCudnnKernel
from ring_backends.kernels.choice import MAX_ROWS_IN_PLACE, MAX_ROWS_OF_WINDOW
from ring_backends.kernels.triton_dilated import TritonDilatedKernel

FORWARD_FLOPS_PER_SECOND, BACKWARD_FLOPS_PER_SECOND = 600e12, 450e12
BYTES_PER_SECOND = 4e12
LAUNCH_SECONDS = 80e-6
"""Measured on the machine of an H100: the host of a replayed rank of 8 took 3.5 ms for 45 launches, and 8.1 for 100."""

CONSTANTS = (
    f"Modelled, not measured: {FORWARD_FLOPS_PER_SECOND / 1e12:.0f} TFLOP/s in the attention kernels of a forward and "
    f"{BACKWARD_FLOPS_PER_SECOND / 1e12:.0f} in those of a backward, {BYTES_PER_SECOND / 1e12:.0f} TB/s in all other "
    f"launches, {LAUNCH_SECONDS * 1e6:.0f} µs of the host per launch. bf16, causal, batch 1. FLOPs are those of the "
    "visible pairs of query and key. Tables and copies that a second call finds in a cache do not count."
)
NOTES = (
    "flash: aten_cuda_flash, with Triton's gathers and merges of rows. auto: what a Hopper GPU takes, cuDNN, and "
    "triton_dilated for dilated rows. triton_dilated: for all rows. All are at the same rates; on an H100, "
    "triton_dilated reaches about 60 % of cuDNN's. The sums that it reads and writes inside its kernels count as "
    "no other bytes."
)

FLASH, AUTO, TRITON = "flash", "auto", "triton_dilated"


def model(case: Case, kernel: str) -> tuple[Row, Row]:
    """Model the forward and the backward of the rank with most work."""
    counter = LaunchCounter()

    def ring_pass(outgoing: Any, incoming: Any, tag: int) -> Any:
        counter.count("hop", 0)
        return no_pass(outgoing, incoming, tag)

    name = {FLASH: "aten_cuda_flash", AUTO: "aten_cuda_cudnn", TRITON: "triton_dilated"}[kernel]
    replay = Replay.of(case, torch.device("meta"), rank=busiest_rank(case), kernel=name, ring_pass=ring_pass)
    if kernel == AUTO:
        gpu, layout = KernelInputs(torch.device("cuda"), torch.bfloat16, case.head_dim), replay.call.layout
        with mock.patch("ring_backends.engine.call.select_kernel", _select):
            _, in_place = kernels_of_call("auto", gpu, case.pattern, layout)
        replay = dataclasses.replace(replay, call=dataclasses.replace(replay.call, in_place=in_place))
    with row_launches(counter), triton_launches(counter):
        replay.backward(replay.forward())  # fills the caches of plans and tables
        out, forward = _modelled(counter, replay)
        _, backward = _modelled(counter, replay, out)
    return forward, backward


def _select(name: str, inputs: KernelInputs) -> Kernel:
    """What ``"auto"`` takes on a Hopper GPU."""
    rows = inputs.rows or 0
    is_short = inputs.is_dilated and rows <= MAX_ROWS_IN_PLACE
    is_in_window = inputs.has_window and rows <= MAX_ROWS_OF_WINDOW
    return TritonDilatedKernel() if is_short or is_in_window else AtenCudaCudnnKernel()


def _modelled(counter: LaunchCounter, replay: Replay, out: Tensor | None = None) -> tuple[Any, Row]:
    """Run the forward, or the backward of ``out``, and model its row."""
    backward = out is not None
    counter.launches.clear()
    counter.bytes.clear()
    replay.ring.traffic.reset()
    with counter:
        result = replay.forward() if out is None else replay.backward(out)
    launches, other_bytes = sum(counter.launches.values()), sum(counter.bytes.values())
    rate = BACKWARD_FLOPS_PER_SECOND if backward else FORWARD_FLOPS_PER_SECOND
    kernels_ms, other_ms = replay.flops(backward=backward) / rate * 1e3, other_bytes / BYTES_PER_SECOND * 1e3
    host_ms = launches * LAUNCH_SECONDS * 1e3
    return result, {
        "pass": "backward" if backward else "forward",
        "tiles": replay.num_tiles(backward=backward),
        "launches": launches,
        "kernels_ms": kernels_ms,
        "other_GB": other_bytes / 1e9,
        "other_ms": other_ms,
        "kernels_share": kernels_ms / (kernels_ms + other_ms),
        "host_ms": host_ms,
        "host_bound": "yes" if host_ms > kernels_ms + other_ms else "no",
        "sent_bytes": replay.ring.traffic.bytes,
        "launches_by_operator": dict(counter.launches),
        "bytes_by_operator": dict(counter.bytes),
    }


def modelled_rows(cases: Sequence[GpuCase]) -> list[Row]:
    """One row per call, kernel and direction."""
    return [
        {"call": given.name, "kernel": kernel, **row, "targets": "; ".join(_targets(given, row))}
        for given in cases
        for kernel in (FLASH, AUTO, TRITON)
        for row in model(given.case, kernel)
    ]


def _targets(given: GpuCase, row: Row) -> Iterator[str]:
    if given.share is not None:
        yield f"{given.share:.0%} {_met(row['kernels_share'] >= given.share)}"
    for name, limits in (("launches", given.launches), ("tiles", given.tiles)):
        if limits is not None:
            limit = limits[row["pass"] == "backward"]
            yield f"{limit} {name} {_met(row[name] <= limit)}"
    yield f"host {_met(row['host_bound'] == 'no')}"


def _met(is_met: bool) -> str:
    return "met" if is_met else "MISSED"


def show(rows: Sequence[Row]) -> None:
    """Print one table per call, with the constants."""
    console = Console(width=None if Console().is_terminal else 170, highlight=False)
    console.print(CONSTANTS)
    for call in dict.fromkeys(row["call"] for row in rows):
        console.print(f"\n{call}")
        console.print(table([{k: v for k, v in row.items() if k != "call"} for row in rows if row["call"] == call]))
    console.print(NOTES)


def show_markdown(rows: Sequence[Row]) -> None:
    """Print the modelled table of docs/performance.md: one line per call and kernel, forward and backward."""
    columns = {"launches": ",", "kernels_ms": ".1f", "other_ms": ".1f", "kernels_share": ".0%", "host_ms": ".1f"}
    titles = ("launches", "kernels, ms", "other, ms", "kernels' share", "host, ms")
    lines: list[Row] = []
    for both in zip(rows[::2], rows[1::2], strict=True):
        cells = (" / ".join(format(row[name], form) for row in both) for name, form in columns.items())
        lines.append({name: both[0][name] for name in ("call", "kernel")} | dict(zip(titles, cells, strict=True)))
    Console(width=160, highlight=False).print(table(lines, markup=True))
