"""The clock that pytest-benchmark reads: it stands still but for the seconds that the slowest rank took."""

from __future__ import annotations


class SlowestRankClock:
    """Makes pytest-benchmark's statistics those of the ranks, and not of the pipe through which they are called."""

    __name__ = "slowest_rank"  # in the results, instead of an address

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


CLOCK = SlowestRankClock()
