"""The rows that go around the ring, in one forward or backward of one rank.

In each step, this rank computes with the parcels of K and V that have arrived, while the next ones arrive. The dK and
dV of a parcel follow it one step later, and each rank adds its share. The last rank sends them back to the rank that
holds the keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ring_backends.engine.hops import Hop, Hops
from ring_backends.engine.sums import BlockGrads
from ring_backends.engine.wire_buffers import RowFormat, WireBuffer
from ring_backends.kernels.gather_rows import gather_many, scatter_many
from ring_backends.kernels.steps import StepRows
from ring_backends.kernels.triton_rows_launch import Rows
from ring_backends.schedule.rank_plan import Parcel, RankPlan, Step


def own_rows(buffer: WireBuffer, rows: StepRows, parcels: tuple[Parcel, ...]) -> None:
    """Copy this rank's rows of K, V and their marks into the buffer."""
    tensors = rows.key, rows.value, rows.key_marks
    gather_many(
        [
            Rows(tensor, parcel.source, destination)
            for parcel in parcels
            for destination, tensor in zip(buffer.slices(parcel), tensors, strict=True)
            if destination is not None and tensor is not None
        ]
    )


def key_format(rows: StepRows) -> RowFormat:
    """The format of K, V and their marks."""
    marks = None if rows.key_marks is None else rows.key_marks.dtype
    return RowFormat(rows.key.shape[0], rows.key.shape[3], rows.value.shape[3], rows.key.dtype, marks)


def grad_format(rows: StepRows, dtype: torch.dtype) -> RowFormat:
    """The format of dK and dV in another dtype."""
    return replace(key_format(rows), dtype=dtype, marks=None)


class KeysAround:
    """K and V that arrive step by step."""

    def __init__(self, plan: RankPlan, rows: StepRows, hops: Hops) -> None:
        self._plan, self._rows, self._hops = plan, rows, hops
        self._arriving: tuple[Hop, WireBuffer] | None = None

    def advance(self, step: int) -> WireBuffer | None:
        """Wait for the parcels of ``step``, and post the hop of the next step. Return the parcels."""
        arrived = None
        if self._arriving is not None:
            hop, arrived = self._arriving
            self._arriving = None
            hop.wait()
            del hop  # frees the buffer that it sent
        if step + 1 < len(self._plan.steps):
            self._arriving = self._post(step + 1, arrived)
        return arrived

    def _post(self, index: int, arrived: WireBuffer | None) -> tuple[Hop, WireBuffer] | None:
        """Post the hop that ``index`` waits for: parcels that have arrived, or this rank's own rows."""
        block, step = self._plan.steps[index]
        if not step.sends and not step.receives:
            return None
        rows = self._rows.block(block)
        row_format, device = key_format(rows), rows.key.device
        outgoing = arrived
        if arrived is None or not all(parcel in arrived for message in step.sends for parcel in message.parcels):
            outgoing = WireBuffer.of(row_format, step.sends, device)
            own_rows(outgoing, rows, tuple(outgoing.parcels))
        assert outgoing is not None
        incoming = WireBuffer.of(row_format, step.receives, device)
        by_peer = incoming.by_peer(step.receives)
        hop = self._hops.post(index, outgoing.by_peer(step.sends), step.sends, by_peer, row_format)
        return None if hop is None else (hop, incoming)


class _Arriving(NamedTuple):
    hop: Hop | None
    buffer: WireBuffer | None
    grads: BlockGrads
    ends_block: bool


class GradsAround:
    """dK and dV that follow the parcels.

    Args:
        rows: this rank's rows.
        sum_dtype: the dtype in which dK and dV are added.
        wire_dtype: the dtype in which they travel.
    """

    def __init__(self, rows: StepRows, hops: Hops, *, sum_dtype: torch.dtype, wire_dtype: torch.dtype) -> None:
        self._hops, self._device = hops, rows.key.device
        self._sum_format, self._wire_format = grad_format(rows, sum_dtype), grad_format(rows, wire_dtype)
        self._before: _Arriving | None = None

    def of_step(self, step: Step) -> WireBuffer | None:
        """A buffer for dK and dV of the parcels of a step; None if it has no parcels."""
        if not step.grad_sends:
            return None
        return WireBuffer.of(self._sum_format, step.grad_sends, self._device, zeroed=True)

    def advance(
        self, index: int, step: Step, passed_on: WireBuffer | None, grads: BlockGrads, *, ends_block: bool
    ) -> None:
        """After the tiles of a step: add what arrives from the step before, and send the buffer of this step."""
        self.settle(passed_on)
        hop = incoming = None
        if step.grad_sends or step.grad_receives:
            incoming = WireBuffer.of(self._wire_format, step.grad_receives, self._device)
            outgoing = {}
            if passed_on is not None:
                outgoing = passed_on.to(self._wire_format.dtype).by_peer(step.grad_sends)
            by_peer = incoming.by_peer(step.grad_receives)
            hop = self._hops.post(index, outgoing, step.grad_sends, by_peer, self._wire_format, grads=True)
        self._before = _Arriving(hop, incoming, grads, ends_block)

    def settle(self, passed_on: WireBuffer | None = None) -> None:
        """Wait for dK and dV of the step before, and add them.

        Args:
            passed_on: what this rank sends next. The rows of other parcels are this rank's own.
        """
        if self._before is None:
            return
        hop, arrived, grads, ends_block = self._before
        self._before = None
        if hop is not None and arrived is not None:
            hop.wait()
            sums = grads.sums
            own: dict[int, list[Rows]] = {}
            passing: list[tuple[Tensor, Tensor]] = []
            for parcel in arrived.parcels:
                key, value, _ = arrived.slices(parcel)
                if passed_on is not None and parcel in passed_on:
                    passing += zip(passed_on.slices(parcel)[:2], (key, value), strict=True)
                else:
                    of_branch = own.setdefault(parcel.branch, [])
                    of_branch += [Rows(sums.key, parcel.source, key), Rows(sums.value, parcel.source, value)]
            if passing:
                torch._foreach_add_(*map(list, zip(*passing, strict=True)))
            for parts in own.values():  # parcels of different branches may hold the same rows
                scatter_many(added=parts)
        if ends_block:
            grads.finish()
