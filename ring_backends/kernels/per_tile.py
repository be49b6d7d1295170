"""The step of a kernel that computes one tile at a time: gathers its rows, computes it, and merges the results.

Rows that kernels do not take as they are get changed for the tile alone. Anticausal tiles are reversed, and are causal
then. If values have another width than keys (multi-head latent attention, arXiv 2405.04434), the narrower rows are
padded with zeros: zeros in query and key leave the scores as they are, and zeros in value and grad_out give columns
that are cut off.

With packed documents, dropout or a score_mod, visibility or weights depend on a query row and a key together. A tile
with documents is cut at their ends (:mod:`ring_backends.kernels.documents`). Parts in which several documents meet, and
whole tiles with dropout, a score_mod, or documents and a band other than a causal one, are computed by
:mod:`ring_backends.kernels.blockwise` instead of the kernel.

Tensors are [batch, local seq, heads, …]; LSE is [batch, local seq, heads]; gathered rows are [B, H, S, …].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ring_backends.kernels import blockwise
from ring_backends.kernels.base import TILE_SPAN, Kernel
from ring_backends.kernels.constants import constant
from ring_backends.kernels.documents import document_parts
from ring_backends.kernels.merge import merge_, statistics_dtype
from ring_backends.kernels.rows import RowMemory, gather, gather_all, row_view
from ring_backends.kernels.score_mod import PairScores, ScoreMod
from ring_backends.kernels.steps import PackedParcels, SavedRows, StepGrads, StepOut, StepRows, part_positions
from ring_backends.kernels.tile import PairRule, TileInputs
from ring_backends.schedule.bands import ANTICAUSAL
from ring_backends.schedule.rank_plan import ParcelRows, Tile
from ring_backends.schedule.rows import DilatedRows
from ring_backends.torch_internals import mode_of, span

MIN_PART_FLOPS = 2e11
"""The least FLOPs of a part's forward. A GPU is then busy with a part until the host has launched the next one: a part
takes three launches or more, and each took 80 to 130 µs on the machine of an H100. A backward takes three times as
many launches, and 2.5 times as many FLOPs."""

MIN_COPY_BYTES = 2**16
"""The smallest rows that are copied for a kernel that prefers contiguous rows."""


class PerTileKernel(Kernel):
    """Base of the kernels that compute one tile at a time: a subclass defines ``forward`` and ``backward``.

    Attributes:
        prefers_contiguous: whether it is faster to copy strided rows into contiguous memory first, except those of out
            in a backward, which it reads once.
        gathers_rows_outermost: whether copies of strided rows get the memory layout [B, S, H, D], if it does not prefer
            contiguous ones. The rows of out and grad_out then always have it.
        reads_strided_rows: whether it is as fast on strided rows as on copies. Tiles are then cut to avoid copies.
    """

    prefers_contiguous: ClassVar[bool] = False
    gathers_rows_outermost: ClassVar[bool] = False
    reads_strided_rows: ClassVar[bool] = False

    def forward_step(
        self, tiles: Sequence[Tile], rows: StepRows, arrived: PackedParcels | None, out: StepOut, memory: RowMemory
    ) -> None:
        for tile in _cut(tiles, rows.query) if self.reads_strided_rows else tiles:
            with span(TILE_SPAN):
                inputs, _ = self._inputs_of(tile, rows, arrived, memory)
                out.merge_tile(tile, *forward_tile(self, inputs))

    def backward_step(
        self,
        tiles: Sequence[Tile],
        rows: StepRows,
        arrived: PackedParcels | None,
        saved: SavedRows,
        grads: StepGrads,
        passed_on: PackedParcels | None,
        memory: RowMemory,
    ) -> None:
        of_queries = {"grad_out": saved.grad_out, "out": saved.out, "lse": saved.lse}
        for tile in _cut(tiles, rows.query) if self.reads_strided_rows else tiles:
            with span(TILE_SPAN):
                inputs, gathered = self._inputs_of(tile, rows, arrived, memory, of_queries)
                tile_grads = backward_tile(self, inputs, *gathered)
                if not tile.streams_are_grouped:
                    grad_query, *of_keys = tile_grads
                    grad_key, grad_value = (_sum_over_heads(grad, tile) for grad in of_keys)
                    tile_grads = grad_query, grad_key, grad_value
                grads.add_tile(tile, tile_grads, passed_on)

    def _inputs_of(
        self,
        tile: Tile,
        rows: StepRows,
        arrived: PackedParcels | None,
        memory: RowMemory,
        of_queries: Mapping[str, Tensor] | None = None,
    ) -> tuple[TileInputs, list[Tensor]]:
        """The inputs of the kernel, and the rows of further tensors ``of_queries``.

        If the heads do not share the streams evenly, every query head gets a key/value head of its own.
        """
        queries, keys = tile.queries, tile.keys
        parts = {"query": (rows.query, queries)}
        for name, tensor in (of_queries or {}).items():
            parts[name] = tensor, queries
        marks = words = None
        if isinstance(keys, DilatedRows):
            parts |= {"key": (rows.key, keys), "value": (rows.value, keys)}
        in_place = tile.is_anticausal and not self.takes_bands  # reversed rows are copies
        query, *others = self._gather(parts, memory, in_place=in_place)
        if isinstance(keys, DilatedRows):
            *others, key, value = others
            marks = None if rows.key_marks is None else gather(rows.key_marks, keys)
            words = None if rows.key_words is None else gather(rows.key_words, keys)
        else:
            assert arrived is not None
            key, value, marks = arrived.rows(keys)
            if rows.dropout is not None:
                words = rows.key_words_at(_parcel_positions(keys, rows))[None].expand(key.shape[0], -1, -1)
        if not tile.streams_are_grouped:
            index = constant(tile.stream_of_head, key)
            key, value = key.index_select(1, index), value.index_select(1, index)
            marks, words = (None if x is None else x.index_select(1, index) for x in (marks, words))
        rule = None
        if not (rows.query_documents is None and rows.dropout is None and rows.score_mod is None):
            documents, query_words = (
                None if x is None else gather(x, queries) for x in (rows.query_documents, rows.query_words)
            )
            marks, key_documents = (marks, None) if documents is None else (None, marks)
            scores = None if rows.score_mod is None else _pair_scores(rows, tile, rows.score_mod)
            rule = PairRule(documents, key_documents, rows.dropout, query_words, words, scores)
        band = None if tile.is_causal else tile.band
        return TileInputs(query, key, value, rows.scale, tile.is_causal, marks, band, rule), others

    def _gather(
        self, parts: Mapping[str, tuple[Tensor, DilatedRows]], memory: RowMemory, *, in_place: bool
    ) -> list[Tensor]:
        """Gather rows, or with ``in_place`` view them if possible. They are valid until the next rows of that name.

        A kernel that prefers contiguous rows gets a view if they are few, contiguous, or those of out, read once.
        """
        if self.prefers_contiguous and not in_place:
            gathered = []
            for name, (tensor, rows) in parts.items():
                view = row_view(tensor, rows, None if name == "out" else MIN_COPY_BYTES)
                gathered.append(memory.copy(name, tensor, rows) if view is None else view)
            return gathered
        if in_place or not self.gathers_rows_outermost:
            return gather_all([*parts.values()])
        # The kernel reads any strides of the others.
        return gather_all([*parts.values()], rows_outermost=True, dense=[name in ("out", "grad_out") for name in parts])


def _cut(tiles: Sequence[Tile], query: Tensor) -> Iterator[Tile]:
    """Cut large tiles by heads. A kernel that reads strided rows then needs no copies."""
    batch, *_, head_dim = query.shape
    for tile in tiles:
        pairs = tile.queries.size * tile.keys.rows // (2 if tile.is_causal else 1)
        is_cut = pairs * 4 * batch * head_dim >= len(tile.lattices) * MIN_PART_FLOPS
        yield from tile.lattices if is_cut else [tile]


# --- one tile ---------------------------------------------------------------------------------------------------------


def forward_tile(kernel: Kernel, tile: TileInputs) -> tuple[Tensor, Tensor]:
    """As :meth:`Kernel.forward`, also for anticausal tiles, for the pairs that a rule allows, and for any V.

    With documents, out of a full or causal tile is in the statistics dtype.
    """
    if tile.band == ANTICAUSAL and not kernel.takes_bands:
        out, lse = forward_tile(kernel, tile.reversed())
        return out.flip(2), lse.flip(2)
    if tile.rule is None or tile.rule.needs_math or tile.band is not None:
        return _whole_forward(kernel, tile)
    query, value, stats = tile.query, tile.value, statistics_dtype(tile.query.dtype)
    out = query.new_zeros(*query.shape[:3], value.shape[3], dtype=stats)
    lse = query.new_full(query.shape[:-1], -torch.inf, dtype=stats)
    for batch, rows, _, part in document_parts(tile, tile.rule):
        merge_(out[batch, :, rows], lse[batch, :, rows], *_whole_forward(kernel, part))
    return out, lse


def backward_tile(
    kernel: Kernel, tile: TileInputs, grad_out: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As :meth:`Kernel.backward`, also for anticausal tiles, for the pairs that a rule allows, and for any V.

    With a rule, gradients are in the statistics dtype.
    """
    if tile.band == ANTICAUSAL and not kernel.takes_bands:
        grads = backward_tile(kernel, tile.reversed(), grad_out.flip(2), out.flip(2), lse.flip(2))
        return grads[0].flip(2), grads[1].flip(2), grads[2].flip(2)
    if tile.rule is None or tile.rule.needs_math or tile.band is not None:
        return _whole_backward(kernel, tile, grad_out, out, lse)
    stats = statistics_dtype(tile.query.dtype)
    grad_query, grad_key, grad_value = (
        torch.zeros_like(x, dtype=stats, memory_format=torch.contiguous_format) for x in tile.tensors
    )
    for batch, rows, keys, part in document_parts(tile, tile.rule):
        grads = _whole_backward(kernel, part, grad_out[batch, :, rows], out[batch, :, rows], lse[batch, :, rows])
        grad_query[batch, :, rows] += grads[0]
        grad_key[batch, :, keys] += grads[1]
        grad_value[batch, :, keys] += grads[2]
    return grad_query, grad_key, grad_value


