"""One branch of a schedule: the pieces of segments that cross chunks, and the rows and hops of their parts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ring_backends.schedule.crossing import CrossingPieces


@dataclass(frozen=True, eq=False)
class BranchSchedule:
    """One branch's share of the schedule.

    Attributes:
        index: number of the branch.
        ring_size: number of ranks.
        rate: dilation rate r.
        segment_length: w, at most the length of the sequence.
        offsets: the distinct offsets of the branch's heads: int64 [offsets].
        heads_at: number of query heads at each offset: int64 [offsets].
        streams: the distinct pairs of a key/value head and the index of an offset: int64 [streams, 2].
        band: by how many rows a query and a key may be apart; None without a window.
        pieces: the pieces of segments that lie on several chunks.
        rows_of_pieces: rows of each piece at each offset: int64 [pieces, offsets].
        crossing: the parts of pieces that other chunks see. Without a window, these are the pieces.
        num_rows: rows of each part at each offset: int64 [parts, offsets].
        reach: hops that these rows make: int64 [parts, offsets].
    """

    index: int
    ring_size: int
    rate: int
    segment_length: int
    offsets: Tensor
    heads_at: Tensor
    streams: Tensor
    band: int | None
    pieces: CrossingPieces
    rows_of_pieces: Tensor
    crossing: CrossingPieces
    num_rows: Tensor
    reach: Tensor

    @cached_property
    def longest_reach(self) -> int:
        """The number of hops that the rows of the longest route make; 0 if no segment crosses a chunk boundary."""
        return int(self.reach.max()) if self.reach.numel() else 0

    @cached_property
    def own_rows(self) -> Tensor:
        """The rows of K and V of each rank that another rank needs, over all heads: int64 [ring size]."""
        rows, reach = self.travelling
        total = torch.zeros(self.ring_size, dtype=torch.int64, device="cpu")
        return total.index_add_(0, self.crossing.rank, (rows * (reach > 0)).sum(1))

    @cached_property
    def travelling(self) -> tuple[Tensor, Tensor]:
        """The rows of K and V of each part, over all heads, and their reach: int64 [parts, different reaches]."""
        if not self.reach.numel():
            return self.num_rows, self.reach
        reach, column = self.reach.unique(dim=1, return_inverse=True)
        streams_at = self.streams[:, 1].bincount(minlength=len(self.offsets))
        return torch.zeros_like(reach).index_add_(1, column, self.num_rows * streams_at), reach

    def rows_of_blocks(self, blocks: Tensor, shares: int) -> Tensor:
        """The rows of each part that travel, in the largest of some shares: int64 [parts, blocks of heads].

        Args:
            blocks: the block of each key/value head, int64 [key/value heads].
        """
        head, offset = self.streams.T
        streams = torch.zeros(len(self.offsets), 1 + int(blocks.max()), dtype=torch.int64, device="cpu")
        streams.index_put_((offset, blocks[head]), torch.ones_like(head), accumulate=True)
        return (-(-self.num_rows // shares) * (self.reach > 0)) @ streams

    @cached_property
    def lanes(self) -> tuple[Tensor, Tensor, Tensor]:
        """The lane of each part, int64 [parts]; the first rank that receives on each lane, and the last: int64 [lanes].

        On one lane, a rank receives rows of one other rank in each hop along a chain. So parts of a segment share a
        lane if they travel in the same direction, and their routes all begin at the source, or all have the same ranks.
        With a window, it is enough if all have as many ranks before the source and as many after it.
        """
        parts = self.crossing
        is_up = parts.direction > 0
        ends = (parts.lo, parts.hi) if self.band is None else (parts.rank - parts.lo, parts.hi - parts.rank)
        route = _numbered(parts.segment_start, parts.direction, *ends)
        wraps = torch.isin(route, route[parts.rank != torch.where(is_up, parts.lo, parts.hi)])
        lane = _numbered(parts.segment_start, parts.direction, torch.where(wraps, route, -1))
        first, last = parts.lo + (~wraps & is_up).long(), parts.hi - (~wraps & ~is_up).long()
        lowest = torch.zeros(1 + int(lane.max()), dtype=torch.int64, device="cpu") if len(lane) else lane
        lowest, highest = (
            lowest.scatter_reduce(0, lane, rank, reduce, include_self=False)
            for rank, reduce in ((first, "amin"), (last, "amax"))
        )
        return lane, lowest, highest


def _numbered(*columns: Tensor) -> Tensor:
    """The number of each row of a table among its distinct rows."""
    number: Tensor = torch.stack(columns, 1).unique(dim=0, return_inverse=True)[1]
    return number
