"""How the rows of all branches of a call travel: around the ring, or spread in few hops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

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
        left = SPREAD_SHARE * self.tensor_rows
        for index in sorted(received, key=received.__getitem__):
            branch = self.branches[index]
            for spread in spreads(branch.longest_reach):
                rows = self._buffer_rows(branch, spread, received[index])
                if rows <= left:
                    found[index] = spread, rows
                    left -= rows
                    break
        steps = max((branch.longest_reach for branch in self.branches if branch.index not in found), default=0)
        return {
            index: (spread, rows)
            for index, (spread, rows) in found.items()
            if self.branches[index].longest_reach > min(steps, 2 * spread.num_hops)
        }

    def _buffer_rows(self, branch: BranchSchedule, spread: Spread, received: int) -> int:
        """The size of the buffers of a spread branch, in rows of K or V.

        A rank has the received rows and a copy of its own. In a backward, it also has the gradients of the received
        rows. Later, these and the gradients that arrive in one hop exist instead.
        """
        own = int(_own_rows(branch, self.ring_size).max())
        arriving = min(received, own * spread.most_received(branch.longest_reach)) if self.grad_size else 0
        return 2 * max(received + own + self.grad_size * received, self.grad_size * (received + arriving))

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
                total += rows_spread(branch, self.ring_size, self.spreads[branch.index])
            else:
                total += rows_at(branch, self.ring_size, first=0, behind=1)
        return total


def _own_rows(branch: BranchSchedule, ring_size: int) -> Tensor:
    """The rows of each rank that another rank needs, over all heads: int64 [ring size]."""
    rows, reach = branch.travelling
    total = torch.zeros(ring_size, dtype=torch.int64, device="cpu")
    return total.index_add_(0, branch.crossing.rank, (rows * (reach > 0)).sum(1))
