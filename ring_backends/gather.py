"""Dilated rows as strides: gather them from, and scatter them into, tensors of any memory layout.

The rows that a branch shows to a set of heads differ from head to head by their offset. Where head and offset
advance evenly (``j % r``, ``j // k``), the rows of all those heads are one strided view, so that a gather is one
copy, or none, and a scatter writes through the same view. Nothing here assumes that a tensor is contiguous.

Tensors are [batch, seq, heads, …]; gathered rows are [batch * segments, heads, rows, …].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from ring_backends.softmax import merge_

ROWS_AT_ONCE = 512
"""Dilated rows copied head after head on the CPU; the pages of as many rows fit the translation buffer (TLB)."""


@dataclass(frozen=True)
class HeadRun:
    """A lattice of outer × inner heads whose index and first row advance evenly along both axes."""

    head: int
    phase: int
    outer: int = 1
    outer_head: int = 0
    outer_phase: int = 0
    inner: int = 1
    inner_head: int = 0
    inner_phase: int = 0

    @property
    def num_heads(self) -> int:
        return self.outer * self.inner

    def heads_and_phases(self) -> Iterator[tuple[int, int]]:
        """Every head of the run with the position of its first row."""
        for outer in range(self.outer):
            for inner in range(self.inner):
                yield (
                    self.head + outer * self.outer_head + inner * self.inner_head,
                    self.phase + outer * self.outer_phase + inner * self.inner_phase,
                )


@dataclass(frozen=True)
class DilatedRows:
    """Every ``rate``-th position of some equally long segments, for a list of heads, each with its own first row.

    Attributes:
        start: local position at which the first segment (or the piece of it that lies here) begins.
        segments: how many segments, ``segment_stride`` positions apart.
        rows: rows per segment and head; every head of the list has the same number.
        runs: the heads, in order, with the position of their first row relative to ``start``.
    """

    start: int
    segments: int
    segment_stride: int
    rate: int
    rows: int
    runs: tuple[HeadRun, ...]

    @cached_property
    def num_heads(self) -> int:
        return sum(run.num_heads for run in self.runs)

    def part_of_segments(self, segments: range) -> DilatedRows:
        return replace(self, start=self.start + segments.start * self.segment_stride, segments=len(segments))

    def part_of_heads(self, heads: range) -> DilatedRows:
        if len(heads) == self.num_heads:
            return self
        chosen = [pair for run in self.runs for pair in run.heads_and_phases()][heads.start : heads.stop]
        return replace(self, runs=head_runs(*zip(*chosen, strict=True)))

    def part_of_rows(self, rows: range) -> DilatedRows:
        return replace(self, start=self.start + rows.start * self.rate, rows=len(rows))

    def views(self, tensor: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield (heads, view) per run, the view being [batch, segments, outer, inner, rows, …] of ``tensor`` itself."""
        batch, _, _, *rest = tensor.shape
        batch_stride, seq_stride, head_stride, *rest_strides = tensor.stride()
        first_head = 0
        for run in self.runs:
            view = tensor.as_strided(
                (batch, self.segments, run.outer, run.inner, self.rows, *rest),
                (
                    batch_stride,
                    self.segment_stride * seq_stride,
                    run.outer_head * head_stride + run.outer_phase * seq_stride,
                    run.inner_head * head_stride + run.inner_phase * seq_stride,
                    self.rate * seq_stride,
                    *rest_strides,
                ),
                tensor.storage_offset() + (self.start + run.phase) * seq_stride + run.head * head_stride,
            )
            yield slice(first_head, first_head + run.num_heads), view
            first_head += run.num_heads


def gathered_shape(tensor: Tensor, rows: DilatedRows) -> tuple[int, ...]:
    """[batch * segments, heads, rows, …]."""
    return (tensor.shape[0] * rows.segments, rows.num_heads, rows.rows, *tensor.shape[3:])


