"""The waits of this rank for its peers, and a thread, the watchdog, that ends those for a peer that will not come.

When the interpreter exits, no thread of this package may run in Python or in torch. A thread that
returns from C++ while Python is being finalized ends the process with SIGABRT.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from ring_backends.ring.calls import Call
from ring_backends.ring.connections import Connections
from ring_backends.ring.store import unanswered

_LOGGER = logging.getLogger(__name__)

_INTERVAL = 0.25
"""Seconds between two checks. Waits that last from one check to the next are examined."""

_EXIT_TIMEOUT = 2.0
"""The longest delay, in seconds, of the interpreter's exit by this module."""


class Wait:
    """A wait of the host for a peer, which a ``with`` statement wraps.

    Attributes:
        end: ends the wait from another thread.
        progress: returns another value after this rank has made progress; None without.
        ends_on_refusal: whether the refusal of ``call`` by another rank ends the wait.
        seen, since: what ``progress`` returned, and when this was last new, by ``time.monotonic``.
        is_ended: whether ``end`` was called.
    """

    def __init__(
        self,
        waits: Waits,
        call: Call,
        end: Callable[[], None],
        progress: Callable[[], object] | None,
        ends_on_refusal: bool,
    ) -> None:
        self.call, self.end, self.progress, self.ends_on_refusal = call, end, progress, ends_on_refusal
        self.is_ended = False
        self._waits = waits

    def __enter__(self) -> Wait:
        self.seen = None if self.progress is None else self.progress()
        self.since = time.monotonic()
        self._before, self._waits.current = self._waits.current, self
        self._waits.progress += 1
        return self

    def __exit__(self, error_type: object, *_: object) -> None:
        with self._waits.ending:
            self._waits.current = self._before
        if self.is_ended and error_type is None:
            raise RuntimeError("a wait for a peer was ended")

    def is_late(self) -> bool:
        if self.progress is not None and (seen := self.progress()) != self.seen:
            self.seen, self.since = seen, time.monotonic()
        return time.monotonic() - self.since > self.call.longest_wait


class Waits:
    """The waits of this rank in the calls of one ring: those of its host, and those of a stream for a hop.

    Attributes:
        current: what the host waits for; None if it does not wait.
        ending: held while ``current`` is about to be ended, or ends by itself.
        progress: a number that grows with each call and each wait of this rank.
        failed_in: the call in which this rank has waited in vain.
    """

    def __init__(self, connections: Connections) -> None:
        self.current: Wait | None = None
        self.ending = threading.Lock()
        self.progress = 0
        self.failed_in: Call | None = None
        self._connections = connections
        self._notices = connections.notices
        self._seen: int | None = None
        self._seen_hop: float | None = None

    def waiting(
        self,
        call: Call,
        end: Callable[[], None] | None = None,
        progress: Callable[[], object] | None = None,
        *,
        ends_on_refusal: bool = True,
    ) -> Wait:
        """Wraps a wait for a peer in ``call``, so that :meth:`end_vain_wait` can end it.

        Args:
            end: ends the wait, also when it has taken the call's timeout. None closes the ring's connections.
            progress: returns another value after this rank has made progress, from which the timeout counts again.
            ends_on_refusal: whether the refusal of ``call`` by another rank ends the wait.

        Raises:
            RuntimeError: the wait was ended, and has raised nothing itself. NCCL's kernels end without an error.
        """
        return Wait(self, call, end or self._connections.end, progress, ends_on_refusal)

    def place(self) -> str | None:
        """The call in which this rank waits, or has waited in vain until its deadline; None if there is none."""
        wait, call = self.current, self.failed_in
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
        if self._connections.failure is None and self.current is None:
            self._notices.answer_from(place, unasked=unasked)

    def examine(self) -> bool:
        """End waits in vain that the watchdog's last check has seen too. Return whether the host waits."""
        self._examine_hops()
        number = None if self.current is None else self.progress
        if number is not None and number == self._seen:
            self.end_vain_wait()
        self._seen = number
        return number is not None

    def end_vain_wait(self) -> None:
        """End the host's wait if a rank has closed the ring, refused the call or made another one, or if it is late.

        Called from the watchdog's thread. The waiting thread does not use the store meanwhile.
        """
        wait = self.current
        if wait is None or wait.is_ended:
            return
        # The host may also wait for the GPU, whose followed hops have deadlines of their own.
        is_late = wait.is_late() and not self._connections.followed
        latest = list(self._connections.latest)
        if not is_late and not self._notices.peer_stopped(wait.call, latest, with_refusals=wait.ends_on_refusal):
            return
        with self.ending:
            if self.current is not wait:  # it has finished meanwhile, so the connections that it used stay open
                return
            wait.is_ended = True
        wait.end()

    def _examine_hops(self) -> None:
        """Close the ring, so that the stream continues, if a followed hop has failed or will not end.

        The host raises the error at its next use of the ring.
        """
        followed = self._connections.followed
        failure, oldest = followed.examine(), followed.oldest
        was_seen = failure is None and oldest is not None and oldest.since == self._seen_hop
        if oldest is not None and was_seen and self._notices.peer_stopped(oldest.call, list(self._connections.latest)):
            followed.fail(oldest, "another rank closed the ring or refused the call")
            failure = followed.examine()
        self._seen_hop = None if oldest is None else oldest.since
        if failure is not None:
            hop, _ = failure
            self._connections.close(hop.what, hop.call)


