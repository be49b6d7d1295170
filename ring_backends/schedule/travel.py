"""How the rows of all branches of a call travel: around the ring, or spread in few hops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from ring_backends.schedule.branch import BranchSchedule
from ring_backends.schedule.limits import SPREAD_SHARE
from ring_backends.schedule.links import rows_at, rows_spread
from ring_backends.schedule.spread import Spread, spreads


@dataclass(frozen=True, eq=False)
class Travel:
    """How the rows of K and V travel in a forward, or those of K, V, dK and dV in a backward.

    The sparsest branches are spread, as long as the buffers of all of them take at most ``SPREAD_SHARE`` of query, key,
    value, out and their gradients. The rows of the others go around. If they take as many hops anyway, a branch that
    would save hardly any tile goes around with them.

    Args:
        branches: the branches of the schedule.
        ring_size: number of ranks.
        tensor_rows: rows of query, key, value, out and their gradients of one rank, over all heads.
        grad_size: in a backward, bytes per element of dK and dV, relative to those of K and V; 0 in a forward.
    """

    branches: Sequence[BranchSchedule]
    ring_size: int
    tensor_rows: int
    grad_size: int

    @cached_property
    def _chosen(self) -> dict[int, tuple[Spread, int]]:
        """The spread branches by index, each with its tree and the rows of its buffers."""
        received = {
            branch.index: int(rows_at(branch, self.ring_size, first=1).max())
            for branch in self.branches
            if branch.longest_reach
        }
        found: dict[int, tuple[Spread, int]] = {}
        sparsest = sorted(received, key=received.__getitem__)
        while sparsest and not found:
            found = self._trees({index: received[index] for index in sparsest})
            sparsest.pop()
        steps = max((branch.longest_reach for branch in self.branches if branch.index not in found), default=0)
        return {
            index: (spread, rows)
            for index, (spread, rows) in found.items()
            if self.branches[index].longest_reach > min(steps, 2 * spread.num_hops)
        }

    def _trees(self, received: Mapping[int, int]) -> dict[int, tuple[Spread, int]]:
        """The tree of each branch and the rows of its buffers; empty if these are too large together.

        The hops of all branches travel at the same time, so the slowest tree counts. Among trees that are at most as
        slow, each branch takes that with the smallest buffers.
        """
        found: dict[int, tuple[Spread, int]] = {}
        limit = SPREAD_SHARE * self.tensor_rows
        if sum(self._rows_with_keys(index, rows) for index, rows in received.items()) > limit:
            return {}
        reach = {index: self.branches[index].longest_reach for index in received}
        trees = [(tree.cost(reach[index]), index, tree) for index in received for tree in spreads(reach[index])]
        for _, as_slow in groupby(sorted(trees, key=itemgetter(0)), key=itemgetter(0)):
            for _, index, tree in as_slow:
                rows = self._buffer_rows(index, tree, received[index])
                if index not in found or rows < found[index][1]:
                    found[index] = tree, rows
            if len(found) == len(received) and sum(rows for _, rows in found.values()) <= limit:
                return found
        return {}

    def _rows_with_keys(self, index: int, received: int) -> int:
        """The size of the buffers of a spread branch during its tiles, in rows of K or V.

        A rank has the received rows, a copy of its own, and in a backward the gradients of the received rows.
        """
        own = int(_own_rows(self.branches[index], self.ring_size).max())
        return 2 * (received + own + self.grad_size * received)

    def _buffer_rows(self, index: int, spread: Spread, received: int) -> int:
        """The largest size of the buffers of a spread branch, in rows of K or V.

        After its tiles, a rank has the gradients of the received rows, and those that arrive in one hop. With several
        blocks of heads, it also has the sums of the gradients of its own rows, which are not counted here.
        """
        arriving = int(self._sent(index, spread).max()) if self.grad_size else 0
        return max(self._rows_with_keys(index, received), 2 * self.grad_size * (received + arriving))

    @cached_property
    def _sent(self) -> Callable[[int, Spread], Tensor]:
        """The rows that each rank sends in each hop if a branch is spread: int64 [hops, ring size]."""
        return cache(lambda index, spread: rows_spread(self.branches[index], self.ring_size, spread))

    @cached_property
    def spreads(self) -> dict[int, Spread]:
        """The spread branches by index, each with its tree."""
        return {index: spread for index, (spread, _) in self._chosen.items()}

    @cached_property
    def spread_rows(self) -> int:
        """The size of the buffers of all spread branches, in rows of K or V, over all heads."""
        return sum(rows for _, rows in self._chosen.values())

    @cached_property
    def num_spread_hops(self) -> int:
        """The number of hops after which all rows of spread branches have arrived; 0 if no branch is spread."""
        return max((spread.num_hops for spread in self.spreads.values()), default=0)

    @cached_property
    def first_hop_share(self) -> float:
        """The share of the spread rows that travel in the first hop. Their dK and dV come home in the last one."""
        sent = [self._sent(index, tree) for index, tree in self.spreads.items()]
        return sum(int(of_hops[0].sum()) for of_hops in sent) / max(1, sum(int(of_hops.sum()) for of_hops in sent))

    @cached_property
    def around(self) -> tuple[BranchSchedule, ...]:
        """The branches whose rows go around."""
        return tuple(branch for branch in self.branches if branch.index not in self.spreads)

    @cached_property
    def num_steps(self) -> int:
        """The number of hops after which all rows that go around have arrived; 0 if there are none."""
        return max((branch.longest_reach for branch in self.around), default=0)

    @cached_property
    def num_spread_messages(self) -> int:
        """How many messages with K and V of spread branches a rank sends, at most."""
        messages = (spread.num_messages(self.branches[index].longest_reach) for index, spread in self.spreads.items())
        return max(messages, default=0)

    def num_hops(self, branch: int) -> int:
        """The number of hops after which the rows of K and V of a branch have arrived. dK and dV take as many."""
        return self.spreads[branch].num_hops if branch in self.spreads else self.branches[branch].longest_reach

    @cached_property
    def max_rows_in_flight(self) -> int:
        """Maximum number of rows of K and V, over all heads, that one rank passes on at a time."""
        rows = torch.zeros(self.ring_size, dtype=torch.int64, device="cpu")
        return int(sum((_own_rows(branch, self.ring_size) for branch in self.around), rows).max())

    @cached_property
    def key_rows_sent(self) -> Tensor:
        """Rows of K and V that each rank sends, over all heads. K and V count as one row: int64 [ring size]."""
        total = torch.zeros(self.ring_size, dtype=torch.int64, device="cpu")
        for branch in self.branches:
            if branch.index in self.spreads:
                total += self._sent(branch.index, self.spreads[branch.index]).sum(0)
            else:
                total += rows_at(branch, self.ring_size, first=0, behind=1)
        return total


def _own_rows(branch: BranchSchedule, ring_size: int) -> Tensor:
    """The rows of each rank that another rank needs, over all heads: int64 [ring size]."""
    rows, reach = branch.travelling
    total = torch.zeros(ring_size, dtype=torch.int64, device="cpu")
    return total.index_add_(0, branch.crossing.rank, (rows * (reach > 0)).sum(1))
