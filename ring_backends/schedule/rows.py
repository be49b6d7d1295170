"""Dilated rows as data: which positions of a tensor a branch reads for each head, without an index per row.

The rows that a branch selects differ from head to head by the offset. If the offset grows by the same amount from each
head to the next (``j % r``, ``j // k``), the rows of these heads form one lattice. A kernel can address it by strides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class HeadRun:
    """A lattice of outer × inner heads. Head index and first row grow by constant steps along both axes.

    Attributes:
        head: index of the first head.
        phase: position of the first head's first row.
        outer, inner: number of heads along each axis.
        outer_head, inner_head: steps of the head index.
        outer_phase, inner_phase: steps of the position of the first row.
    """

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
    """Every ``rate``-th position of equally long segments, for a list of heads. Each head has its own first row.

    Attributes:
        start: local position where the first segment, or the local piece of it, begins.
        segments: number of segments, ``segment_stride`` positions apart.
        rows: rows per segment and head, the same for every head.
        runs: the heads, in order, with the position of their first row relative to ``start``.
    """

    start: int
    segments: int
    segment_stride: int
    rate: int
    rows: int
    runs: tuple[HeadRun, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Kept, because the hash of many runs takes as long as a launch, and every launch looks up its rows."""
        return hash((self.start, self.segments, self.segment_stride, self.rate, self.rows, self.runs))

    @cached_property
    def num_heads(self) -> int:
        return sum(run.num_heads for run in self.runs)

    @cached_property
    def size(self) -> int:
        """Number of rows over all segments and heads."""
        return self.segments * self.num_heads * self.rows

    @cached_property
    def views(self) -> dict[Any, Any]:
        """What kernels work out about these rows of a tensor, by its shape and strides."""
        return {}

    @cached_property
    def launches(self) -> list[Any]:
        """The records of the launches whose first rows these are (``kernels/launch_records.py``)."""
        return []

    def part_of_segments(self, segments: range) -> DilatedRows:
        return replace(self, start=self.start + segments.start * self.segment_stride, segments=len(segments))

    def part_of_heads(self, heads: range) -> DilatedRows:
        if len(heads) == self.num_heads:
            return self
        return replace(self, runs=head_runs(*zip(*self.heads_and_phases[heads.start : heads.stop], strict=True)))

    @cached_property
    def heads_and_phases(self) -> list[tuple[int, int]]:
        """Every head with the position of its first row relative to ``start``."""
        return [pair for run in self.runs for pair in run.heads_and_phases()]

    def part_of_rows(self, rows: range) -> DilatedRows:
        return replace(self, start=self.start + rows.start * self.rate, rows=len(rows))


def head_runs(heads: Sequence[int], phases: Sequence[int]) -> tuple[HeadRun, ...]:
    """Group heads with their phases greedily into a small number of lattices.

    Steps are never negative, since torch has no negative strides.
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
    """Stack one-dimensional runs of equal shape and spacing into two-dimensional runs."""
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
