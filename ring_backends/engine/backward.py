"""The backward of ring dilated attention on one rank.

K and V pass around the ring again, in parcels. The dK and dV of a parcel follow it one step later, and each rank adds
its share. The last rank sends them back to the rank that holds the keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ring_backends.engine.call import AttentionCall
from ring_backends.engine.hops import NOTHING, Arrival, ByHops, Hops, post_keys, report_failure
from ring_backends.engine.inputs import AttentionInputs
from ring_backends.engine.local_rows import LocalRows
from ring_backends.engine.sums import BlockGrads, Result
from ring_backends.engine.tiles import SavedRows, TileRunner
from ring_backends.engine.wire_buffers import RowFormat, WireBuffer
from ring_backends.kernels.base import split_scale
from ring_backends.kernels.gather_rows import scatter_many
from ring_backends.kernels.merge import statistics_dtype
from ring_backends.kernels.triton_rows_launch import Rows
from ring_backends.schedule.rank_plan import Message


def backward(
    call: AttentionCall, inputs: AttentionInputs, out: Tensor, lse: Tensor, grad_out: Tensor, hops: Hops | None
) -> ByHops[tuple[Tensor, Tensor, Tensor]]:
    """Compute the gradients of query, key and value. Every tile uses the global ``out`` and ``lse``."""
    with report_failure(hops):
        plan = call.plan(inputs, backward=True)
        grads = Result(inputs.query), Result(inputs.key), Result(inputs.value)
        rows = LocalRows.of(call, inputs)
        tiles = TileRunner(call.kernel, call.scale, call.in_place)
        saved = SavedRows(out, lse, grad_out)
        sum_dtype = wire_dtype = statistics_dtype(inputs.key.dtype)
        if inputs.key.dtype == torch.bfloat16 and call.grad_wire_dtype is not None:
            wire_dtype = call.grad_wire_dtype
        arriving = NOTHING
        grad_hop: _GradHop | None = None
        for index, (block, step) in enumerate(plan.steps):
            arrived, arriving = arriving.wait(), NOTHING
            arriving = yield from post_keys(plan, index + 1, rows, arrived, hops)
            if step is block.steps[0]:
                here, its_saved, block_grads = rows.block(block), saved.of(block), BlockGrads(*grads, block)
            passed_on = _grad_buffer(step.grad_sends, rows.key, sum_dtype, zeroed=True)
            tiles.backward_into(step.tiles, here, arrived, its_saved, block_grads, passed_on)
            del arrived  # frees the received buffer, as in forward()
            if grad_hop is not None:
                grad_hop.settle(passed_on)
            arrival = NOTHING
            if hops is not None:
                incoming = _grad_buffer(step.grad_receives, rows.key, wire_dtype)
                outgoing = passed_on.to(wire_dtype).by_peer
                arrival = yield from hops.post(2 * index + 1, "dK and dV", outgoing, step.grad_sends, incoming)
            grad_hop = _GradHop(arrival, block_grads, step is block.steps[-1])
        if grad_hop is not None:
            grad_hop.settle(None)
        sign, _ = split_scale(call.scale)
        if sign != 1:  # the query of the rows is the input times the sign
            grads[0].tensor.mul_(sign)
        return grads[0].tensor, grads[1].tensor, grads[2].tensor


def _grad_buffer(messages: tuple[Message, ...], key: Tensor, dtype: torch.dtype, *, zeroed: bool = False) -> WireBuffer:
    row_format = RowFormat(key.shape[0], key.shape[-1], dtype)
    return WireBuffer(row_format, messages, key.device, zeroed=zeroed)


@dataclass(frozen=True)
class _GradHop:
    """A hop of dK and dV after one step, with the gradients of its block."""

    arrival: Arrival
    grads: BlockGrads
    ends_block: bool

    def settle(self, passed_on: WireBuffer | None) -> None:
        """Add the received dK and dV to the buffer that this rank sends next, or to its sums if it holds the keys."""
        arrived = self.arrival.wait()
        if arrived is not None:
            sums = self.grads.sums
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
        if self.ends_block:
            self.grads.finish()
