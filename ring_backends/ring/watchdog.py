"""Background threads: store requests with a timeout, and a watchdog that ends waits for a peer that will not come.

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
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

if TYPE_CHECKING:
    from ring_backends.ring.agreement import Agreement

Answer = TypeVar("Answer")

_LOGGER = logging.getLogger(__name__)

_INTERVAL = 0.25
"""Seconds between two checks. Waits that last from one check to the next are examined."""

_EXIT_TIMEOUT = 2.0
"""The longest delay, in seconds, of the interpreter's exit by this module."""

_unanswered: dict[threading.Thread, object] = {}
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
    for thread in [thread for thread in list(_unanswered) if not thread.is_alive()]:
        _unanswered.pop(thread, None)
    if asker is not None and any(other is asker for other in list(_unanswered.values())):
        return default
    answers = []

    def listen() -> None:
        with contextlib.suppress(dist.DistError):
            answers.append(ask())

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    listener.join(seconds)
    if listener.is_alive():
        _unanswered[listener] = asker
    return answers[0] if answers else default


class Watchdog:
    """A thread that examines the long waits of this process. A ring's Agreement knows its wait, and can end it."""

    def __init__(self) -> None:
        self._rings: weakref.WeakSet[Agreement] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._places: list[str] = []

    def add(self, ring: Agreement) -> None:
        """Watch a ring from now on."""
        with self._lock:
            self._rings.add(ring)
        if self._thread is None or not self._thread.is_alive():  # threads do not survive a fork
            self._thread = threading.Thread(target=self._run, name="ring_backends watch", daemon=True)
            self._thread.start()

    def answer_from(self, failed: Agreement) -> None:
        """Tell the ranks of the other rings that this one has waited in a call of ``failed``."""
        with self._lock:
            others = [ring for ring in self._rings if ring is not failed]
        place = failed.waits_in()
        if place is not None:
            for ring in others:
                ring.answer_from(place, unasked=True)

    def _run(self) -> None:
        seen: dict[int, int] = {}
        while not self._stopped.wait(_INTERVAL):
            seen = self._check(seen)

    def _check(self, seen: dict[int, int]) -> dict[int, int]:
        """Examine the waits that the last check has seen, and return the current waits."""
        with self._lock:
            rings = list(self._rings)
        waits: dict[int, int] = {}
        places = [place for ring in rings if (place := ring.waits_in()) is not None]
        for ring in rings:
            try:
                ring.examine_stream()
                wait = ring.wait_number()
                if wait is None:
                    if places and places == self._places:
                        ring.answer_from(places[0])
                    continue
                waits[id(ring)] = wait
                if wait == seen.get(id(ring)):
                    ring.end_vain_wait()
            except Exception:  # such as that of a group that the user has destroyed; it would be logged at each check
                _LOGGER.exception("the watchdog cannot examine a ring, and watches it no more")
                with self._lock:
                    self._rings.discard(ring)
        self._places = places
        return waits

    def stop(self, seconds: float) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(seconds)


WATCHDOG = Watchdog()


def _before_exit() -> None:
    """Wait until no thread can return to the interpreter, for at most ``_EXIT_TIMEOUT`` seconds."""
    end = time.monotonic() + _EXIT_TIMEOUT
    WATCHDOG.stop(_EXIT_TIMEOUT)
    for thread in list(_unanswered):
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
