"""The pieces of segments that lie on several chunks, their parts, and the routes along which K and V of a part travel.

Everything here is arithmetic on arrays with one entry per piece. A chunk has at most two such pieces per branch. So the
cost of this module does not grow with the length of the sequence.

The K and V of a piece travel along a *route*: from the rank that holds them through the ranks ``lo`` … ``hi`` in one
direction to the last rank that needs them. A route is cyclic: upwards, ``lo`` follows ``hi``; downwards, ``hi`` follows
``lo``. Without a causal mask, the route is the sub-ring of all ranks that share the segment. With a causal mask, only
later chunks need a piece, so it travels towards them: upwards, or downwards if it lies in the second half of a zigzag
layout.

With a window, the queries on another rank may see only the first or the last rows of a piece. So a piece is cut into
*parts* whose rows are seen from the same chunks. Each part has a route of its own, and a part that no other chunk sees
has none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ring_backends.schedule.layout import SequenceLayout
from ring_backends.schedule.pattern import num_covered


@dataclass(frozen=True, eq=False)
class CrossingPieces:
    """The pieces of one branch's segments that lie on several chunks, or parts of them: int64 [pieces] each.

    They are in order of position.

    Attributes:
        chunk, rank: the chunk of each piece, and the rank that holds it.
        segment_start, segment_stop: global positions of the piece's segment.
        start, stop: global positions of the piece.
        lo, hi: the lowest and the highest rank of the piece's route.
        direction: +1 if the route goes to higher ranks, −1 if it goes to lower ranks.
        is_causal: whether the routes are those of causal attention.
    """

    chunk: Tensor
    rank: Tensor
    segment_start: Tensor
    segment_stop: Tensor
    start: Tensor
    stop: Tensor
    lo: Tensor
    hi: Tensor
    direction: Tensor
    is_causal: bool

    def __len__(self) -> int:
        return len(self.start)

    def first_row(self, offsets: Tensor, rate: int) -> Tensor:
        """How many rows of the segment lie before each piece at each offset: int64 [pieces, offsets]."""
        return num_covered((self.start - self.segment_start).unsqueeze(1), offsets, rate)

    def num_rows(self, offsets: Tensor, rate: int) -> Tensor:
        """Rows of each piece at each offset: int64 [pieces, offsets]."""
        stop = num_covered((self.stop - self.segment_start).unsqueeze(1), offsets, rate)
        return stop - self.first_row(offsets, rate)

    def reach(self, pieces: CrossingPieces, offsets: Tensor, rate: int, band: int | None) -> Tensor:
        """How many hops the rows of each part make at each offset: int64 [parts, offsets], 0 for parts without rows.

        Rows travel to the last rank of their route that has a query row that sees them. If every piece of the segment
        has a row at every offset, that rank is the last of the route. Otherwise, all pairs of a part and a piece of the
        segment are examined.

        Args:
            pieces: the pieces that the parts were cut from.
            band: by how many rows a query and a key may be apart; None for no limit.
        """
        num_rows, rows_of_pieces = self.num_rows(offsets, rate), pieces.num_rows(offsets, rate)
        reach = (self.hi - self.lo).unsqueeze(1).expand_as(num_rows).clone()
        rowless = pieces.segment_start[(rows_of_pieces == 0).any(1)]
        if len(rowless):
            source, target = _pairs(self.segment_start, pieces.segment_start, rowless)
            lo, hi, rank = self.lo[source], self.hi[source], pieces.rank[target]
            hop = ((rank - self.rank[source]) * self.direction[source]).remainder(hi - lo + 1)
            hop *= (lo <= rank) & (rank <= hi)
            if self.is_causal:
                hop *= pieces.chunk[target] > self.chunk[source]
            is_seen = rows_of_pieces[target] > 0
            if band is not None:
                first, first_query = self.first_row(offsets, rate)[source], pieces.first_row(offsets, rate)[target]
                last, last_query = first + num_rows[source] - 1, first_query + rows_of_pieces[target] - 1
                is_seen &= (first_query - last <= band) & (first - last_query <= band)
            reach[torch.isin(self.segment_start, rowless)] = 0
            hops = hop.unsqueeze(1) * is_seen
            reach.scatter_reduce_(0, source.unsqueeze(1).expand_as(hops), hops, "amax")
        return reach * (num_rows > 0)

    def parts(self, layout: SequenceLayout, distance: int) -> CrossingPieces:
        """Cut the pieces into parts that are seen from the same chunks, and leave out what no other chunk sees.

        Args:
            distance: by how many positions a query and a key of a segment may be apart.
        """
        # A chunk has at most one position more than another one. So at most one end of a chunk lies ``distance``
        # positions behind a position inside a piece, and at most one lies so far before.
        starts = layout.chunk_starts()
        cuts = [self.start, self.stop]
        for sign in (1, -1) if not self.is_causal else (1,):
            seen = torch.searchsorted(starts, self.start + sign * distance, right=True).clamp(max=len(starts) - 1)
            cut = starts[seen] - sign * distance
            is_inside = (self.segment_start < starts[seen]) & (starts[seen] < self.segment_stop)
            cuts.append(torch.where(is_inside & (self.start < cut), cut, self.stop).minimum(self.stop))
        bounds = torch.stack(cuts, 1).sort(1).values
        start, stop = bounds[:, :-1], bounds[:, 1:]
        piece, number = (start < stop).nonzero(as_tuple=True)
        start, stop = start[piece, number], stop[piece, number]
        chunk, segment_start, segment_stop = (x[piece] for x in (self.chunk, self.segment_start, self.segment_stop))
        seen_from = start if self.is_causal else torch.maximum(start - distance, segment_start)
        first = torch.searchsorted(starts, seen_from, right=True) - 1
        last = torch.searchsorted(starts, torch.minimum(stop - 1 + distance, segment_stop - 1), right=True) - 1
        travels = first != last
        columns = (x[travels] for x in (chunk, segment_start, segment_stop, start, stop, first, last))
        return _with_routes(layout, *columns, is_causal=self.is_causal)


def _pairs(of_sources: Tensor, of_targets: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
    """The indices of all pairs of a source and a target that share one of the given segments.

    Args:
        of_sources, of_targets: the segment of each source and of each target, both in ascending order.
    """
    source = torch.isin(of_sources, segments).nonzero().squeeze(1)
    first = torch.searchsorted(of_targets, of_sources[source])
    count = torch.searchsorted(of_targets, of_sources[source], right=True) - first
    within = torch.arange(int(count.sum()), device="cpu") - (count.cumsum(0) - count).repeat_interleave(count)
    return source.repeat_interleave(count), first.repeat_interleave(count) + within


def crossing_pieces(layout: SequenceLayout, segment_length: int, *, is_causal: bool) -> CrossingPieces:
    """Cut every segment at the chunk boundaries inside it. ``segment_length`` is at most the sequence length."""
    starts = layout.chunk_starts()
    chunk = torch.arange(layout.num_chunks, device="cpu")[starts[:-1] < starts[1:]]
    begin, end = starts[chunk], starts[chunk + 1]

    first_segment = begin // segment_length * segment_length
    last_segment = (end - 1) // segment_length * segment_length
    from_left = begin > first_segment
    to_right = (last_segment + segment_length).clamp(max=layout.seq_len) > end
    to_right &= ~(from_left & (first_segment == last_segment))  # one piece that crosses on both sides counts once

    chunk = torch.cat([chunk[from_left], chunk[to_right]])
    segment_start = torch.cat([first_segment[from_left], last_segment[to_right]])
    segment_stop = (segment_start + segment_length).clamp(max=layout.seq_len)
    start = torch.maximum(segment_start, starts[chunk])
    start, order = start.sort()
    chunk, segment_start, segment_stop = chunk[order], segment_start[order], segment_stop[order]

    first_chunk = torch.searchsorted(starts, segment_start, right=True) - 1
    last_chunk = torch.searchsorted(starts, segment_stop - 1, right=True) - 1
    stop = torch.minimum(segment_stop, starts[chunk + 1])
    columns = chunk, segment_start, segment_stop, start, stop, first_chunk, last_chunk
    return _with_routes(layout, *columns, is_causal=is_causal)


def _with_routes(
    layout: SequenceLayout,
    chunk: Tensor,
    segment_start: Tensor,
    segment_stop: Tensor,
    start: Tensor,
    stop: Tensor,
    first_chunk: Tensor,
    last_chunk: Tensor,
    *,
    is_causal: bool,
) -> CrossingPieces:
    """Pieces with the routes through the chunks from the first to the last one that sees each of them."""
    rank = layout.chunk_ranks()[chunk]
    lo, hi, direction = _routes(layout, chunk, first_chunk, last_chunk, is_causal=is_causal)
    return CrossingPieces(chunk, rank, segment_start, segment_stop, start, stop, lo, hi, direction, is_causal)


def _routes(
    layout: SequenceLayout, chunk: Tensor, first_chunk: Tensor, last_chunk: Tensor, *, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The ranks lo … hi that each piece's route runs through, and its direction, +1 or −1."""
    ranks, upwards = layout.chunk_ranks(), torch.ones_like(chunk)
    if layout.kind == "contiguous":
        return (chunk if is_causal else first_chunk), last_chunk, upwards
    top = layout.ring_size - 1
    if not is_causal:
        lo = torch.minimum(ranks[first_chunk], ranks[last_chunk])
        over_the_top = (first_chunk <= top) & (last_chunk > top)
        return lo, torch.where(over_the_top, top, torch.maximum(ranks[first_chunk], ranks[last_chunk])), upwards
    in_first_half = chunk <= top
    lo = torch.where(in_first_half & (last_chunk <= top), ranks[chunk], torch.minimum(ranks[chunk], ranks[last_chunk]))
    hi = torch.where(in_first_half, last_chunk.clamp(max=top), ranks[chunk])
    return lo, hi, torch.where(in_first_half, upwards, -upwards)
