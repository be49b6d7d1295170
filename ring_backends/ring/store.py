"""What the ranks of a ring publish for each other in its store: configurations, refusals and reports.

A comparison of configurations costs each rank, besides its polls, a number of requests that does not grow with the
ring. The ranks count themselves in the store: first under the digest of their configuration, then as arrived. When all
ranks have arrived, a rank's digest has counted all of them unless they differ. Only then does a rank read the other
ranks' configurations.

A rank publishes a report when it closes a ring. :func:`ring_backends.ring.differences.error_of_reports` finds the error
that all reports show.

Every request to the store has a timeout, because the host of the store may be gone.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from ring_backends.ring.calls import Call, Configuration, grace

Answer = TypeVar("Answer")

REFUSED = "refused"
"""The field under which a rank publishes why it refuses a call, in place of a configuration."""

Report = dict[str, Any]
"""``calls``: positions of a rank's latest calls by number. ``raised``: its own error. ``refused``: refused calls.
``place``: the call of another ring in which it waits, instead of the others."""


unanswered: dict[threading.Thread, object] = {}
"""The threads that wait for a store, and who asked."""


def call_with_timeout(
    seconds: float, ask: Callable[[], Answer], *, default: Answer, asker: object | None = None
) -> Answer:
    """Call ``ask`` in a thread and return its answer; ``default`` if it fails or takes longer than ``seconds``.

    ``ask`` is a request to a store. If the process that hosts the store is gone, the request fails. If the network is
    gone, torch may wait forever.

    Args:
        asker: who asks repeatedly. While an earlier request of the same asker is not answered, ``ask`` is not called.
    """
    for thread in [thread for thread in list(unanswered) if not thread.is_alive()]:
        unanswered.pop(thread, None)
    if asker is not None and any(other is asker for other in list(unanswered.values())):
        return default
    answers = []

    def listen() -> None:
        with contextlib.suppress(dist.DistError):
            answers.append(ask())

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    listener.join(seconds)
    if listener.is_alive():
        unanswered[listener] = asker
    return answers[0] if answers else default


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
    _published: list[str] = field(default_factory=list)
    _refused: dict[int, str] = field(default_factory=dict)
    _store_is_lost: bool = False
    _newest_shown: int | None = None
    _answered: str | None = None

    @property
    def _patience(self) -> float:
        """Timeout in seconds of one request to the store of a ring that may have failed."""
        return grace(self.timeout) / 6

    def refuse(self, number: int, text: str) -> None:
        """Publish that this rank refuses call ``number``."""
        self._refused[number] = text

        def publish() -> None:
            # The text stays: a rank whose GPU is behind may look for it after the next comparison.
            self._published.extend(publish_refusal(self.store, self.rank, number, text)[1:])

        call_with_timeout(self._patience, publish, default=None)

    def compare_configurations(self, call: Call, is_vain: Callable[[], bool]) -> dict[int, dict[str, Any]] | None:
        """Publish this rank's configuration of ``call``, and compare it with those of the other ranks.

        Returns:
            The configurations of all ranks, or their refusals, if they differ. An empty dict if all are equal. None if
            some rank has published none in time, or once ``is_vain`` returns True.
        """

        def compare() -> dict[int, dict[str, Any]]:
            earlier = self._published
            self._published = publish_configuration(self.store, self.rank, call.number, call.configuration)
            self._wait_for_all(call, is_vain)
            equal = self.store.add(_equal_key(call.number, call.configuration), 0)
            texts = [] if equal == self.size else self.store.multi_get(self._configuration_keys(call))
            # All ranks have arrived, so earlier entries are no longer read. Otherwise each seq_len would leave some.
            for key in earlier:
                self.store.delete_key(key)
            self._refused.clear()
            return {rank: json.loads(text) for rank, text in enumerate(texts)}

        seconds = call.time_left().total_seconds() + self._patience
        return call_with_timeout(seconds, compare, default=None)

    def absent_ranks(self, call: Call) -> list[int]:
        """The ranks that have not published a configuration of ``call``; all ranks if the store does not answer.

        Halves of the ring that are complete cost one request.
        """
        keys = self._configuration_keys(call)

        def absent(ranks: Sequence[int]) -> list[int]:
            if self.store.check([keys[rank] for rank in ranks]):
                return []
            middle = len(ranks) // 2
            return [*absent(ranks[:middle]), *absent(ranks[middle:])] if middle else [*ranks]

        everyone = range(self.size)
        return call_with_timeout(self._patience, lambda: absent(everyone), default=[*everyone])

    def _configuration_keys(self, call: Call) -> list[str]:
        return [_configuration_key(call.number, rank) for rank in range(self.size)]

    def _wait_for_all(self, call: Call, is_vain: Callable[[], bool]) -> None:
        """Poll the store until all ranks have arrived. ``Store.wait`` would block the other threads that use it."""
        pause, longest = 0.001, 0.05
        while self.store.add(_arrived_key(call.number), 0) < self.size:
            if call.time_left() <= timedelta(milliseconds=1) or is_vain():
                raise dist.DistStoreError("not all ranks arrived")
            time.sleep(pause)
            pause = min(longest, 1.5 * pause)

    def close(self, calls: Mapping[int, dict[str, object]], raised: str | None) -> Report:
        """Publish that this rank closes the ring, with the positions of its latest calls and its own error."""
        report = json.dumps({"calls": calls, "raised": raised, REFUSED: dict(self._refused)})

        def publish() -> None:
            self.store.set(f"failed/{self.rank}", report)
            _append(self.store, "failed", str(self.rank))

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
                _append(self.store, "answered", str(self.rank))
                self._answered = report

        if report != self._answered:
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
        """The reports by rank, of those ranks that publish one within ``seconds``, or refuse a call of this rank.

        A look at the store costs at most six requests, and each new report is read once.
        """
        reports = {self.rank: own}
        end = time.monotonic() + seconds
        numbers = {call.number, *map(int, own["calls"])}

        def collect() -> None:
            while len(reports) < self.size and time.monotonic() < end:
                closed = {int(rank) for key in ("failed", "answered") for rank in _entries(self.store, key)}
                new = [rank for rank in closed if rank not in reports]
                texts = self.store.multi_get([f"failed/{rank}" for rank in new]) if new else []
                reports.update({rank: json.loads(text) for rank, text in zip(new, texts, strict=True)})
                for number, rank in _refusals(self.store):
                    key = _configuration_key(number, rank)
                    if number in numbers and rank not in reports and self.store.check([key]):
                        text = json.loads(self.store.get(key))[REFUSED]
                        reports[rank] = {"calls": {}, "raised": None, REFUSED: {str(number): text}}
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
            numbers = {call.number, *(made.number for made in latest)}
            return with_refusals and any(
                number in numbers and rank != self.rank for number, rank in _refusals(self.store)
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

    def peer_has_closed(self) -> bool:
        """Whether a rank has closed the ring."""
        return call_with_timeout(self._patience, partial(self.store.check, ["failed"]), default=False)


def publish_configuration(store: Store, rank: int, number: int, configuration: Configuration) -> list[str]:
    """Publish the configuration of call ``number`` on ``rank``. Returns the keys that this rank has to delete later."""
    # In this order, because a rank that sees all as arrived reads the first counter.
    counters = _equal_key(number, configuration), _arrived_key(number)
    return _publish(store, rank, number, configuration.text, counters)


def publish_refusal(store: Store, rank: int, number: int, text: str) -> list[str]:
    """Publish that ``rank`` refuses call ``number``. Returns the keys that this rank has to delete later."""
    published = _publish(store, rank, number, json.dumps({REFUSED: text}), [_arrived_key(number)])
    _append(store, REFUSED, f"{number}/{rank}")
    return published


def _publish(store: Store, rank: int, number: int, text: str, counters: Iterable[str]) -> list[str]:
    key = _configuration_key(number, rank)
    store.set(key, text)  # before the rank counts as arrived
    return [key, *(counter for counter in counters if store.add(counter, 1) == 1)]


def _append(store: Store, key: str, entry: str) -> None:
    cast(Any, store).append(key, f" {entry}")  # torch's annotations lack append()


def _entries(store: Store, key: str) -> list[str]:
    return store.get(key).decode().split() if store.check([key]) else []


def _refusals(store: Store) -> list[tuple[int, int]]:
    """The numbers of refused calls, each with the rank that refused it."""
    return [
        (int(number), int(rank)) for number, _, rank in (entry.partition("/") for entry in _entries(store, REFUSED))
    ]


def _configuration_key(number: int, rank: int) -> str:
    return f"check/{number}/{rank}"


def _equal_key(number: int, configuration: Configuration) -> str:
    return f"check/{number}/equal/{configuration.digest.hex()}"


def _arrived_key(number: int) -> str:
    return f"check/{number}/arrived"
