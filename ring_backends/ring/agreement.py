"""Checks that all ranks make the same call, and distinguishes a mismatch from a lost peer.

The first time a rank uses a configuration, it publishes it in the ring's store and compares it with the other ranks'
(:mod:`ring_backends.ring.store`).
After that, a check costs no communication: the tag of every hop contains a hash of the call number and the
configuration. Ranks whose calls differ then wait for each other instead of reading each other's bytes. When such a
wait fails, every rank publishes its latest calls. The reports show which ranks made different calls and which are gone.

A rank whose arguments are invalid raises before its first hop, and its peers would wait until the timeout. It therefore
publishes this refusal. The watchdog (:mod:`ring_backends.ring.watchdog`) of a waiting peer finds it and ends the wait.
The watchdog also ends waits of ranks whose calls differ: if a wait takes long, rank 0 publishes digests of its latest
calls, and the other ranks compare theirs.

Calls outside of attention (:mod:`ring_backends.ring.collectives`) are *events*, whose order is compared without
communication, too (:mod:`ring_backends.ring.events`).

Over NCCL only a CUDA stream waits for a hop (:mod:`ring_backends.ring.stream_hops`). The ring follows the hop until it
is over. A hop that fails closes the ring, and the host's next use of the ring raises the error.

Deadlines hold even if the store no longer answers, because every request to it has a timeout.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from ring_backends.errors import RingMismatchError, RingPeerError
from ring_backends.ring.calls import NOTHING, Call, Configuration, grace
from ring_backends.ring.connections import Connections
from ring_backends.ring.differences import describe_differences, error_of_reports
from ring_backends.ring.events import Events
from ring_backends.ring.store import REFUSED, Notices
from ring_backends.ring.stream_hops import FollowedHop, FollowedHops, StreamHop
from ring_backends.ring.watchdog import WATCHDOG, Waits


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
        events: the calls outside of attention.
        num_calls: number of calls so far.
        posting, waiting: wrap the post of a hop, and a wait for a peer (:class:`Connections`, :class:`Waits`).
        raised_by_all: the latest error that all ranks have raised, as after a comparison, so that none has to be told.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        abort: Callable[[], None],
        has_error: Callable[[], bool] = lambda: False,
    ) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self.context: Mapping[str, object] = {}
        self.events = Events()
        self.num_calls = 0
        self.raised_by_all: RingMismatchError | None = None
        self.notices = Notices(store, rank, size, timeout)
        self.connections = Connections(self.notices, abort, FollowedHops(has_error))
        self.waits = Waits(self.connections)
        self.posting, self.waiting = self.connections.posting, self.waits.waiting
        self._agreed: set[bytes] = set()
        self._num_modules = 0

    @property
    def has_failed(self) -> bool:
        """Whether the ring is closed because one of its calls has failed."""
        return self.connections.failure is not None

    def begin(
        self,
        configuration: Configuration,
        *,
        direction: str = "forward",
        check_again: bool = False,
        timeout: timedelta | None = None,
        details: Mapping[str, object] = NOTHING,
    ) -> Call:
        """Begin the next call, after checking that all ranks make the same call.

        Args:
            configuration: the fields that must be equal on all ranks.
            direction: ``"forward"``, or what :func:`~ring_backends.ring.calls.backward_of` returns.
            check_again: compare with the other ranks even if they have agreed on this configuration before.
            timeout: the timeout of this call; None takes the ring's.
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
        call = Call(self.num_calls, configuration, direction, end, timeout, details, self.context)
        self.num_calls += 1
        self.waits.progress += 1
        self.connections.latest.append(call)
        if check_again or configuration.digest not in self._agreed:
            try:
                self._check(call)
            except RingMismatchError as error:
                if not self.has_failed:
                    self.forget(error)
                raise
            self._agreed.add(configuration.digest)
        return call

    def forget(self, error: RingMismatchError) -> None:
        """Forget the calls before ``error``, which all ranks raise, so that they may continue."""
        self.raised_by_all = error
        self.connections.latest.clear()
        self.events = Events()

    def _check(self, call: Call) -> None:
        is_vain = threading.Event()
        published: dict[int, dict[str, Any]] | None = None
        with (
            contextlib.suppress(RuntimeError),  # the wait was ended
            self.waiting(call, is_vain.set, ends_on_refusal=False),  # a refusal is among the configurations
        ):
            published = self.notices.compare_configurations(call, is_vain.is_set)
        if published is None:
            absent = self.notices.absent_ranks(call)
            cause = TimeoutError("not all ranks arrived")
            whom = f"ranks {absent}" if absent else "a rank that stopped while it published its configuration"
            self.fail(call, f"rank {self.rank} waited for {whom} to compare configurations", cause)
        refusals = [f"rank {rank} {fields[REFUSED]}" for rank, fields in published.items() if REFUSED in fields]
        if refusals:
            raise RingMismatchError(f"{'; '.join(refusals)}. The other ranks made the call; all ranks must make it.")
        if published:
            raise RingMismatchError(describe_differences(published))

    def number_module(self) -> int:
        """Number an attention module, so that two equal modules called in a different order are a mismatch."""
        self._num_modules += 1
        return self._num_modules

    def refuse(self, error: Exception) -> None:
        """Publish the error that this rank raised for its arguments, so that the other ranks stop waiting for it."""
        number = self.num_calls
        self.num_calls += 1  # a refused call is counted, as on the ranks that make it
        self.notices.refuse(number, f"refused its arguments with {type(error).__name__}: {str(error).rstrip(chr(46))}")
        self.events = Events()  # as on the ranks that are told

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

    def follow(self, call: Call, what: str, hop: StreamHop | None) -> None:
        """Follow a hop that a stream waits for, until it is over. ``hop`` is the result of the transfer's ``wait``.

        Raises:
            RingMismatchError, RingPeerError: an earlier hop has failed.
        """
        if hop is not None:
            self.connections.followed.add(FollowedHop(hop, call, what))
            self.check()

    def check(self) -> None:
        """Raise if the ring is closed, or a hop on a stream is known to have failed. Does not wait.

        Raises:
            RingMismatchError, RingPeerError: the error of the hop at first, and RingPeerError afterwards.
        """
        failure = self.connections.followed.examine()
        if failure is not None:
            hop, cause = failure
            self.fail(hop.call, hop.what, cause)
        if self.connections.failure is not None:
            raise RingPeerError(
                f"this ring was closed when {self.connections.failure}; make a new one with initialize()."
            )

    def synchronize(self) -> None:
        """Wait until all followed hops are over, and raise if one has failed. Their deadlines bound the wait."""
        self.check()
        while self.connections.followed:
            time.sleep(0.001)
            self.check()
        self.check()  # a ring that another thread has just closed follows no hops

    def fail(self, call: Call, what: str, cause: BaseException) -> NoReturn:
        """Close the ring after a failed wait, collect the other ranks' reports, and raise the error that they show.

        If a hop on a stream has failed before, the error is that hop's.

        Args:
            what: the wait that failed, for the message.

        Raises:
            RingMismatchError: another rank made a different call under the same number, or refused to make it.
            RingPeerError: otherwise.
        """
        report = self.connections.close(what, call)
        seconds = max(0.1, min(grace(call.timeout), call.end - time.monotonic()))
        failure = self.connections.followed.take_failure()
        if failure is not None:
            hop, cause = failure
            call, what = hop.call, hop.what
            seconds = max(1.0, grace(call.timeout))  # the others look at the store twice a second
        self.waits.failed_in = call
        reports = self.notices.collect_reports(report, call, seconds)
        if any("place" in of_rank for of_rank in reports.values()):
            WATCHDOG.answer_from(self.waits)  # before this rank leaves, and answers no more
        raise error_of_reports(reports, self.rank, self.size, what, call.timeout, cause) from cause

    @contextlib.contextmanager
    def report_errors(self, call: Call) -> Iterator[None]:
        """Wraps this rank's part in ``call``: an exception in it closes the ring and is published for the others."""
        try:
            yield
        except GeneratorExit:  # the caller closed the generator, which is no error
            raise
        except BaseException as error:
            self.report_error(call.direction, error)
            raise

    def report_error(self, what: str, error: BaseException) -> None:
        """Close the ring unless it is closed, and publish the error that this rank raised in ``what``."""
        self.connections.close(f"rank {self.rank} raised in {what}", raised=f"{type(error).__name__}: {error}")
