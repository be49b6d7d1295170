"""The pieces of segments that lie on several chunks, and the routes along which their K and V travel.

Everything here is arithmetic on arrays with one entry per piece. A chunk has at most two such pieces per branch. So the
cost of this module does not grow with the length of the sequence.

The K and V of a piece travel along a *route*: from the rank that holds them through the ranks ``lo`` … ``hi`` in one
direction to the last rank that needs them. A route is cyclic: upwards, ``lo`` follows ``hi``; downwards, ``hi`` follows
``lo``. Without a causal mask, the route is the sub-ring of all ranks that share the segment. With a causal mask, only
later chunks need a piece, so it travels towards them: upwards, or downwards if it lies in the second half of a zigzag
layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ring_backends.schedule.layout import SequenceLayout
from ring_backends.schedule.pattern import num_covered


@dataclass(frozen=True, eq=False)
class CrossingPieces:
    """The pieces of one branch's segments that lie on several chunks, in order of position: int64 [pieces] each.

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

    def num_rows(self, offsets: Tensor, rate: int) -> Tensor:
        """Rows of each piece at each offset: int64 [pieces, offsets]."""
        start = (self.start - self.segment_start).unsqueeze(1)
        stop = (self.stop - self.segment_start).unsqueeze(1)
        return num_covered(stop, offsets, rate) - num_covered(start, offsets, rate)

    def reach(self, num_rows: Tensor) -> Tensor:
        """How many hops each piece's rows make at each offset: int64 [pieces, offsets], 0 for pieces without rows.

        Rows travel to the last rank of their route that has a query row at their offset. If every piece of the segment
        has a row at every offset, that rank is the last of the route. Otherwise, all pairs of pieces of the segment are
        examined.
        """
        reach = (self.hi - self.lo).unsqueeze(1).expand_as(num_rows).clone()
        rowless = torch.isin(self.segment_start, self.segment_start[(num_rows == 0).any(1)])
        if rowless.any():
            source, target = self._pairs(rowless.nonzero().squeeze(1))
            hop = (self.rank[target] - self.rank[source]) * self.direction[source]
            hop = hop.remainder((self.hi - self.lo + 1)[source]).unsqueeze(1)
            if self.is_causal:
                hop = hop * (self.chunk[target] > self.chunk[source]).unsqueeze(1)
            hop = hop * (num_rows[target] > 0)
            reach[rowless] = 0
            reach.scatter_reduce_(0, source.unsqueeze(1).expand_as(hop), hop, "amax")
        return reach * (num_rows > 0)

    def _pairs(self, pieces: Tensor) -> tuple[Tensor, Tensor]:
        """All ordered pairs of the given pieces that share a segment."""
        _, segment, count = self.segment_start[pieces].unique_consecutive(return_inverse=True, return_counts=True)
        first = count.cumsum(0) - count
        partners = count[segment]
        source = torch.arange(len(pieces), device="cpu").repeat_interleave(partners)
        within = torch.arange(len(source), device="cpu") - (partners.cumsum(0) - partners).repeat_interleave(partners)
        return pieces[source], pieces[first[segment[source]] + within]


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
    lo, hi, direction = _routes(layout, chunk, first_chunk, last_chunk, is_causal=is_causal)
    return CrossingPieces(
        chunk=chunk,
        rank=layout.chunk_ranks()[chunk],
        segment_start=segment_start,
        segment_stop=segment_stop,
        start=start,
        stop=torch.minimum(segment_stop, starts[chunk + 1]),
        lo=lo,
        hi=hi,
        direction=direction,
        is_causal=is_causal,
    )


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
