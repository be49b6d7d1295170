"""The smallest ring that fits into memory, and the smallest that is also faster than one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ring_backends.cost.hardware import Hardware
from ring_backends.cost.model import RingCost

MAX_RING_SIZE = 65_536
"""The largest ring size that a search tries."""


@dataclass(frozen=True)
class RingChoice:
    """The result of a search over ring sizes. A value is None if the search finds no such ring.

    Attributes:
        fits: the smallest ring that fits into the memory of its ranks.
        fits_and_pays: the smallest ring of several ranks that fits and takes less time than one device.
    """

    fits: int | None
    fits_and_pays: int | None


def smallest_rings(
    cost: RingCost, memory_bytes: float, hardware: Hardware | None, *, sizes: list[int] | None = None
) -> RingChoice:
    """Find the smallest ring that fits into ``memory_bytes`` per rank, and the smallest that fits and pays.

    A ring *pays* if forward and backward take less time than on one device.

    Args:
        cost: the attention call, on a ring of any size.
        memory_bytes: memory of one rank.
        hardware: constants for the seconds. None: search only for a ring that fits.
        sizes: ring sizes to choose from, in ascending order. None: all sizes up to ``MAX_RING_SIZE``. The search is
            then a bisection. It assumes that memory per rank falls as the ring grows, and that all rings from the
            smallest that pays to the fastest pay.
    """
    largest = min(MAX_RING_SIZE, cost.schedule.layout.seq_len)

    def smallest(holds: Callable[[RingCost], bool], first: int) -> int | None:
        if sizes is None:
            return _smallest(lambda size: holds(cost.on_ring(size)), first, largest)
        return next((size for size in sizes if size >= first and holds(cost.on_ring(size))), None)

    def fits(ring: RingCost) -> bool:
        return int(ring.memory_bytes.max()) <= memory_bytes

    found = smallest(fits, 1)
    if found is None or hardware is None:
        return RingChoice(found, None)
    alone = _seconds(cost.on_ring(1), hardware)
    return RingChoice(found, smallest(lambda ring: fits(ring) and _seconds(ring, hardware) < alone, max(found, 2)))


def _seconds(cost: RingCost, hardware: Hardware) -> float:
    return cost.call_seconds(hardware) + cost.call_seconds(hardware, backward=True)


def _smallest(holds: Callable[[int], bool], first: int, largest: int) -> int | None:
    """Find the smallest number from ``first`` to ``largest`` that ``holds`` accepts, by doubling and bisection."""
    fails, size = first - 1, first
    while size <= largest:
        if holds(size):
            while size - fails > 1:
                middle = (fails + size) // 2
                fails, size = (fails, middle) if holds(middle) else (middle, size)
            return size
        if size == largest:
            return None
        fails, size = size, min(2 * size, largest)
    return None
