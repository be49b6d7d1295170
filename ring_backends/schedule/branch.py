"""One branch of a schedule: which of its segments cross chunks, and how many rows travel how far."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ring_backends.schedule.crossing import CrossingPieces


@dataclass(frozen=True, eq=False)
class BranchSchedule:
    """One branch's share of the schedule.

    Attributes:
        index, rate, segment_length: which branch, r, and w (at most the sequence).
        offsets: the distinct offsets that its heads have: int64 [offsets].
        heads_at, streams_at: the number of query heads, and of distinct (key/value head, offset) pairs, at each offset.
        crossing: the pieces of segments that lie on several chunks.
        num_rows, reach: per piece and offset, rows and hops: int64 [pieces, offsets].
    """

    index: int
    rate: int
    segment_length: int
    offsets: Tensor
    heads_at: Tensor
    streams_at: Tensor
    crossing: CrossingPieces
    num_rows: Tensor
    reach: Tensor
