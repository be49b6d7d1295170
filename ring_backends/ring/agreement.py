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
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import InitVar, dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from ring_backends.errors import RingMismatchError, RingPeerError
from ring_backends.ring.calls import Call, Configuration, grace
from ring_backends.ring.differences import all_equal, describe_differences
from ring_backends.ring.notices import Notices
from ring_backends.ring.reports import REFUSED, Report, error_of_reports
from ring_backends.ring.stream_hops import FollowedHop, FollowedHops, StreamHop, StreamHopError


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

    store: InitVar[Store]
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
    _failure: str | None = None
    _report: Report | None = None
    _closing: Any = field(default_factory=threading.RLock)
    _followed: FollowedHops = field(default_factory=FollowedHops)
    _examined_since: float | None = None
    _is_aborted: bool = False
    _stream_failure: tuple[FollowedHop, StreamHopError] | None = None

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
    ) -> Call:
        """Begin the next call, after checking that all ranks make the same call.

        Args:
            configuration: the fields that must be equal on all ranks.
            direction: ``"forward"``, or what :func:`~ring_backends.ring.calls.backward_of` returns.
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
        number = self._num_calls
        self._num_calls += 1  # a refused call is counted, as on the ranks that make it
        self._notices.refuse(number, f"refused its arguments with {type(error).__name__}: {str(error).rstrip(chr(46))}")

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
        if is_late or self._notices.peer_stopped(wait.call):
            wait.is_ended = True
            self._is_aborted |= wait.end == self.abort
            wait.end()

    def peer_has_failed(self) -> bool:
        """Whether another rank has closed the ring, and this one has not."""
        return not self.has_failed and self._notices.peer_has_closed()

    def _check(self, call: Call) -> None:
        published = self._notices.exchange_configurations(call)
        if not published:
            absent = self._notices.absent_ranks(call)
            cause = TimeoutError("not all ranks arrived")
            self.fail(call, f"rank {self.rank} waited for ranks {absent} to compare configurations", cause)
        refusals = [f"rank {rank} {fields[REFUSED]}" for rank, fields in published.items() if REFUSED in fields]
        if refusals:
            raise RingMismatchError(f"{'; '.join(refusals)}. The other ranks made the call; all ranks must make it.")
        if not all_equal(published.values()):
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
        reports = self._notices.collect_reports(report, call, seconds)
        raise error_of_reports(reports, self.rank, what, call.timeout, cause) from cause

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
        if oldest is not None and was_seen and self._notices.peer_stopped(oldest.call):
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
                self.abort()
            return self._report
