"""Wire buffers: the memory layout of parcels of K and V, or of dK and dV, in the buffers that hops transfer."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ring_backends.kernels.constants import constant
from ring_backends.kernels.rows import SumPart, Sums, add_parts
from ring_backends.ring.wire_memory import CallMemory
from ring_backends.schedule.rank_plan import Message, Parcel, ParcelPart, ParcelRows

ALIGNMENT = 16
"""Every slice of a buffer starts at a multiple of this many bytes."""


@dataclass(frozen=True)
class RowFormat:
    """The shapes and dtypes of the slices of a parcel: K and V, or dK and dV, and marks of the keys.

    They are [batch, streams, rows, …]: K is as wide as ``head_dim``, V as ``value_dim``. The marks are [batch, streams,
    rows].

    Attributes:
        dtype: dtype of K and V.
        marks: dtype of the marks: bool for a key padding mask, an integer dtype for documents; None without marks.
    """

    batch: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    marks: torch.dtype | None = None

    def buffer_bytes(self, parcels: Iterable[Parcel]) -> int:
        return sum(slices_of(self, len(parcel.streams), parcel.rows)[-1].end for parcel in parcels)


class Slice(NamedTuple):
    """One slice of a parcel. Bytes are counted from where the parcel begins.

    Attributes:
        start, stop: the bytes of the slice.
        end: where the next slice begins.
        strides: of a contiguous tensor with this shape.
    """

    start: int
    stop: int
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@lru_cache(maxsize=4096)
def slices_of(row_format: RowFormat, streams: int, rows: int) -> tuple[Slice, ...]:
    """The slices of a parcel of this many streams and rows: K, V and their marks if there are some, or dK and dV."""
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = [
        ((row_format.batch, streams, rows, dim), row_format.dtype)
        for dim in (row_format.head_dim, row_format.value_dim)
    ]
    if row_format.marks is not None:
        shapes.append(((row_format.batch, streams, rows), row_format.marks))
    slices: list[Slice] = []
    for shape, dtype in shapes:
        start = slices[-1].end if slices else 0
        size = math.prod(shape) * dtype.itemsize
        strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        slices.append(Slice(start, start + size, start + -(-size // ALIGNMENT) * ALIGNMENT, dtype, shape, strides))
    return tuple(slices)


@lru_cache(maxsize=4096)
def payload_bytes(row_format: RowFormat, messages: tuple[Message, ...]) -> int:
    """The bytes of the parcels of some messages, without padding."""
    return sum(
        part.stop - part.start
        for parcel in parcels_of(messages)
        for part in slices_of(row_format, len(parcel.streams), parcel.rows)
    )


@lru_cache(maxsize=4096)
def parcels_of(messages: tuple[Message, ...]) -> tuple[Parcel, ...]:
    return tuple(parcel for message in messages for parcel in message.parcels)


@lru_cache(maxsize=4096)
def wire_layout(row_format: RowFormat, parcels: tuple[Parcel, ...]) -> tuple[dict[Parcel, int], int]:
    """Where each parcel begins in a buffer, and the size of the buffer, in bytes."""
    size, starts = 0, {}
    for parcel in parcels:
        starts[parcel] = size
        size += row_format.buffer_bytes([parcel])
    return starts, size


@lru_cache(maxsize=4096)
def _stretches(row_format: RowFormat, held: tuple[Parcel, ...], parcels: tuple[Parcel, ...]) -> list[tuple[int, int]]:
    """The bytes of some parcels, in order, in a buffer of the parcels ``held``: one stretch if they are adjacent."""
    starts, _ = wire_layout(row_format, held)
    found: list[tuple[int, int]] = []
    for parcel in parcels:
        start = starts[parcel]
        if found and found[-1][1] == start:
            start, _ = found.pop()
        found.append((start, starts[parcel] + row_format.buffer_bytes([parcel])))
    return found


def views_at(buffer: Tensor, first: int, row_format: RowFormat, parcel: Parcel) -> list[Tensor]:
    """The slices of a parcel that begins at the byte ``first`` of a buffer."""
    offset = int(buffer.storage_offset()) + first
    return [
        buffer.view(dtype).as_strided(shape, strides, (offset + start) // dtype.itemsize)
        for start, _, _, dtype, shape, strides in slices_of(row_format, len(parcel.streams), parcel.rows)
    ]


def _rows_of(whole: Tensor, part: ParcelPart) -> Tensor:
    """A view of the rows of a part, given a slice of its parcel; all streams if the part has no stretch of them."""
    if part.is_stretch and len(part.streams) < whole.shape[1]:
        whole = whole.narrow(1, part.streams[0], len(part.streams))
    rows = part.row_range
    return whole if len(rows) == whole.shape[2] else whole.narrow(2, rows.start, len(rows))


class Parts(NamedTuple):
    """The parts of a buffer that a hop sends or receives.

    Attributes:
        by_peer: the part that holds each message, or a copy of its parcels.
        copies: the copies. Whoever asks for them gives them back.
        has_views: whether some are parts of the buffer itself.
    """

    by_peer: dict[int, Tensor]
    copies: list[Tensor]
    has_views: bool


class WireBuffer:
    """One buffer for parcels that a rank sends or receives.

    Args:
        parcels: in the order of the buffer.
        memory: where the buffer is taken from. Whoever makes it gives ``buffer`` back.

    Attributes:
        starts: where each parcel begins in the buffer, in bytes.
    """

    def __init__(
        self, row_format: RowFormat, parcels: tuple[Parcel, ...], memory: CallMemory, *, zeroed: bool = False
    ) -> None:
        self.row_format, self.parcels = row_format, parcels
        self.starts, size = wire_layout(row_format, parcels)
        self.buffer = memory.take(size, zeroed=zeroed)

    @property
    def layout(self) -> object:
        """Equal for buffers in which the same parcels have their slices at the same places."""
        return self.row_format, self.starts

    def slice_offsets(self, parcel: Parcel) -> tuple[int, ...]:
        """Where K, V and the marks of ``parcel`` begin in the buffer, in bytes."""
        start = self.starts[parcel]
        return tuple(start + part.start for part in slices_of(self.row_format, len(parcel.streams), parcel.rows))

    def slices(self, parcel: Parcel) -> list[Tensor]:
        """K, V and the marks of ``parcel`` as views of the buffer, or dK and dV. Without marks, there are two."""
        return views_at(self.buffer, self.starts[parcel], self.row_format, parcel)

    def rows(self, rows: ParcelRows) -> tuple[Tensor, Tensor, Tensor | None]:
        """K, V and the marks of the rows, [batch, streams, rows, …]: views of the buffer if there is one part."""
        parts = []
        for part in rows.parts:
            slices = [_rows_of(whole, part) for whole in self.slices(part.parcel)]
            if not part.is_stretch:
                slices = [whole.index_select(1, constant(part.streams, whole)) for whole in slices]
            parts.append(slices)
        key, value, *marks = parts[0] if len(parts) == 1 else [torch.cat(x, 2) for x in zip(*parts, strict=True)]
        return key, value, marks[0] if marks else None

    def add(self, rows: ParcelRows, grad_key: Tensor, grad_value: Tensor) -> None:
        """Add dK and dV, [batch, streams, rows, …], to those of the rows."""
        counts = [len(part.row_range) for part in rows.parts]
        grads = zip(*(grad.split(counts, 2) for grad in (grad_key, grad_value)), strict=True)
        for part, of_part in zip(rows.parts, grads, strict=True):
            for whole, grad in zip(self.slices(part.parcel), of_part, strict=True):
                place = _rows_of(whole, part)
                if part.is_stretch:
                    place.add_(grad)
                else:
                    place.index_add_(1, constant(part.streams, grad), grad.to(place.dtype))

    def add_arrived(self, arrivals: Arrivals) -> None:
        """Add the dK and dV that arrived to those of the same parcels here, if there are some."""
        sums = _sums(self.row_format, self.parcels, arrivals.row_format, arrivals.messages)
        if sums.parts:
            arrived = arrivals.buffer.view(arrivals.row_format.dtype)
            add_parts(self.buffer.view(self.row_format.dtype), arrived, sums)

    def to(self, dtype: torch.dtype, parcels: tuple[Parcel, ...], memory: CallMemory) -> WireBuffer:
        """Return a buffer in ``dtype``: this one if it has it, or a copy of some parcels, which have no marks."""
        if dtype == self.row_format.dtype:
            return self
        converted = WireBuffer(replace(self.row_format, dtype=dtype), parcels, memory)
        for parcel in parcels:
            for part, source in zip(converted.slices(parcel), self.slices(parcel), strict=True):
                part.copy_(source)
        return converted

    def parts(self, messages: Sequence[Message], memory: CallMemory) -> Parts:
        """The part of the buffer that holds each message: a view if its parcels are adjacent, else a copy.

        Messages with the same parcels share a copy of them.
        """
        found: dict[tuple[Parcel, ...], Tensor] = {}
        copies: list[Tensor] = []
        for message in messages:
            if message.parcels not in found:
                stretches = _stretches(self.row_format, self.parcels, message.parcels)
                views = [self.buffer[start:stop] for start, stop in stretches]
                if len(views) > 1:
                    copies.append(memory.take(sum(map(len, views))))
                    torch.cat(views, out=copies[-1])
                found[message.parcels] = views[0] if len(views) == 1 else copies[-1]
        by_peer = {message.peer: found[message.parcels] for message in messages}
        return Parts(by_peer, copies, has_views=len(found) > len(copies))


class Arrivals:
    """The messages with dK and dV that arrive in one hop, one after the other in one buffer.

    A parcel may arrive from several peers.
    """

    def __init__(self, row_format: RowFormat, messages: tuple[Message, ...], memory: CallMemory) -> None:
        self.row_format, self.messages = row_format, messages
        self._bounds = _bounds(row_format, messages)
        self.buffer = memory.take(self._bounds[-1])

    @property
    def by_peer(self) -> dict[int, Tensor]:
        places = zip(self.messages, pairwise(self._bounds), strict=True)
        return {message.peer: self.buffer[start:stop] for message, (start, stop) in places}

    def slices(self) -> Iterator[tuple[Parcel, list[Tensor]]]:
        """dK and dV of each parcel of each message, as views of the buffer."""
        for message, first in zip(self.messages, self._bounds, strict=False):
            starts, _ = wire_layout(self.row_format, message.parcels)
            for parcel in message.parcels:
                yield parcel, views_at(self.buffer, first + starts[parcel], self.row_format, parcel)


@lru_cache(maxsize=4096)
def _bounds(row_format: RowFormat, messages: tuple[Message, ...]) -> tuple[int, ...]:
    """Where each message begins in a buffer, in bytes, and where the last one ends."""
    return tuple(accumulate((row_format.buffer_bytes(message.parcels) for message in messages), initial=0))


@lru_cache(maxsize=4096)
def _sums(sums: RowFormat, held: tuple[Parcel, ...], arriving: RowFormat, messages: tuple[Message, ...]) -> Sums:
    """Which elements of messages are added to those of a buffer of the parcels ``held``."""
    at, _ = wire_layout(sums, held)
    found: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for message, first in zip(messages, _bounds(arriving, messages), strict=False):
        starts, _ = wire_layout(arriving, message.parcels)
        for parcel in message.parcels:
            if parcel in at:
                both = (slices_of(x, len(parcel.streams), parcel.rows) for x in (sums, arriving))
                for here, there in zip(*both, strict=True):
                    place = (at[parcel] + here.start) // sums.dtype.itemsize, math.prod(here.shape)
                    found[place].append((first + starts[parcel] + there.start) // arriving.dtype.itemsize)
    return Sums(tuple(SumPart(*place, tuple(sources)) for place, sources in found.items()))
