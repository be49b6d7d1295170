"""Wire buffers: the memory layout of parcels of K and V, or of dK and dV, in the buffers that hops transfer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from ring_backends.schedule.rank_plan import Message, Parcel, ParcelRows

ALIGNMENT = 16
"""Every slice of a buffer starts at a multiple of this many bytes."""


@dataclass(frozen=True)
class RowFormat:
    """The shapes and dtypes of the slices of a parcel: K and V, or dK and dV, and marks of the keys.

    K and V are [batch, streams, rows, head_dim] each. The marks are [batch, streams, rows].

    Attributes:
        dtype: dtype of K and V.
        marks: dtype of the marks: bool for a key padding mask, an integer dtype for documents; None without marks.
    """

    batch: int
    head_dim: int
    dtype: torch.dtype
    marks: torch.dtype | None = None

    def shapes(self, parcel: Parcel) -> list[tuple[tuple[int, ...], torch.dtype]]:
        rows = (self.batch, parcel.num_streams, parcel.rows)
        slices: list[tuple[tuple[int, ...], torch.dtype]] = [((*rows, self.head_dim), self.dtype)] * 2
        return slices if self.marks is None else [*slices, (rows, self.marks)]

    def payload_bytes(self, parcels: Iterable[Parcel]) -> int:
        return sum(_num_bytes(shape, dtype) for parcel in parcels for shape, dtype in self.shapes(parcel))

    def buffer_bytes(self, parcels: Iterable[Parcel]) -> int:
        return sum(_aligned(_num_bytes(shape, dtype)) for parcel in parcels for shape, dtype in self.shapes(parcel))


class WireBuffer:
    """One buffer for all messages that a rank sends, or receives, in one hop.

    Attributes:
        by_peer: maps a peer to the part of the buffer that holds its message.
    """

    def __init__(
        self, row_format: RowFormat, messages: Sequence[Message], device: torch.device, *, zeroed: bool = False
    ) -> None:
        self.row_format = row_format
        self._messages = messages
        sizes = {message.peer: row_format.buffer_bytes(message.parcels) for message in messages}
        allocate = torch.zeros if zeroed else torch.empty
        self.buffer = allocate(sum(sizes.values()), dtype=torch.uint8, device=device)
        self.by_peer = dict(zip(sizes, self.buffer.split(list(sizes.values())), strict=True))
        self._offsets: dict[Parcel, int] = {}
        offset = 0
        for message in messages:
            for parcel in message.parcels:
                self._offsets[parcel] = offset
                offset += row_format.buffer_bytes([parcel])

    @property
    def parcels(self) -> Iterable[Parcel]:
        return self._offsets

    def __contains__(self, parcel: Parcel) -> bool:
        return parcel in self._offsets

    def slice_offsets(self, parcel: Parcel) -> tuple[int, ...]:
        """Where K, V and the marks of ``parcel`` begin in the buffer, in bytes."""
        sizes = (_aligned(_num_bytes(shape, dtype)) for shape, dtype in self.row_format.shapes(parcel))
        *offsets, _ = accumulate(sizes, initial=self._offsets[parcel])
        return tuple(offsets)

    def slices(self, parcel: Parcel) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return K, V and the marks of ``parcel`` as views of the buffer. Without marks, the third is None."""
        views = []
        for offset, (shape, dtype) in zip(self.slice_offsets(parcel), self.row_format.shapes(parcel), strict=True):
            size = _num_bytes(shape, dtype)
            views.append(self.buffer[offset : offset + size].view(dtype).view(shape))
        return views[0], views[1], None if self.row_format.marks is None else views[2]

    def rows(self, rows: ParcelRows) -> tuple[Tensor, Tensor, Tensor | None]:
        """Like :meth:`slices`, but only for some streams and rows of a parcel."""
        streams, row_range = (slice(part.start, part.stop) for part in (rows.streams, rows.row_range))
        key, value, marks = self.slices(rows.parcel)
        return (
            key[:, streams, row_range],
            value[:, streams, row_range],
            None if marks is None else marks[:, streams, row_range],
        )

    def to(self, dtype: torch.dtype) -> WireBuffer:
        """Return a buffer of the same parcels in ``dtype``: this one, or a copy. It has no marks."""
        if dtype == self.row_format.dtype:
            return self
        converted = WireBuffer(replace(self.row_format, dtype=dtype, marks=None), self._messages, self.buffer.device)
        for parcel in self.parcels:
            for part, source in zip(converted.slices(parcel)[:2], self.slices(parcel)[:2], strict=True):
                part.copy_(source)
        return converted

    def stretch(self, parcels: Sequence[Parcel]) -> Tensor:
        """Return a buffer of these parcels in order: a view if they are adjacent in this buffer, else a copy."""
        ends = [self._offsets[parcel] + self.row_format.buffer_bytes([parcel]) for parcel in parcels]
        starts = [self._offsets[parcel] for parcel in parcels]
        if starts[1:] == ends[:-1]:
            return self.buffer[starts[0] : ends[-1]]
        return torch.cat([self.buffer[start:end] for start, end in zip(starts, ends, strict=True)])


def _num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
