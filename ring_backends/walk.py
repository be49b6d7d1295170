"""Walk a plan: the forward and the backward of ring dilated attention on one rank.

Both post the next hop of K and V before they compute the tiles of the current one. Backward passes K and V around
again; the dK and dV of a parcel follow one step behind it, gathering every rank's share, and go home from the last.

A walk pauses before every hop that it posts (:data:`ByHops`): in a compiled graph, each hop is an operator that lets
the walk go on to the next one. Elsewhere :func:`finish` runs it to its end.

Tensors are [batch, local seq, heads, head_dim]; LSE is [batch, local seq, heads]; gathered rows are [B, H, S, D].
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.profiler import record_function

from ring_backends.agreement import Agreement, Call
from ring_backends.gather import DilatedRows, gather, gather_into, gathered_shape, scatter, scatter_add, scatter_merge
from ring_backends.kernels import Kernel
from ring_backends.packing import PackedRows, RowFormat
from ring_backends.plan import HeadBlock, Message, Phantom, RankPlan, Tile
from ring_backends.ring import Traffic, Transfer
from ring_backends.softmax import statistics_dtype

RingPass = Callable[[Mapping[int, Tensor], Mapping[int, Tensor], int], Transfer]
"""(outgoing, incoming, tag) -> Transfer: post one hop, with at most one buffer per ring rank in either direction."""

TILE_SPAN, POST_SPAN, WAIT_SPAN = (f"ring_backends::{span}" for span in ("tile", "post_hop", "wait_hop"))
"""What torch.profiler calls the parts of a walk."""


@dataclass(frozen=True)
class Inputs:
    """What one call attends over, on this rank."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_padding_mask: Tensor | None

    def block(self, block: HeadBlock) -> Inputs:
        """The heads of one block; the mask as one per key/value head, without a copy."""
        mask = self.key_padding_mask
        if mask is not None:
            mask = mask.unsqueeze(2).expand(-1, -1, block.kv_heads.stop - block.kv_heads.start)
        kv_heads = block.kv_heads
        return Inputs(self.query[:, :, block.heads], self.key[:, :, kv_heads], self.value[:, :, kv_heads], mask)


Result = TypeVar("Result")
ByHops = Generator[None, None, Result]
"""A computation that pauses once before each hop that it posts."""


def finish(by_hops: ByHops[Result]) -> Result:
    """Run it to its end, without a stop."""
    while True:
        try:
            next(by_hops)
        except StopIteration as end:
            result: Result = end.value
            return result


class Arrival(Protocol):
    """Something on its way. ``wait`` is called once, and returns None where nothing was to come."""

    def wait(self) -> PackedRows | None: ...


class _Nothing:
    def wait(self) -> None:
        return None


NOTHING: Arrival = _Nothing()


@dataclass(frozen=True)
class _Posted:
    """A hop under way; holds on to what leaves until it has left."""

    transfer: Transfer
    outgoing: Mapping[int, Tensor]
    incoming: PackedRows
    what: str
    hops: Hops

    def wait(self) -> PackedRows:
        started = time.perf_counter()
        try:
            with record_function(WAIT_SPAN):
                self.transfer.wait(self.hops.call.time_left())
        except Exception as error:
            self.hops.agreement.fail(self.hops.call, self.what, error)
        self.hops.traffic.wait_seconds += time.perf_counter() - started
        return self.incoming


@dataclass(frozen=True)
class Hops:
    """Posts the hops of one walk: tags and counts them, and gives a failed one its meaning."""

    rank: int
    ring_pass: RingPass
    call: Call
    agreement: Agreement
    traffic: Traffic

    def post(
        self, index: int, name: str, outgoing: Mapping[int, Tensor], sends: tuple[Message, ...], incoming: PackedRows
    ) -> ByHops[Arrival]:
        if not outgoing and not incoming.by_peer:
            return NOTHING
        yield
        what = (
            f"rank {self.rank} waited in step {index // 2} of {self.call.direction} for {name} "
            f"from rank {[*incoming.by_peer]} and to rank {[*outgoing]}"
        )
        try:
            with record_function(POST_SPAN):
                transfer = self.ring_pass(outgoing, incoming.by_peer, self.call.tag(index))
        except Exception as error:
            self.agreement.fail(self.call, what, error)
        self.traffic.messages += len(outgoing)
        self.traffic.bytes += sum(incoming.row_format.payload_bytes(message.parcels) for message in sends)
        return _Posted(transfer, outgoing, incoming, what, self)


