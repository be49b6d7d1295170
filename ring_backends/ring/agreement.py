"""Checks that all ranks make the same call, and distinguishes a mismatch from a lost peer.

The first time a rank uses a configuration, it publishes it in the ring's store and compares it with the other ranks'.
After that, a check costs no communication: the tag of every hop contains a hash of the call number and the
configuration. Ranks whose calls differ then wait for each other instead of reading each other's bytes. When such a
wait fails, every rank publishes its latest calls. The reports show which ranks made different calls and which are gone.

A rank whose arguments are invalid raises before its first hop, and its peers would wait until the timeout. It therefore
publishes this refusal. The watchdog (:mod:`ring_backends.ring.watchdog`) of a waiting peer finds it and ends the wait.

Over NCCL only a CUDA stream waits for a hop (:mod:`ring_backends.ring.stream_hops`). The ring follows the hop until it
is over. A hop that fails closes the ring, and the host's next use of the ring raises the error.

A store that does not answer changes no deadline.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from ring_backends.errors import RingMismatchError, RingPeerError
from ring_backends.ring.differences import all_equal, describe_differences
from ring_backends.ring.reports import REFUSED, Report, error_of_reports
from ring_backends.ring.stream_hops import FollowedHop, FollowedHops, StreamHop, StreamHopError
from ring_backends.ring.watchdog import call_with_timeout


def grace(timeout: timedelta) -> float:
    """The last seconds before a call's deadline, in which a rank whose wait failed collects the others' reports."""
    return min(3.0, timeout.total_seconds() / 4)


@dataclass(frozen=True, eq=False)
class Configuration:
    """The fields of a call that must be equal on all ranks, as JSON-serializable values by name."""

    fields: Mapping[str, object]

    @cached_property
    def text(self) -> str:
        return json.dumps(self.fields)

    @cached_property
    def digest(self) -> bytes:
        """A hash of the text, short enough to store one for every configuration."""
        return hashlib.blake2b(self.text.encode(), digest_size=16).digest()


def backward_of(call_number: int) -> str:
    """The direction of a backward. It contains the call's number, since two calls may be equal otherwise."""
    return f"backward of call {call_number}"


@dataclass(frozen=True)
class Call:
    """One call that all ranks of a ring make: its number, its configuration and its deadline.

    Attributes:
        end: the deadline of the call, by ``time.monotonic``.
        timeout: the time from the beginning of the call to ``end``.
        name: name of the call for error messages, if the configuration does not contain it.
    """

    number: int
    configuration: Configuration
    direction: str
    end: float
    timeout: timedelta
    name: str | None = None

    @cached_property
    def _tag(self) -> int:
        return zlib.crc32(f"{self.number}:{self.direction}:{self.configuration.text}".encode()) & 0x7FFF_0000

    def tag(self, index: int) -> int:
        """The 31-bit tag of hop ``index``. The upper 15 bits are a hash of the call and its configuration."""
        return self._tag | (index & 0xFFFF)

    def time_left(self) -> timedelta:
        """How long a wait for a peer may still take. Never zero, which some transports read as no limit."""
        return timedelta(seconds=max(0.001, self.end - grace(self.timeout) - time.monotonic()))

    @property
    def position(self) -> dict[str, object]:
        own_name = {} if self.name is None else {"order of calls": self.name}
        return {"direction": self.direction, **self.configuration.fields, **own_name}


@dataclass(eq=False)
class Wait:
    """A wait of the host for a peer.

    Attributes:
        end: ends the wait from another thread.
        deadline: by ``time.monotonic``; infinite for a wait without a deadline.
        is_ended: whether ``end`` was called.
    """

    call: Call
    end: Callable[[], None]
    deadline: float
    is_ended: bool = False


