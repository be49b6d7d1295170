"""The ranks that run measurements. Each is a process with one thread. Many cases share the same ranks."""

from __future__ import annotations

import contextlib
from typing import Any

import rank
from case import Case

from ring_backends.testing.world import World

_CALL_TIMEOUT = 3 * 3600.0  # seconds; one call of a dense method at 65,536 tokens takes minutes


class Worlds(contextlib.ExitStack):
    """Holds one world for each adapter and ring size. A world is a set of ranks, and starts at its first use.

    This is a context manager. It ends all its worlds at exit.

    Args:
        fresh_for_memory: whether to start new ranks to measure memory.
    """

    def __init__(self, *, fresh_for_memory: bool = True) -> None:
        super().__init__()
        self.fresh_for_memory = fresh_for_memory
        self._worlds: dict[tuple[str, int], World] = {}

    def of(self, case: Case) -> World:
        """Return the world for ``case``. Other cases share it."""
        at = case.adapter, case.ring_size
        if at not in self._worlds:
            self._worlds[at] = self.enter_context(World(case.ring_size, call_timeout=_CALL_TIMEOUT))
        return self._worlds[at]

    def time(self, case: Case, direction: rank.Direction) -> dict[str, Any]:
        """Time one call.

        Returns:
            The seconds of the slowest rank, and for each rank the share of its time that it waits for hops, and the
            messages and bytes that it sends.
        """
        ranks = self.of(case).run(rank.timed, case, direction)
        return {
            "seconds": max(found["seconds"] for found in ranks),
            "wait_share": [found["wait_seconds"] / found["seconds"] for found in ranks],
            "messages": [found["messages"] for found in ranks],
            "bytes": [found["bytes"] for found in ranks],
        }

    def peak_memory(self, case: Case) -> dict[str, Any]:
        """Measure the peak memory of forward and backward with the inputs, and that of the wire buffers, by rank."""
        if self.fresh_for_memory:  # an earlier case may have left memory in the heap
            with World(case.ring_size, call_timeout=_CALL_TIMEOUT) as world:
                ranks = world.run(rank.peak_memory, case)
        else:
            ranks = self.of(case).run(rank.peak_memory, case)
        return {f"{name}_bytes": [found[name] for found in ranks] for name in ("peak", "buffers")}

    def forget(self) -> None:
        """Let the ranks free the inputs of earlier cases."""
        for world in self._worlds.values():
            world.run(rank.forget)
