"""Wire buffers: the memory layout of parcels of K and V, or of dK and dV, in the buffers that hops transfer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ring_backends.kernels.constants import constant
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

    def shapes(self, parcel: Parcel) -> list[tuple[tuple[int, ...], torch.dtype]]:
        rows = (self.batch, parcel.num_streams, parcel.rows)
        dims = self.head_dim, self.value_dim
        slices: list[tuple[tuple[int, ...], torch.dtype]] = [((*rows, dim), self.dtype) for dim in dims]
        return slices if self.marks is None else [*slices, (rows, self.marks)]

    def payload_bytes(self, parcels: Iterable[Parcel]) -> int:
        return sum(_num_bytes(shape, dtype) for parcel in parcels for shape, dtype in self.shapes(parcel))

    def buffer_bytes(self, parcels: Iterable[Parcel]) -> int:
        return sum(_aligned(_num_bytes(shape, dtype)) for parcel in parcels for shape, dtype in self.shapes(parcel))


@lru_cache(maxsize=4096)
def wire_layout(row_format: RowFormat, parcels: tuple[Parcel, ...]) -> dict[Parcel, tuple[int, ...]]:
    """Where each slice of each parcel begins in a buffer, and then where the parcel ends, in bytes."""
    offset, offsets = 0, {}
    for parcel in parcels:
        begins = []
        for shape, dtype in row_format.shapes(parcel):
            begins.append(offset)
            offset += _aligned(_num_bytes(shape, dtype))
        offsets[parcel] = (*begins, offset)
    return offsets


class WireBuffer:
    """One buffer for parcels that a rank sends or receives.

    Args:
        parcels: in the order of the buffer.

    Attributes:
        layout: the result of :func:`wire_layout`.
    """

    def __init__(
        self, row_format: RowFormat, parcels: tuple[Parcel, ...], device: torch.device, *, zeroed: bool = False
    ) -> None:
        self.row_format, self.layout = row_format, wire_layout(row_format, parcels)
        allocate = torch.zeros if zeroed else torch.empty
        size = self.layout[parcels[-1]][-1] if parcels else 0
        self.buffer = allocate(size, dtype=torch.uint8, device=device)

    @classmethod
    def of(
        cls, row_format: RowFormat, messages: Sequence[Message], device: torch.device, *, zeroed: bool = False
    ) -> WireBuffer:
        """A buffer for the parcels of several messages."""
        return cls(row_format, parcels_of(messages), device, zeroed=zeroed)

    @property
    def parcels(self) -> Iterable[Parcel]:
        return self.layout

    def __contains__(self, parcel: Parcel) -> bool:
        return parcel in self.layout

    def slice_offsets(self, parcel: Parcel) -> tuple[int, ...]:
        """Where K, V and the marks of ``parcel`` begin in the buffer, in bytes."""
        return self.layout[parcel][:-1]

    def slices(self, parcel: Parcel) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return K, V and the marks of ``parcel`` as views of the buffer. Without marks, the third is None."""
        views = [
            self.buffer[offset : offset + _num_bytes(shape, dtype)].view(dtype).view(shape)
            for offset, (shape, dtype) in zip(self.slice_offsets(parcel), self.row_format.shapes(parcel), strict=True)
        ]
        return views[0], views[1], None if self.row_format.marks is None else views[2]

    def parts(self, rows: ParcelRows) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield K, V and the marks of each part of the rows, [batch, streams, rows, …]: views where possible."""
        for part in rows.parts:
            key, value, marks = self.slices(part.parcel)
            yield of_part(key, part), of_part(value, part), None if marks is None else of_part(marks, part)

    def rows(self, rows: ParcelRows) -> tuple[Tensor, Tensor, Tensor | None]:
        """K, V and the marks of the rows, [batch, streams, rows, …]: views of the buffer if there is one part."""
        keys, values, marks = zip(*self.parts(rows), strict=True)
        if len(keys) == 1:
            return keys[0], values[0], marks[0]
        return torch.cat(keys, 2), torch.cat(values, 2), None if marks[0] is None else torch.cat(marks, 2)

    def add(self, rows: ParcelRows, grad_key: Tensor, grad_value: Tensor) -> None:
        """Add dK and dV, [batch, streams, rows, …], to those of the rows."""
        sizes = [len(part.row_range) for part in rows.parts]
        grads = zip(grad_key.split(sizes, 2), grad_value.split(sizes, 2), strict=True)
        for part, its_grads in zip(rows.parts, grads, strict=True):
            for whole, grad in zip(self.slices(part.parcel)[:2], its_grads, strict=True):
                place = whole[:, :, part.row_range.start : part.row_range.stop]
                if part.is_stretch:
                    place[:, part.streams[0] : part.streams[-1] + 1] += grad
                else:
                    place.index_add_(1, constant(part.streams, grad), grad.to(place.dtype))

    def to(self, dtype: torch.dtype, parcels: tuple[Parcel, ...] | None = None) -> WireBuffer:
        """Return a buffer in ``dtype``: this one if it has it, or a copy of all or some parcels, without marks."""
        if dtype == self.row_format.dtype:
            return self
        row_format = replace(self.row_format, dtype=dtype, marks=None)
        converted = WireBuffer(row_format, tuple(self.parcels) if parcels is None else parcels, self.buffer.device)
        for parcel in converted.parcels:
            for part, source in zip(converted.slices(parcel)[:2], self.slices(parcel)[:2], strict=True):
                part.copy_(source)
        return converted

    def stretch(self, parcels: Sequence[Parcel]) -> Tensor:
        """Return a buffer of these parcels in order: a view if they are adjacent in this buffer, else a copy."""
        ends = [self.layout[parcel][-1] for parcel in parcels]
        starts = [self.layout[parcel][0] for parcel in parcels]
        if starts[1:] == ends[:-1]:
            return self.buffer[starts[0] : ends[-1]]
        return torch.cat([self.buffer[start:end] for start, end in zip(starts, ends, strict=True)])

    def by_peer(self, messages: Sequence[Message]) -> dict[int, Tensor]:
        """The part of the buffer that holds each message. Messages with the same parcels share a copy of them."""
        stretches = {message.parcels: self.stretch(message.parcels) for message in messages}
        return {message.peer: stretches[message.parcels] for message in messages}


def parcels_of(messages: Iterable[Message]) -> tuple[Parcel, ...]:
    return tuple(parcel for message in messages for parcel in message.parcels)


def of_part(tensor: Tensor, part: ParcelPart) -> Tensor:
    """The streams and rows of one part of a slice [batch, streams, rows, …]."""
    rows = tensor[:, :, part.row_range.start : part.row_range.stop]
    if part.is_stretch:
        return rows[:, part.streams[0] : part.streams[-1] + 1]
    return rows.index_select(1, constant(part.streams, tensor))


def _num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