@dataclass(eq=False)
class Agreement:
    """One rank's part in the checks of a ring's calls.

    Args:
        store: shared by the ranks of this ring only.
        rank, size: ring rank and ring size.
        timeout: the longest time from a call's first wait for a peer until it returns or raises.
        abort: closes the ring's connections, which ends the waits of peers for this rank. Over NCCL it also ends hops
            on streams.
        has_error: whether the transport knows that a hop on a stream cannot end.
    """

    store: Store
    rank: int
    size: int
    timeout: timedelta
    abort: Callable[[], None]
    has_error: Callable[[], bool] = lambda: False
    _agreed: set[bytes] = field(default_factory=set)
    _num_calls: int = 0
    _num_modules: int = 0
    _num_waits: int = 0
    _waiting: Wait | None = None
    _latest: deque[Call] = field(default_factory=lambda: deque(maxlen=64))
    _published: deque[str] = field(default_factory=deque)
    _refused: dict[int, str] = field(default_factory=dict)
    _failure: str | None = None
    _report: Report | None = None
    _closing: Any = field(default_factory=threading.RLock)
    _followed: FollowedHops = field(default_factory=FollowedHops)
    _examined_since: float | None = None
    _is_aborted: bool = False
    _store_is_lost: bool = False
    _stream_failure: tuple[FollowedHop, StreamHopError] | None = None

    @property
    def _patience(self) -> float:
        """Timeout in seconds of one request to the store of a ring that may have failed."""
        return grace(self.timeout) / 6

    @property
    def has_failed(self) -> bool:
        """Whether the ring is closed because one of its calls has failed."""
        return self._failure is not None

    def begin(
        self,
        configuration: Configuration,
        *,
        direction: str = "forward",
        check_again: bool = False,
        timeout: timedelta | None = None,
        name: str | None = None,
    ) -> Call:
        """Begin the next call, after checking that all ranks make the same call.

        Args:
            configuration: the fields that must be equal on all ranks.
            direction: ``"forward"``, or what :func:`backward_of` returns.
            check_again: compare with the other ranks even if they have agreed on this configuration before.
            timeout: the timeout of this call; None takes the ring's.
            name: name of the call for error messages, if the configuration does not contain it.

        Raises:
            RingMismatchError: on every rank, naming each field that differs and every rank's value.
            RingPeerError: a rank did not publish its configuration in time, or an earlier call of this ring failed.
            RuntimeError: the current stream captures a CUDA graph.
        """
        self._refuse_capture()
        self.check()
        timeout = self.timeout if timeout is None else timeout
        end = time.monotonic() + timeout.total_seconds()
        call = Call(self._num_calls, configuration, direction, end, timeout, name)
        self._num_calls += 1
        self._latest.append(call)
        if check_again or configuration.digest not in self._agreed:
            self._check(call)
            self._agreed.add(configuration.digest)
        return call

    def number_module(self) -> int:
        """Number an attention module, so that two equal modules called in a different order are a mismatch."""
        self._num_modules += 1
        return self._num_modules

    def refuse(self, error: Exception) -> None:
        """Publish the error that this rank raised for its arguments, so that the other ranks stop waiting for it."""
        text = f"refused its arguments with {type(error).__name__}: {str(error).rstrip(chr(46))}"
        number = self._num_calls
        self._num_calls += 1  # a refused call is counted, as on the ranks that make it
        self._refused[number] = text
        keys = {f"check/{number}/{self.rank}": json.dumps({REFUSED: text}), f"refused/{number}": str(self.rank)}
        for key, value in keys.items():
            call_with_timeout(self._patience, partial(self.store.set, key, value), default=None)
            self._published.append(key)

    def _refuse_capture(self) -> None:
        # Before CUDA is initialized, the question would initialize it on GPU 0.
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            error = RuntimeError(
                f"a call on a ring of {self.size} ranks cannot be captured in a CUDA graph: the ranks compare their "
                "calls on the host, which a replay does not repeat. Leave the call out of the graph, or use a ring of "
                "one; torch.compile leaves it out by itself."
            )
            self.refuse(error)
            raise error

    @contextlib.contextmanager
    def waiting(self, call: Call, end: Callable[[], None] | None = None) -> Iterator[Wait]:
        """Wraps a wait for a peer in ``call``, so that :meth:`end_vain_wait` can end it.

        Args:
            end: ends the wait, which has no deadline here. None closes the ring's connections, also when the wait has
                taken the call's timeout.

        Raises:
            RuntimeError: the wait was ended, and has raised nothing itself. NCCL's kernels end without an error.
        """
        seconds = call.timeout.total_seconds() - grace(call.timeout) if end is None else math.inf
        wait = Wait(call, end or self.abort, time.monotonic() + seconds)
        before, self._num_waits = self._waiting, self._num_waits + 1
        self._waiting = wait
        try:
            yield wait
        finally:
            self._waiting = before
        if wait.is_ended:
            raise RuntimeError("a wait for a peer was ended")

    def wait_number(self) -> int | None:
        """The number of the current wait; None if this rank waits for nothing."""
        return None if self._waiting is None else self._num_waits

    def end_vain_wait(self) -> None:
        """End this rank's wait if a rank has closed the ring or refused the call, or if the wait's deadline is over.

        Called from the watchdog's thread. The waiting thread does not use the store meanwhile.
        """
        wait = self._waiting  # read it once: the waiting thread may finish at any moment
        if wait is None or wait.is_ended:
            return
        # The host may also wait for the GPU, whose followed hops have deadlines of their own.
        is_late = time.monotonic() > wait.deadline and not self._followed
        if is_late or self._peer_stopped(wait.call):
            wait.is_ended = True
            self._is_aborted |= wait.end == self.abort
            wait.end()

    def _peer_stopped(self, call: Call) -> bool:
        """Whether the store shows that a rank has closed the ring or refused the call. Asked by the watchdog's thread.

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

    def peer_has_failed(self) -> bool:
        """Whether another rank has closed the ring, and this one has not."""
        failed = partial(self.store.check, ["failed"])
        return not self.has_failed and call_with_timeout(self._patience, failed, default=False)

    def _check(self, call: Call) -> None:
        keys = [f"check/{call.number}/{rank}" for rank in range(self.size)]
        self._published.append(keys[self.rank])

        def compare() -> dict[int, dict[str, Any]]:
            self.store.set(keys[self.rank], call.configuration.text)
            self._wait_for(keys, call)
            published = {rank: json.loads(self.store.get(key)) for rank, key in enumerate(keys)}
            # All ranks have arrived, so earlier entries are no longer read. Otherwise each seq_len would leave some.
            while len(self._published) > 1:
                self.store.delete_key(self._published.popleft())
            self._refused.clear()
            return published

        no_answer: dict[int, dict[str, Any]] = {}
        published = call_with_timeout(call.time_left().total_seconds() + self._patience, compare, default=no_answer)
        if not published:
            everybody = [*range(self.size)]
            absent = call_with_timeout(
                self._patience, lambda: [r for r in everybody if not self.store.check([keys[r]])], default=everybody
            )
            cause = TimeoutError("not all ranks arrived")
            self.fail(call, f"rank {self.rank} waited for ranks {absent} to compare configurations", cause)
        refusals = [f"rank {rank} {fields[REFUSED]}" for rank, fields in published.items() if REFUSED in fields]
        if refusals:
            raise RingMismatchError(f"{'; '.join(refusals)}. The other ranks made the call; all ranks must make it.")
        if not all_equal(published.values()):
            raise RingMismatchError(describe_differences(published))

    def _wait_for(self, keys: list[str], call: Call) -> None:
        """Poll the store. ``Store.wait`` would block the other threads that use it."""
        pause = 0.001
        while not self.store.check(keys):
            if call.time_left() <= timedelta(milliseconds=1):
                raise dist.DistStoreError("not all ranks arrived")
            time.sleep(pause)
            pause = min(0.05, 1.5 * pause)

    def fail(self, call: Call, what: str, cause: BaseException) -> NoReturn:
        """Close the ring after a failed wait, collect the other ranks' reports, and raise the error that they show.

        If a hop on a stream has failed before, the error is that hop's.

        Args:
            what: the wait that failed, for the message.

        Raises:
            RingMismatchError: another rank made a different call under the same number, or refused to make it.
            RingPeerError: otherwise.
        """
        with self._closing:
            reports = {self.rank: self._close(what)}
            seconds = max(0.1, min(grace(call.timeout), call.end - time.monotonic()))
            if self._stream_failure is not None:
                followed, cause = self._stream_failure
                call, what, self._stream_failure = followed.call, followed.what, None
                seconds = max(1.0, grace(call.timeout))  # the others look at the store twice a second
        call_with_timeout(
            seconds, lambda: self._collect_failures(reports, call, time.monotonic() + seconds), default=None
        )
        # A copy: the thread that asks a slow store may still add reports.
        raise error_of_reports(dict(reports), self.rank, what, call.timeout, cause) from cause

    def follow(self, call: Call, what: str, hop: StreamHop | None) -> None:
        """Follow a hop that a stream waits for, until it is over. ``hop`` is the result of the transfer's ``wait``.

        Raises:
            RingMismatchError, RingPeerError: an earlier hop has failed.
        """
        if hop is not None:
            seconds = call.timeout.total_seconds() - grace(call.timeout)
            self._followed.add(FollowedHop(hop, call, what, seconds))
            self.check()

    def check(self) -> None:
        """Raise if the ring is closed, or a hop on a stream is known to have failed. Does not wait.

        Raises:
            RingMismatchError, RingPeerError: the error of the hop at first, and RingPeerError afterwards.
        """
        self._examine_finished()
        if self._stream_failure is not None:
            followed, cause = self._stream_failure
            self.fail(followed.call, followed.what, cause)
        if self._failure is not None:
            raise RingPeerError(f"this ring was closed when {self._failure}; make a new one with initialize().")

    def synchronize(self) -> None:
        """Wait until all followed hops are over, and raise if one has failed. Their deadlines bound the wait."""
        self.check()
        while self._followed:
            time.sleep(0.001)
            self.check()

    def examine_stream(self) -> None:
        """Close the ring if a followed hop has failed, or will not end. Called from the watchdog's thread."""
        self._examine_finished()
        oldest = self._followed.oldest
        was_seen = self._failure is None and oldest is not None and oldest.since == self._examined_since
        if oldest is not None and was_seen and self._peer_stopped(oldest.call):
            self._fail_on_stream(oldest, StreamHopError("another rank closed the ring or refused the call"))
        self._examined_since = None if oldest is None else oldest.since

    def _examine_finished(self) -> None:
        with self._closing:  # so that no thread sees a hop removed before its failure is known
            oldest = self._followed.oldest
            if oldest is None or self._failure is not None:
                return
            if self._is_aborted:  # its hops are over, with anything in their headers
                self._fail_on_stream(oldest, StreamHopError("the connections of the ring were closed"))
            elif self.has_error():
                self._fail_on_stream(oldest, StreamHopError("NCCL reported an error"))
            elif failure := self._followed.first_failure():
                self._fail_on_stream(*failure)

    def _fail_on_stream(self, followed: FollowedHop, cause: StreamHopError) -> None:
        """Close the ring, so that the stream continues. The host raises the error at its next use of the ring."""
        with self._closing:
            if self._failure is None:
                self._stream_failure = followed, cause
                self._latest = deque([followed.call, *self._latest])  # appendleft might drop the newest call
                self._close(followed.what)
                self._followed.clear()

    def _collect_failures(self, reports: dict[int, dict[str, Any]], call: Call, deadline: float) -> None:
        """Add the other ranks' reports to ``reports``, until all have arrived or ``deadline`` has passed."""
        while len(reports) < self.size and time.monotonic() < deadline:
            for rank in set(range(self.size)) - set(reports):
                if self.store.check([f"failed/{rank}"]):
                    reports[rank] = json.loads(self.store.get(f"failed/{rank}"))
                elif self.store.check([f"check/{call.number}/{rank}"]):
                    published = json.loads(self.store.get(f"check/{call.number}/{rank}"))
                    if REFUSED in published:
                        reports[rank] = {"calls": {}, "raised": None, REFUSED: {str(call.number): published[REFUSED]}}
            time.sleep(0.02)

    @contextlib.contextmanager
    def report_errors(self, call: Call) -> Iterator[None]:
        """Wraps this rank's part in ``call``: an exception in it closes the ring and is published for the others."""
        try:
            yield
        except GeneratorExit:  # the caller closed the generator, which is no error
            raise
        except BaseException as error:
            self.report_error(call.direction if call.name is None else call.name, error)
            raise

    def report_error(self, what: str, error: BaseException) -> None:
        """Close the ring unless it is closed, and publish the error that this rank raised in ``what``."""
        if self._failure is None:
            self._close(f"rank {self.rank} raised in {what}", f"{type(error).__name__}: {error}")

    def _close(self, what: str, raised: str | None = None) -> Report:
        """Publish a report of this rank's latest calls and its error, close the ring, and return the report."""
        with self._closing:
            if self._report is None:
                self._failure = what
                # Copies: the thread of a failed hop on a stream is not the thread that makes calls.
                calls = {latest.number: latest.position for latest in list(self._latest)}
                end = json.dumps({"calls": calls, "raised": raised, REFUSED: dict(self._refused)})

                def publish() -> None:
                    self.store.set(f"failed/{self.rank}", end)
                    self.store.set("failed", str(self.rank))

                call_with_timeout(self._patience, publish, default=None)
                self.abort()
                self._report = json.loads(end)
            assert self._report is not None
            return self._report