def _whole_forward(kernel: Kernel, tile: TileInputs) -> tuple[Tensor, Tensor]:
    """Compute a tile that is not cut: by the kernel, or if it has a rule, blockwise."""
    if tile.rule is not None:
        return blockwise.forward(tile)
    head_dim, value_dim = tile.query.shape[3], tile.value.shape[3]
    if kernel.takes_value_dim or head_dim == value_dim:
        return kernel.forward(tile)
    query, key, value = _padded(*tile.tensors)
    out, lse = kernel.forward(replace(tile, query=query, key=key, value=value))
    return out[..., :value_dim], lse


def _whole_backward(
    kernel: Kernel, tile: TileInputs, grad_out: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    if tile.rule is not None:
        return blockwise.backward(tile, grad_out, out, lse)
    head_dim, value_dim = tile.query.shape[3], tile.value.shape[3]
    if kernel.takes_value_dim or head_dim == value_dim:
        return kernel.backward(tile, grad_out, out, lse)
    query, key, value, grad_out, out = _padded(*tile.tensors, grad_out, out)
    grads = kernel.backward(replace(tile, query=query, key=key, value=value), grad_out, out, lse)
    return grads[0][..., :head_dim], grads[1][..., :head_dim], grads[2][..., :value_dim]


def _padded(*tensors: Tensor) -> list[Tensor]:
    """The tensors [B, H, S, …], each as wide as the widest."""
    width = max(x.shape[3] for x in tensors)
    return [x if x.shape[3] == width else pad(x, (0, width - x.shape[3])) for x in tensors]


def _sum_over_heads(grad: Tensor, tile: Tile) -> Tensor:
    """Sum the gradients of the kernel's key/value heads to those of the streams."""
    index = constant(tile.stream_of_head, grad)
    grad = grad.to(statistics_dtype(grad.dtype))
    sums = grad.new_zeros((grad.shape[0], tile.keys.num_heads, *grad.shape[2:]))
    return sums.index_add_(1, index, grad)


# --- positions --------------------------------------------------------------------------------------------------------


def _pair_scores(here: StepRows, tile: Tile, function: ScoreMod) -> PairScores:
    """The score_mod of the call, with the batch, heads and positions of the tile's rows."""
    queries, keys, batch = tile.queries, tile.keys, here.query.shape[0]
    query_positions = _positions(here, queries)
    key_positions = _positions(here, keys) if isinstance(keys, DilatedRows) else _parcel_positions(keys, here)[None]
    if key_positions.shape[1] > 1:
        key_positions = key_positions.index_select(1, constant(tile.stream_of_head, here.key))
    heads = constant(tuple(here.first_head + head for head, _ in queries.heads_and_phases), here.query)
    entries = constant(tuple(entry for entry in range(batch) for _ in range(queries.segments)), here.query)
    if queries.segments > 1:
        query_positions, key_positions = (x.repeat(batch, 1, 1) for x in (query_positions, key_positions))
    return PairScores(function, entries, heads, query_positions, key_positions)


def _positions(here: StepRows, rows: DilatedRows) -> Tensor:
    """The global positions of dilated rows: int64 [segments, heads, rows]; one head if they are the same for all."""
    assert here.positions is not None
    phases = tuple(phase for _, phase in rows.heads_and_phases)
    phases = phases[:1] if len(set(phases)) == 1 else phases
    starts = tuple(rows.start + segment * rows.segment_stride for segment in range(rows.segments))
    first = constant(starts, here.query)[:, None] + constant(phases, here.query)
    with mode_of(first):
        return here.positions.take(first[:, :, None] + rows.rate * torch.arange(rows.rows, device=first.device))


def _parcel_positions(rows: ParcelRows, here: StepRows) -> Tensor:
    """The global positions of keys from other ranks: int64 [streams, rows]."""
    return torch.cat([part_positions(part, here.key) for part in rows.parts], 1)
