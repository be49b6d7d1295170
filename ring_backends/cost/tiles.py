"""The rows and visible pairs of each rank's tiles, counted from a schedule.

A *span* is the part of one segment that one rank holds: a whole segment, or one piece of a segment that crosses ranks.
A span's queries meet the span's own keys in a tile that is causal if the call is. They meet each other piece of their
segment in a tile without a mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ring_backends.schedule.branch import BranchSchedule
from ring_backends.schedule.pattern import num_covered
from ring_backends.schedule.ring_schedule import RingSchedule


@dataclass(frozen=True, eq=False)
class TileRows:
    """Rows of each rank's tiles, summed over heads: int64 [ring size] each.

    Attributes:
        own, own_keys: query and key rows in tiles of spans against themselves.
        other: query rows in tiles against other pieces of their segment, counted once per piece.
    """

    own: Tensor
    other: Tensor
    own_keys: Tensor


@dataclass(frozen=True, eq=False)
class TileCounts:
    """What the tiles of every rank of a schedule's ring compute."""

    schedule: RingSchedule

    @cached_property
    def rows(self) -> TileRows:
        own, other, keys = (self._zeros(torch.int64) for _ in range(3))
        for branch in self.schedule.branches:
            pieces = branch.crossing
            whole, of_pieces = self._whole_rows(branch), (branch.num_rows * branch.heads_at).sum(1)
            others = _tiles_of_pieces(pieces.segment_start, is_causal=self.schedule.is_causal) - 1
            own += (whole * branch.heads_at).sum(1) + self._by_rank(pieces.rank, of_pieces)
            other += self._by_rank(pieces.rank, of_pieces * others)
            of_pieces = (branch.num_rows * branch.streams_at).sum(1)
            keys += (whole * branch.streams_at).sum(1) + self._by_rank(pieces.rank, of_pieces)
        return TileRows(own, other, keys)

    @cached_property
    def own_pairs(self) -> Tensor:
        """Visible pairs in tiles of spans against themselves: float64 [ring size]."""

        def pairs(rows: Tensor) -> Tensor:
            rows = rows.double()
            return rows * (rows + 1) / 2 if self.schedule.is_causal else rows**2

        total = self._zeros(torch.float64)
        for branch in self.schedule.branches:
            full, full_rows, tail_rows = self._segments_within(branch)
            own = full.unsqueeze(1) * pairs(full_rows) + pairs(tail_rows)
            total += self._by_rank(self.schedule.layout.chunk_ranks(), (own * branch.heads_at).sum(1))
            total += self._by_rank(branch.crossing.rank, (pairs(branch.num_rows) * branch.heads_at).sum(1))
        return total

    @cached_property
    def largest_rows(self) -> Tensor:
        """Four times the query and key rows of the branch with most of them, summed over heads: int64 [ring size].

        Per query row a backward tile holds q, out, dO and dq. Per key row it holds k, v, dk and dv.
        """
        largest = self._zeros(torch.int64)
        for branch in self.schedule.branches:
            rows = torch.maximum(self._whole_rows(branch), self._largest_piece(branch))
            query_rows, key_rows = (rows * branch.heads_at).sum(1), (rows * branch.streams_at).sum(1)
            largest = torch.maximum(largest, 4 * (query_rows + key_rows))
        return largest

    def _segments_within(self, branch: BranchSchedule) -> tuple[Tensor, Tensor, Tensor]:
        """Segments that lie whole on one chunk of the layout.

        Returns:
            The number of full segments: int64 [chunks]. One head's rows in a full segment: int64 [1, offsets]. One
            head's rows in a shorter last segment: int64 [chunks, offsets].
        """
        length, n = branch.segment_length, self.schedule.layout.seq_len
        starts = self.schedule.layout.chunk_starts()
        begin, end = starts[:-1], starts[1:]
        full = (end // length - -(-begin // length)).clamp(min=0)
        tail = ((end == n) & (begin < end) & (begin <= n // length * length)) * (n % length)
        full_rows = num_covered(torch.tensor([length], device="cpu"), branch.offsets, branch.rate)
        return full, full_rows, num_covered(tail.unsqueeze(1), branch.offsets, branch.rate)

    def _whole_rows(self, branch: BranchSchedule) -> Tensor:
        """One head's rows in segments that lie whole on a rank, at each offset: int64 [ring size, offsets]."""
        full, full_rows, tail_rows = self._segments_within(branch)
        return self._by_rank(self.schedule.layout.chunk_ranks(), full.unsqueeze(1) * full_rows + tail_rows)

    def _largest_piece(self, branch: BranchSchedule) -> Tensor:
        """One head's rows in the longest piece of a crossing segment, at each offset: int64 [ring size, offsets]."""
        size = (self.schedule.layout.ring_size, branch.num_rows.shape[1])
        rank = branch.crossing.rank.unsqueeze(1).expand_as(branch.num_rows)
        largest = torch.zeros(size, dtype=torch.int64, device="cpu")
        return largest.scatter_reduce_(0, rank, branch.num_rows, "amax")

    def _zeros(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros(self.schedule.layout.ring_size, dtype=dtype, device="cpu")

    def _by_rank(self, rank: Tensor, values: Tensor) -> Tensor:
        return sum_by_rank(rank, values, self.schedule.layout.ring_size)


def sum_by_rank(rank: Tensor, values: Tensor, ring_size: int) -> Tensor:
    """Sums of ``values`` [n, …] over equal entries of ``rank`` [n]: [ring size, …]."""
    total = torch.zeros((ring_size, *values.shape[1:]), dtype=values.dtype, device="cpu")
    return total.index_add_(0, rank, values)


def _tiles_of_pieces(segment_start: Tensor, *, is_causal: bool) -> Tensor:
    """The number of pieces of its segment that each piece's queries meet. Pieces are in order of position."""
    _, segment, count = segment_start.unique_consecutive(return_inverse=True, return_counts=True)
    first: Tensor = count.cumsum(0) - count
    number: Tensor = torch.arange(len(segment_start), device="cpu") - first[segment]
    pieces: Tensor = number + 1 if is_causal else count[segment]
    return pieces
