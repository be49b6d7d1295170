"""The clock for pytest-benchmark. It advances only by the seconds of the slowest rank."""

from __future__ import annotations


class SlowestRankClock:
    """A clock that leaves out the time of the pipes to the ranks."""

    __name__ = "slowest_rank"  # in the results, instead of an address

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


CLOCK = SlowestRankClock()
