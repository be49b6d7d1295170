"""What the ranks of a ring publish for each other in its store: configurations, refusals and reports.

A rank publishes a report when it closes a ring. :func:`error_of_reports` finds the error that all reports show.

Every request to the store has a timeout, because the host of the store may be gone.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from ring_backends.errors import RingMismatchError, RingPeerError
from ring_backends.ring.calls import Call, grace
from ring_backends.ring.differences import all_equal, describe_differences
from ring_backends.ring.stream_hops import HeaderMismatchError
from ring_backends.ring.watchdog import Answer, call_with_timeout

REFUSED = "refused"
"""The field under which a rank publishes why it refuses a call, in place of a configuration."""

Report = dict[str, Any]
"""``calls``: positions of a rank's latest calls by number. ``raised``: its own error. ``refused``: refused calls.
``place``: the call of another ring in which it waits, instead of the others."""


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
    _newest_shown: int | None = None

    @property
    def _patience(self) -> float:
        """Timeout in seconds of one request to the store of a ring that may have failed."""
        return grace(self.timeout) / 6

    def refuse(self, number: int, text: str) -> None:
        """Publish that this rank refuses call ``number``."""
        self._refused[number] = text
        keys = {_configuration_key(number, self.rank): json.dumps({REFUSED: text}), f"refused/{number}": str(self.rank)}

        def publish() -> None:
            for key, value in keys.items():
                self.store.set(key, value)
            store: Any = self.store  # torch's annotations lack append()
            store.append(REFUSED, f"{number}/{self.rank} ")

        call_with_timeout(self._patience, publish, default=None)
        self._published.extend(keys)

    def exchange_configurations(self, call: Call, is_vain: Callable[[], bool]) -> dict[int, dict[str, Any]]:
        """Publish this rank's configuration of ``call``, and return those of all ranks, or their refusals.

        The result is empty if some rank has published none in time, or once ``is_vain`` returns True.
        """
        keys = self._configuration_keys(call)
        self._published.append(keys[self.rank])

        def exchange() -> dict[int, dict[str, Any]]:
            self.store.set(keys[self.rank], call.configuration.text)
            self._wait_for(keys, call, is_vain)
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

    def _wait_for(self, keys: list[str], call: Call, is_vain: Callable[[], bool]) -> None:
        """Poll the store until it has ``keys``. ``Store.wait`` would block the other threads that use it.

        A rank that has closed the ring does not come any more.
        """
        pause, longest = 0.001, 0.05
        while not self.store.check(keys):
            is_over = call.time_left() <= timedelta(milliseconds=1) or is_vain()
            if is_over or (pause == longest and self.store.check(["failed"])):
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
        return cast(Report, json.loads(report))

    def answer_from(self, place: str, *, unasked: bool) -> None:
        """Publish that this rank waits in ``place``, a call of another ring, if a rank has closed this ring.

        Args:
            unasked: also if no rank has closed this ring yet.
        """
        report = json.dumps({"calls": {}, "raised": None, REFUSED: {}, "place": place})

        def answer() -> None:
            if unasked or self.store.check(["failed"]):
                self.store.set(f"failed/{self.rank}", report)

        self._ask_unless_lost(answer, default=None)

    def _ask_unless_lost(self, ask: Callable[[], Answer], *, default: Answer) -> Answer:
        """Call ``ask``, a request of the watchdog's thread; ``default`` if it or an earlier one has failed.

        If the network is gone, torch may wait forever for the answer. The store is asked again only after it. If a
        request has failed, the store is not asked again, since torch logs each failure at length.
        """

        def request() -> Answer:
            try:
                return ask()
            except dist.DistError:
                self._store_is_lost = True
                raise

        return (
            default if self._store_is_lost else call_with_timeout(self._patience, request, default=default, asker=self)
        )

    def collect_reports(self, own: Report, call: Call, seconds: float) -> dict[int, Report]:
        """The reports by rank, of those ranks that publish one within ``seconds``, or refuse a call of this rank."""
        reports = {self.rank: own}
        end = time.monotonic() + seconds

        def refusal(rank: int) -> Report | None:
            for number in {str(call.number), *self._refused_by(own["calls"], rank)}:
                key = _configuration_key(int(number), rank)
                if self.store.check([key]) and REFUSED in (published := json.loads(self.store.get(key))):
                    return {"calls": {}, "raised": None, REFUSED: {number: published[REFUSED]}}
            return None

        def collect() -> None:
            while len(reports) < self.size and time.monotonic() < end:
                for rank in set(range(self.size)) - set(reports):
                    if self.store.check([f"failed/{rank}"]):
                        reports[rank] = json.loads(self.store.get(f"failed/{rank}"))
                    elif report := refusal(rank):
                        reports[rank] = report
                time.sleep(0.02)

        call_with_timeout(seconds, collect, default=None)
        return dict(reports)  # a copy: the thread that asks a slow store may still add reports

    def peer_stopped(self, call: Call, latest: Sequence[Call], *, with_refusals: bool = True) -> bool:
        """Whether a rank has closed the ring, refused a call of this rank, or made another one than rank 0.

        Args:
            call: the call in which this rank waits.
            latest: the latest calls of this rank.
            with_refusals: False leaves out refusals.
        """

        def ask() -> bool:
            if self.store.check(["failed"]) or self._differs_from_rank0(latest):
                return True
            return with_refusals and (
                self.store.check([f"refused/{call.number}"])
                or bool(self._refused_by({str(made.number) for made in latest}))
            )

        return self._ask_unless_lost(ask, default=False)

    def _differs_from_rank0(self, latest: Sequence[Call]) -> bool:
        """Rank 0 publishes digests of its latest calls when it waits long, and the other ranks compare theirs."""
        if self.rank == 0:
            newest = latest[-1].number if latest else None
            if newest != self._newest_shown:
                self.store.set("calls of rank 0", json.dumps({call.number: call.digest for call in latest}))
                self._newest_shown = newest
            return False
        if not self.store.check(["calls of rank 0"]):
            return False
        shown = json.loads(self.store.get("calls of rank 0"))
        return any(shown[number] != call.digest for call in latest if (number := str(call.number)) in shown)

    def _refused_by(self, numbers: Collection[str], rank: int | None = None) -> list[str]:
        """Those of the calls ``numbers`` that another rank, or ``rank``, has refused."""
        if not self.store.check([REFUSED]):
            return []
        refused = [entry.split("/") for entry in self.store.get(REFUSED).decode().split()]
        others = {str(self.rank)} if rank is None else {str(other) for other in range(self.size)} - {str(rank)}
        return [number for number, by in refused if by not in others and number in numbers]

    def peer_has_closed(self) -> bool:
        """Whether a rank has closed the ring."""
        return call_with_timeout(self._patience, partial(self.store.check, ["failed"]), default=False)


def _configuration_key(number: int, rank: int) -> str:
    return f"check/{number}/{rank}"


def error_of_reports(
    reports: Mapping[int, Report], rank: int, size: int, what: str, timeout: timedelta, cause: BaseException
) -> RingMismatchError | RingPeerError:
    """The error that explains a failed wait.

    Args:
        reports: by ring rank; those of lost ranks are missing.
        rank, size: ring rank, whose report is there, and ring size.
        what, timeout, cause: the wait that failed, its timeout, and how it failed.
    """
    for number in reports[rank]["calls"]:
        positions = {other: end["calls"][number] for other, end in sorted(reports.items()) if number in end["calls"]}
        if not all_equal(positions.values()):
            return RingMismatchError(f"in call {number} of the ring " + describe_differences(positions))
    made = {other: {*end["calls"]} for other, end in reports.items()}
    refusals = [
        f"rank {refusing} {text}"
        for refusing, end in sorted(reports.items())
        for number, text in end[REFUSED].items()
        if any(number in calls for other, calls in made.items() if other != refusing)
    ]
    if refusals:
        return RingMismatchError(
            f"{'; '.join(refusals)}. The other ranks made the call; all ranks must make it. The ring is closed; "
            "make a new one with initialize()."
        )
    raised = [f"rank {other} raised {end['raised']}" for other, end in sorted(reports.items()) if end["raised"]]
    if raised:
        return RingPeerError(f"{what}, but {'; '.join(raised)}. Look at its log.")
    if isinstance(cause, HeaderMismatchError):
        return RingMismatchError(
            f"{what}, but {cause}. Every rank must make the same calls in the same order with the same arguments."
        )
    places = [f"rank {other} waits in {end['place']}" for other, end in sorted(reports.items()) if "place" in end]
    if places and len(reports) == size:
        return RingPeerError(
            f"{what}, but {' and '.join(places)} of another ring. Every rank must make the calls of all its rings in "
            "the same order. If they do, a rank of the other ring has died or stalled; look at its log."
        )
    return RingPeerError(
        f"{what}, and the wait failed within the ring's timeout of {timeout.total_seconds():g} s: {cause}. A rank has "
        "died, stalled or left; look at its log, or raise the timeout of initialize() if it is only slow."
    )
