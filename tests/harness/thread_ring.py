"""A ring inside one process: threads as ranks, a hop as a hand-over through a queue.

It runs the same attention as the adapters, without processes. Property tests can therefore use rings of 16 ranks, and
a debugger can step from rank to rank.

    def attend(ring):
        attention = ThreadRingDilatedAttention([64], [1], ring=ring)
        ...
        return out

    outs = run_in_threads(4, attend)
"""

from __future__ import annotations

import queue
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ring_backends.attention import RingDilatedAttention
from ring_backends.ring.agreement import Agreement
from ring_backends.ring.ring import Ring
from ring_backends.ring.transfer import Transfer
from ring_backends.schedule.layout import LayoutKind

T = TypeVar("T")


class Exchange:
    """Shared by the threads of a ring: a queue per (source, destination, tag), and an event that closes the ring."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.closed = threading.Event()
        self._queues: defaultdict[tuple[int, int, object], queue.Queue[Tensor]] = defaultdict(queue.Queue)
        self._lock = threading.Lock()

    def get(self, source: int, destination: int, tag: object, timeout: timedelta) -> Tensor:
        end = time.monotonic() + timeout.total_seconds()
        while not self.closed.is_set() and time.monotonic() < end:
            try:
                return self.queue(source, destination, tag).get(timeout=0.02)
            except queue.Empty:
                continue
        raise TimeoutError(
            f"nothing arrived from rank {source}; " + ("the ring is closed" if self.closed.is_set() else "timed out")
        )

    def queue(self, source: int, destination: int, tag: object) -> queue.Queue[Tensor]:
        with self._lock:
            return self._queues[source, destination, tag]


@dataclass(frozen=True)
class ThreadRing(Ring):
    """A ring whose ranks are threads."""

    queues: Exchange = field(default_factory=Exchange)

    def post(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], tag: int) -> Transfer:
        for destination, buffer in outgoing.items():
            self.queues.queue(self.rank, destination, tag).put(buffer.clone())
        return _HandOver(self.queues, self.rank, incoming, tag)


@dataclass(frozen=True)
class _HandOver(Transfer):
    queues: Exchange
    rank: int
    incoming: Mapping[int, Tensor]
    tag: int

    def wait(self, timeout: timedelta) -> None:
        for source, buffer in self.incoming.items():
            arrived = self.queues.get(source, self.rank, self.tag, timeout)
            assert arrived.shape == buffer.shape, (
                f"rank {source} sent {arrived.shape}, rank {self.rank} expects {buffer.shape}"
            )
            buffer.copy_(arrived)


class ThreadRingDilatedAttention(RingDilatedAttention):
    """Ring dilated attention over a :class:`ThreadRing`."""

    def ring_pass(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], tag: int) -> Transfer:
        assert isinstance(self.ring, ThreadRing)
        return self.ring.post(outgoing, incoming, tag)


def run_in_threads(
    size: int,
    function: Callable[[ThreadRing], T],
    *,
    layout: LayoutKind = "contiguous",
    timeout: timedelta = timedelta(seconds=60),
) -> list[T]:
    """Call ``function(ring)`` on every rank of a new ring of threads.

    Returns:
        The results by rank.

    Raises:
        AssertionError: a rank raised. The message has the traceback of every rank, and the first error is the cause.
    """
    exchange = Exchange()
    shared: dict[str, Any] = {"ranks": tuple(range(size)), "layout_kind": layout, "timeout": timeout}

    def ring_of(rank: int) -> ThreadRing:
        agreement = Agreement(exchange.store, rank, size, timeout, exchange.closed.set) if size > 1 else None
        return ThreadRing(size, rank, agreement=agreement, queues=exchange, **shared)

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(function, ring_of(rank)) for rank in range(size)]
        for future in futures:
            future.add_done_callback(lambda done: exchange.closed.set() if done.exception() else None)
        errors = {rank: future.exception() for rank, future in enumerate(futures)}
    failed = {rank: error for rank, error in errors.items() if error is not None}
    if failed:
        reports = (f"rank {rank}:\n{''.join(traceback.format_exception(error))}" for rank, error in failed.items())
        raise AssertionError("\n".join(reports)) from next(iter(failed.values()))
    return [future.result() for future in futures]
