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
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.profiler import record_function

from ring_backends.engine.wire_buffers import PackedRows, RowFormat
from ring_backends.kernels import Kernel, PairRule, pairwise
from ring_backends.kernels.dropout import Dropout
from ring_backends.kernels.gather_rows import gather, gather_into, gathered_shape, scatter, scatter_add, scatter_merge
from ring_backends.kernels.merge import statistics_dtype
from ring_backends.ring.agreement import Agreement, Call
from ring_backends.ring.ring import Traffic
from ring_backends.ring.transfer import Transfer
from ring_backends.schedule.rank_plan import HeadBlock, Message, ParcelRows, Phantom, RankPlan, Tile
from ring_backends.schedule.rows import DilatedRows

RingPass = Callable[[Mapping[int, Tensor], Mapping[int, Tensor], int], Transfer]
"""(outgoing, incoming, tag) -> Transfer: post one hop, with at most one buffer per ring rank in either direction."""

TILE_SPAN, POST_SPAN, WAIT_SPAN = (f"ring_backends::{span}" for span in ("tile", "post_hop", "wait_hop"))
"""What torch.profiler calls the parts of a walk."""


@dataclass(frozen=True)
class Inputs:
    """What one call attends over, on this rank.

    Attributes:
        key_padding_mask: bool [batch, local seq].
        document_ids: int [batch, local seq].
        dropout_seed: int64 [1], on the CPU; None without dropout.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    key_padding_mask: Tensor | None = None
    document_ids: Tensor | None = None
    dropout_seed: Tensor | None = None


@dataclass(frozen=True)
class MarkedRows:
    """The rows of one call, with what tells them apart beyond what the plan knows; marks as one per head.

    Attributes:
        key_marks: [batch, local seq, key/value heads]; bool, True for a key to be ignored, or with documents an
            integer, the key's document, or −1 for a key to be ignored.
        query_documents: [batch, local seq, heads]; −2 for a query that is of no document.
        query_words, key_words: as of ``dropout``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    key_marks: Tensor | None = None
    query_documents: Tensor | None = None
    dropout: Dropout | None = None
    dropout_seed: int = 0
    query_words: Tensor | None = None
    key_words: Tensor | None = None

    @classmethod
    def of(cls, inputs: Inputs, dropout: Dropout | None) -> MarkedRows:
        query, key, marks, documents = inputs.query, inputs.key, inputs.key_padding_mask, None
        if inputs.document_ids is not None:
            ids = inputs.document_ids
            ignored = ids < 0 if marks is None else marks | (ids < 0)
            marks = ids.masked_fill(ignored, -1)
            documents = ids.masked_fill(ids < 0, -2).unsqueeze(2).expand(-1, -1, query.shape[2])
        if marks is not None:
            marks = marks.unsqueeze(2).expand(-1, -1, key.shape[2])
        if dropout is None:
            return cls(query, key, inputs.value, marks, documents)
        assert inputs.dropout_seed is not None
        seed = int(inputs.dropout_seed)
        query_words = dropout.query_words(seed, query.shape[0], query.shape[2], query.device)
        key_words = dropout.key_words(seed, dropout.positions).to(key.device)[:, None].expand(*key.shape[:3])
        return cls(query, key, inputs.value, marks, documents, dropout, seed, query_words, key_words)

    def block(self, block: HeadBlock) -> MarkedRows:
        """The heads of one block."""
        heads, kv_heads = block.heads, block.kv_heads
        return replace(
            self,
            query=self.query[:, :, heads],
            key=self.key[:, :, kv_heads],
            value=self.value[:, :, kv_heads],
            key_marks=_heads(self.key_marks, kv_heads),
            query_documents=_heads(self.query_documents, heads),
            query_words=_heads(self.query_words, heads),
            key_words=_heads(self.key_words, kv_heads),
        )


