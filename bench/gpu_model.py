"""The modelled table: what a call would cost on a GPU, from counts on tensors of device "meta".

The time of a call's kernels is their FLOPs, divided by a rate. All other launches take the bytes that they move,
divided by a bandwidth. The host takes the same time for every launch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from gpu_cases import GpuCase
from gpu_counts import LaunchCounter, row_launches, triton_launches
from gpu_replay import Replay, busiest_rank, no_pass
from report import Row, table
from rich.console import Console
from torch import Tensor

from ring_backends.engine.call import kernels_of_call
from ring_backends.kernels import Kernel, KernelInputs
from ring_backends.kernels.aten_cuda import AtenCudaFlashKernel
from ring_backends.kernels.aten_cudnn import AtenCudaCudnnKernel
from ring_backends.kernels.choice import MAX_ROWS_IN_PLACE, MAX_ROWS_OF_WINDOW
from ring_backends.kernels.triton_dilated import TritonDilatedKernel

FORWARD_FLOPS_PER_SECOND, BACKWARD_FLOPS_PER_SECOND = 600e12, 450e12
BYTES_PER_SECOND = 4e12
LAUNCH_SECONDS = 130e-6
"""Measured: a replayed rank of 8 on an H100 took 30 ms for 228 launches (forward), and 171 ms for 1,300 (backward)."""

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


@dataclass
class Modelled:
    """One pass of one call with one kernel.

    Attributes:
        launches, bytes: by operator.
        wire_bytes: what this rank sends.
    """

    tiles: int
    flops: int
    flops_per_second: float
    wire_bytes: int
    launches: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)

    @property
    def num_launches(self) -> int:
        return sum(self.launches.values())

    @property
    def kernel_seconds(self) -> float:
        return self.flops / self.flops_per_second

    @property
    def other_bytes(self) -> int:
        return sum(self.bytes.values())

    @property
    def other_seconds(self) -> float:
        return self.other_bytes / BYTES_PER_SECOND

    @property
    def host_seconds(self) -> float:
        return self.num_launches * LAUNCH_SECONDS

    @property
    def share(self) -> float:
        return self.kernel_seconds / (self.kernel_seconds + self.other_seconds)

    @property
    def is_host_bound(self) -> bool:
        return self.host_seconds > self.kernel_seconds + self.other_seconds


def model(given: GpuCase, kernel: str) -> tuple[Modelled, Modelled]:
    """Model the forward and the backward of the rank with most work."""
    case = given.case
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
        call = dataclasses.replace(replay.call, in_place=in_place)
        replay = dataclasses.replace(replay, call=call)
    with row_launches(counter), triton_launches(counter):
        replay.backward(replay.forward())  # fills the caches of plans and tables
        run = partial(_count, counter, replay)
        out, forward = run(backward=False)
        _, backward = run(out, backward=True)
    return forward, backward


def _select(name: str, inputs: KernelInputs) -> Kernel:
    """What ``"auto"`` takes on a Hopper GPU without measurements."""
    rows = inputs.rows or 0
    if inputs.is_dilated and rows <= MAX_ROWS_IN_PLACE:
        return TritonDilatedKernel()
    return AtenCudaFlashKernel() if inputs.has_window and rows <= MAX_ROWS_OF_WINDOW else AtenCudaCudnnKernel()


def _count(
    counter: LaunchCounter, replay: Replay, out: Tensor | None = None, *, backward: bool
) -> tuple[Any, Modelled]:
    counter.launches.clear()
    counter.bytes.clear()
    replay.ring.traffic.reset()
    with counter:
        result = replay.forward() if out is None else replay.backward(out)
    rate = BACKWARD_FLOPS_PER_SECOND if backward else FORWARD_FLOPS_PER_SECOND
    tiles, flops = replay.num_tiles(backward=backward), replay.flops(backward=backward)
    sent = replay.ring.traffic.bytes
    return result, Modelled(tiles, flops, rate, sent, dict(counter.launches), dict(counter.bytes))


def modelled_rows(cases: Sequence[GpuCase]) -> list[Row]:
    """One row per call, kernel and direction."""
    rows: list[Row] = []
    for given in cases:
        for kernel in (FLASH, AUTO, TRITON):
            for direction, found in zip(("forward", "backward"), model(given, kernel), strict=True):
                rows.append(
                    {
                        "call": given.name,
                        "kernel": kernel,
                        "pass": direction,
                        "tiles": found.tiles,
                        "launches": found.num_launches,
                        "kernels_ms": found.kernel_seconds * 1e3,
                        "other_GB": found.other_bytes / 1e9,
                        "other_ms": found.other_seconds * 1e3,
                        "kernels_share": found.share,
                        "host_ms": found.host_seconds * 1e3,
                        "host_bound": "yes" if found.is_host_bound else "no",
                        "sent_bytes": found.wire_bytes,
                        "targets": "; ".join(_targets(given, found, direction == "backward")),
                        "launches_by_operator": found.launches,
                        "bytes_by_operator": found.bytes,
                    }
                )
    return rows


def _targets(given: GpuCase, found: Modelled, backward: bool) -> Iterator[str]:
    target = given.target
    if target.share is not None:
        yield f"{target.share:.0%} {_met(found.share >= target.share)}"
    for name, limits, number in (
        ("launches", target.launches, found.num_launches),
        ("tiles", target.tiles, found.tiles),
    ):
        if limits is not None:
            yield f"{limits[backward]} {name} {_met(number <= limits[backward])}"
    yield f"host {_met(not found.is_host_bound)}"


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
    lines = []
    for forward, backward in zip(rows[::2], rows[1::2], strict=True):
        both = (forward, backward)
        lines.append(
            {
                "call": forward["call"],
                "kernel": forward["kernel"],
                "launches": " / ".join(f"{row['launches']:,}" for row in both),
                "kernels, ms": " / ".join(f"{row['kernels_ms']:.1f}" for row in both),
                "other, ms": " / ".join(f"{row['other_ms']:.1f}" for row in both),
                "kernels' share": " / ".join(f"{row['kernels_share']:.0%}" for row in both),
                "host, ms": " / ".join(f"{row['host_ms']:.1f}" for row in both),
            }
        )
    Console(width=160, highlight=False).print(table(lines, markup=True))
