"""How the rows of a branch reach all ranks of their routes in few hops.

By default a branch's rows go *around*: in each hop, every rank passes them on to its neighbour, and computes meanwhile
with those that have arrived. This takes as many hops as there are ranks, and little memory. The rows of a sparse branch
are so few that each rank can hold those of all ranks. Such rows are *spread*: in one hop, each rank sends its rows to
every rank that needs them. A long route takes a few hops instead, so that no rank sends too many messages:

    distance     0   1   2   3   4   5   6   7   8        strides (3, 1)
    first hop    0 ─────────► 3 ─────────► 6              by multiples of 3
    second hop   0 ─► 1,2     3 ─► 4,5     6 ─► 7,8       by 1 and 2

Every rank of a route receives the rows once, both around and spread, so the number of bytes is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

MESSAGE_COST = 0.15
"""The host's time to post one more message of a hop, relative to the latency of a hop."""


@dataclass(frozen=True)
class Spread:
    """The tree along which rows reach the ranks at the distances 1, 2, … from their source, counted along the route.

    Attributes:
        strides: in hop h (1, 2, …), a rank that has the rows sends them to the ranks that are multiples of
            ``strides[h - 1]`` further on, below ``strides[h - 2]``. Each stride divides the one before it. The last is
            1.
    """

    strides: tuple[int, ...]

    @property
    def num_hops(self) -> int:
        return len(self.strides)

    def arrival(self, distance: int) -> tuple[int, int]:
        """The hop in which the rank at ``distance``, at least 1, receives the rows, and the distance of the sender."""
        for hop in range(self.num_hops, 1, -1):
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
        for hop in range(first + 1, self.num_hops + 1):
            end = reach if hop == 1 else min(reach, distance + self.strides[hop - 2] - 1)
            for receiver in range(distance + self.strides[hop - 1], end + 1, self.strides[hop - 1]):
                yield hop, receiver

    def num_messages(self, reach: int) -> int:
        """How many messages, at most, a rank sends in all hops."""
        per_hop = reach if self.num_hops == 1 else self.strides[-2] - 1
        return self.num_hops * per_hop

    def cost(self, reach: int) -> float:
        """The latency of all hops, and the time of the host to post them, relative to the latency of one hop."""
        return self.num_hops + MESSAGE_COST * self.num_messages(reach)


def spreads(reach: int) -> list[Spread]:
    """The trees for routes of ``reach`` hops, the one with the least cost first."""
    size, found = reach + 1, set()
    for num_hops in range(1, max(1, reach).bit_length() + 1):
        fan_out = next(number for number in range(2, size + 2) if number**num_hops >= size)
        strides = tuple(fan_out**power for power in range(num_hops - 1, -1, -1))
        if strides[0] <= reach:
            found.add(Spread(strides))
    return sorted(found, key=lambda spread: spread.cost(reach))
