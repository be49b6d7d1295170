"""Hops over NCCL: their headers, the memory they use, and the end of each hop on the GPU.

NCCL's ``wait`` only orders CUDA streams, and returns to the host at once. NCCL also ignores message tags, and pairs
messages by their order. Therefore every message follows a header with the hop's tag, in the same batch. When the host
has waited for a hop, a stream of this module's own waits for it too, and copies the headers to pinned memory. The
ring's thread and the watchdog read this memory. The watchdog calls no function of CUDA, and frees no tensors: it must
not wait for a GPU that hangs, and while a thread captures a CUDA graph, the query of an event may end the capture.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from ring_backends.ring.calls import Call

Buffers = Sequence[tuple[int, Tensor]]
"""Pairs of a ring rank and a flat uint8 buffer, in the order in which they are posted."""

_MARK = 0x52494E47 << 31
"""The upper 33 bits of a header, in which it differs from most other data. The lower 31 bits are the tag."""

_ARRIVED = -(1 << 63)
"""The sign bit, which no header has. With it, a header that is copied to the host is not 0, whatever was received."""


class StreamHopError(RuntimeError):
    """A hop on a stream has failed, or will not end."""


class HeaderMismatchError(StreamHopError):
    """A peer sent the message of another hop."""


@dataclass(frozen=True)
class Headers:
    """The headers of one hop, on the device of its buffers.

    Attributes:
        value: the header that this rank sends, and expects to receive.
        numbers: int64 [1 + number of sources], the own header and the received ones.
        sources: the ring ranks of the received headers.
    """

    value: int
    numbers: Tensor
    sources: tuple[int, ...]

    @classmethod
    def of(cls, tag: int, sources: Iterable[int], device: torch.device) -> Headers:
        value, sources = _MARK | tag, tuple(sources)
        numbers = torch.empty(1 + len(sources), dtype=torch.int64, device=device)
        numbers[:1].fill_(value)
        return cls(value, numbers, sources)

    def before(self, outgoing: Buffers, incoming: Buffers) -> tuple[Buffers, Buffers]:
        """Put a header before each message. Both ends of a hop order their messages in this way."""
        own, *received = self.numbers.view(torch.uint8).split(self.numbers.itemsize)
        return (
            [(peer, part) for peer, buffer in outgoing for part in (own, buffer)],
            [
                (peer, part)
                for (peer, buffer), header in zip(incoming, received, strict=False)
                for part in (header, buffer)
            ],
        )

    def difference(self, numbers: Sequence[int]) -> str | None:
        """Describe the received headers that differ from the expected one; None if there are none.

        Args:
            numbers: the values of ``self.numbers``. The sign bit does not matter.
        """
        differing = [
            f"rank {source} sent {_describe(header)}"
            for source, header in zip(self.sources, [number & ~_ARRIVED for number in numbers[1:]], strict=True)
            if header != self.value
        ]
        return f"{'; '.join(differing)}; expected was {_describe(self.value)}" if differing else None


def _describe(header: int) -> str:
    if header >> 31 != _MARK >> 31:
        return "no header, but bytes of another message"
    return f"hop {header & 0xFFFF} of the call with hash {(header & 0x7FFF_0000) >> 16:#06x}"


@dataclass(frozen=True)
class StreamHop:
    """A hop that a stream waits for, while the host continues.

    It keeps the headers alive until they are copied, because the stream that copies them is not the stream that
    allocated them.

    Attributes:
        arrived: the headers in host memory: 0 until the hop is over, with the sign bit set afterwards.
    """

    headers: Headers
    arrived: Tensor

    def is_over(self) -> bool:
        return all(self.arrived.tolist())

    def difference(self) -> str | None:
        """Describe how the headers differ from the expected one. Called when the hop is over."""
        return self.headers.difference(self.arrived.tolist())


def follow(works: Sequence[dist.Work], headers: Headers | None, device: torch.device) -> StreamHop:
    """Follow works that the current stream waits for.

    The works are waited for a second time, on another stream. NCCL allows this. So the end of a hop does not depend on
    what the current stream computes afterwards, and the current stream copies no headers.

    Args:
        headers: None if the works send none.
    """
    with torch.cuda.stream(_watching_stream(device)):
        for work in works:
            work.wait()
        headers = headers or Headers.of(0, (), device)
        return StreamHop(headers, _copy_to_host(headers.numbers))


def keep_until_over(works: Sequence[dist.Work], buffers: Iterable[Tensor], device: torch.device) -> None:
    """Let the allocator reuse ``buffers`` only after ``works``, for works that no stream will wait for.

    NCCL's own stream cannot be named in ``record_stream``. So another stream waits for the works, and is recorded.
    """
    stream = _watching_stream(device)
    with torch.cuda.stream(stream):
        for work in works:
            with contextlib.suppress(RuntimeError):  # a failed work orders the streams before it raises
                if waits_block_host():
                    work.wait(timedelta(milliseconds=1))
                else:
                    work.wait()
    for buffer in buffers:
        buffer.record_stream(stream)


def waits_block_host() -> bool:
    """Whether the environment makes NCCL's ``wait`` block the host until the work is over."""
    names = "TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"
    setting = next((os.environ[name] for name in names if name in os.environ), "0")
    return setting.lower() in ("1", "t", "true", "y", "yes")


