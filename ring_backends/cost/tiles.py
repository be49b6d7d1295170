"""The rows and visible pairs of each rank's tiles, counted from a schedule.

A *span* is the part of one segment that one rank holds: a whole segment, or a *piece* of a segment that crosses ranks.
Two pieces that fill both chunks of a zigzag rank are one span if their rows follow each other at the same distance. One
tile computes a span's queries against the span's own keys, together with a span that lies alike in the other chunk.
This tile is causal if the call is causal. For every other piece of the segment that the queries see, one more tile
computes them against its keys, without a mask. With a window, the queries see the pieces within its reach, and the last
rows of the farthest one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from ring_backends.schedule.branch import BranchSchedule
from ring_backends.schedule.pattern import num_covered
from ring_backends.schedule.ring_schedule import RingSchedule, visible_pairs
from ring_backends.schedule.travel import Travel


@dataclass(frozen=True, eq=False)
class TileRows:
    """Rows of each rank's tiles, summed over heads: int64 [ring size] each.

    Attributes:
        own, own_keys: query rows and key rows in tiles of a span's queries against the span's own keys.
        other: query rows in tiles against other pieces of the segment. A query row counts once for each piece.
    """

    own: Tensor
    other: Tensor
    own_keys: Tensor


@dataclass(frozen=True, eq=False)
class TileCounts:
    """Counts the rows and visible pairs in the tiles of each rank."""

    schedule: RingSchedule

    @cached_property
    def rows(self) -> TileRows:
        own, other, keys = (self._zeros(torch.int64) for _ in range(3))
        for branch in self.schedule.branches:
            pieces, rows, others = branch.pieces, branch.rows_of_pieces, self._others(branch)
            whole, of_pieces = self._whole_rows(branch), (rows * branch.heads_at).sum(1)
            own += (whole * branch.heads_at).sum(1) + self._by_rank(pieces.rank, of_pieces)
            farthest = rows if branch.band is None else rows.clamp(max=branch.band)
            of_farthest = (farthest * branch.heads_at).sum(1)
            other += self._by_rank(pieces.rank, of_pieces * (others - 1).clamp(min=0) + of_farthest * (others > 0))
            of_pieces = (rows * branch.streams_at).sum(1)
            keys += (whole * branch.streams_at).sum(1) + self._by_rank(pieces.rank, of_pieces)
        return TileRows(own, other, keys)

    @cached_property
    def _num_tiles(self) -> tuple[Tensor, tuple[tuple[Tensor, Tensor], ...]]:
        """Tiles of each rank with keys of the same span. Then for each branch the number of tiles with keys of other
        pieces, and of pieces with such tiles: int64 [ring size] each.
        """
        own, of_branches = self._zeros(torch.int64), []
        for branch in self.schedule.branches:
            pieces, heads_at = branch.pieces, branch.heads_at
            full, full_rows, tail_rows = self._segments_within(branch)
            of_chunks = (full > 0) * _distinct(full_rows, heads_at) + _distinct(tail_rows, heads_at)
            of_pieces, others = _distinct(branch.rows_of_pieces, heads_at), self._others(branch)
            own += self._by_rank(self.schedule.layout.chunk_ranks(), of_chunks)
            own += self._by_rank(pieces.rank, _distinct(self._rows_of_spans(branch), heads_at))
            own -= self._joined(branch, full, _distinct(full_rows, heads_at))
            rows = self._by_rank(pieces.rank, of_pieces * others), self._by_rank(pieces.rank, of_pieces * (others > 0))
            of_branches.append(rows)
        return own, tuple(of_branches)

    def _joined(self, branch: BranchSchedule, full: Tensor, of_full: Tensor) -> Tensor:
        """How many tiles each rank saves because segments of both its chunks share a tile: int64 [ring size].

        Args:
            full: number of full segments in each chunk: int64 [chunks].
            of_full: number of tiles of such segments: int64 [1].
        """
        layout, pieces = self.schedule.layout, branch.pieces
        saved = self._zeros(torch.int64)
        if layout.num_chunks > layout.ring_size:
            starts = layout.chunk_starts()
            lengths, begin = starts.diff(), -starts[:-1] % branch.segment_length
            low, high = _chunks_of_ranks(layout.ring_size)
            adjoins = lengths[low] + begin[high] == begin[low] + full[low] * branch.segment_length
            are_single = (full[low] == 1) & (full[high] == 1)
            saved += of_full * ((full[low] > 0) & (full[high] > 0) & (adjoins | are_single))
        alike, _ = self._alike(branch)
        return saved.index_add_(0, pieces.rank[alike], _distinct(branch.rows_of_pieces, branch.heads_at)[alike])

    def _alike(self, branch: BranchSchedule) -> tuple[Tensor, Tensor]:
        """Pairs of pieces of two segments that share a tile: the indices of the first and the second, int64 [pairs]."""
        first, second, is_same = self._filling(branch)
        lengths = branch.pieces.stop - branch.pieces.start
        are_alike = ~is_same & (lengths[first] == lengths[second])
        return first[are_alike], second[are_alike]

    @cached_property
    def _filling(self) -> Callable[[BranchSchedule], tuple[Tensor, Tensor, Tensor]]:
        """As :meth:`_find_filling`, once for each branch."""
        return cache(self._find_filling)

    def _find_filling(self, branch: BranchSchedule) -> tuple[Tensor, Tensor, Tensor]:
        """Pairs of pieces that fill both chunks of a rank and may share a tile.

        Returns:
            The indices of the first and of the second piece, int64 [pairs]; and whether they are one span, because they
            belong to the same segment, bool [pairs].
        """
        layout, pieces = self.schedule.layout, branch.pieces
        at = torch.full((layout.num_chunks,), -1, device="cpu")
        lengths = pieces.stop - pieces.start
        filling = (lengths == layout.chunk_starts().diff()[pieces.chunk]).nonzero().squeeze(1)
        at[pieces.chunk[filling]] = filling
        low, high = _chunks_of_ranks(layout.ring_size if layout.num_chunks > layout.ring_size else 0)
        first, second = at[low], at[high]
        exist = (first >= 0) & (second >= 0)
        first, second = first[exist], second[exist]
        phase = (pieces.start - pieces.segment_start) % branch.rate
        is_same = pieces.segment_start[first] == pieces.segment_start[second]
        fits = phase[first] == phase[second]
        if branch.band is None:
            fits &= ~is_same | (lengths[first] % branch.rate == 0)
        else:
            fits &= ~is_same
        return first[fits], second[fits], is_same[fits]

    def _rows_of_spans(self, branch: BranchSchedule) -> Tensor:
        """Rows of each piece at each offset. Those of two pieces that are one span belong to the second."""
        rows, (first, second, is_same) = branch.rows_of_pieces.clone(), self._filling(branch)
        rows[second[is_same]] += rows[first[is_same]]
        rows[first[is_same]] = 0
        return rows

    def num_tiles(self, travel: Travel) -> tuple[Tensor, Tensor, Tensor]:
        """Tiles of each rank with keys of the same span, of rows that go around, and of spread rows: [ring size] each.

        Cuts multiply these numbers. Heads with different numbers of rows need separate tiles. Rows that go around need
        one tile for each piece. Spread rows need one tile for all pieces.
        """
        own, of_branches = self._num_tiles
        around, spread = self._zeros(torch.int64), self._zeros(torch.int64)
        for index, (of_each, of_all) in enumerate(of_branches):
            if index in travel.trees:
                spread += of_all
            else:
                around += of_each
        return own, around, spread

    @cached_property
    def own_pairs(self) -> Tensor:
        """Visible pairs in tiles of a span's queries against the span's own keys: float64 [ring size]."""

        def pairs(rows: Tensor, branch: BranchSchedule) -> Tensor:
            rows = rows.double()
            return visible_pairs(rows, rows, branch.band, is_causal=self.schedule.is_causal) * branch.heads_at

        total = self._zeros(torch.float64)
        for branch in self.schedule.branches:
            full, full_rows, tail_rows = self._segments_within(branch)
            own = full.unsqueeze(1) * pairs(full_rows, branch) + pairs(tail_rows, branch)
            total += self._by_rank(self.schedule.layout.chunk_ranks(), own.sum(1))
            total += self._by_rank(branch.pieces.rank, pairs(self._rows_of_spans(branch), branch).sum(1))
        return total

    @cached_property
    def largest_rows(self) -> Tensor:
        """Rows in memory during the largest backward tile, summed over heads: int64 [ring size].

        A backward tile has four rows for each query row (q, out, dO and dq), and four for each key row (k, v, dk and
        dv). The largest tile is that of the branch with the most rows.
        """
        largest = self._zeros(torch.int64)
        for branch in self.schedule.branches:
            rows = torch.maximum(self._whole_rows(branch), self._largest_piece(branch))
            query_rows, key_rows = (rows * branch.heads_at).sum(1), (rows * branch.streams_at).sum(1)
            largest = torch.maximum(largest, 4 * (query_rows + key_rows))
        return largest

    def _segments_within(self, branch: BranchSchedule) -> tuple[Tensor, Tensor, Tensor]:
        """Count the segments that lie completely in one chunk of the layout.

        Returns:
            The number of full segments: int64 [chunks]. The rows of one head in a full segment: int64 [1, offsets]. The
            rows of one head in a shorter last segment: int64 [chunks, offsets].
        """
        length, n = branch.segment_length, self.schedule.layout.seq_len
        starts = self.schedule.layout.chunk_starts()
        begin, end = starts[:-1], starts[1:]
        full = (end // length - -(-begin // length)).clamp(min=0)
        tail = ((end == n) & (begin < end) & (begin <= n // length * length)) * (n % length)
        full_rows = num_covered(torch.tensor([length], device="cpu"), branch.offsets, branch.rate)
        return full, full_rows, num_covered(tail.unsqueeze(1), branch.offsets, branch.rate)

    def _whole_rows(self, branch: BranchSchedule) -> Tensor:
        """Rows of one head in segments that lie completely on a rank, by offset: int64 [ring size, offsets]."""
        full, full_rows, tail_rows = self._segments_within(branch)
        return self._by_rank(self.schedule.layout.chunk_ranks(), full.unsqueeze(1) * full_rows + tail_rows)

    def _largest_piece(self, branch: BranchSchedule) -> Tensor:
        """Rows of one head in the pieces of the largest tile, by offset: int64 [ring size, offsets]."""
        rows, (first, second) = self._rows_of_spans(branch), self._alike(branch)
        rows[second] += rows[first]
        rank = branch.pieces.rank.unsqueeze(1).expand_as(rows)
        largest = torch.zeros(self.schedule.layout.ring_size, rows.shape[1], dtype=torch.int64, device="cpu")
        return largest.scatter_reduce_(0, rank, rows, "amax")

    def _others(self, branch: BranchSchedule) -> Tensor:
        """For each piece, the number of other pieces that its queries see: int64 [pieces]."""
        pieces, is_causal = branch.pieces, self.schedule.is_causal
        if branch.band is None:
            others = _tiles_of_pieces(pieces.segment_start, is_causal=is_causal) - 1
            first, second, is_same = self._filling(branch)
            others[second[is_same]] -= 1
            others[first[is_same]] -= 0 if is_causal else 1
            return others
        starts, distance = self.schedule.layout.chunk_starts(), branch.band * branch.rate
        first = torch.maximum(pieces.start - distance, pieces.segment_start)
        last = pieces.stop - 1 if is_causal else torch.minimum(pieces.stop - 1 + distance, pieces.segment_stop - 1)
        return torch.searchsorted(starts, last, right=True) - torch.searchsorted(starts, first, right=True)

    def _zeros(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros(self.schedule.layout.ring_size, dtype=dtype, device="cpu")

    def _by_rank(self, rank: Tensor, values: Tensor) -> Tensor:
        return sum_by_rank(rank, values, self.schedule.layout.ring_size)


def _chunks_of_ranks(ring_size: int) -> tuple[Tensor, Tensor]:
    """The first and the second chunk of each rank in the zigzag layout: int64 [ring size] each."""
    rank = torch.arange(ring_size, device="cpu")
    return rank, 2 * ring_size - 1 - rank


def sum_by_rank(rank: Tensor, values: Tensor, ring_size: int) -> Tensor:
    """Sum ``values`` [n, …] by rank: [ring size, …]. ``rank`` [n] holds the rank of each value."""
    total = torch.zeros((ring_size, *values.shape[1:]), dtype=values.dtype, device="cpu")
    return total.index_add_(0, rank, values)


def _distinct(num_rows: Tensor, heads_at: Tensor) -> Tensor:
    """The number of different positive row counts among the offsets that have heads: int64 […].

    Args:
        num_rows: […, offsets].
        heads_at: [offsets].
    """
    rows = (num_rows * (heads_at > 0)).sort(-1).values
    steps = rows.diff(dim=-1, prepend=torch.zeros_like(rows[..., :1]))
    return (steps > 0).sum(-1)


def _tiles_of_pieces(segment_start: Tensor, *, is_causal: bool) -> Tensor:
    """For each piece, count the pieces of its segment that its queries see. Pieces are in order of position."""
    _, segment, count = segment_start.unique_consecutive(return_inverse=True, return_counts=True)
    first: Tensor = count.cumsum(0) - count
    number: Tensor = torch.arange(len(segment_start), device="cpu") - first[segment]
    pieces: Tensor = number + 1 if is_causal else count[segment]
    return pieces
