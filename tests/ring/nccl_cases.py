"""A simulated NCCL communicator with simulated CUDA streams. Threads are the ranks.

The simulated communicator pairs messages by their order, as NCCL does. Its ``wait`` returns at once. A wait and what
follows it on a simulated stream are carried out when the hop has arrived, or when the communicator is aborted.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ring_backends.attention import RingDilatedAttention
from ring_backends.ring import stream_hops, transfer
from ring_backends.ring.agreement import Agreement
from ring_backends.ring.calls import Call, Configuration
from ring_backends.ring.ring import Ring
from ring_backends.ring.stream_hops import StreamHop
from ring_backends.ring.transfer import Transfer, post_works
from ring_backends.ring.watchdog import Watchdog
from ring_backends.testing.failing_calls import ending

DEVICE = torch.device("cpu")
SEQ_LEN = 16

copy_to_host = stream_hops._copy_to_host


class Stream:
    """A CUDA stream: operations that are carried out in order, each when it is ready."""

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self._operations: deque[tuple[Callable[[], bool], Callable[[], object]]] = deque()
        self._lock = threading.RLock()

    def add(self, ready: Callable[[], bool], action: Callable[[], object] = lambda: None) -> None:
        with self._lock:
            self._operations.append((ready, action))
        self.run()

    def run(self) -> None:
        with self._lock:
            while self._operations and self._operations[0][0]():
                self._operations.popleft()[1]()


class HostNumbers:
    """Pinned memory, into which a stream copies ``numbers`` when it gets there."""

    def __init__(self, numbers: Tensor) -> None:
        self.values = [0] * len(numbers)
        self.stream = running.streams[-1]
        self.stream.events.append("copy headers")
        self.stream.add(lambda: True, lambda: setattr(self, "values", copy_to_host(numbers).tolist()))

    def tolist(self) -> list[int]:
        self.stream.run()
        return self.values


def forbidden(*_: object, **__: object) -> None:
    raise AssertionError("a query would end the capture of a CUDA graph in another thread, and a wait blocks the host")


class RunningThread(threading.local):
    """The streams that the running thread has entered, innermost last."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []


running = RunningThread()


class Cuda:
    """The streams of every thread, each of which is a rank."""

    def __init__(self) -> None:
        self._watching: dict[int, Stream] = {}
        self.events: defaultdict[int, list[str]] = defaultdict(list)

    def watching_stream(self, device: torch.device) -> Stream:
        rank = threading.get_ident()
        return self._watching.setdefault(rank, Stream(self.events[rank]))

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        running.streams.append(stream)
        try:
            yield
        finally:
            running.streams.pop()


@pytest.fixture(autouse=True)
def cuda() -> Iterator[Cuda]:
    """Replace CUDA and its streams by the simulated ones, in the tests of a module that imports this."""
    fake = Cuda()
    with (
        mock.patch.object(transfer, "stream_device", return_value=DEVICE),
        mock.patch.object(stream_hops, "_watching_stream", fake.watching_stream),
        mock.patch.object(stream_hops, "_copy_to_host", HostNumbers),
        mock.patch.object(torch.cuda, "stream", fake.stream),
        mock.patch.object(torch.cuda, "Event", forbidden),
        mock.patch.object(torch.cuda, "synchronize", forbidden),
    ):
        yield fake


class Communicator:
    """Connects the ranks of a simulated ring. Messages between two ranks are paired by their order alone.

    Args:
        blocks: whether ``wait`` waits for the arrival. Otherwise results of calls are garbage, since the CPU does not
            wait for a stream.

    Attributes:
        is_stuck: whether posts wait for the connection to a lost peer until the communicator is aborted.
    """

    def __init__(self, size: int, blocks: bool = False) -> None:
        self.size, self.blocks, self.is_stuck = size, blocks, False
        self.store = HashStore()
        self._sent: defaultdict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
        self._lock = threading.Lock()

    def send(self, source: int, destination: int, buffer: Tensor) -> None:
        with self._lock:
            self._sent[source, destination].append(buffer.clone())

    def receive_all(self, rank: int, incoming: list[tuple[int, Tensor]]) -> bool:
        """Fill these buffers if the next messages are there and have the same sizes. NCCL hangs if sizes differ."""
        with self._lock:
            counts: defaultdict[int, int] = defaultdict(int)
            found = []
            for source, buffer in incoming:
                queue = self._sent[source, rank]
                if len(queue) <= counts[source] or queue[counts[source]].shape != buffer.shape:
                    return False
                found.append(queue[counts[source]])
                counts[source] += 1
            for (source, buffer), message in zip(incoming, found, strict=True):
                buffer.copy_(message)
                self._sent[source, rank].popleft()
            return True


