"""Along which trees the rows of all branches of a call travel, and when."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ring_backends.schedule.branch import BranchSchedule
from ring_backends.schedule.limits import TREE_SHARE, Limits
from ring_backends.schedule.links import messages_on_trees, rows_at, rows_in_hops, rows_on_tree
from ring_backends.schedule.trees import CHAIN, MESSAGE_COST, Tree, trees

TILE_COST = 0.3
"""The host's time to launch the tiles of one branch in one step, relative to the latency of a hop."""

EXPOSED_COST = 1.4
"""How many times as much lots cost if few tiles hide their hops."""


@dataclass(frozen=True)
class Volume:
    """How large a call is: the tensors of the rank with most positions, and what its buffers may take.

    Attributes:
        query_rows, key_rows: rows of query and of key, over all heads.
        kv_heads: number of key/value heads.
        pair_bytes: bytes of a row of K and its row of V.
        itemsize, grad_itemsize: bytes per element of K and V, and of dK and dV on the wire. 0 for a forward.
        buffer_bytes: communication buffers may take this many bytes, even if that is more than their share of the
            tensors.
    """

    query_rows: int
    key_rows: int
    kv_heads: int
    pair_bytes: int
    itemsize: int
    grad_itemsize: int
    limits: Limits
    buffer_bytes: int

    @property
    def tensor_bytes(self) -> int:
        """Bytes of query, key, value, out and their gradients."""
        return 2 * (self.query_rows + self.key_rows) * self.pair_bytes

    @property
    def budget(self) -> float:
        """The maximum size of the communication buffers, in rows of K or V."""
        size = max(TREE_SHARE * self.tensor_bytes, self.buffer_bytes)
        return 2 * size / max(1, self.pair_bytes)


class Part(NamedTuple):
    """A share of the rows of a branch: number ``share`` of ``shares``, counted from 0, and the tree of all shares."""

    branch: int
    tree: Tree
    share: int = 0
    shares: int = 1


@dataclass(frozen=True)
class Lot:
    """Rows that travel along trees at the same time.

    Attributes:
        parts: what travels.
        step: the step whose tiles use the rows. The last hop arrives before it. dK and dV go home after it.
    """

    parts: tuple[Part, ...]
    step: int = 0

    @property
    def num_hops(self) -> int:
        return max(len(part.tree.strides) for part in self.parts)


