"""Measures the peak of the bytes in all wire buffers that are alive at the same time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ring_backends.engine.wire_buffers import WireBuffer


class BufferWatch:
    """Adds up the bytes of all watched buffers that are alive.

    Attributes:
        peak_bytes: the largest sum so far.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def add(self, buffer: Tensor) -> None:
        storage = buffer.untyped_storage()
        self._alive = {at: entry for at, entry in self._alive.items() if not entry[0].expired()}
        self._alive[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, sum(size for _, size in self._alive.values()))


@contextlib.contextmanager
def watched_buffers(attention: Any) -> Iterator[BufferWatch]:
    """Watch the wire buffers that ``attention`` creates, and the buffers that it sends or receives."""
    watch = BufferWatch()
    make, post = WireBuffer.__init__, attention.ring_pass

    def make_and_watch(self: WireBuffer, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        watch.add(self.buffer)

    def post_and_watch(outgoing: Any, incoming: Any, tag: int) -> Any:
        for buffer in (*outgoing.values(), *incoming.values()):
            watch.add(buffer)
        return post(outgoing, incoming, tag)

    with (
        mock.patch.object(WireBuffer, "__init__", make_and_watch),
        mock.patch.object(attention, "ring_pass", post_and_watch),
    ):
        yield watch
