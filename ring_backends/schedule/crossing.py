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
        has a row at every offset, that rank is the last of the route. Otherwise, it is searched for at each offset.

        Args:
            pieces: the pieces that the parts were cut from.
            band: by how many rows a query and a key may be apart; None for no limit.
        """
        num_rows, rows_of_pieces = self.num_rows(offsets, rate), pieces.num_rows(offsets, rate)
        reach = (self.hi - self.lo).unsqueeze(1).expand_as(num_rows).clone()
        rowless = pieces.segment_start[(rows_of_pieces == 0).any(1)]
        sources = torch.isin(self.segment_start, rowless).nonzero().squeeze(1)
        if len(sources):
            first, first_query = self.first_row(offsets, rate), pieces.first_row(offsets, rate)
            for column in range(len(offsets)):
                targets = rows_of_pieces[:, column].nonzero().squeeze(1)
                begin, end = self._seeing(pieces, sources, targets)
                if band is not None:
                    # Rows are numbered within a segment. Together with its start, they are in order of position.
                    own, others = self.segment_start[sources], pieces.segment_start[targets]
                    first_seen = own + first[sources, column] - band
                    last_seen = own + (first + num_rows - 1)[sources, column] + band
                    first_of_target = others + first_query[targets, column]
                    last_of_target = first_of_target + rows_of_pieces[targets, column] - 1
                    begin = begin.maximum(torch.searchsorted(last_of_target, first_seen))
                    end = end.minimum(torch.searchsorted(first_of_target, last_seen, right=True))
                reach[sources, column] = self._farthest(pieces, sources, targets, begin, end)
        return reach * (num_rows > 0)

    def _seeing(self, pieces: CrossingPieces, sources: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The first of the targets whose queries may see each source, and the end of these: int64 [sources] each.

        Args:
            sources, targets: indices of parts and of pieces, in ascending order.
        """
        segment, segments = self.segment_start[sources], pieces.segment_start[targets]
        begin, end = torch.searchsorted(segments, segment), torch.searchsorted(segments, segment, right=True)
        if self.is_causal:
            begin = begin.maximum(torch.searchsorted(pieces.chunk[targets], self.chunk[sources], right=True))
        return begin, end

    def _farthest(self, pieces: CrossingPieces, sources: Tensor, targets: Tensor, begin: Tensor, end: Tensor) -> Tensor:
        """How many hops each source makes to the last of its targets on its route: int64 [sources].

        Args:
            sources, targets: as in :meth:`_seeing`.
            begin, end: which of the targets see each source.
        """
        rank, lo, hi, direction = (x[sources] for x in (self.rank, self.lo, self.hi, self.direction))
        hops = torch.zeros_like(rank)
        ranks = pieces.rank[targets]
        # In order of position, ranks rise to the last one. In a zigzag layout they then fall.
        top = int((ranks.diff() >= 0).long().cumprod(0).sum()) + 1 if len(ranks) else 0
        for sign, half in ((1, ranks[:top]), (-1, -ranks[top:])):
            if not len(half):
                continue
            before = 0 if sign > 0 else top
            own, lowest, highest = sign * rank, *((lo, hi) if sign > 0 else (-hi, -lo))
            first = (begin - before).maximum(torch.searchsorted(half, lowest))
            stop = (end - before).minimum(torch.searchsorted(half, highest, right=True))
            # The route is cyclic, so the last rank is the nearest one behind the source, and else the farthest ahead.
            below = torch.searchsorted(half, own).minimum(stop) - 1
            below = torch.where(below < first, stop - 1, below)
            above = torch.searchsorted(half, own, right=True).maximum(first)
            above = torch.where(above >= stop, first, above)
            last = torch.where(sign * direction > 0, below, above).clamp(0, len(half) - 1)
            hop = ((sign * half[last] - rank) * direction).remainder(hi - lo + 1)
            hops = hops.maximum(hop * (first < stop))
        return hops

    def parts(self, layout: SequenceLayout, distance: int) -> CrossingPieces:
        """Cut the pieces into parts that are seen from the same chunks, and leave out what no other chunk sees.

        Args:
            distance: by how many positions a query and a key of a segment may be apart.
        """
        # A chunk has at most ``group_size`` positions more than another one. So at most one end of a chunk lies
        # ``distance`` positions behind a position inside a piece, and at most one so far before; with groups, two do.
        starts = layout.chunk_starts()
        cuts = [self.start, self.stop]
        for sign in (1, -1) if not self.is_causal else (1,):
            first = torch.searchsorted(starts, self.start + sign * distance, right=True)
            for seen in [first, first + 1] if layout.group_size > 1 else [first]:
                end = starts[seen.clamp(max=len(starts) - 1)]
                cut = end - sign * distance
                is_inside = (self.segment_start < end) & (end < self.segment_stop)
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