class Work:
    """The work of one hop on one rank. It starts when the rank's work before it is over, in the order of a stream.

    After an abort it is over without having received anything.
    """

    def __init__(self, ring: SimulatedRing, outgoing: Any, incoming: Any) -> None:
        self.ring, self.outgoing, self.incoming = ring, [*outgoing], [*incoming]
        self.has_arrived = False
        self.before: Work | None = ring.works[-1] if ring.works else None
        ring.works.append(self)
        self.is_over()

    def is_over(self) -> bool:
        if self.ring.aborted.is_set():
            return True
        if self.before is not None and not self.before.is_over():
            return False
        with self.ring.lock:
            self.before = None
            while self.outgoing:
                self.ring.communicator.send(self.ring.rank, *self.outgoing.pop(0))
            if not self.has_arrived:
                self.has_arrived = self.ring.communicator.receive_all(self.ring.rank, self.incoming)
            return self.has_arrived

    def wait(self, timeout: timedelta | None = None) -> None:
        assert timeout is None, "with a timeout, NCCL blocks the host"
        if running.streams:
            running.streams[-1].events.append("wait for the hop")
            running.streams[-1].add(self.is_over)
        elif self.ring.communicator.blocks:
            while not self.is_over():
                time.sleep(0.001)


@dataclass(frozen=True)
class SimulatedRing(Ring):
    """A ring over the simulated communicator, with the package's own headers, agreement and watchdog."""

    communicator: Communicator = None
    aborted: threading.Event = None
    abort: mock.Mock = None
    works: list[Work] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)

    @classmethod
    def of(cls, communicator: Communicator, rank: int, seconds: float) -> SimulatedRing:
        aborted, size = threading.Event(), communicator.size
        abort = mock.Mock(side_effect=aborted.set)
        agreement = Agreement(communicator.store, rank, size, timedelta(seconds=seconds), abort)
        return cls(
            size=size,
            rank=rank,
            ranks=tuple(range(size)),
            agreement=agreement,
            timeout=agreement.timeout,
            communicator=communicator,
            aborted=aborted,
            abort=abort,
        )

    def post(self, outgoing: Any, incoming: Any, tag: int) -> Transfer:
        if self.communicator.is_stuck:
            assert self.aborted.wait(20)
            raise RuntimeError("NCCL communicator was aborted")

        with mock.patch.object(transfer, "needs_host", return_value=False):
            return post_works(mock.Mock(), lambda *buffers: [Work(self, *buffers)], outgoing, incoming, tag)


class Attention(RingDilatedAttention):
    def ring_pass(self, outgoing: Any, incoming: Any, tag: int) -> Transfer:
        return self.ring.post(outgoing, incoming, tag)


def run(size: int, part: Callable[[SimulatedRing], object], seconds: float = 2.0, blocks: bool = False) -> list[Any]:
    """Run ``part`` on every rank. Returns its result, or how it failed, by rank. It takes at most 20 s."""
    communicator, watchdog = Communicator(size, blocks), Watchdog()
    rings = [SimulatedRing.of(communicator, rank, seconds) for rank in range(size)]
    results: list[Any] = [None] * size

    def run_rank(rank: int) -> None:
        def keep() -> None:
            results[rank] = part(rings[rank])

        ended = ending(keep)
        if ended.error != "no error":
            results[rank] = ended

    for ring in rings:
        watchdog.add(ring.agreement)
    threads = [threading.Thread(target=run_rank, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)  # less than the deadline of rings that must fail before it
        assert not thread.is_alive()
    watchdog.stop(10)
    return results


def attention(ring: SimulatedRing) -> Attention:
    """A module with one segment and without dilation."""
    return Attention([SEQ_LEN], [1], ring=ring)


def local_inputs(ring: Ring) -> list[Tensor]:
    """The rank's rows of query, key and value."""
    whole = torch.randn(3, 1, SEQ_LEN, 2, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [ring.shard(x).requires_grad_() for x in whole]


def attended(ring: SimulatedRing) -> tuple[Attention, list[Tensor]]:
    """Make a call, which has succeeded on every rank. Returns the module and its inputs."""
    attend, inputs = attention(ring), local_inputs(ring)
    attend(*inputs)
    ring.synchronize()
    return attend, inputs


def hop_from(ring: SimulatedRing, peer: int, tag: int = 7) -> StreamHop:
    """Post a hop that receives four bytes, and wait for it as the CPU does over NCCL."""
    return ring.post({}, {peer: torch.zeros(4, dtype=torch.uint8)}, tag).wait(timedelta(seconds=1))


def begin(ring: Ring, seq_len: int = 8) -> Call:
    """Begin a call."""
    return ring.agreement.begin(Configuration({"seq_len": seq_len}))
