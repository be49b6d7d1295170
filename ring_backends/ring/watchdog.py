"""What runs beside the main thread: bounded questions to a store, and a look at waits that last.

The rule of this file: no thread of this package is inside of the interpreter, or of torch, when the interpreter ends.
A thread that comes back from C++ while Python is being finalized ends the process with SIGABRT.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

import torch.distributed as dist

Answer = TypeVar("Answer")

_LOOK_EVERY = 0.25
"""Seconds. A wait that has lasted from one look to the next is looked into."""

_LEAVE_WITHIN = 2.0
"""Seconds that the end of the interpreter may be held up."""

_unanswered: set[threading.Thread] = set()


def call_with_timeout(seconds: float, ask: Callable[[], Answer], *, default: Answer) -> Answer:
    """What ``ask`` answers within some seconds; ``default`` if it fails or does not.

    A store goes with the process that hosts it, which is an error, or with the network, which torch may not notice.
    """
    answers = []

    def listen() -> None:
        with contextlib.suppress(dist.DistError):
            answers.append(ask())

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    listener.join(seconds)
    _unanswered.difference_update({thread for thread in _unanswered if not thread.is_alive()})
    if listener.is_alive():
        _unanswered.add(listener)
    return answers[0] if answers else default


class Waiting(Protocol):
    """What may wait for a peer in vain."""

    def wait_number(self) -> int | None:
        """The number of the wait that it is in; None if it is in none."""

    def end_vain_wait(self) -> None:
        """End the wait if the store says that it is in vain."""


class Watchdog:
    """A thread that looks into the waits of this process that last."""

    def __init__(self) -> None:
        self._rings: weakref.WeakSet[Waiting] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, ring: Waiting) -> None:
        """Look after a ring from now on."""
        with self._lock:
            self._rings.add(ring)
        if self._thread is None or not self._thread.is_alive():  # as after a fork
            self._thread = threading.Thread(target=self._run, name="ring_backends watch", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        seen: dict[int, int] = {}
        while not self._stopped.wait(_LOOK_EVERY):
            seen = self._look(seen)

    def _look(self, seen: dict[int, int]) -> dict[int, int]:
        """Look into the waits that were there at the last look; return those that are there now."""
        with self._lock:
            rings = list(self._rings)
        waits = {}
        for ring in rings:
            wait = ring.wait_number()
            if wait is None:
                continue
            waits[id(ring)] = wait
            if wait != seen.get(id(ring)):
                continue
            try:
                ring.end_vain_wait()
            except Exception:  # such as that the store is gone; the wait ends by its own limit
                with self._lock:
                    self._rings.discard(ring)
        return waits

    def stop(self, seconds: float) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(seconds)


WATCHDOG = Watchdog()


def _before_exit() -> None:
    """Wait, for a moment at most, until no thread is on its way back into the interpreter."""
    end = time.monotonic() + _LEAVE_WITHIN
    WATCHDOG.stop(_LEAVE_WITHIN)
    for thread in _unanswered:
        thread.join(max(0.0, end - time.monotonic()))
    while time.monotonic() < end and _gloo_is_busy():
        time.sleep(0.001)


def _gloo_is_busy() -> bool:
    """Whether a thread that carries out gloo's collectives is running.

    After its collective is over for the caller, such a thread still gives back the tensors, for which it has to enter
    the interpreter. It sleeps when it has done so, or while it waits for a peer.
    """
    for thread in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it ended just now
            name, _, state = thread.read_text().partition("(")[2].rpartition(")")
            if name == "pt_gloo_runloop" and state.split()[0] == "R":
                return True
    return False


atexit.register(_before_exit)