@dataclass(frozen=True)
class Walk:
    """One rank's plans, of a forward and of a backward, with the kernel and the score scale that carry them out."""

    forward_plan: RankPlan
    backward_plan: RankPlan
    kernel: Kernel
    scale: float

    def forward(self, inputs: Inputs, hops: Hops | None) -> ByHops[tuple[Tensor, Tensor]]:
        """Attend.

        Returns:
            out as query, and LSE [batch, local seq, heads] in the statistics dtype; 0 and −inf where nothing is seen.
        """
        with _told(hops):
            return (yield from self._forward(inputs, hops))

    def backward(
        self, inputs: Inputs, out: Tensor, lse: Tensor, grad_out: Tensor, hops: Hops | None
    ) -> ByHops[tuple[Tensor, Tensor, Tensor]]:
        """The gradients of query, key and value. Every tile takes the global ``out`` and ``lse``."""
        with _told(hops):
            return (yield from self._backward(inputs, out, lse, grad_out, hops))

    def _forward(self, inputs: Inputs, hops: Hops | None) -> ByHops[tuple[Tensor, Tensor]]:
        query = inputs.query
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        lse = query.new_empty(query.shape[:3], dtype=statistics_dtype(query.dtype))
        workspace = Workspace(self.kernel)
        arriving = NOTHING
        for index, (block, step) in enumerate(self.forward_plan.steps):
            arrived, arriving = arriving.wait(), NOTHING
            arriving = yield from self._post_keys(self.forward_plan, index + 1, inputs, arrived, hops)
            here = inputs.block(block)
            block_lse = lse[:, :, block.heads]
            if step is block.steps[0]:
                block_out = _accumulator(out[:, :, block.heads])
                if not block.is_opened:
                    block_out.zero_()
                    block_lse.fill_(-math.inf)
            for tile in step.tiles:
                with record_function(TILE_SPAN):
                    merge_tile(tile, block_out, block_lse, *self._tile_forward(tile, here, arrived, workspace))
            for phantom in step.phantoms:
                _merge_phantom(block_out, block_lse, phantom)
            del arrived  # before the next hop is posted: two received buffers are enough
            if step is block.steps[-1] and block_out.dtype != out.dtype:
                out[:, :, block.heads] = block_out
        return out, lse

    def _backward(
        self, inputs: Inputs, out: Tensor, lse: Tensor, grad_out: Tensor, hops: Hops | None
    ) -> ByHops[tuple[Tensor, Tensor, Tensor]]:
        query_grad, key_grad, value_grad = (
            torch.empty_like(x, memory_format=torch.contiguous_format) for x in (inputs.query, inputs.key, inputs.value)
        )
        grads = Inputs(query_grad, key_grad, value_grad, None)
        workspace = Workspace(self.kernel)
        arriving = NOTHING
        grad_hop: _GradHop | None = None
        for index, (block, step) in enumerate(self.backward_plan.steps):
            arrived, arriving = arriving.wait(), NOTHING
            arriving = yield from self._post_keys(self.backward_plan, index + 1, inputs, arrived, hops)
            if step is block.steps[0]:
                sums = _BlockSums.of(grads, block)
            here = inputs.block(block)
            block_out, block_lse, block_grad_out = (x[:, :, block.heads] for x in (out, lse, grad_out))
            passed_on = _grad_rows(step.grad_sends, inputs, zeroed=True)
            for tile in step.tiles:
                with record_function(TILE_SPAN):
                    tile_grads = self._tile_backward(
                        tile, here, arrived, block_out, block_lse, block_grad_out, workspace
                    )
                    add_tile_grads(tile, tile_grads, sums, passed_on)
            del arrived  # as in forward
            if grad_hop is not None:
                grad_hop.settle(passed_on, grads)
            arrival = NOTHING
            if hops is not None:
                incoming = _grad_rows(step.grad_receives, inputs)
                arrival = yield from hops.post(2 * index + 1, "dK and dV", passed_on.by_peer, step.grad_sends, incoming)
            grad_hop = _GradHop(arrival, sums, step is block.steps[-1])
        if grad_hop is not None:
            grad_hop.settle(None, grads)
        return grads.query, grads.key, grads.value

    def _tile_forward(
        self, tile: Tile, here: Inputs, arrived: PackedRows | None, workspace: Workspace
    ) -> tuple[Tensor, Tensor]:
        rows = _TileRows.gather(tile, here, arrived, workspace)
        return self.kernel.forward(
            rows.query, rows.key, rows.value, is_causal=tile.is_causal, scale=self.scale, key_mask=rows.key_mask
        )

    def _tile_backward(
        self,
        tile: Tile,
        here: Inputs,
        arrived: PackedRows | None,
        out: Tensor,
        lse: Tensor,
        grad_out: Tensor,
        workspace: Workspace,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = _TileRows.gather(tile, here, arrived, workspace)
        grad_query, grad_key, grad_value = self.kernel.backward(
            workspace.gather("grad_out", grad_out, tile.queries),
            rows.query,
            rows.key,
            rows.value,
            workspace.gather("out", out, tile.queries),
            workspace.gather("lse", lse, tile.queries),
            is_causal=tile.is_causal,
            scale=self.scale,
            key_mask=rows.key_mask,
        )
        return grad_query, rows.sum_over_heads(grad_key), rows.sum_over_heads(grad_value)

    def _post_keys(
        self, plan: RankPlan, index: int, inputs: Inputs, arrived: PackedRows | None, hops: Hops | None
    ) -> ByHops[Arrival]:
        """Send on what ``arrived``, or send this rank's own K and V off, and receive what step ``index`` needs."""
        if hops is None or index == len(plan.steps):
            return NOTHING
        block, step = plan.steps[index]
        inputs = inputs.block(block)
        batch, head_dim, masked = inputs.key.shape[0], inputs.key.shape[-1], inputs.key_padding_mask is not None
        row_format = RowFormat(batch, head_dim, inputs.key.dtype, masked)
        if arrived is not None and all(parcel in arrived for message in step.sends for parcel in message.parcels):
            outgoing = {message.peer: arrived.stretch(message.parcels) for message in step.sends}
        else:
            packed = PackedRows(row_format, step.sends, inputs.key.device)
            for parcel in packed.parcels:
                own = (inputs.key, inputs.value, inputs.key_padding_mask)
                for destination, tensor in zip(packed.slices(parcel), own, strict=True):
                    if destination is not None and tensor is not None:
                        gather_into(destination, tensor, parcel.source)
            outgoing = packed.by_peer
        incoming = PackedRows(row_format, step.receives, inputs.key.device)
        return (yield from hops.post(2 * index, "K and V", outgoing, step.sends, incoming))


def _told(hops: Hops | None) -> contextlib.AbstractContextManager[None]:
    """The other ranks hear of an exception that ends this rank's walk."""
    return contextlib.nullcontext() if hops is None else hops.agreement.told(hops.call)


def merge_tile(tile: Tile, out: Tensor, lse: Tensor, tile_out: Tensor, tile_lse: Tensor) -> None:
    """Merge a tile's out and LSE into those of its block of heads."""
    if tile.opens_queries:
        scatter(out, tile.queries, tile_out)
        scatter(lse, tile.queries, tile_lse)
    else:
        scatter_merge(out, lse, tile.queries, tile_out, tile_lse)


def add_tile_grads(
    tile: Tile, tile_grads: tuple[Tensor, Tensor, Tensor], sums: Inputs | _BlockSums, parcels: PackedRows
) -> None:
    """Add a tile's dQ, and its dK and dV: to this rank's own sums, or to those of the parcel that they belong to."""
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


def _grad_rows(messages: tuple[Message, ...], inputs: Inputs, *, zeroed: bool = False) -> PackedRows:
    key = inputs.key
    row_format = RowFormat(key.shape[0], key.shape[-1], statistics_dtype(key.dtype))
    return PackedRows(row_format, messages, key.device, zeroed=zeroed)


def _accumulator(tensor: Tensor) -> Tensor:
    """``tensor`` itself where it has the statistics dtype, else an empty one that has."""
    dtype = statistics_dtype(tensor.dtype)
    return tensor if tensor.dtype == dtype else torch.empty_like(tensor, dtype=dtype)


@dataclass(frozen=True)
class _BlockSums:
    """Gradients of one block of heads, summed in the statistics dtype."""

    block: HeadBlock
    query: Tensor
    key: Tensor
    value: Tensor

    @classmethod
    def of(cls, grads: Inputs, block: HeadBlock) -> _BlockSums:
        part = grads.block(block)
        sums = cls(block, _accumulator(part.query), _accumulator(part.key), _accumulator(part.value))
        if not block.is_opened:
            for tensor in (sums.query, sums.key, sums.value):
                tensor.zero_()
        return sums

    def store(self, grads: Inputs) -> None:
        """Round the sums to the gradients' dtype, where they are not the gradients themselves."""
        if self.query.dtype != grads.query.dtype:
            part = grads.block(self.block)
            part.query.copy_(self.query)
            part.key.copy_(self.key)
            part.value.copy_(self.value)


@dataclass(frozen=True)
class _GradHop:
    """The dK and dV under way after one step, for the block whose sums they belong to."""

    arrival: Arrival
    sums: _BlockSums
    ends_block: bool

    def settle(self, passed_on: PackedRows | None, grads: Inputs) -> None:
        """Add what arrived to what this rank passes on next, or, where it came home, to this rank's own sums."""
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


class Workspace:
    """Gathers the rows of one tile after the other, into the same memory where the kernel wants them contiguous."""

    def __init__(self, kernel: Kernel) -> None:
        self._contiguous = kernel.prefers_contiguous
        self._buffers: dict[str, Tensor] = {}
        self._gathered: dict[str, tuple[Tensor, DilatedRows, Tensor]] = {}

    def gather(self, name: str, tensor: Tensor, rows: DilatedRows) -> Tensor:
        """The rows, until the next of this name are gathered; tiles that follow each other may ask for the same."""
        if not self._contiguous:
            return gather(tensor, rows)
        if name in self._gathered:
            held_tensor, held_rows, gathered = self._gathered[name]
            if held_tensor is tensor and held_rows is rows:
                return gathered
        gathered = self._buffer(name, gathered_shape(tensor, rows), tensor)
        gather_into(gathered, tensor, rows)
        self._gathered[name] = tensor, rows, gathered
        return gathered

    def _buffer(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        size = math.prod(shape)
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers.pop(name, None)
            self._buffers[name] = like.new_empty(size)
        return self._buffers[name][:size].view(shape)


@dataclass(frozen=True)
class _TileRows:
    """What one kernel call reads: [B, H, S, D], with as many key/value heads as the kernel can group evenly."""

    tile: Tile
    query: Tensor
    key: Tensor
    value: Tensor
    key_mask: Tensor | None

    @classmethod
    def gather(cls, tile: Tile, inputs: Inputs, arrived: PackedRows | None, workspace: Workspace) -> _TileRows:
        mask: Tensor | None
        if isinstance(tile.keys, DilatedRows):
            key = workspace.gather("key", inputs.key, tile.keys)
            value = workspace.gather("value", inputs.value, tile.keys)
            mask = None if inputs.key_padding_mask is None else gather(inputs.key_padding_mask, tile.keys)
        else:
            assert arrived is not None
            key, value, mask = arrived.rows(tile.keys)
        if not tile.streams_are_grouped:
            index = torch.tensor(tile.stream_of_head, device=key.device)
            key, value = key.index_select(1, index), value.index_select(1, index)
            mask = None if mask is None else mask.index_select(1, index)
        return cls(tile, workspace.gather("query", inputs.query, tile.queries), key, value, mask)

    def sum_over_heads(self, grad: Tensor) -> Tensor:
        """The gradient of each stream, from that of each key/value head the kernel saw."""
        if self.tile.streams_are_grouped:
            return grad
        index = torch.tensor(self.tile.stream_of_head, device=grad.device)
        grad = grad.to(statistics_dtype(grad.dtype))
        sums = grad.new_zeros((grad.shape[0], self.tile.keys.num_heads, *grad.shape[2:]))
        return sums.index_add_(1, index, grad)


def _merge_phantom(out: Tensor, lse: Tensor, phantom: Phantom) -> None:
    """Let the phantom's queries see its zero keys: scores 0, values 0."""
    rows = phantom.queries
    shape = (out.shape[0] * rows.segments, rows.num_heads, rows.rows)
    zeros = out.new_zeros(()).expand(*shape, out.shape[-1])
    scatter_merge(out, lse, rows, zeros, lse.new_tensor(math.log(phantom.count)).expand(shape))
