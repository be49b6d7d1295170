"""The smallest ring that fits into memory, and the smallest that is also faster than one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ring_backends.cost.hardware import Hardware
from ring_backends.cost.model import RingCost
from ring_backends.schedule.layout import SequenceLayout
from ring_backends.schedule.ring_schedule import RingSchedule

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


@dataclass(frozen=True, eq=False)
class Workload:
    """One attention call, to compare its cost on rings of different sizes.

    Args:
        schedule: the call's schedule for any ring size. Only its pattern, sequence length, layout, heads and mask
            matter.
        batch, head_dim, itemsize, device_type: as in :class:`~ring_backends.cost.model.RingCost`.
    """

    schedule: RingSchedule
    batch: int
    head_dim: int
    itemsize: int
    device_type: str = "cpu"

    def on_ring(self, ring_size: int) -> RingCost:
        """Return the cost of the call on a ring of ``ring_size`` ranks."""
        given = self.schedule
        layout = SequenceLayout(given.layout.seq_len, ring_size, given.layout.kind)
        schedule = RingSchedule(given.pattern, layout, given.num_heads, given.kv_heads, given.is_causal)
        return RingCost(schedule, self.batch, self.head_dim, self.itemsize, self.device_type)

    def seconds(self, ring_size: int, hardware: Hardware) -> float:
        """Estimated seconds of forward and backward on the slowest rank."""
        cost = self.on_ring(ring_size)
        return cost.call_seconds(hardware) + cost.call_seconds(hardware, backward=True)

    def speedup(self, ring_size: int, hardware: Hardware) -> float:
        """Seconds on one device divided by seconds on the ring. The ring *pays* if this is above 1."""
        return self.seconds(1, hardware) / self.seconds(ring_size, hardware)

    def memory_bytes(self, ring_size: int) -> int:
        """Memory of the rank that needs most."""
        return int(self.on_ring(ring_size).memory_bytes.max())

    def smallest_rings(
        self, memory_bytes: float, hardware: Hardware | None, *, sizes: list[int] | None = None
    ) -> RingChoice:
        """Find the smallest ring that fits into ``memory_bytes`` per rank, and the smallest that fits and pays.

        Args:
            memory_bytes: memory of one rank.
            hardware: constants for the seconds. None: search only for a ring that fits.
            sizes: ring sizes to choose from, in ascending order. None: all sizes up to ``MAX_RING_SIZE``. The search
                is then a bisection. It assumes that memory per rank falls as the ring grows, and that all rings from
                the smallest that pays to the fastest pay.
        """
        largest = min(MAX_RING_SIZE, self.schedule.layout.seq_len)

        def smallest(holds: Callable[[int], bool], first: int) -> int | None:
            if sizes is None:
                return _smallest(holds, first, largest)
            return next((size for size in sizes if size >= first and holds(size)), None)

        fits = smallest(lambda size: self.memory_bytes(size) <= memory_bytes, 1)
        if fits is None or hardware is None:
            return RingChoice(fits, None)
        alone = self.seconds(1, hardware)

        def fits_and_pays(size: int) -> bool:
            return self.memory_bytes(size) <= memory_bytes and self.seconds(size, hardware) < alone

        return RingChoice(fits, smallest(fits_and_pays, max(fits, 2)))


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