def _heads(tensor: Tensor | None, heads: slice) -> Tensor | None:
    return None if tensor is None else tensor[:, :, heads]


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
            with record_function(WAIT_SPAN), self.hops.agreement.waiting(self.hops.call):
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
    """One rank's plans, of a forward and of a backward, with the kernel and the score scale that carry them out.

    ``dropout`` is None, or its inputs hold a seed.
    """

    forward_plan: RankPlan
    backward_plan: RankPlan
    kernel: Kernel
    scale: float
    dropout: Dropout | None

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
        marked, workspace = MarkedRows.of(inputs, self.dropout), Workspace(self.kernel)
        arriving = NOTHING
        for index, (block, step) in enumerate(self.forward_plan.steps):
            arrived, arriving = arriving.wait(), NOTHING
            arriving = yield from self._post_keys(self.forward_plan, index + 1, marked, arrived, hops)
            here = marked.block(block)
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
        grads = MarkedRows(query_grad, key_grad, value_grad)
        marked, workspace = MarkedRows.of(inputs, self.dropout), Workspace(self.kernel)
        arriving = NOTHING
        grad_hop: _GradHop | None = None
        for index, (block, step) in enumerate(self.backward_plan.steps):
            arrived, arriving = arriving.wait(), NOTHING
            arriving = yield from self._post_keys(self.backward_plan, index + 1, marked, arrived, hops)
            if step is block.steps[0]:
                sums = _BlockSums.of(grads, block)
            here = marked.block(block)
            block_out, block_lse, block_grad_out = (x[:, :, block.heads] for x in (out, lse, grad_out))
            passed_on = _grad_rows(step.grad_sends, marked, zeroed=True)
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
                incoming = _grad_rows(step.grad_receives, marked)
                arrival = yield from hops.post(2 * index + 1, "dK and dV", passed_on.by_peer, step.grad_sends, incoming)
            grad_hop = _GradHop(arrival, sums, step is block.steps[-1])
        if grad_hop is not None:
            grad_hop.settle(None, grads)
        return grads.query, grads.key, grads.value

    def _tile_forward(
        self, tile: Tile, here: MarkedRows, arrived: PackedRows | None, workspace: Workspace
    ) -> tuple[Tensor, Tensor]:
        rows = _TileRows.gather(tile, here, arrived, workspace)
        tensors = rows.query, rows.key, rows.value
        options: dict[str, Any] = {"is_causal": tile.is_causal, "scale": self.scale, "key_mask": rows.key_mask}
        if rows.rule is not None:
            return pairwise.forward(self.kernel, rows.rule, *tensors, **options)
        return self.kernel.forward(*tensors, **options)

    def _tile_backward(
        self,
        tile: Tile,
        here: MarkedRows,
        arrived: PackedRows | None,
        out: Tensor,
        lse: Tensor,
        grad_out: Tensor,
        workspace: Workspace,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = _TileRows.gather(tile, here, arrived, workspace)
        tensors = (
            workspace.gather("grad_out", grad_out, tile.queries),
            rows.query,
            rows.key,
            rows.value,
            workspace.gather("out", out, tile.queries),
            workspace.gather("lse", lse, tile.queries),
        )
        options: dict[str, Any] = {"is_causal": tile.is_causal, "scale": self.scale, "key_mask": rows.key_mask}
        if rows.rule is not None:
            grad_query, grad_key, grad_value = pairwise.backward(self.kernel, rows.rule, *tensors, **options)
        else:
            grad_query, grad_key, grad_value = self.kernel.backward(*tensors, **options)
        return grad_query, rows.sum_over_heads(grad_key), rows.sum_over_heads(grad_value)

    def _post_keys(
        self, plan: RankPlan, index: int, marked: MarkedRows, arrived: PackedRows | None, hops: Hops | None
    ) -> ByHops[Arrival]:
        """Send on what ``arrived``, or send this rank's own K and V off, and receive what step ``index`` needs."""
        if hops is None or index == len(plan.steps):
            return NOTHING
        block, step = plan.steps[index]
        own = marked.block(block)
        marks = None if own.key_marks is None else own.key_marks.dtype
        row_format = RowFormat(own.key.shape[0], own.key.shape[-1], own.key.dtype, marks)
        if arrived is not None and all(parcel in arrived for message in step.sends for parcel in message.parcels):
            outgoing = {message.peer: arrived.stretch(message.parcels) for message in step.sends}
        else:
            packed = PackedRows(row_format, step.sends, own.key.device)
            for parcel in packed.parcels:
                for destination, tensor in zip(packed.slices(parcel), (own.key, own.value, own.key_marks), strict=True):
                    if destination is not None and tensor is not None:
                        gather_into(destination, tensor, parcel.source)
            outgoing = packed.by_peer
        incoming = PackedRows(row_format, step.receives, own.key.device)
        return (yield from hops.post(2 * index, "K and V", outgoing, step.sends, incoming))


def _told(hops: Hops | None) -> contextlib.AbstractContextManager[None]:
    """The other ranks hear of an exception that ends this rank's walk."""
    return contextlib.nullcontext() if hops is None else hops.agreement.report_errors(hops.call)


def merge_tile(tile: Tile, out: Tensor, lse: Tensor, tile_out: Tensor, tile_lse: Tensor) -> None:
    """Merge a tile's out and LSE into those of its block of heads."""
    if tile.opens_queries:
        scatter(out, tile.queries, tile_out)
        scatter(lse, tile.queries, tile_lse)
    else:
        scatter_merge(out, lse, tile.queries, tile_out, tile_lse)


def add_tile_grads(
    tile: Tile, tile_grads: tuple[Tensor, Tensor, Tensor], sums: MarkedRows | _BlockSums, parcels: PackedRows
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


def _grad_rows(messages: tuple[Message, ...], marked: MarkedRows, *, zeroed: bool = False) -> PackedRows:
    key = marked.key
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
    def of(cls, grads: MarkedRows, block: HeadBlock) -> _BlockSums:
        part = grads.block(block)
        sums = cls(block, _accumulator(part.query), _accumulator(part.key), _accumulator(part.value))
        if not block.is_opened:
            for tensor in (sums.query, sums.key, sums.value):
                tensor.zero_()
        return sums

    def store(self, grads: MarkedRows) -> None:
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

    def settle(self, passed_on: PackedRows | None, grads: MarkedRows) -> None:
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
    rule: PairRule | None

    @classmethod
    def gather(cls, tile: Tile, here: MarkedRows, arrived: PackedRows | None, workspace: Workspace) -> _TileRows:
        marks: Tensor | None
        words: Tensor | None
        if isinstance(tile.keys, DilatedRows):
            key = workspace.gather("key", here.key, tile.keys)
            value = workspace.gather("value", here.value, tile.keys)
            marks, words = (None if x is None else gather(x, tile.keys) for x in (here.key_marks, here.key_words))
        else:
            assert arrived is not None
            key, value, marks = arrived.rows(tile.keys)
            words = _key_words(here, tile.keys)
        if not tile.streams_are_grouped:
            index = torch.tensor(tile.stream_of_head, device=key.device)
            key, value = key.index_select(1, index), value.index_select(1, index)
            marks, words = (None if x is None else x.index_select(1, index) for x in (marks, words))
        query = workspace.gather("query", here.query, tile.queries)
        if here.query_documents is None and here.dropout is None:
            return cls(tile, query, key, value, marks, None)
        documents, query_words = (
            None if x is None else gather(x, tile.queries) for x in (here.query_documents, here.query_words)
        )
        mask, key_documents = (marks, None) if documents is None else (None, marks)
        rule = PairRule(documents, key_documents, here.dropout, query_words, words)
        return cls(tile, query, key, value, mask, rule)

    def sum_over_heads(self, grad: Tensor) -> Tensor:
        """The gradient of each stream, from that of each key/value head the kernel saw."""
        if self.tile.streams_are_grouped:
            return grad
        index = torch.tensor(self.tile.stream_of_head, device=grad.device)
        grad = grad.to(statistics_dtype(grad.dtype))
        sums = grad.new_zeros((grad.shape[0], self.tile.keys.num_heads, *grad.shape[2:]))
        return sums.index_add_(1, index, grad)


def _key_words(here: MarkedRows, rows: ParcelRows) -> Tensor | None:
    """What dropout takes of keys that came from another rank: it follows from where they are. [B, streams, rows]."""
    if here.dropout is None:
        return None
    first = torch.tensor(rows.parcel.first_positions, device=here.key.device)[rows.streams.start : rows.streams.stop]
    indices = torch.arange(rows.row_range.start, rows.row_range.stop, device=here.key.device)
    words = here.dropout.key_words(here.dropout_seed, first[:, None] + rows.parcel.source.rate * indices)
    return words.expand(here.key.shape[0], -1, -1)


def _merge_phantom(out: Tensor, lse: Tensor, phantom: Phantom) -> None:
    """Let the phantom's queries see its zero keys: scores 0, values 0."""
    rows = phantom.queries
    shape = (out.shape[0] * rows.segments, rows.num_heads, rows.rows)
    zeros = out.new_zeros(()).expand(*shape, out.shape[-1])
    scatter_merge(out, lse, rows, zeros, lse.new_tensor(math.log(phantom.count)).expand(shape))