@cache
def _watching_stream(device: torch.device) -> torch.cuda.Stream:
    # Its kernel, which marks headers, must not wait behind the blocks of a tile.
    return torch.cuda.Stream(device, priority=-1)


def _copy_to_host(numbers: Tensor) -> Tensor:
    """Copy ``numbers`` to pinned memory in the order of the current stream. Each copy is 0 until it has arrived."""
    arrived = torch.zeros(len(numbers), dtype=torch.int64, device="cpu", pin_memory=torch.cuda.is_available())
    # Not in place: after a failure the memory of ``numbers`` may be in use again when the stream gets here.
    return arrived.copy_(numbers | _ARRIVED, non_blocking=True)


@dataclass(eq=False)
class FollowedHop:
    """A hop that is followed, with its call and the text for an error.

    Attributes:
        since: when it became the oldest unfinished hop of its ring, by ``time.monotonic``. It may remain so for the
            longest wait of its call. A hop cannot end before the one before it.
    """

    hop: StreamHop
    call: Call
    what: str
    since: float = 0.0


class FollowedHops:
    """The unfinished hops of one ring, oldest first. The ring's thread and the watchdog's thread use it.

    Hops that are removed are kept until the ring's thread adds another one, which frees their tensors.

    Args:
        has_error: whether the transport knows that a hop cannot end.

    Attributes:
        are_aborted: whether this rank has closed its connections. Its hops are then over, with anything in their
            headers.
    """

    def __init__(self, has_error: Callable[[], bool] = lambda: False) -> None:
        self.has_error = has_error
        self.are_aborted = False
        self._hops: deque[FollowedHop] = deque()
        self._removed: list[FollowedHop] = []
        self._failure: tuple[FollowedHop, StreamHopError] | None = None
        self._is_closed = False
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._hops)

    @property
    def oldest(self) -> FollowedHop | None:
        with self._lock:
            return self._hops[0] if self._hops else None

    def add(self, followed: FollowedHop) -> None:
        """Follow a hop. Those of a closed ring are not followed."""
        with self._lock:
            followed.since = time.monotonic()
            if not self._is_closed:
                self._hops.append(followed)
            removed, self._removed = self._removed, []
        del removed  # without the lock, for which the watchdog may wait

    def close(self) -> None:
        """Follow no hop from now on."""
        with self._lock:
            self._is_closed = True
            self._removed += self._hops
            self._hops.clear()

    def take_failure(self) -> tuple[FollowedHop, StreamHopError] | None:
        """Return what :meth:`examine` has found, and forget it."""
        with self._lock:
            failure, self._failure = self._failure, None
        return failure

    def fail(self, followed: FollowedHop, why: str) -> None:
        """Let a hop count as failed, unless another one has failed before or the ring is closed."""
        with self._lock:
            if not self._is_closed:
                self._failure = self._failure or (followed, StreamHopError(why))

    def examine(self) -> tuple[FollowedHop, StreamHopError] | None:
        """Remove the hops that are over. Return the first one that failed, and why; None if none has."""
        with self._lock:  # so that no thread sees a hop removed before its failure is known
            if self._failure is None and self._hops:
                self._failure = self._first_failure()
            return self._failure

    def _first_failure(self) -> tuple[FollowedHop, StreamHopError] | None:
        if self.are_aborted:
            return self._hops[0], StreamHopError("the connections of the ring were closed")
        if self.has_error():
            return self._hops[0], StreamHopError("NCCL reported an error")
        while self._hops:
            oldest = self._hops[0]
            if not oldest.hop.is_over():
                is_late = time.monotonic() - oldest.since > oldest.call.longest_wait
                return (oldest, StreamHopError("the hop did not end on the GPU")) if is_late else None
            self._removed.append(self._hops.popleft())
            if self._hops:
                self._hops[0].since = time.monotonic()
            difference = oldest.hop.difference()
            if difference is not None:
                return oldest, HeaderMismatchError(difference)
        return None
