"""Computes tiles: gathers the rows of a tile, calls the kernel, and merges the results.

Tensors are [batch, local seq, heads, …]; LSE is [batch, local seq, heads]; gathered rows are [B, H, S, …].
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from ring_backends.engine.sums import BlockGrads, BlockOut
from ring_backends.engine.wire_buffers import WireBuffer, of_part
from ring_backends.kernels import Kernel, PairRule, TileInputs, pairwise
from ring_backends.kernels.base import split_scale
from ring_backends.kernels.constants import constant
from ring_backends.kernels.gather_rows import gather, gather_all, gather_into, gathered_shape, row_view
from ring_backends.kernels.merge import statistics_dtype
from ring_backends.kernels.score_mod import PairScores, ScoreMod
from ring_backends.kernels.steps import StepKernel, StepRows, parcel_key_words, parcel_positions
from ring_backends.schedule.rank_plan import HeadBlock, ParcelRows, Tile
from ring_backends.schedule.rows import DilatedRows
from ring_backends.torch_internals import mode_of, span

TILE_SPAN = "ring_backends::tile"
"""The name under which torch.profiler shows the computation of one tile, including its merge.

If the kernel computes all tiles of a step at once, it shows the step.
"""

MIN_PART_FLOPS = 2e11
"""The least FLOPs of a part's forward. A GPU is then busy with a part until the host has launched the next one: a part
takes three launches or more, and each took 80 to 130 µs on the machine of an H100. A backward takes three times as
many launches, and 2.5 times as many FLOPs."""

MIN_COPY_BYTES = 2**16
"""The smallest rows that are copied for a kernel that prefers contiguous rows."""


@dataclass(frozen=True)
class SavedRows:
    """What the backward of one block of heads takes from the forward, and the gradient of its out.

    Attributes:
        out, grad_out: [batch, local seq, heads, value_dim].
        lse: [batch, local seq, heads].
    """

    out: Tensor
    lse: Tensor
    grad_out: Tensor

    def of(self, block: HeadBlock) -> SavedRows:
        """The part of one block of heads."""
        if block.has_all_heads:
            return self
        return SavedRows(*(x[:, :, block.heads] for x in (self.out, self.lse, self.grad_out)))


class TileRunner:
    """Computes the tiles of one forward or backward.

    Args:
        kernel: computes the tiles.
        scale: factor on the scores. The query of the :class:`StepRows` already has its sign.
        in_place: the kernels that compute some branches instead, by the branch's index.
    """

    def __init__(self, kernel: Kernel, scale: float, in_place: Mapping[int, StepKernel] | None = None) -> None:
        self.kernel, self._in_place = kernel, in_place or {}
        _, self.scale = split_scale(scale)
        self._memory: dict[str, Tensor] = {}
        self._gathered: dict[str, tuple[Tensor, DilatedRows, Tensor]] = {}

    def forward(self, tile: Tile, here: StepRows, arrived: WireBuffer | None) -> tuple[Tensor, Tensor]:
        """Compute out and LSE of one tile. ``here`` holds this rank's rows of the tile's block of heads."""
        inputs, _ = self._inputs_of(tile, here, arrived)
        out, lse = pairwise.forward(self.kernel, inputs)
        return (out.flip(2), lse.flip(2)) if self._reverses(tile) else (out, lse)

    def forward_into(
        self, tiles: Sequence[Tile], here: StepRows, arrived: WireBuffer | None, block_out: BlockOut
    ) -> None:
        """Compute the tiles of one step, and merge them into the results of their block of heads."""
        for kernel, group in self._groups(tiles, block_out.block):
            if isinstance(kernel, StepKernel):
                with span(TILE_SPAN):
                    kernel.forward_into(group, here, arrived, *block_out.of(group[0]), scale=self.scale)
                continue
            for tile in self._parts(group, here.query):
                with span(TILE_SPAN):
                    block_out.merge_tile(tile, *self.forward(tile, here, arrived))

    def backward_into(
        self,
        tiles: Sequence[Tile],
        here: StepRows,
        arrived: WireBuffer | None,
        saved: SavedRows,
        grads: BlockGrads,
        passed_on: WireBuffer | None,
    ) -> None:
        """Compute the gradients of the tiles of one step, and add them up."""
        for kernel, group in self._groups(tiles, grads.block):
            if isinstance(kernel, StepKernel):
                given = here, arrived, saved.grad_out, saved.out, saved.lse
                with span(TILE_SPAN):
                    kernel.backward_into(group, *given, grads.of(group[0]), passed_on, scale=self.scale)
                continue
            for tile in self._parts(group, here.query):
                with span(TILE_SPAN):
                    tile_grads = self.backward(tile, here, arrived, saved.out, saved.lse, saved.grad_out)
                    grads.add_tile(tile, tile_grads, passed_on)

    def backward(
        self, tile: Tile, here: StepRows, arrived: WireBuffer | None, out: Tensor, lse: Tensor, grad_out: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute dQ, dK and dV of one tile from the global ``out``, ``lse`` and ``grad_out`` of the block's heads."""
        of_queries = ("grad_out", grad_out), ("out", out), ("lse", lse)
        inputs, rows = self._inputs_of(tile, here, arrived, *of_queries)
        grads = pairwise.backward(self.kernel, inputs, *rows)
        if self._reverses(tile):
            grads = grads[0].flip(2), grads[1].flip(2), grads[2].flip(2)
        if tile.streams_are_grouped:
            return grads
        grad_query, *of_keys = grads
        grad_key, grad_value = (_sum_over_heads(grad, tile) for grad in of_keys)
        return grad_query, grad_key, grad_value

    def _reverses(self, tile: Tile) -> bool:
        """Whether the kernel gets the rows of an anticausal tile in reverse order, in which it is causal."""
        return tile.is_anticausal and not self.kernel.takes_bands

    def _groups(self, tiles: Sequence[Tile], block: HeadBlock) -> Iterable[tuple[Kernel, Sequence[Tile]]]:
        """Split the tiles of a step by their kernel, and for kernels of steps by whether their results have sums."""
        if not self._in_place and not isinstance(self.kernel, StepKernel):
            return ((self.kernel, tiles),)

        def key(tile: Tile) -> tuple[bool, Kernel]:
            return block.roles.has_sums(tile.branch), self._in_place.get(tile.branch, self.kernel)

        return [(kernel, tuple(group)) for (_, kernel), group in groupby(tiles, key)]

    def _parts(self, tiles: Sequence[Tile], query: Tensor) -> Iterable[Tile]:
        """Cut large tiles by heads, if the kernel then reads their rows where they lie, and no copy is needed."""
        if not self.kernel.reads_strided_rows:
            return tiles
        batch, *_, head_dim = query.shape
        return self._cut(tiles, 4 * batch * head_dim)

    def _cut(self, tiles: Sequence[Tile], flops_per_pair: int) -> Iterator[Tile]:
        for tile in tiles:
            pairs = tile.queries.size * tile.keys.rows // (2 if tile.is_causal else 1)
            is_cut = pairs * flops_per_pair >= len(tile.lattices) * MIN_PART_FLOPS
            yield from tile.lattices if is_cut else [tile]

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _inputs_of(
        self, tile: Tile, here: StepRows, arrived: WireBuffer | None, *of_queries: tuple[str, Tensor]
    ) -> tuple[TileInputs, list[Tensor]]:
        """The inputs of a kernel, and the rows of further tensors ``of_queries``.

        If the heads do not share the streams evenly, every query head gets a key/value head of its own.
        """
        reverses = self._reverses(tile)  # reversed rows are copies, so they are first viewed in place
        queries, keys = tile.queries, tile.keys
        parts = [("query", here.query, queries)]
        parts += [(name, tensor, queries) for name, tensor in of_queries]
        marks = words = None
        if isinstance(keys, DilatedRows):
            parts += [("key", here.key, keys), ("value", here.value, keys)]
            *gathered, key, value = self._gather(parts, in_place=reverses)
            if here.key_marks is not None:
                marks = gather(here.key_marks, keys)
            if here.key_words is not None:
                words = gather(here.key_words, keys)
        else:
            assert arrived is not None
            gathered = self._gather(parts, in_place=reverses)
            key, value, marks = arrived.rows(keys)
            words = None if here.dropout is None else _key_words(here, keys)
        if not tile.streams_are_grouped:
            index = constant(tile.stream_of_head, key)
            key, value = key.index_select(1, index), value.index_select(1, index)
            marks, words = (None if x is None else x.index_select(1, index) for x in (marks, words))
        query, *others = gathered
        rule = None
        if not (here.query_documents is None and here.dropout is None and here.score_mod is None):
            documents, query_words = (
                None if x is None else gather(x, queries) for x in (here.query_documents, here.query_words)
            )
            marks, key_documents = (marks, None) if documents is None else (None, marks)
            scores = None if here.score_mod is None else _pair_scores(here, tile, here.score_mod)
            rule = PairRule(documents, key_documents, here.dropout, query_words, words, scores)
        band = None if tile.is_causal else tile.band
        inputs = TileInputs(query, key, value, self.scale, tile.is_causal, marks, band, rule)
        return (inputs.reversed(), [x.flip(2) for x in others]) if reverses else (inputs, others)

    def _gather(self, parts: Sequence[tuple[str, Tensor, DilatedRows]], *, in_place: bool) -> list[Tensor]:
        """Gather rows, or with ``in_place`` view them if possible. They are valid until the next rows of that name.

        A kernel that prefers contiguous rows gets a view if they are few, contiguous, or those of out, read once.
        """
        if self.kernel.prefers_contiguous and not in_place:
            gathered = []
            for name, tensor, rows in parts:
                view = row_view(tensor, rows, None if name == "out" else MIN_COPY_BYTES)
                gathered.append(self._copied(name, tensor, rows) if view is None else view)
            return gathered
        tensors = [(tensor, rows) for _, tensor, rows in parts]
        if in_place or not self.kernel.gathers_rows_outermost:
            return gather_all(tensors)
        # The kernel reads any strides of the others.
        return gather_all(tensors, rows_outermost=True, dense=[name in ("out", "grad_out") for name, *_ in parts])

    def _copied(self, name: str, tensor: Tensor, rows: DilatedRows) -> Tensor:
        """The rows, in memory that all tiles use."""
        if name in self._gathered:
            held_tensor, held_rows, gathered = self._gathered[name]
            if held_tensor is tensor and held_rows == rows:
                return gathered
        shape = gathered_shape(tensor, rows)
        size = math.prod(shape)
        if name not in self._memory or self._memory[name].numel() < size:
            self._memory.pop(name, None)
            self._memory[name] = tensor.new_empty(size)
        gathered = self._memory[name][:size].view(shape)
        gather_into(gathered, tensor, rows)
        self._gathered[name] = tensor, rows, gathered
        return gathered


