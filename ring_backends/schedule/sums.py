"""Where the results of each branch are added up, decided once per block of heads.

Several tiles contribute to a row of out, dQ, dK or dV, and their results are added up in fp32, or in fp64 for fp64
inputs. For bf16 and fp16 inputs this takes additional tensors, the *sums*, which are rounded once at the end. They cost
memory and time, so branches whose tiles hold each row only once do without: the *base* stores its results where the
call returns them, and *merged* branches merge theirs into those of the base at once. Only the *others* need sums.
Nothing is lost, since a result is rounded once in each of them.

A tile that is the first for its rows, of all tiles whose results go to the same place, *opens* the rows: its results
are stored, and not merged or added, so that the place need not be filled with zeros before. docs/architecture.md has a
picture of the roles. :mod:`ring_backends.engine.results` carries them out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import takewhile

from ring_backends.schedule.branch import BranchSchedule
from ring_backends.schedule.rows import DilatedRows


@dataclass(frozen=True)
class Roles:
    """The roles of the branches of one block of heads. Branches are given by their index.

    Attributes:
        order: all branches, in the order in which their tiles are computed.
        is_opened: whether the tiles of the first branch open every row of every head. If not, all results start with
            zeros.
        base: the branch whose tiles hold every row of every head exactly once, or None. It is the first.
        merged: branches whose results are merged into those of the base at once. In each of them, a row is in one tile
            only. There are two if the block has exactly three branches: sums of the third would hold the result of one
            tile, and save no rounding.
        others: if there is a base and results are rounded (bf16, fp16), all other branches, by rate; else empty.
    """

    order: tuple[int, ...] = ()
    is_opened: bool = False
    base: int | None = None
    merged: tuple[int, ...] = ()
    others: tuple[int, ...] = ()

    def opens(self, branch: int) -> bool:
        """Whether the tiles of a branch open its rows: all rows of the call, or those of the sums that it has."""
        return (self.is_opened and branch == self.order[0]) or branch in self.others[:1]


@dataclass(frozen=True)
class BranchRows:
    """The rows of one branch on this rank, each once."""

    queries: tuple[DilatedRows, ...]
    keys: tuple[DilatedRows, ...]


def assign_roles(
    branches: Iterable[BranchSchedule],
    opening: BranchSchedule | None,
    is_single: Callable[[BranchSchedule], bool],
    *,
    is_rounded: bool,
) -> Roles:
    """Assign a role to each branch.

    Args:
        opening: a branch that has every row of every head; None if there is none.
        is_single: whether each row of a branch is in one tile only.
        is_rounded: whether results have a lower precision than sums.
    """
    ordered = sorted(branches, key=lambda branch: (branch is not opening, branch.rate))
    order = tuple(branch.index for branch in ordered)
    if opening is None or not is_single(opening):
        return Roles(order, is_opened=opening is not None)
    base, *rest = order
    if not is_rounded:
        return Roles(order, is_opened=True, base=base)
    singles = [branch.index for branch in takewhile(is_single, ordered[1:])]
    num_merged = 2 if len(singles) == len(rest) == 2 else min(1, len(singles))
    return Roles(order, True, base, tuple(rest[:num_merged]), tuple(rest[num_merged:]))
