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
        streams_at: number of distinct (key/value head, offset) pairs at each offset: int64 [offsets].
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
    streams_at: Tensor
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
        return torch.zeros_like(reach).index_add_(1, column, self.num_rows * self.streams_at), reach
