"""Times the kernels of one GPU, so that ``"auto"`` can prefer the fastest (:mod:`ring_backends.kernels.choice`).

A measured call computes one branch with dilation rate 1 or 4. It includes what a tile needs besides the kernel:
gathering rows, and merging or adding results. A kernel that reads rows in place needs neither.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ring_backends.cost.machine import device_name, median_seconds
from ring_backends.engine.sums import BlockGrads, BlockOut, Result
from ring_backends.engine.wire_buffers import RowFormat, WireBuffer
from ring_backends.kernels import Kernel, KernelInputs, kernels
from ring_backends.kernels.base import StepKernels
from ring_backends.kernels.merge import statistics_dtype
from ring_backends.kernels.steps import SavedRows, StepRows
from ring_backends.schedule.bands import CAUSAL
from ring_backends.schedule.rank_plan import HeadBlock, Tile
from ring_backends.schedule.rows import DilatedRows, head_runs
from ring_backends.schedule.sums import Roles

ROWS = (256, 1024, 4096, 16384)
HEAD_DIMS = (64, 128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
RATES = (1, 4)
HEADS = 16


def measure_kernels(
    device: torch.device,
    *,
    all_rows: Sequence[int] = ROWS,
    head_dims: Sequence[int] = HEAD_DIMS,
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> dict[str, Any]:
    """Time each kernel that ``device`` can run, except ``math``.

    Args:
        all_rows: the numbers of rows per head in a segment, w / r. Every call has ``max(all_rows)`` rows per head.

    Returns:
        A dict. ``device`` is the name of the device. ``times`` is a list of dicts with ``kernel``, ``dtype``,
        ``head_dim``, ``rows``, ``rate``, and the medians ``forward_seconds`` and ``backward_seconds``.
    """
    times = []
    for dtype, head_dim, rows, rate in itertools.product(dtypes, head_dims, all_rows, RATES):
        branch = _Branch(device, dtype, head_dim, rows, max(all_rows) // rows, rate)
        case = {"dtype": str(dtype).removeprefix("torch."), "head_dim": head_dim, "rows": rows, "rate": rate}
        for kernel in kernels():
            if kernel.name == "math" or kernel.not_supported_reasons(KernelInputs(device, dtype, head_dim)):
                continue
            calls = dict(zip(("forward_seconds", "backward_seconds"), branch.calls(kernel), strict=True))
            times.append({"kernel": kernel.name, **case, **median_seconds(calls, device, rounds=5, calls_on_gpu=8)})
    return {"device": device_name(device), "times": times}


class _Branch:
    """One branch over a sequence: its tile, its inputs, and the sums that results are merged into and added to."""

    def __init__(
        self, device: torch.device, dtype: torch.dtype, head_dim: int, rows: int, segments: int, rate: int
    ) -> None:
        length = rows * rate
        runs = head_runs(range(HEADS), [head % rate for head in range(HEADS)])
        lattice = DilatedRows(0, segments, length, rate, rows, runs)
        shape = (1, segments * length, HEADS, head_dim)
        query, key, value, self.grad_out = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
        self.tile = Tile(0, lattice, lattice, tuple(range(HEADS)), CAUSAL)
        self.inputs = StepRows(query, key, value, head_dim**-0.5)
        stats, block = statistics_dtype(dtype), HeadBlock(slice(HEADS), slice(HEADS), (), Roles())
        lse = torch.empty(shape[:3], device=device, dtype=stats)
        out, grad_query, grad_key, grad_value = (Result(x, dtype=stats) for x in (query, query, key, value))
        self.out, self.grads = BlockOut(out, lse, block), BlockGrads(grad_query, grad_key, grad_value, block)

    def calls(self, kernel: Kernel) -> tuple[Callable[[], None], Callable[[], None]]:
        """The forward and backward with a kernel. The backward takes the results so far."""
        head_dim = self.grad_out.shape[3]
        tiles, runner = (self.tile,), StepKernels(kernel, {})
        out, lse = self.out.sums
        saved = SavedRows(out.to(self.grad_out.dtype), lse, self.grad_out)
        none_sent = WireBuffer(RowFormat(1, head_dim, head_dim, out.dtype), (), out.device)
        return (
            lambda: runner.forward_step(tiles, self.inputs, None, self.out),
            lambda: runner.backward_step(tiles, self.inputs, None, saved, self.grads, none_sent),
        )
