"""What the ranks of a ring publish for each other in its store: configurations, refusals and reports.

Every request to the store has a timeout, because the host of the store may be gone.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from ring_backends.ring.calls import Call, grace
from ring_backends.ring.reports import REFUSED, Report
from ring_backends.ring.watchdog import call_with_timeout


@dataclass(eq=False)
class Notices:
    """The notices of one rank, and those that it reads.

    Args:
        store: shared by the ranks of this ring only.
        rank, size: ring rank and ring size.
        timeout: the ring's timeout.
    """

    store: Store
    rank: int
    size: int
    timeout: timedelta
    _published: deque[str] = field(default_factory=deque)
    _refused: dict[int, str] = field(default_factory=dict)
    _store_is_lost: bool = False

    @property
    def _patience(self) -> float:
        """Timeout in seconds of one request to the store of a ring that may have failed."""
        return grace(self.timeout) / 6

    def refuse(self, number: int, text: str) -> None:
        """Publish that this rank refuses call ``number``."""
        self._refused[number] = text
        keys = {_configuration_key(number, self.rank): json.dumps({REFUSED: text}), f"refused/{number}": str(self.rank)}
        for key, value in keys.items():
            call_with_timeout(self._patience, partial(self.store.set, key, value), default=None)
            self._published.append(key)

    def exchange_configurations(self, call: Call) -> dict[int, dict[str, Any]]:
        """Publish this rank's configuration of ``call``, and return those of all ranks, or their refusals.

        The result is empty if some rank has published none in time.
        """
        keys = self._configuration_keys(call)
        self._published.append(keys[self.rank])

        def exchange() -> dict[int, dict[str, Any]]:
            self.store.set(keys[self.rank], call.configuration.text)
            self._wait_for(keys, call)
            published = {rank: json.loads(self.store.get(key)) for rank, key in enumerate(keys)}
            # All ranks have arrived, so earlier entries are no longer read. Otherwise each seq_len would leave some.
            while len(self._published) > 1:
                self.store.delete_key(self._published.popleft())
            self._refused.clear()
            return published

        no_answer: dict[int, dict[str, Any]] = {}
        return call_with_timeout(call.time_left().total_seconds() + self._patience, exchange, default=no_answer)

    def absent_ranks(self, call: Call) -> list[int]:
        """The ranks that have not published a configuration of ``call``; all ranks if the store does not answer."""
        keys = self._configuration_keys(call)

        def absent() -> list[int]:
            return [rank for rank, key in enumerate(keys) if not self.store.check([key])]

        return call_with_timeout(self._patience, absent, default=[*range(self.size)])

    def _configuration_keys(self, call: Call) -> list[str]:
        return [_configuration_key(call.number, rank) for rank in range(self.size)]

    def _wait_for(self, keys: list[str], call: Call) -> None:
        """Poll the store until it has ``keys``. ``Store.wait`` would block the other threads that use it.

        A rank that has closed the ring does not come any more.
        """
        pause, longest = 0.001, 0.05
        while not self.store.check(keys):
            if call.time_left() <= timedelta(milliseconds=1) or (pause == longest and self.store.check(["failed"])):
                raise dist.DistStoreError("not all ranks arrived")
            time.sleep(pause)
            pause = min(longest, 1.5 * pause)

    def close(self, calls: Mapping[int, dict[str, object]], raised: str | None) -> Report:
        """Publish that this rank closes the ring, with the positions of its latest calls and its own error."""
        report = json.dumps({"calls": calls, "raised": raised, REFUSED: dict(self._refused)})

        def publish() -> None:
            self.store.set(f"failed/{self.rank}", report)
            self.store.set("failed", str(self.rank))

        call_with_timeout(self._patience, publish, default=None)
        as_read: Report = json.loads(report)
        return as_read

    def collect_reports(self, own: Report, call: Call, seconds: float) -> dict[int, Report]:
        """The reports by rank, of those ranks that publish one within ``seconds``, or refuse ``call``."""
        reports = {self.rank: own}
        end = time.monotonic() + seconds

        def collect() -> None:
            while len(reports) < self.size and time.monotonic() < end:
                for rank in set(range(self.size)) - set(reports):
                    configuration = _configuration_key(call.number, rank)
                    if self.store.check([f"failed/{rank}"]):
                        reports[rank] = json.loads(self.store.get(f"failed/{rank}"))
                    elif self.store.check([configuration]):
                        published = json.loads(self.store.get(configuration))
                        if REFUSED in published:
                            refused = {str(call.number): published[REFUSED]}
                            reports[rank] = {"calls": {}, "raised": None, REFUSED: refused}
                time.sleep(0.02)

        call_with_timeout(seconds, collect, default=None)
        return dict(reports)  # a copy: the thread that asks a slow store may still add reports

    def peer_stopped(self, call: Call) -> bool:
        """Whether a rank has closed the ring or refused ``call``. Asked by the watchdog's thread.

        If the network is gone, torch may wait forever for the answer. The store is asked again only after it. If a
        request has failed, the store is not asked again, since torch logs each failure at length.
        """

        def ask() -> bool:
            try:
                return any(self.store.check([key]) for key in ("failed", f"refused/{call.number}"))
            except dist.DistError:
                self._store_is_lost = True
                raise

        return not self._store_is_lost and call_with_timeout(self._patience, ask, default=False, asker=self)

    def peer_has_closed(self) -> bool:
        """Whether a rank has closed the ring."""
        return call_with_timeout(self._patience, partial(self.store.check, ["failed"]), default=False)


def _configuration_key(number: int, rank: int) -> str:
    return f"check/{number}/{rank}"
