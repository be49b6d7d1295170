"""How the rows of a branch reach all ranks of their routes: along chains, or along trees with fewer hops.

On a *chain*, every rank passes the rows on to its neighbour in each hop, and computes meanwhile with those that have
arrived. This takes almost as many hops as there are ranks, and little memory. On any other *tree*, each rank sends its
rows to every rank that needs them in one hop, and keeps all rows that arrive. A long route takes a few hops instead, so
that no rank sends too many messages:

    distance     0   1   2   3   4   5   6   7   8        strides (3, 1)
    first hop    0 ─────────► 3 ─────────► 6              by multiples of 3
    second hop   0 ─► 1,2     3 ─► 4,5     6 ─► 7,8       by 1 and 2

A chain is a tree whose ranks send to one other rank each. Every rank of a route receives the rows once in both, so the
number of bytes is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

MESSAGE_COST = 0.15
"""The host's time to post one more message of a hop, relative to the latency of a hop."""


@dataclass(frozen=True)
class Tree:
    """The tree along which rows reach the ranks at the distances 1, 2, … from their source, counted along the route.

    Attributes:
        strides: in hop h (1, 2, …), a rank that has the rows sends them to the ranks that are multiples of
            ``strides[h - 1]`` further on, below ``strides[h - 2]``. Each stride divides the one before it. The last is
            1.
    """

    strides: tuple[int, ...]

    def num_hops(self, reach: int) -> int:
        """The number of hops after which the rows have reached the distance ``reach``."""
        return len(self.strides)

    def arrival(self, distance: int) -> tuple[int, int]:
        """The hop in which the rank at ``distance``, at least 1, receives the rows, and the distance of the sender."""
        for hop in range(len(self.strides), 1, -1):
            within = distance % self.strides[hop - 2]
            if within:
                return hop, distance - within
        return 1, 0

    def sends(self, distance: int, reach: int) -> Iterator[tuple[int, int]]:
        """The hops in which the rank at ``distance`` sends the rows, each with the distance of a receiver.

        Args:
            reach: the largest distance.
        """
        first = self.arrival(distance)[0] if distance else 0
        for hop in range(first + 1, len(self.strides) + 1):
            end = reach if hop == 1 else min(reach, distance + self.strides[hop - 2] - 1)
            for receiver in range(distance + self.strides[hop - 1], end + 1, self.strides[hop - 1]):
                yield hop, receiver

    def cost(self, reach: int) -> float:
        """The latency of all hops, and the time of the host to post them, relative to the latency of one hop."""
        num_messages = reach // self.strides[0] + sum(far // near - 1 for far, near in pairwise(self.strides))
        return len(self.strides) + MESSAGE_COST * num_messages


class Chain(Tree):
    """The tree in which each rank sends the rows to the next one. A step with tiles comes after each hop."""

    def num_hops(self, reach: int) -> int:
        return reach

    def arrival(self, distance: int) -> tuple[int, int]:
        return distance, distance - 1

    def sends(self, distance: int, reach: int) -> Iterator[tuple[int, int]]:
        if distance < reach:
            yield distance + 1, distance + 1


CHAIN = Chain(())


def trees(reach: int) -> list[Tree]:
    """The trees for routes of ``reach`` hops, the one with the least cost first."""
    size, found = reach + 1, set()
    for num_hops in range(1, max(1, reach).bit_length() + 1):
        fan_out = next(number for number in range(2, size + 2) if number**num_hops >= size)
        strides = tuple(fan_out**power for power in range(num_hops - 1, -1, -1))
        if strides[0] <= reach:
            found.add(Tree(strides))
    return sorted(found, key=lambda tree: tree.cost(reach))
