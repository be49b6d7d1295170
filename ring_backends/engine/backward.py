"""The backward of ring dilated attention on one rank.

K and V pass around the ring again, in parcels. The dK and dV of a parcel follow it one step later, and each rank adds
its share. The last rank sends them back to the rank that holds the keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.profiler import record_function

from ring_backends.engine.call import AttentionCall
from ring_backends.engine.hops import NOTHING, Arrival, ByHops, Hops, post_keys, report_failure
from ring_backends.engine.inputs import AttentionInputs
from ring_backends.engine.local_rows import LocalRows
from ring_backends.engine.tiles import TILE_SPAN, TileRunner, accumulator
from ring_backends.engine.wire_buffers import RowFormat, WireBuffer
from ring_backends.kernels.gather_rows import scatter, scatter_add
from ring_backends.kernels.merge import statistics_dtype
from ring_backends.kernels.steps import StepKernel
from ring_backends.schedule.rank_plan import HeadBlock, Message, Tile
from ring_backends.schedule.rows import DilatedRows


def backward(
    call: AttentionCall, inputs: AttentionInputs, out: Tensor, lse: Tensor, grad_out: Tensor, hops: Hops | None
) -> ByHops[tuple[Tensor, Tensor, Tensor]]:
    """Compute the gradients of query, key and value. Every tile uses the global ``out`` and ``lse``."""
    with report_failure(hops):
        plan = call.plan(inputs, backward=True)
        query_grad, key_grad, value_grad = (
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in (inputs.query, inputs.key, inputs.value)
        )
        grads = LocalRows(query_grad, key_grad, value_grad)
        rows, tiles = LocalRows.of(inputs, call.dropout), TileRunner(call.kernel, call.scale)
        deltas = call.kernel.row_deltas(out, grad_out) if isinstance(call.kernel, StepKernel) else None
        sum_dtype = wire_dtype = statistics_dtype(inputs.key.dtype)
        if inputs.key.dtype == torch.bfloat16 and call.grad_wire_dtype is not None:
            wire_dtype = call.grad_wire_dtype
        arriving = NOTHING
        grad_hop: _GradHop | None = None
        for index, (block, step) in enumerate(plan.steps):
            arrived, arriving = arriving.wait(), NOTHING
            arriving = yield from post_keys(plan, index + 1, rows, arrived, hops)
            if step is block.steps[0]:
                sums = _BlockSums.of(grads, block)
            here = rows.block(block)
            block_out, block_lse, block_grad_out = (x[:, :, block.heads] for x in (out, lse, grad_out))
            passed_on = _grad_buffer(step.grad_sends, rows.key, sum_dtype, zeroed=True)
            if isinstance(call.kernel, StepKernel):
                assert deltas is not None
                given = block_grad_out, block_lse, deltas[:, :, block.heads]
                with record_function(TILE_SPAN):
                    call.kernel.backward_into(step.tiles, here, arrived, *given, sums, passed_on, scale=call.scale)
            else:
                for tile in step.tiles:
                    with record_function(TILE_SPAN):
                        tile_grads = tiles.backward(tile, here, arrived, block_out, block_lse, block_grad_out)
                        add_tile_grads(tile, tile_grads, sums, passed_on)
            del arrived  # frees the received buffer, as in forward()
            if grad_hop is not None:
                grad_hop.settle(passed_on, grads)
            arrival = NOTHING
            if hops is not None:
                incoming = _grad_buffer(step.grad_receives, rows.key, wire_dtype)
                outgoing = passed_on.to(wire_dtype).by_peer
                arrival = yield from hops.post(2 * index + 1, "dK and dV", outgoing, step.grad_sends, incoming)
            grad_hop = _GradHop(arrival, sums, step is block.steps[-1])
        if grad_hop is not None:
            grad_hop.settle(None, grads)
        return grads.query, grads.key, grads.value


def add_tile_grads(
    tile: Tile, tile_grads: tuple[Tensor, Tensor, Tensor], sums: LocalRows | _BlockSums, parcels: WireBuffer
) -> None:
    """Add a tile's dQ to this rank's sums, and its dK and dV to this rank's sums or to the buffer of its parcel."""
    grad_query, grad_key, grad_value = tile_grads
    (scatter if tile.opens_queries else scatter_add)(sums.query, tile.queries, grad_query)
    if isinstance(tile.keys, DilatedRows):
        scatter_keys = scatter if tile.opens_keys else scatter_add
        scatter_keys(sums.key, tile.keys, grad_key)
        scatter_keys(sums.value, tile.keys, grad_value)
    else:
        parcel_key, parcel_value, _ = parcels.rows(tile.keys)
        parcel_key += grad_key
        parcel_value += grad_value


def _grad_buffer(messages: tuple[Message, ...], key: Tensor, dtype: torch.dtype, *, zeroed: bool = False) -> WireBuffer:
    row_format = RowFormat(key.shape[0], key.shape[-1], dtype)
    return WireBuffer(row_format, messages, key.device, zeroed=zeroed)


@dataclass(frozen=True)
class _BlockSums:
    """Gradients of one block of heads, summed in the statistics dtype."""

    block: HeadBlock
    query: Tensor
    key: Tensor
    value: Tensor

    @classmethod
    def of(cls, grads: LocalRows, block: HeadBlock) -> _BlockSums:
        part = grads.block(block)
        sums = cls(block, accumulator(part.query), accumulator(part.key), accumulator(part.value))
        if not block.is_opened:
            for tensor in (sums.query, sums.key, sums.value):
                tensor.zero_()
        return sums

    def store(self, grads: LocalRows) -> None:
        """Copy the sums into the gradients, unless both are the same tensors."""
        if self.query.dtype != grads.query.dtype:
            part = grads.block(self.block)
            part.query.copy_(self.query)
            part.key.copy_(self.key)
            part.value.copy_(self.value)


@dataclass(frozen=True)
class _GradHop:
    """A hop of dK and dV after one step, with the sums of its block."""

    arrival: Arrival
    sums: _BlockSums
    ends_block: bool

    def settle(self, passed_on: WireBuffer | None, grads: LocalRows) -> None:
        """Add the received dK and dV to the buffer that this rank sends next, or to its sums if it holds the keys."""
        arrived = self.arrival.wait()
        if arrived is not None:
            for parcel in arrived.parcels:
                key, value, _ = arrived.slices(parcel)
                if passed_on is not None and parcel in passed_on:
                    next_key, next_value, _ = passed_on.slices(parcel)
                    next_key += key
                    next_value += value
                else:
                    scatter_add(self.sums.key, parcel.source, key)
                    scatter_add(self.sums.value, parcel.source, value)
        if self.ends_block:
            self.sums.store(grads)
