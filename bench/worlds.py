"""The ranks for measurements: processes with one thread each, which many cases share."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import rank
from case import Case

from ring_backends.testing.world import World

_CALL_TIMEOUT = 3 * 3600.0  # seconds; a dense method over 65,536 tokens takes minutes


class Worlds:
    """A world per adapter and ring size, started at first use. As a context manager it ends all of them.

    Args:
        fresh_for_memory: whether to measure memory on new ranks.
    """

    def __init__(self, *, fresh_for_memory: bool = True) -> None:
        self.fresh_for_memory = fresh_for_memory
        self._worlds: dict[tuple[str, int], World] = {}

    def of(self, case: Case) -> World:
        """The ranks for ``case``, which other cases share."""
        at = case.adapter, case.ring_size
        if at not in self._worlds:
            self._worlds[at] = World(case.ring_size, call_timeout=_CALL_TIMEOUT)
        return self._worlds[at]

    def time(self, case: Case, direction: rank.Direction) -> dict[str, Any]:
        """One call: seconds of the slowest rank; by rank the share of waiting, messages and bytes sent."""
        ranks = self.of(case).run(rank.timed, case, direction)
        return {
            "seconds": max(found["seconds"] for found in ranks),
            "wait_share": [found["wait_seconds"] / found["seconds"] for found in ranks],
            "messages": [found["messages"] for found in ranks],
            "bytes": [found["bytes"] for found in ranks],
        }

    def peak_memory(self, case: Case) -> dict[str, Any]:
        """Peak bytes of forward and backward by rank, with inputs, and of the wire buffers if known."""
        if self.fresh_for_memory:  # memory that an earlier case left in the heap must not count
            with World(case.ring_size, call_timeout=_CALL_TIMEOUT) as world:
                ranks = world.run(rank.peak_memory, case)
        else:
            ranks = self.of(case).run(rank.peak_memory, case)
        return {f"{name}_bytes": [found[name] for found in ranks] for name in ("peak", "buffers")}

    def forget(self) -> None:
        """Let the ranks free the inputs of earlier cases."""
        for world in self._worlds.values():
            world.run(rank.forget)

    def __enter__(self) -> Worlds:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for world in self._worlds.values():
            world.close()