def rows_of_parts(branches: Sequence[BranchSchedule]) -> Callable[[Part], tuple[int, int, int, int]]:
    """A function that returns the rows of a part that a rank receives, holds, sends in one hop, and copies to send.

    Each is the largest number of all ranks. The function takes the number of rows of the largest share. The rows that a
    rank copies are at most those that it sends in one hop after the first.
    """

    @cache
    def rows(part: Part) -> tuple[int, int, int, int]:
        branch = branches[part.branch]
        if part.shares > 1:
            branch = replace(branch, num_rows=-(-branch.num_rows // part.shares))
        sent = rows_on_tree(branch, part.tree).amax(1).tolist()
        received, own = (int(count.max()) for count in (rows_at(branch, first=1), branch.own_rows))
        return received, own, max(sent), max(sent[1:], default=0)

    return rows


class _Way(NamedTuple):
    """A way in which the rows of a call may travel, with what it costs relative to the latency of a hop."""

    cost: float
    rows: int
    lots: tuple[Lot, ...]


@dataclass(frozen=True, eq=False)
class Travel:
    """How the rows of K and V travel in a forward, or those of K, V, dK and dV in a backward.

    The rows of some branches travel along trees of few hops, those of the others along chains. Rows on trees are kept
    until the step that uses them. If the buffers for all of them would be too large, they travel in several *lots*, one
    after the other. Of all ways whose buffers are small enough, the one with the least cost is taken: of its hops, the
    messages in them, and the tiles of each branch in each step.

    Args:
        branches: the branches of the schedule.
        rows_of: what :func:`rows_of_parts` returns for these branches.
        volume: the size of the call.
        few_hops: False lets all rows travel along chains.
    """

    branches: Sequence[BranchSchedule]
    rows_of: Callable[[Part], tuple[int, int, int, int]]
    volume: Volume
    few_hops: bool = True

    @cached_property
    def _way(self) -> _Way:
        """The branches with the longest routes travel along trees first, since the longest chain counts."""
        longest = sorted(
            (branch for branch in self.branches if branch.longest_reach),
            key=lambda branch: (-branch.longest_reach, self.rows_of(self._part(branch.index))),
        )
        numbers = [branch.index for branch in longest]
        found = [_Way(self._chain_cost(numbers, self._cuts(numbers, 0)), 0, ())]
        for count in range(1, 1 + self.few_hops * len(numbers)):
            chained = numbers[count:]
            for way in self._in_lots(numbers[:count]):
                if len(way.lots) == 1 or self._blocks_of_sums == 1:
                    cost = self._chain_cost(chained, self._cuts(chained, way.rows))
                    found.append(way._replace(cost=way.cost + cost))
        return min(found, key=lambda way: (way.cost, way.rows))

    def _part(self, index: int) -> Part:
        """All rows of a branch, and the tree along which they may travel."""
        return Part(index, trees(self.branches[index].longest_reach)[0])

    def _chain_cost(self, chained: Sequence[int], cuts: int) -> float:
        reaches = [self.branches[index].longest_reach for index in chained]
        hops = max(reaches, default=0) * (1 + MESSAGE_COST)
        return self._directions * cuts * (hops + TILE_COST * sum(reaches))

    @property
    def _directions(self) -> int:
        return 2 if self.volume.grad_itemsize else 1

    def _in_lots(self, on_trees: Sequence[int]) -> Iterator[_Way]:
        """The ways in which the rows of these branches travel in one lot, or in several, within the budget.

        Lots may overlap: while the tiles use one, the next one arrives, and the gradients of the one before go home.
        Else each lot has the buffers for itself. Copies of rows that are sent come on top of the budget.
        """
        budget = self.volume.budget
        branches = [*map(self._part, on_trees)]
        whole = sum(map(self._alone, branches))
        if whole <= budget:
            lots = [Lot(tuple(branches))]
            yield _Way(self._lot_cost(lots), self._rows_with_copies(lots), self._timed(lots, overlap=True))
            return
        for overlap, size, limit, factor in (
            (True, self._overlapping, budget / 2, 1.0),
            (False, self._alone, budget, EXPOSED_COST),
        ):
            lots, largest = self._packed(branches, size, limit)
            if lots:
                rows = int(2 * largest) if overlap else self._rows_with_copies(lots)
                yield _Way(factor * self._lot_cost(lots), rows, self._timed(lots, overlap=overlap))

    def _packed(self, branches: Sequence[Part], size: Callable[[Part], float], limit: float) -> tuple[list[Lot], float]:
        """Lots of at most ``limit`` rows, and the rows of the largest; none if a chain would take fewer hops."""
        lots: list[tuple[float, list[Part]]] = []
        for part in sorted(branches, key=size, reverse=True):
            shares = self._num_shares(part, size, limit)
            if shares is None:
                return [], 0.0
            rows = size(part._replace(shares=shares))
            if shares > 1:
                lots += [(rows, [part._replace(share=share, shares=shares)]) for share in range(shares)]
                continue
            fitting = [place for place, (held, _) in enumerate(lots) if held + rows <= limit]
            if not fitting:
                lots.append((rows, [part]))
            else:
                held, parts = lots[fitting[0]]
                lots[fitting[0]] = held + rows, [*parts, part]
        return [Lot(tuple(parts)) for _, parts in lots], max(rows for rows, _ in lots)

    def _num_shares(self, part: Part, size: Callable[[Part], float], limit: float) -> int | None:
        """The fewest shares of at most ``limit`` rows; None if a chain would take fewer hops."""
        branch = self.branches[part.branch]
        least = max(1, math.ceil(size(part) / max(1, limit)))
        numbers = range(least, 1 + min(branch.longest_reach, int(branch.num_rows.max())))
        place = bisect_left(numbers, True, key=lambda shares: size(part._replace(shares=shares)) <= limit)
        return numbers[place] if place < len(numbers) else None

    def _lot_cost(self, lots: Sequence[Lot]) -> float:
        costs = (
            lot.num_hops + MESSAGE_COST * int(self._messages(lot).max()) + TILE_COST * len(lot.parts) for lot in lots
        )
        return self._directions * sum(costs)

    def _messages(self, lot: Lot) -> Tensor:
        """How many messages with K and V each rank sends (:func:`messages_on_trees`): int64 [ring size]."""
        return self._messages_on_trees(tuple((part.branch, part.tree) for part in lot.parts))

    @cached_property
    def _messages_on_trees(self) -> Callable[[tuple[tuple[int, Tree], ...]], Tensor]:
        return cache(lambda parts: messages_on_trees((self.branches[index], tree) for index, tree in parts))

    def _timed(self, lots: Sequence[Lot], *, overlap: bool) -> tuple[Lot, ...]:
        """The lots with their steps."""
        found: list[Lot] = []
        home = [0]  # for each lot, the first step after which its gradients are home
        for lot in lots:
            before = found[-1].step if found else 0
            step = before + lot.num_hops
            if found:
                step = max(step, home[-2] + 1) if overlap else home[-1] + 1 + lot.num_hops
            found.append(Lot(lot.parts, step))
            home.append(step + (lot.num_hops if self.volume.grad_itemsize else 0))
        return tuple(found)

    def _alone(self, part: Part) -> float:
        """The largest size of the buffers of rows on a tree that share them with no others, in rows of K or V.

        A rank has the received rows, a copy of its own, and in a backward the gradients of both. After its tiles, it
        has these gradients, and those that arrive in one hop.
        """
        keys, grads, arriving, _ = self._sizes(part)
        return max(keys + grads, grads + arriving)

    def _overlapping(self, part: Part) -> float:
        """The same for rows that share the buffers with those before and after them: half of what all of them need."""
        keys, grads, arriving, _ = self._sizes(part)
        return keys + grads + arriving / 2

    def _rows_with_copies(self, lots: Sequence[Lot]) -> int:
        """The largest size of the buffers of lots that do not overlap, with copies of rows that are sent.

        In a backward, a rank has these copies before it has gradients. If lots overlap, the one before has been used
        when rows are copied.
        """

        def size(part: Part) -> float:
            keys, _, _, copied = self._sizes(part)
            return max(self._alone(part), keys + copied)

        return int(max(sum(map(size, lot.parts)) for lot in lots))

    def _sizes(self, part: Part) -> tuple[float, float, float, float]:
        """Rows of K or V in buffers: those of keys, of gradients, of gradients that arrive in one hop, and copies."""
        received, own, sent, copied = self.rows_of(part._replace(share=0))
        grad_size = self.volume.grad_itemsize / self.volume.itemsize
        keys = received + own
        return 2 * keys, 2 * grad_size * keys, 2 * grad_size * sent, 2 * copied

    @cached_property
    def _sent(self) -> Callable[[int, Tree], Tensor]:
        """The rows that each rank sends in each hop if a branch is on a tree: int64 [hops, ring size]."""
        return cache(lambda index, tree: rows_on_tree(self.branches[index], tree))

    @property
    def lots(self) -> tuple[Lot, ...]:
        """The lots in which rows travel along trees, in the order of their steps."""
        return self._way.lots

    @cached_property
    def trees(self) -> dict[int, Tree]:
        """The branches whose rows do not travel along chains, by index, each with its tree."""
        return {part.branch: part.tree for lot in self.lots for part in lot.parts}

    def tree(self, branch: int) -> Tree:
        """The tree along which the rows of a branch travel."""
        return self.trees.get(branch, CHAIN)

    @property
    def tree_rows(self) -> int:
        """The size of the buffers of all rows on trees, in rows of K or V, over all heads."""
        return self._way.rows

    @cached_property
    def num_tree_hops(self) -> int:
        """The number of hops with K and V on trees; 0 if there are none."""
        return sum(lot.num_hops for lot in self.lots)

    @cached_property
    def last_hop_share(self) -> float:
        """The share of the dK and dV on trees that come home in the last hop."""
        if not self.lots:
            return 0.0
        total = last = 0.0
        for lot in self.lots:
            for part in lot.parts:
                of_hops = self._sent(part.branch, part.tree).sum(1) / part.shares
                total += float(of_hops.sum())
                last += float(of_hops[0]) if lot is self.lots[-1] else 0.0
        return last / max(1.0, total)

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
        return int(torch.stack([*map(self._messages, self.lots)]).sum(0).max()) if self.lots else 0

    def num_hops(self, branch: int) -> int:
        """The number of hops with rows of K and V of a branch. dK and dV take as many."""
        return max(1, self.num_lots(branch)) * self.tree(branch).num_hops(self.branches[branch].longest_reach)

    def num_lots(self, branch: int) -> int:
        """In how many lots the rows of a branch travel; 0 if they travel along chains."""
        return sum(part.branch == branch for lot in self.lots for part in lot.parts)

    @cached_property
    def cuts(self) -> tuple[int, int]:
        """Into how many blocks the heads are cut, and into how many shares the rows of each hop along chains.

        Rows on trees travel for all blocks at once, so several lots need a single block.
        """
        chained, left = [branch.index for branch in self.chained], self._left(self.tree_rows)
        cuts = self._cuts(chained, self.tree_rows)
        most = min(2 * cuts, self._most_cuts(chained))  # single rows cannot be cut
        while cuts < most and self._chain_bytes(chained, *self._blocks_and_shares(cuts)) > left:
            cuts += 1
        return self._blocks_and_shares(cuts)

    def _blocks_and_shares(self, cuts: int) -> tuple[int, int]:
        """The fewest blocks of heads, and shares of rows, that are all as small as ``cuts`` equal parts would be."""
        if len(self.lots) > 1:
            return 1, cuts
        heads = max(1, self.volume.kv_heads // cuts)
        blocks = max(-(-self.volume.kv_heads // heads), self._blocks_of_sums)
        return blocks, -(-cuts // blocks)

    @property
    def _blocks_of_sums(self) -> int:
        """How many blocks keep the sums of gradients small."""
        volume, least = self.volume, self.volume.limits.min_block_bytes
        if least is None or volume.grad_itemsize <= volume.itemsize:
            return 1
        return max(1, min(volume.kv_heads, volume.query_rows * volume.pair_bytes // 2 // least))

    def _cuts(self, chained: Sequence[int], tree_rows: int) -> int:
        """How many equal cuts keep the communication buffers small. Only the rows on chains are cut."""
        cuts = math.ceil(self._chain_bytes(chained, 1, 1) / max(1, self._left(tree_rows)))
        return max(1, min(cuts, self._most_cuts(chained)))

    def _left(self, tree_rows: int) -> float:
        """The bytes that the buffers of rows on trees leave for the others, but never less than a quarter."""
        budget = max(self.volume.limits.communication_share * self.volume.tensor_bytes, self.volume.buffer_bytes)
        return max(budget / 4, budget - tree_rows * self.volume.pair_bytes / 2)

    def _most_cuts(self, chained: Sequence[int]) -> int:
        """Into how many parts hops may be cut."""
        if not chained:
            return 0
        own = torch.stack([self.branches[index].own_rows for index in chained]).sum(0)
        return int(own.max()) * self.volume.pair_bytes // self.volume.limits.min_hop_bytes

    def _chain_bytes(self, chained: Sequence[int], blocks: int, shares: int) -> int:
        """The largest size of the buffers of rows on chains.

        A rank has three buffers of K and V at most: in use, on their way to it, and being sent. What is in use is sent
        without a copy if it lies together. In a backward, it has three more of dK and dV: being computed, on their way,
        and being sent. What is on its way may include rows that come home, from routes that are not the longest.
        """
        if not chained:
            return 0
        num_steps = max(self.branches[index].longest_reach for index in chained)
        counts = [self._rows_in_hops(index, blocks, shares, num_steps) for index in chained]
        received, own, home = (torch.stack(of_branches).sum(0) for of_branches in zip(*counts, strict=True))
        keys = 2 * received + torch.maximum(received, own)
        grads = 2 * received + torch.maximum(received + home, own)
        volume = self.volume
        rows = keys * volume.itemsize + grads * volume.grad_itemsize
        return int(rows.max()) * volume.pair_bytes // volume.itemsize

    @cached_property
    def _rows_in_hops(self) -> Callable[[int, int, int, int], tuple[Tensor, Tensor, Tensor]]:
        """:func:`rows_in_hops` of a branch, given its index, how often heads and rows are cut, and the last step."""
        kv_heads = self.volume.kv_heads
        heads = torch.arange(1, 1 + kv_heads, device="cpu")

        @cache
        def rows(index: int, blocks: int, shares: int, num_steps: int) -> tuple[Tensor, Tensor, Tensor]:
            return rows_in_hops(self.branches[index], (heads * blocks - 1) // kv_heads, shares, num_steps)

        return rows

    @property
    def buffer_bytes(self) -> int:
        """The largest size of all communication buffers of a rank, in bytes."""
        chained = [branch.index for branch in self.chained]
        return self._chain_bytes(chained, *self.cuts) + -(-self.tree_rows * self.volume.pair_bytes // 2)

    @cached_property
    def key_rows_sent(self) -> Tensor:
        """Rows of K and V that each rank sends, over all heads. K and V count as one row: int64 [ring size]."""
        sent = [
            self._sent(branch.index, self.trees[branch.index]).sum(0)
            if branch.index in self.trees
            else rows_at(branch, first=0, behind=1)
            for branch in self.branches
        ]
        return torch.stack(sent).sum(0)
