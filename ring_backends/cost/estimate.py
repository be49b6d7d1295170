"""Compares one ring with one device: memory, bytes, FLOPs and estimated seconds. A ring *pays* if it is faster."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ring_backends.cost.hardware import Hardware
from ring_backends.cost.model import RingChoice, RingCost, smallest_rings
from ring_backends.ring.topology import topology_order
from ring_backends.schedule.ring_schedule import RingSchedule, format_bytes

_MAX_POWER = 16  # the largest exponent of the ring sizes 1, 2, 4, …, 65,536


@dataclass(frozen=True, eq=False)
class Estimate:
    """The cost of an attention call on a ring, and on one device.

    Args:
        ring: the cost on the ring.
        hardware: constants for the seconds.
        memory_bytes: memory of one rank. None: ``hardware.memory_bytes``.
    """

    ring: RingCost
    hardware: Hardware
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.memory_bytes is None:
            object.__setattr__(self, "memory_bytes", self.hardware.memory_bytes)

    @property
    def schedule(self) -> RingSchedule:
        return self.ring.schedule

    @cached_property
    def largest(self) -> dict[str, dict[str, Any]]:
        """Each quantity of the cost of the ``"ring"`` and of ``"one_device"``, as the largest value over all ranks."""
        return {"ring": self._largest(self.ring), "one_device": self._largest(self.ring.on_ring(1))}

    @property
    def _both_seconds(self) -> list[float]:
        """Estimated seconds of forward and backward together, on the ring and on one device."""
        return [sum(cost["seconds"].values()) for cost in self.largest.values()]

    @property
    def speedup(self) -> float:
        """Seconds on one device divided by seconds on the ring. The ring pays if this is above 1."""
        ring, alone = self._both_seconds
        return alone / ring

    @cached_property
    def smallest_rings(self) -> RingChoice | None:
        """The smallest ring that fits, and the smallest ring that fits and pays. None if the memory is unknown."""
        if self.memory_bytes is None:
            return None
        return smallest_rings(self.ring, self.memory_bytes, self.hardware)

    @cached_property
    def over_ring_sizes(self) -> list[dict[str, Any]]:
        """Records with ``ring_size``, ``seconds`` and ``memory_bytes``.

        The ring sizes are the powers of two up to 64 or the ring's size, whichever is larger, and the ring's size. No
        power of two exceeds the length of the sequence, or cannot be cut into the groups of the schedule.
        """
        ring_size = self.ring.ring_size
        largest = min(max(ring_size, 64), self.schedule.layout.seq_len)
        powers = {2**power for power in range(_MAX_POWER + 1) if 2**power <= largest}
        in_groups = {size for size in powers if size == 1 or size % self.schedule.ulysses_size == 0}
        costs = [self.ring.on_ring(size) for size in sorted({*in_groups, ring_size})]
        return [
            {
                "ring_size": cost.ring_size,
                "seconds": self._seconds(cost),
                "memory_bytes": int(cost.memory_bytes.max()),
            }
            for cost in costs
        ]

    def verdict(self) -> str:
        """Say in one sentence whether the ring pays, and which smallest rings fit."""
        here, alone = map(format_seconds, self._both_seconds)
        ring_size = self.ring.ring_size
        ring = f"At {self.schedule.layout.seq_len:,} tokens a ring of {ring_size:,}"
        if ring_size == 1:
            text = f"{ring} is one device, which takes {alone} for forward and backward"
        elif self.speedup > 1:
            text = (
                f"{ring} pays: {here} for forward and backward, {self.speedup:.2f} times as fast as one device "
                f"({alone})"
            )
        else:
            text = (
                f"{ring} does not pay: {here} for forward and backward, {1 / self.speedup:.2f} times as long as one "
                f"device ({alone})"
            )
        found = self.smallest_rings
        if found is None or self.memory_bytes is None:
            return f"{text}."
        memory = format_bytes(self.memory_bytes)
        if found.fits is None:
            return f"{text}; no ring fits into {memory} per rank."
        text += f"; the smallest ring that fits into {memory} per rank has {_ranks(found.fits)}"
        if found.fits_and_pays is None:
            return f"{text}, and none that fits pays."
        if found.fits_and_pays == found.fits:
            return f"{text}, and pays."
        return f"{text}, and the smallest that fits and pays has {_ranks(found.fits_and_pays)}."

    def as_dict(self) -> dict[str, Any]:
        """All numbers as plain values, for JSON."""
        cost, choice = self.ring, self.smallest_rings
        return {
            "hardware": dataclasses.asdict(self.hardware),
            **self.largest,
            "per_rank": {
                "tokens": cost.tokens.tolist(),
                "memory_bytes": cost.memory_bytes.tolist(),
                "bytes_sent": _both(lambda backward: cost.sent_bytes(backward=backward).tolist()),
                "flops": _both(lambda backward: cost.flops(backward=backward).tolist()),
            },
            "pays": self.speedup > 1,
            "speedup": self.speedup,
            "memory_bytes_per_rank": self.memory_bytes,
            "smallest_ring": None if choice is None else dataclasses.asdict(choice),
            "ring_sizes": self.over_ring_sizes,
            "sentence": self.verdict(),
        }

    def bytes_between_hosts(self, hosts: Sequence[str]) -> dict[str, int]:
        """Count the bytes between hosts in forward and backward, for ``ring_order="rank"`` and ``"topology"``.

        Args:
            hosts: the host of every rank. They may form several rings. The bytes of all rings are added.
        """
        orders = {"rank": tuple(range(len(hosts))), "topology": topology_order(hosts)}
        numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
        size = self.ring.ring_size

        def crossing(order: Sequence[int]) -> int:
            rings = [order[first : first + size] for first in range(0, len(order), size)]
            on_hosts = [[numbers[hosts[rank]] for rank in ring] for ring in rings]
            return sum(self.schedule.bytes_between_hosts(ring, **self.ring.sizes) for ring in on_hosts)

        return {name: crossing(order) for name, order in orders.items()}

    def _seconds(self, cost: RingCost) -> dict[str, float]:
        return _both(lambda backward: cost.call_seconds(self.hardware, backward=backward))

    def _largest(self, cost: RingCost) -> dict[str, Any]:
        return {
            "ring_size": cost.ring_size,
            "tensor_bytes": int(cost.tensor_bytes.max()),
            "lse_bytes": int(cost.lse_bytes.max()),
            "communication_bytes": cost.communication_bytes,
            "tile_bytes": int(cost.tile_bytes.max()),
            "exchange_bytes": int(cost.exchange_bytes.max()),
            "memory_bytes": int(cost.memory_bytes.max()),
            "bytes_sent": _both(lambda backward: int(cost.sent_bytes(backward=backward).max())),
            "flops": _both(lambda backward: float(cost.flops(backward=backward).max())),
            "seconds": self._seconds(cost),
        }


def _both(value: Callable[[bool], Any]) -> dict[str, Any]:
    return {"forward": value(False), "backward": value(True)}


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number:,} ranks"


def format_seconds(seconds: float) -> str:
    """Format seconds with three digits, in s, ms or µs."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:,.3g} {unit}" if seconds < 1000 * size else f"{seconds / size:,.0f} {unit}"
    return f"{seconds / 1e-6:.3g} µs"