def gather(tensor: Tensor, rows: DilatedRows) -> Tensor:
    """The rows, as [batch * segments, heads, rows, …]: a view where the tensor's strides allow one, else a copy."""
    shape = gathered_shape(tensor, rows)
    if len(rows.runs) == 1:
        ((_, view),) = rows.views(tensor)
        return view.reshape(shape)
    gathered = tensor.new_empty(shape)
    gather_into(gathered, tensor, rows)
    return gathered


def gather_into(destination: Tensor, tensor: Tensor, rows: DilatedRows) -> None:
    """Copy the rows into ``destination``, [batch * segments, heads, rows, …]."""
    for view, part in _paired(tensor, rows, destination):
        part.copy_(view)


def scatter(tensor: Tensor, rows: DilatedRows, values: Tensor) -> None:
    """Copy ``values``, [batch * segments, heads, rows, …], into the rows of ``tensor``."""
    for view, part in _paired(tensor, rows, values):
        view.copy_(part)


def scatter_add(tensor: Tensor, rows: DilatedRows, values: Tensor) -> None:
    """Add ``values``, [batch * segments, heads, rows, …], to the rows of ``tensor``, in place."""
    for view, part in _paired(tensor, rows, values):
        view.add_(part)


def scatter_merge(out: Tensor, lse: Tensor, rows: DilatedRows, tile_out: Tensor, tile_lse: Tensor) -> None:
    """Merge a tile's out and LSE into the rows of ``out``, and of ``lse`` [batch, seq, heads], in place."""
    pairs = zip(_paired(out, rows, tile_out), _paired(lse, rows, tile_lse), strict=True)
    for (out_view, out_part), (lse_view, lse_part) in pairs:
        merge_(out_view, lse_view, out_part, lse_part)


def _paired(tensor: Tensor, rows: DilatedRows, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (view of the tensor's rows, the same heads of ``values``), equally shaped, run by run.

    On the CPU some rows of all heads after the other: they lie on the same pages of memory, which all rows of one head
    would leave before the next head comes to them.
    """
    values = values.unflatten(0, (values.shape[0] // rows.segments, rows.segments))
    at_once = ROWS_AT_ONCE if tensor.device.type == "cpu" and rows.rate > 1 else rows.rows
    for heads, view in rows.views(tensor):
        part = values[:, :, heads].unflatten(2, view.shape[2:4])
        yield from zip(view.split(at_once, 4), part.split(at_once, 4), strict=True)


def head_runs(heads: Sequence[int], phases: Sequence[int]) -> tuple[HeadRun, ...]:
    """Cut a list of heads with their phases into as few lattices as a greedy walk finds.

    Steps never go backwards in memory, since torch's strides are not negative.
    """
    inner_runs: list[HeadRun] = []
    index = 0
    while index < len(heads):
        length, step = 1, (0, 0)
        while index + length < len(heads):
            following = (
                heads[index + length] - heads[index + length - 1],
                phases[index + length] - phases[index + length - 1],
            )
            if min(following) < 0 or (length > 1 and following != step):
                break
            length, step = length + 1, following
        inner_runs.append(HeadRun(heads[index], phases[index], inner=length, inner_head=step[0], inner_phase=step[1]))
        index += length
    return tuple(_stack(inner_runs))


def _stack(runs: Sequence[HeadRun]) -> Iterator[HeadRun]:
    """Stack runs of equal shape that follow each other evenly into two-dimensional ones."""
    index = 0
    while index < len(runs):
        first = runs[index]
        length, step = 1, (0, 0)
        while index + length < len(runs):
            run, before = runs[index + length], runs[index + length - 1]
            following = (run.head - before.head, run.phase - before.phase)
            same_shape = (run.inner, run.inner_head, run.inner_phase) == (
                first.inner,
                first.inner_head,
                first.inner_phase,
            )
            if not same_shape or min(following) < 0 or (length > 1 and following != step):
                break
            length, step = length + 1, following
        yield HeadRun(
            first.head, first.phase, length, step[0], step[1], first.inner, first.inner_head, first.inner_phase
        )
        index += length
