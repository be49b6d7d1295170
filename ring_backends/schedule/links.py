"""How many rows each rank receives and sends, in how many messages, and how many cross between hosts.

Rows are counted over all heads. A row of K and its row of V count as one, as do a row of dK and its row of dV.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from ring_backends.schedule.branch import BranchSchedule
from ring_backends.schedule.trees import CHAIN, Tree


def rows_at(branch: BranchSchedule, *, first: int, behind: int = 0) -> Tensor:
    """Count the rows that visit each rank on a part of their routes: int64 [ring size].

    The part begins at the distance ``first`` and ends ``behind`` ranks before the last one. With ``first=1``, these are
    the rows that each rank receives; with ``first=0`` and ``behind=1``, those that it passes on or sends on a
    chain.
    """
    total = torch.zeros(branch.ring_size + 1, dtype=torch.int64, device="cpu")
    rows, reach = branch.travelling
    source, lo, hi, direction = (
        column.unsqueeze(1).expand_as(rows)
        for column in (branch.crossing.rank, branch.crossing.lo, branch.crossing.hi, branch.crossing.direction)
    )
    count = (reach + 1 - first - behind).clamp(min=0) * (reach > 0)
    begin = lo + (source - lo + direction * first).remainder(hi - lo + 1)
    # A part has at most two stretches of neighbouring ranks: up to the end of the route's ranks, and after it wraps.
    until_end = torch.where(direction > 0, hi - begin, begin - lo) + 1
    before = torch.minimum(count, until_end)
    for start, length in ((begin, before), (torch.where(direction > 0, lo, hi), count - before)):
        low = torch.where(direction > 0, start, start - length + 1)
        weight = rows * (length > 0)
        total.index_add_(0, low.clamp(min=0).flatten(), weight.flatten())
        total.index_add_(0, (low + length).clamp(min=0).flatten(), -weight.flatten())
    return total.cumsum(0)[:-1]


def rows_in_hops(branch: BranchSchedule, blocks: Tensor, shares: int, num_steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """The rows that each rank receives in one hop along a chain, those that it holds, and those that come home early.

    All three are counted at most, for each block of heads: int64 [ring size, blocks].

    Args:
        blocks: the block of each key/value head, int64 [key/value heads].
        shares: into how many shares the rows of each hop are cut.
        num_steps: in which step the dK and dV of the longest routes come home. Other rows still arrive before it.
    """
    rows, source = branch.rows_of_blocks(blocks, shares), branch.crossing.rank
    lane, lowest, highest = branch.lanes
    number = lane * branch.ring_size + source
    numbers, index = number.unique(return_inverse=True)
    of_sources = rows.new_zeros(len(numbers), rows.shape[1]).index_add_(0, index, rows)
    of_lanes = rows.new_zeros(len(lowest), rows.shape[1])
    of_lanes.scatter_reduce_(0, (numbers // branch.ring_size).unsqueeze(1).expand_as(of_sources), of_sources, "amax")
    received = rows.new_zeros(branch.ring_size + 1, rows.shape[1])
    received.index_add_(0, lowest, of_lanes).index_add_(0, highest + 1, -of_lanes)
    own, home = rows.new_zeros(2, branch.ring_size, rows.shape[1])
    own.index_add_(0, source, rows)
    home.index_add_(0, source, rows * (branch.reach < num_steps).any(1, keepdim=True))
    return received.cumsum(0)[:-1], own, home


def rows_on_tree(branch: BranchSchedule, tree: Tree) -> Tensor:
    """The rows that each rank sends in each hop if the rows travel along a tree: int64 [hops, ring size]."""
    (rows, reach), longest = branch.travelling, branch.longest_reach
    hops = []
    for hop, stride in enumerate(tree.strides):
        # Senders are ``step`` ranks apart: those in between have no rows before this hop. All but the last one send to
        # as many ranks.
        step = tree.strides[hop - 1] if hop else longest + 1
        number = ((reach + 1) // step) * (reach > 0)
        last = number * step
        total = _in_steps(branch, step, number, rows * ((step - 1) // stride))
        receivers = (reach - last).clamp(min=0) // stride
        total.index_add_(0, _rank_at(branch, last).flatten(), (rows * receivers).flatten())
        hops.append(total)
    return torch.stack(hops)


def messages_on_trees(branches: Iterable[tuple[BranchSchedule, Tree]]) -> Tensor:
    """The messages that each rank sends if the rows of these branches travel at the same time: int64 [ring size].

    Only messages with own rows are counted. In a hop, the rows that a rank passes on go to the same peers as its own
    rows of their segment. So the number is exact without windows if every chunk has positions, and every piece rows at
    every offset. Otherwise it may be too small. It may be too large if a branch travels in shares, of which short
    pieces have no rows.
    """
    sent: defaultdict[int, list[Tensor]] = defaultdict(list)
    ring_size = 0
    for branch, tree in branches:
        ring_size = branch.ring_size
        reach = branch.reach.amax(1, keepdim=True)
        for hop, stride in enumerate(tree.strides):
            last = reach.clamp(max=tree.strides[hop - 1] - 1) if hop else reach
            distance = torch.arange(stride, int(last.max()) + 1, stride, device="cpu").expand(len(reach), -1)
            pairs = branch.crossing.rank.unsqueeze(1) * ring_size + _rank_at(branch, distance)
            sent[hop].append(pairs[distance <= last])
    senders = [torch.cat(pairs).unique() // ring_size for pairs in sent.values()]
    return torch.bincount(torch.cat(senders), minlength=ring_size)


def _in_steps(branch: BranchSchedule, step: int, number: Tensor, weight: Tensor) -> Tensor:
    """Add ``weight`` to the first ``number`` ranks on each route that are ``step`` apart: int64 [ring size].

    Args:
        number, weight: int64 [parts, different reaches].
    """
    crossing = branch.crossing
    rank, lo, hi, direction = (
        column.unsqueeze(1).expand_as(number)
        for column in (crossing.rank, crossing.lo, crossing.hi, crossing.direction)
    )
    is_up, size = direction > 0, hi - lo + 1
    begin = torch.where(is_up, rank - lo, hi - rank)  # counted along the route, from the end where it begins
    before = torch.minimum(number, (size - begin + step - 1) // step)
    # A column for each remainder, so that ranks ``step`` apart are neighbours in a column. A route wraps at most once.
    changes = torch.zeros(-(-branch.ring_size // step) + 1, step, dtype=torch.int64, device="cpu")
    for start, count in ((begin, before), (begin + before * step - size, number - before)):
        first = torch.where(is_up, lo + start, hi - start - (count - 1) * step)
        first = torch.where(count > 0, first, 0)
        added = (weight * (count > 0)).flatten()
        changes.view(-1).index_add_(0, first.flatten(), added)
        changes.view(-1).index_add_(0, (first + count * step).flatten(), -added)
    return changes.cumsum(0).view(-1)[: branch.ring_size]


def rows_between(branch: BranchSchedule, hosts: Tensor, tree: Tree) -> tuple[int, int]:
    """The rows of K and V, and those of dK and dV, with source and destination on different hosts.

    Args:
        hosts: the host of each ring rank, int64 [ring size].
        tree: along which the rows travel.
    """
    rows, reach = branch.travelling
    if tree is CHAIN:
        source = branch.crossing.rank.unsqueeze(1)
        returns = hosts[_rank_at(branch, reach)] != hosts[source]
        keys, grads = (_boundaries(branch, hosts, first) for first in (0, 1))
        return int((rows * keys).sum()), int((rows * (grads + returns) * (reach > 0)).sum())
    longest, crossing = branch.longest_reach, 0
    for hop, stride in enumerate(tree.strides):
        step = tree.strides[hop - 1] if hop else longest + 1
        crossing += sum(_rows_to(branch, hosts, step, ahead) for ahead in range(stride, min(step, longest + 1), stride))
    return crossing, crossing  # dK and dV go back on the same tree


def _rows_to(branch: BranchSchedule, hosts: Tensor, step: int, ahead: int) -> int:
    """The rows that ranks send ``ahead`` to another host, on each route from its source and every ``step`` after it."""
    (rows, reach), ring_size = branch.travelling, branch.ring_size
    rank, lo, hi, direction = (
        column.unsqueeze(1)
        for column in (branch.crossing.rank, branch.crossing.lo, branch.crossing.hi, branch.crossing.direction)
    )
    number = ((reach - ahead) // step + 1).clamp(min=0)
    total = 0
    for sign in (1, -1):
        sent = _in_steps(branch, step, number, rows * (direction == sign))
        total += int(sent[hosts != hosts.roll(-sign * ahead)].sum())
    # Where a route wraps, one receiver at most is not that many ranks further on.
    until_end = torch.where(direction > 0, hi - rank, rank - lo)
    last = until_end // step * step
    wraps = (last + ahead > until_end) & (last + ahead <= reach)
    sender, receiver = _rank_at(branch, last), _rank_at(branch, last + ahead)
    taken = (sender + direction * ahead) % ring_size
    differs, counted = (hosts[sender] != hosts[peer] for peer in (receiver, taken))
    return total + int((rows * wraps * (differs.long() - counted.long())).sum())


def _boundaries(branch: BranchSchedule, hosts: Tensor, first: int) -> Tensor:
    """How often the rows change the host on their way from the distance ``first`` to the last rank, one by one."""
    reach, direction = branch.travelling[1], branch.crossing.direction.unsqueeze(1)
    lo, hi = branch.crossing.lo.unsqueeze(1), branch.crossing.hi.unsqueeze(1)
    changes = torch.zeros_like(hosts)
    changes[1:] = (hosts[1:] != hosts[:-1]).cumsum(0)
    begin, last = _rank_at(branch, torch.full_like(reach, first)), _rank_at(branch, reach)
    end, restart = torch.where(direction > 0, hi, lo), torch.where(direction > 0, lo, hi)
    wraps = (reach - first) > (end - begin).abs()
    around = (changes[end] - changes[begin]).abs() + (hosts[end] != hosts[restart]).long()
    around += (changes[last] - changes[restart]).abs()
    return torch.where(wraps, around, (changes[last] - changes[begin]).abs()) * (reach > first)


def _rank_at(branch: BranchSchedule, distance: int | Tensor) -> Tensor:
    """The rank at this distance on the route of each piece: int64 [pieces], or [pieces, …] as ``distance``."""
    crossing = branch.crossing
    rank, lo, hi, direction = crossing.rank, crossing.lo, crossing.hi, crossing.direction
    if isinstance(distance, Tensor):
        rank, lo, hi, direction = (column.unsqueeze(1) for column in (rank, lo, hi, direction))
    return lo + (rank - lo + direction * distance).remainder(hi - lo + 1)
