"""Checks that all ranks make the same call, and distinguishes a mismatch from a lost peer.

The first time a rank uses a configuration, it publishes it in the ring's store and compares it with the other ranks'
(:mod:`ring_backends.ring.notices`).
After that, a check costs no communication: the tag of every hop contains a hash of the call number and the
configuration. Ranks whose calls differ then wait for each other instead of reading each other's bytes. When such a
wait fails, every rank publishes its latest calls. The reports show which ranks made different calls and which are gone.

A rank whose arguments are invalid raises before its first hop, and its peers would wait until the timeout. It therefore
publishes this refusal. The watchdog (:mod:`ring_backends.ring.watchdog`) of a waiting peer finds it and ends the wait.
The watchdog also ends waits of ranks whose calls differ: if a wait takes long, rank 0 publishes digests of its latest
calls, and the other ranks compare theirs.

Calls outside of attention are *events* (:mod:`ring_backends.ring.collectives`). Their order is compared without
communication, too: the event that came next at the same place the last time is *expected*. All ranks have made the
same events so far, so they expect the same one. A rank that makes another one compares it with the other ranks, before
it calls a collective of a framework that the others do not call.

Over NCCL only a CUDA stream waits for a hop (:mod:`ring_backends.ring.stream_hops`). The ring follows the hop until it
is over. A hop that fails closes the ring, and the host's next use of the ring raises the error.

Deadlines hold even if the store no longer answers, because every request to it has a timeout.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import InitVar, dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from ring_backends.errors import RingMismatchError, RingPeerError
from ring_backends.ring.calls import NOTHING, Call, Configuration, grace
from ring_backends.ring.differences import describe_differences
from ring_backends.ring.notices import REFUSED, Notices, Report, error_of_reports
from ring_backends.ring.stream_hops import FollowedHop, FollowedHops, StreamHop, StreamHopError
from ring_backends.ring.watchdog import WATCHDOG

_LONGEST_POST = 0.5
"""Seconds after which a post counts as waiting for a peer. Others take less than a millisecond."""


@dataclass(eq=False)
class Wait:
    """A wait of the host for a peer.

    Attributes:
        end: ends the wait from another thread.
        seconds: the longest time without progress.
        progress: returns another value after this rank has made progress.
        ends_on_refusal: whether the refusal of ``call`` by another rank ends the wait.
        is_ended: whether ``end`` was called.
    """

    call: Call
    end: Callable[[], None]
    seconds: float
    progress: Callable[[], object]
    ends_on_refusal: bool = True
    is_ended: bool = False

    def __post_init__(self) -> None:
        self._seen = self.progress()
        self._deadline = time.monotonic() + self.seconds

    def is_late(self) -> bool:
        seen = self.progress()
        if seen != self._seen:
            self._seen, self._deadline = seen, time.monotonic() + self.seconds
        return time.monotonic() > self._deadline


@dataclass(eq=False)
class Agreement:
    """One rank's part in the checks of a ring's calls.

    Args:
        store: shared by the ranks of this ring only.
        rank, size: ring rank and ring size.
        timeout: the longest time from the beginning of a call to the end of its last wait for a peer.
        abort: closes the ring's connections, which ends the waits of peers for this rank. Over NCCL it also ends hops
            on streams.
        has_error: whether the transport knows that a hop on a stream cannot end.

    Attributes:
        context: fields that must be equal on all ranks in the following calls. They are part of the tags of hops, so
            that ranks with different fields do not read each other's bytes.
    """

    store: InitVar[Store]
    rank: int
    size: int
    timeout: timedelta
    abort: Callable[[], None]
    has_error: Callable[[], bool] = lambda: False
    context: Mapping[str, object] = field(default_factory=dict)
    _agreed: set[bytes] = field(default_factory=set)
    _num_calls: int = 0
    _num_modules: int = 0
    _num_waits: int = 0
    _waiting: Wait | None = None
    _failed_in: Call | None = None
    _ending: Any = field(default_factory=threading.Lock)
    _posting: Any = field(default_factory=threading.Lock)
    _latest: deque[Call] = field(default_factory=lambda: deque(maxlen=64))
    _failure: str | None = None
    _report: Report | None = None
    _closing: Any = field(default_factory=threading.RLock)
    _followed: FollowedHops = field(default_factory=FollowedHops)
    _examined_since: float | None = None
    _is_aborted: bool = False
    _stream_failure: tuple[FollowedHop, StreamHopError] | None = None
    _event: Configuration | None = None
    _event_of_another_name: bytes = b""
    _next_events: dict[bytes, bytes] = field(default_factory=dict)
    _history: bytes = b""
    _raised_by_all: RingMismatchError | None = None
    _with_values: deque[tuple[int, str, Mapping[str, object]]] = field(default_factory=lambda: deque(maxlen=16))

    def __post_init__(self, store: Store) -> None:
        self._notices = Notices(store, self.rank, self.size, self.timeout)

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
        details: Mapping[str, object] = NOTHING,
    ) -> Call:
        """Begin the next call, after checking that all ranks make the same call.

        Args:
            configuration: the fields that must be equal on all ranks.
            direction: ``"forward"``, or what :func:`~ring_backends.ring.calls.backward_of` returns.
            check_again: compare with the other ranks even if they have agreed on this configuration before.
            timeout: the timeout of this call; None takes the ring's.
            name: name of the call for error messages, if the configuration does not contain it.
            details: further fields that must be equal on all ranks. They are not compared here.

        Raises:
            RingMismatchError: on every rank, naming each field that differs and every rank's value.
            RingPeerError: a rank did not publish its configuration in time, or an earlier call of this ring failed.
            RuntimeError: the current stream captures a CUDA graph.
        """
        self._refuse_capture()
        self.check()
        timeout = self.timeout if timeout is None else timeout
        end = time.monotonic() + timeout.total_seconds()
        if details:  # a later comparison must not see what the caller has changed since
            details = copy.deepcopy(dict(details))
        call = Call(self._num_calls, configuration, direction, end, timeout, name, details, self.context)
        self._num_calls += 1
        self._latest.append(call)
        if check_again or configuration.digest not in self._agreed:
            try:
                self._check(call)
            except RingMismatchError as error:
                if not self.has_failed:
                    self._forget(error)
                raise
            self._agreed.add(configuration.digest)
        return call

    def _forget(self, error: RingMismatchError) -> None:
        """Forget the calls before ``error``, which all ranks raise, so that they may continue."""
        self._raised_by_all = error
        self._latest.clear()
        self._forget_events()

    def _forget_events(self) -> None:
        self._event, self._event_of_another_name, self._history = None, b"", b""
        self._next_events.clear()
        self._with_values.clear()

    def is_raised_by_all(self, error: BaseException) -> bool:
        """Whether all ranks raise this error, as after a comparison, so that none has to be told."""
        return error is self._raised_by_all

    def is_expected(self, event: Configuration, values: Mapping[str, object]) -> bool:
        """Note that this rank makes the next event. Return whether it came next at the same place the last time, too.

        The place is the event before, and the last one before it with another name. With several micro-batches, the
        same forward precedes several backwards.

        Args:
            event: the fields that all ranks must make alike, before they continue.
            values: further fields that must be equal on all ranks, but usually change each time. They do not decide
                whether the event is expected. A later comparison contains them.
        """
        name, before = event.fields["order of calls"], self._event
        place = self._event_of_another_name + (b"" if before is None else before.digest)
        is_expected = self._next_events.get(place) == event.digest
        self._next_events[place] = event.digest
        if before is not None and before.fields["order of calls"] != name:
            self._event_of_another_name = before.digest
        self._event = event
        if values or self.context:
            values = {**values, **self.context}
            self._with_values.append((self._num_calls, str(name), values))
            text = self._history + event.digest + json.dumps(values).encode()
            self._history = hashlib.blake2b(text, digest_size=16).digest()
        return is_expected

    def summary(self, event: Configuration) -> int:
        """A 48-bit hash of an event and of the values of all events so far. A float represents it exactly."""
        return int.from_bytes(hashlib.blake2b(self._history + event.digest, digest_size=6).digest(), "big")

    def raise_difference(self, fields: Mapping[str, object]) -> NoReturn:
        """Find the fields in which the ranks differ, in this event or in the values of earlier ones.

        All ranks make this call after they have found that they differ.

        Raises:
            RingMismatchError: on every rank, naming each field that differs and every rank's value.
        """
        earlier = {
            f"{field} of {name} (call {number})": value
            for number, name, values in self._with_values
            for field, value in values.items()
        }
        # A field of the call hides one of the context with the same name, and keeps its place in the message.
        self.begin(Configuration({**fields, **self.context, **fields}), check_again=True)
        self.begin(Configuration(earlier), check_again=True)
        error = RingMismatchError(
            "the ranks differ in a call too long ago to name it. Every rank must make the same calls in the same order "
            "with the same arguments."
        )
        self._forget(error)
        raise error

    def number_module(self) -> int:
        """Number an attention module, so that two equal modules called in a different order are a mismatch."""
        self._num_modules += 1
        return self._num_modules

    def refuse(self, error: Exception) -> None:
        """Publish the error that this rank raised for its arguments, so that the other ranks stop waiting for it."""
        number = self._num_calls
        self._num_calls += 1  # a refused call is counted, as on the ranks that make it
        self._notices.refuse(number, f"refused its arguments with {type(error).__name__}: {str(error).rstrip(chr(46))}")
        self._forget_events()  # as the ranks do that are told

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
    def waiting(
        self,
        call: Call,
        end: Callable[[], None] | None = None,
        progress: Callable[[], object] | None = None,
        *,
        ends_on_refusal: bool = True,
    ) -> Iterator[Wait]:
        """Wraps a wait for a peer in ``call``, so that :meth:`end_vain_wait` can end it.

        Args:
            end: ends the wait. None closes the ring's connections, also when the wait has taken the call's timeout.
            progress: returns another value after this rank has made progress. ``end`` is then also called when the rank
                has made none for the call's timeout.
            ends_on_refusal: whether the refusal of ``call`` by another rank ends the wait.

        Raises:
            RuntimeError: the wait was ended, and has raised nothing itself. NCCL's kernels end without an error.
        """
        has_deadline = end is None or progress is not None
        seconds = call.timeout.total_seconds() - grace(call.timeout) if has_deadline else math.inf
        wait = Wait(call, end or self._close_connections, seconds, progress or (lambda: None), ends_on_refusal)
        before, self._num_waits = self._waiting, self._num_waits + 1
        self._waiting = wait
        try:
            yield wait
        finally:
            with self._ending:
                self._waiting = before
        if wait.is_ended:
            raise RuntimeError("a wait for a peer was ended")

    @contextlib.contextmanager
    def posting(self) -> Iterator[None]:
        """Wraps the post of a hop. Another thread closes the connections before it or after it, if possible.

        NCCL's abort frees a communicator even while a post uses it. After an abort, NCCL refuses a message in the
        middle of a batch, and the thread's group of NCCL calls stays open.

        Raises:
            RuntimeError: the connections are closed.
        """
        with self._posting:
            if self._failure is not None or self._is_aborted:
                raise RuntimeError("the connections of the ring are closed")
            yield

    def _close_connections(self) -> None:
        is_between_posts = False
        try:
            is_between_posts = self._posting.acquire(timeout=_LONGEST_POST)
        finally:  # a post that waits for a peer ends in no other way
            try:
                self.abort()
            finally:
                if is_between_posts:
                    self._posting.release()

    def wait_number(self) -> int | None:
        """A number that changes with each wait and each call; None if this rank waits for nothing."""
        return None if self._waiting is None else self.progress()

    def progress(self) -> int:
        """A number that grows with each call and each wait of this rank."""
        return self._num_waits + self._num_calls

    def waits_in(self) -> str | None:
        """The call in which this rank waits, or has waited in vain until its deadline; None if there is none."""
        wait, call = self._waiting, self._failed_in
        if wait is not None:
            call = wait.call
        elif call is None or time.monotonic() > call.end:
            return None
        return f"{call.position.get('order of calls', call.direction)} (call {call.number})"

    def answer_from(self, place: str, *, unasked: bool = False) -> None:
        """Tell ranks that have closed this ring that this rank waits in ``place``, a call of another ring.

        Args:
            unasked: also if no rank has closed this ring yet.
        """
        if self._failure is None and self._waiting is None:
            self._notices.answer_from(place, unasked=unasked)

    def end_vain_wait(self) -> None:
        """End this rank's wait if a rank has closed the ring, refused the call or made another one, or if it is late.

        Called from the watchdog's thread. The waiting thread does not use the store meanwhile.
        """
        wait = self._waiting
        if wait is None or wait.is_ended:
            return
        # The host may also wait for the GPU, whose followed hops have deadlines of their own.
        is_late = wait.is_late() and not self._followed
        latest = list(self._latest)
        if not is_late and not self._notices.peer_stopped(wait.call, latest, with_refusals=wait.ends_on_refusal):
            return
        with self._ending:
            if self._waiting is not wait:  # it has finished meanwhile, so the connections that it used stay open
                return
            wait.is_ended = True
            self._is_aborted |= wait.end == self._close_connections
        wait.end()

    def peer_has_failed(self) -> bool:
        """Whether another rank has closed the ring, and this one has not."""
        return not self.has_failed and self._notices.peer_has_closed()

    def _check(self, call: Call) -> None:
        is_vain = threading.Event()
        published: dict[int, dict[str, Any]] | None = None
        with (
            contextlib.suppress(RuntimeError),  # the wait was ended
            self.waiting(call, is_vain.set, ends_on_refusal=False),  # a refusal is among the configurations
        ):
            published = self._notices.compare_configurations(call, is_vain.is_set)
        if published is None:
            absent = self._notices.absent_ranks(call)
            cause = TimeoutError("not all ranks arrived")
            whom = f"ranks {absent}" if absent else "a rank that stopped while it published its configuration"
            self.fail(call, f"rank {self.rank} waited for {whom} to compare configurations", cause)
        refusals = [f"rank {rank} {fields[REFUSED]}" for rank, fields in published.items() if REFUSED in fields]
        if refusals:
            raise RingMismatchError(f"{'; '.join(refusals)}. The other ranks made the call; all ranks must make it.")
        if published:
            raise RingMismatchError(describe_differences(published))

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
            report = self._close(what)
            seconds = max(0.1, min(grace(call.timeout), call.end - time.monotonic()))
            if self._stream_failure is not None:
                followed, cause = self._stream_failure
                call, what, self._stream_failure = followed.call, followed.what, None
                seconds = max(1.0, grace(call.timeout))  # the others look at the store twice a second
            self._failed_in = call
        reports = self._notices.collect_reports(report, call, seconds)
        if any("place" in of_rank for of_rank in reports.values()):
            WATCHDOG.answer_from(self)  # before this rank leaves, and answers no more
        raise error_of_reports(reports, self.rank, self.size, what, call.timeout, cause) from cause

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
        if oldest is not None and was_seen and self._notices.peer_stopped(oldest.call, list(self._latest)):
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
                self._report = self._notices.close(calls, raised)
                self._close_connections()
            return self._report
