"""The links of a ring: how many rows each rank sends to each other rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ring_backends.schedule.branch import BranchSchedule


@dataclass(frozen=True, eq=False)
class Links:
    """The rows that one call sends from rank to rank: int64 [links] each. A pair of ranks may have several entries.

    Attributes:
        source, destination: ring ranks.
        rows: number of rows, summed over heads. A row of K and its row of V count as one, as do a row of dK and its row
            of dV.
    """

    source: Tensor
    destination: Tensor
    rows: Tensor

    @classmethod
    def of_keys(cls, branches: Sequence[BranchSchedule], ring_size: int) -> Links:
        """The links of K and V, the same in a forward and in a backward."""
        return cls._of(branches, ring_size, grads=False)

    @classmethod
    def of_grads(cls, branches: Sequence[BranchSchedule], ring_size: int) -> Links:
        """The links of dK and dV in a backward: the routes of K and V from the second rank on, then to the source."""
        return cls._of(branches, ring_size, grads=True)

    @classmethod
    def _of(cls, branches: Sequence[BranchSchedule], ring_size: int, *, grads: bool) -> Links:
        """Sum the hops between neighbours over all routes. List every other hop as an entry of its own."""
        changes = {direction: torch.zeros(ring_size + 1, dtype=torch.int64, device="cpu") for direction in (1, -1)}
        listed: list[tuple[Tensor, Tensor, Tensor]] = []
        for branch in branches:
            for direction, change in changes.items():
                chosen = (branch.crossing.direction == direction).nonzero().squeeze(1)
                rows = (branch.num_rows * branch.streams_at)[chosen]
                reach = branch.reach[chosen]
                source, lo, hi = (
                    column[chosen].unsqueeze(1).expand_as(reach)
                    for column in (branch.crossing.rank, branch.crossing.lo, branch.crossing.hi)
                )
                ring = hi - lo + 1
                first = lo + (source - lo + direction * int(grads)).remainder(ring)
                hops = (reach - int(grads)).clamp(min=0)
                # In the direction of travel, a route has three parts: the hops up to the end of the sub-ring, at most
                # one hop that wraps around, and the hops after that one.
                until_end = (hi - first) if direction > 0 else (first - lo)
                before = torch.minimum(hops, until_end)
                around = (hops > until_end).long()
                after = hops - before - around
                begin, end = (lo, hi) if direction > 0 else (hi, lo)
                for start, count in ((first, before), (begin, after)):
                    low = start if direction > 0 else start - count + 1
                    change.index_add_(0, low.flatten(), (rows * (count > 0)).flatten())
                    change.index_add_(0, (low + count).flatten(), -(rows * (count > 0)).flatten())
                listed.append((end, begin, rows * around))
                if grads:
                    last = lo + (source - lo + direction * reach).remainder(ring)
                    listed.append((last, source, rows * (reach > 0)))
        ranks = torch.arange(ring_size, device="cpu")
        neighbours = [(ranks, ranks + direction, change.cumsum(0)[:-1]) for direction, change in changes.items()]
        columns = [torch.cat([part.flatten() for part in column]) for column in zip(*neighbours, *listed, strict=True)]
        used = columns[2] > 0
        return cls(*(column[used] for column in columns))

    def rows_between(self, hosts: Tensor) -> int:
        """Rows with source and destination on different hosts. ``hosts`` is the host of each ring rank, [ring size]."""
        crosses = hosts[self.source] != hosts[self.destination]
        return int((self.rows * crosses).sum())

    def rows_sent(self, ring_size: int) -> Tensor:
        """Rows that each rank sends: int64 [ring size]."""
        return torch.zeros(ring_size, dtype=torch.int64, device="cpu").index_add_(0, self.source, self.rows)