def _sum_over_heads(grad: Tensor, tile: Tile) -> Tensor:
    """Sum the gradients of the kernel's key/value heads to those of the streams."""
    index = constant(tile.stream_of_head, grad)
    grad = grad.to(statistics_dtype(grad.dtype))
    sums = grad.new_zeros((grad.shape[0], tile.keys.num_heads, *grad.shape[2:]))
    return sums.index_add_(1, index, grad)


def _key_words(here: StepRows, rows: ParcelRows) -> Tensor:
    """The dropout words of keys from other ranks, computed from the keys' positions: [B, streams, rows]."""
    words = [of_part(parcel_key_words(here, part.parcel)[None], part) for part in rows.parts]
    return torch.cat(words, 2).expand(here.key.shape[0], -1, -1)


def _pair_scores(here: StepRows, tile: Tile, function: ScoreMod) -> PairScores:
    """The score_mod of the call, with the batch, heads and positions of the tile's rows."""
    queries, keys, batch = tile.queries, tile.keys, here.query.shape[0]
    query_positions = _positions(here, queries)
    if isinstance(keys, DilatedRows):
        key_positions = _positions(here, keys)
    else:
        key_positions = torch.cat([of_part(parcel_positions(x.parcel, here.key)[None], x) for x in keys.parts], 2)
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