class Watchdog:
    """A thread that examines the long waits of this process."""

    def __init__(self) -> None:
        self._rings: weakref.WeakSet[Waits] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._places: list[str] = []

    def add(self, waits: Waits) -> None:
        """Watch the waits of a ring from now on."""
        with self._lock:
            self._rings.add(waits)
        if self._thread is None or not self._thread.is_alive():  # threads do not survive a fork
            self._thread = threading.Thread(target=self._run, name="ring_backends watch", daemon=True)
            self._thread.start()

    def answer_from(self, failed: Waits) -> None:
        """Tell the ranks of the other rings that this one has waited in a call of ``failed``."""
        with self._lock:
            others = [ring for ring in self._rings if ring is not failed]
        place = failed.place()
        if place is not None:
            for ring in others:
                ring.answer_from(place, unasked=True)

    def _run(self) -> None:
        while not self._stopped.wait(_INTERVAL):
            self._check()

    def _check(self) -> None:
        with self._lock:
            rings = list(self._rings)
        places = [place for ring in rings if (place := ring.place()) is not None]
        for ring in rings:
            try:
                is_waiting = ring.examine()
                if not is_waiting and places and places == self._places:
                    ring.answer_from(places[0])
            except Exception:  # such as that of a group that the user has destroyed; it would be logged at each check
                _LOGGER.exception("the watchdog cannot examine a ring, and watches it no more")
                with self._lock:
                    self._rings.discard(ring)
        self._places = places

    def stop(self, seconds: float) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(seconds)


WATCHDOG = Watchdog()


def _before_exit() -> None:
    """Wait until no thread can return to the interpreter, for at most ``_EXIT_TIMEOUT`` seconds."""
    end = time.monotonic() + _EXIT_TIMEOUT
    WATCHDOG.stop(_EXIT_TIMEOUT)
    for thread in list(unanswered):
        thread.join(max(0.0, end - time.monotonic()))
    while time.monotonic() < end and _gloo_is_busy():
        time.sleep(0.001)


def _gloo_is_busy() -> bool:
    """Whether a thread of gloo's collectives is running.

    After a collective has returned, its thread enters the interpreter to release the tensors. Afterwards the thread
    sleeps. It also sleeps while it waits for a peer.
    """
    for thread in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # the thread has just ended
            name, _, state = thread.read_text().partition("(")[2].rpartition(")")
            if name == "pt_gloo_runloop" and state.split()[0] == "R":
                return True
    return False


atexit.register(_before_exit)
