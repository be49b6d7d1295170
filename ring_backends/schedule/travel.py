"""Along which trees the rows of all branches of a call travel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from ring_backends.schedule.branch import BranchSchedule
from ring_backends.schedule.limits import TREE_SHARE
from ring_backends.schedule.links import rows_at, rows_on_tree
from ring_backends.schedule.trees import CHAIN, Tree, trees


@dataclass(frozen=True, eq=False)
class Travel:
    """How the rows of K and V travel in a forward, or those of K, V, dK and dV in a backward.

    The rows of the sparsest branches travel along trees of few hops, as long as the buffers of all of them take at most
    ``TREE_SHARE`` of query, key, value, out and their gradients. The rows of the others travel along chains. If these
    take as many hops anyway, so do those of a branch that would save hardly any tile on a tree.

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
    def _chosen(self) -> dict[int, tuple[Tree, int]]:
        """The branches on trees by index, each with its tree and the rows of its buffers."""
        received = {
            branch.index: int(rows_at(branch, self.ring_size, first=1).max())
            for branch in self.branches
            if branch.longest_reach
        }
        found: dict[int, tuple[Tree, int]] = {}
        sparsest = sorted(received, key=received.__getitem__)
        while sparsest and not found:
            found = self._fastest({index: received[index] for index in sparsest})
            sparsest.pop()
        steps = max((branch.longest_reach for branch in self.branches if branch.index not in found), default=0)
        return {
            index: (tree, rows)
            for index, (tree, rows) in found.items()
            if self.branches[index].longest_reach > min(steps, 2 * len(tree.strides))
        }

    def _fastest(self, received: Mapping[int, int]) -> dict[int, tuple[Tree, int]]:
        """The tree of each branch and the rows of its buffers; empty if these are too large together.

        The hops of all branches travel at the same time, so the slowest tree counts. Among trees that are at most as
        slow, each branch takes that with the smallest buffers.
        """
        found: dict[int, tuple[Tree, int]] = {}
        limit = TREE_SHARE * self.tensor_rows
        if sum(self._rows_with_keys(index, rows) for index, rows in received.items()) > limit:
            return {}
        reach = {index: self.branches[index].longest_reach for index in received}
        choices = [(tree.cost(reach[index]), index, tree) for index in received for tree in trees(reach[index])]
        for _, as_slow in groupby(sorted(choices, key=itemgetter(0)), key=itemgetter(0)):
            for _, index, tree in as_slow:
                rows = self._buffer_rows(index, tree, received[index])
                if index not in found or rows < found[index][1]:
                    found[index] = tree, rows
            if len(found) == len(received) and sum(rows for _, rows in found.values()) <= limit:
                return found
        return {}

    def _rows_with_keys(self, index: int, received: int) -> int:
        """The size of the buffers of a branch on a tree during its tiles, in rows of K or V.

        A rank has the received rows, a copy of its own, and in a backward the gradients of the received rows.
        """
        own = int(_own_rows(self.branches[index], self.ring_size).max())
        return 2 * (received + own + self.grad_size * received)

    def _buffer_rows(self, index: int, tree: Tree, received: int) -> int:
        """The largest size of the buffers of a branch on a tree, in rows of K or V.

        After its tiles, a rank has the gradients of the received rows, and those that arrive in one hop. With several
        blocks of heads, it also has the sums of the gradients of its own rows, which are not counted here.
        """
        arriving = int(self._sent(index, tree).max()) if self.grad_size else 0
        return max(self._rows_with_keys(index, received), 2 * self.grad_size * (received + arriving))

    @cached_property
    def _sent(self) -> Callable[[int, Tree], Tensor]:
        """The rows that each rank sends in each hop if a branch is on a tree: int64 [hops, ring size]."""
        return cache(lambda index, tree: rows_on_tree(self.branches[index], self.ring_size, tree))

    @cached_property
    def trees(self) -> dict[int, Tree]:
        """The branches whose rows do not travel along chains, by index, each with its tree."""
        return {index: tree for index, (tree, _) in self._chosen.items()}

    def tree(self, branch: int) -> Tree:
        """The tree along which the rows of a branch travel."""
        return self.trees.get(branch, CHAIN)

    @cached_property
    def tree_rows(self) -> int:
        """The size of the buffers of all branches on trees, in rows of K or V, over all heads."""
        return sum(rows for _, rows in self._chosen.values())

    @cached_property
    def num_tree_hops(self) -> int:
        """The number of hops after which all rows on trees have arrived; 0 if there are none."""
        return max((len(tree.strides) for tree in self.trees.values()), default=0)

    @cached_property
    def first_hop_share(self) -> float:
        """The share of the rows on trees that travel in the first hop. Their dK and dV come home in the last one."""
        sent = [self._sent(index, tree) for index, tree in self.trees.items()]
        return sum(int(of_hops[0].sum()) for of_hops in sent) / max(1, sum(int(of_hops.sum()) for of_hops in sent))

    @cached_property
    def chained(self) -> tuple[BranchSchedule, ...]:
        """The branches whose rows travel along chains."""
        return tuple(branch for branch in self.branches if branch.index not in self.trees)

    @cached_property
    def num_steps(self) -> int:
        """The number of hops after which all rows on chains have arrived; 0 if there are none."""
        return max((branch.longest_reach for branch in self.chained), default=0)

    @cached_property
    def num_tree_messages(self) -> int:
        """How many messages with K and V on trees a rank sends, at most."""
        messages = (tree.num_messages(self.branches[index].longest_reach) for index, tree in self.trees.items())
        return max(messages, default=0)

    def num_hops(self, branch: int) -> int:
        """The number of hops after which the rows of K and V of a branch have arrived. dK and dV take as many."""
        return self.tree(branch).num_hops(self.branches[branch].longest_reach)

    @cached_property
    def max_rows_in_flight(self) -> int:
        """Maximum number of rows of K and V on chains, over all heads, that one rank passes on at a time."""
        rows = torch.zeros(self.ring_size, dtype=torch.int64, device="cpu")
        return int(sum((_own_rows(branch, self.ring_size) for branch in self.chained), rows).max())

    @cached_property
    def key_rows_sent(self) -> Tensor:
        """Rows of K and V that each rank sends, over all heads. K and V count as one row: int64 [ring size]."""
        total = torch.zeros(self.ring_size, dtype=torch.int64, device="cpu")
        for branch in self.branches:
            if branch.index in self.trees:
                total += self._sent(branch.index, self.trees[branch.index]).sum(0)
            else:
                total += rows_at(branch, self.ring_size, first=0, behind=1)
        return total


def _own_rows(branch: BranchSchedule, ring_size: int) -> Tensor:
    """The rows of each rank that another rank needs, over all heads: int64 [ring size]."""
    rows, reach = branch.travelling
    total = torch.zeros(ring_size, dtype=torch.int64, device="cpu")
    return total.index_add_(0, branch.crossing.rank, (rows * (reach > 0)).sum(1))
