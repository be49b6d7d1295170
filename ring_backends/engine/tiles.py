"""Computes tiles: gathers the rows of a tile, calls the kernel, and merges the results.

Tensors are [batch, local seq, heads, head_dim]; LSE is [batch, local seq, heads]; gathered rows are [B, H, S, D].
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import Tensor
from torch.profiler import record_function

from ring_backends.engine.local_rows import LocalRows
from ring_backends.engine.sums import BlockGrads, BlockOut
from ring_backends.engine.wire_buffers import WireBuffer
from ring_backends.kernels import Kernel, PairRule, pairwise
from ring_backends.kernels.base import split_scale
from ring_backends.kernels.constants import constant
from ring_backends.kernels.gather_rows import gather, gather_all, gather_into, gathered_shape, row_view
from ring_backends.kernels.merge import statistics_dtype
from ring_backends.kernels.steps import StepKernel, parcel_key_words
from ring_backends.schedule.rank_plan import HeadBlock, ParcelRows, Tile
from ring_backends.schedule.rows import DilatedRows

TILE_SPAN = "ring_backends::tile"
"""The name under which torch.profiler shows the computation of one tile, including its merge.

If the kernel computes all tiles of a step at once, it shows the step.
"""

MIN_PART_BYTES = 8 * 2**20
"""The smallest query of a part for which a kernel call costs less time than the copies that it saves."""


@dataclass(frozen=True)
class SavedRows:
    """What the backward of one block of heads takes from the forward, and the gradient of its out.

    Attributes:
        out, grad_out: [batch, local seq, heads, head_dim].
        lse: [batch, local seq, heads].
    """

    out: Tensor
    lse: Tensor
    grad_out: Tensor

    def of(self, block: HeadBlock) -> SavedRows:
        """The part of one block of heads."""
        return SavedRows(*(x[:, :, block.heads] for x in (self.out, self.lse, self.grad_out)))


class TileRunner:
    """Computes the tiles of one forward or backward.

    Args:
        kernel: computes the tiles.
        scale: factor on the scores. The query of the :class:`LocalRows` already has its sign.
        in_place: the kernels that compute some branches instead, by the branch's index.
    """

    def __init__(self, kernel: Kernel, scale: float, in_place: Mapping[int, StepKernel] | None = None) -> None:
        self.kernel, self._in_place = kernel, in_place or {}
        _, self.scale = split_scale(scale)
        self._workspace = _Workspace(kernel)

    def forward(self, tile: Tile, here: LocalRows, arrived: WireBuffer | None) -> tuple[Tensor, Tensor]:
        """Compute out and LSE of one tile. ``here`` holds this rank's rows of the tile's block of heads."""
        rows = _TileRows.gather(tile, here, arrived, self._workspace)
        tensors = rows.query, rows.key, rows.value
        if rows.rule is not None:
            return pairwise.forward(self.kernel, rows.rule, *tensors, **self._options(rows))
        return self.kernel.forward(*tensors, **self._options(rows))

    def forward_into(
        self, tiles: Sequence[Tile], here: LocalRows, arrived: WireBuffer | None, block_out: BlockOut
    ) -> None:
        """Compute the tiles of one step, and merge them into the results of their block of heads."""
        for kernel, group in self._groups(tiles, block_out.block):
            if isinstance(kernel, StepKernel):
                with record_function(TILE_SPAN):
                    kernel.forward_into(group, here, arrived, *block_out.of(group[0]), scale=self.scale)
                continue
            for tile in self._parts(group, here.query):
                with record_function(TILE_SPAN):
                    block_out.merge_tile(tile, *self.forward(tile, here, arrived))

    def backward_into(
        self,
        tiles: Sequence[Tile],
        here: LocalRows,
        arrived: WireBuffer | None,
        saved: SavedRows,
        grads: BlockGrads,
        passed_on: WireBuffer,
    ) -> None:
        """Compute the gradients of the tiles of one step, and add them up."""
        for kernel, group in self._groups(tiles, grads.block):
            if isinstance(kernel, StepKernel):
                given = here, arrived, saved.grad_out, saved.out, saved.lse
                with record_function(TILE_SPAN):
                    kernel.backward_into(group, *given, grads.of(group[0]), passed_on, scale=self.scale)
                continue
            for tile in self._parts(group, here.query):
                with record_function(TILE_SPAN):
                    tile_grads = self.backward(tile, here, arrived, saved.out, saved.lse, saved.grad_out)
                    grads.add_tile(tile, tile_grads, passed_on)

    def _groups(self, tiles: Sequence[Tile], block: HeadBlock) -> Iterator[tuple[Kernel, tuple[Tile, ...]]]:
        """Split the tiles of a step by their kernel, and by whether their results have sums."""

        def key(tile: Tile) -> tuple[bool, Kernel]:
            return block.has_sums(tile), self._in_place.get(tile.branch, self.kernel)

        for (_, kernel), group in groupby(tiles, key):
            yield kernel, tuple(group)

    def _parts(self, tiles: Sequence[Tile], query: Tensor) -> Iterator[Tile]:
        """Cut large tiles by heads, if the kernel then reads their rows where they lie, and no copy is needed."""
        row_bytes = query.shape[0] * query.shape[3] * query.element_size()
        for tile in tiles:
            size = tile.queries.segments * tile.queries.num_heads * tile.queries.rows * row_bytes
            is_cut = self.kernel.reads_strided_rows and size >= len(tile.lattices) * MIN_PART_BYTES
            yield from tile.lattices if is_cut else [tile]

    def backward(
        self, tile: Tile, here: LocalRows, arrived: WireBuffer | None, out: Tensor, lse: Tensor, grad_out: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute dQ, dK and dV of one tile from the global ``out``, ``lse`` and ``grad_out`` of the block's heads."""
        rows = _TileRows.gather(tile, here, arrived, self._workspace, grad_out=grad_out, out=out, lse=lse)
        its_grad_out, its_out, its_lse = rows.others
        tensors = its_grad_out, rows.query, rows.key, rows.value, its_out, its_lse
        if rows.rule is not None:
            grads = pairwise.backward(self.kernel, rows.rule, *tensors, **self._options(rows))
        else:
            grads = self.kernel.backward(*tensors, **self._options(rows))
        grad_query, grad_key, grad_value = grads
        return grad_query, rows.sum_over_heads(grad_key), rows.sum_over_heads(grad_value)

    def _options(self, rows: _TileRows) -> dict[str, Any]:
        return {"is_causal": rows.tile.is_causal, "scale": self.scale, "key_mask": rows.key_mask}


class _Workspace:
    """Gathers the rows of tiles. If the kernel prefers contiguous rows, all tiles use the same memory."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._buffers: dict[str, Tensor] = {}
        self._gathered: dict[str, tuple[Tensor, DilatedRows, Tensor]] = {}

    def gather(self, parts: dict[str, tuple[Tensor, DilatedRows]]) -> dict[str, Tensor]:
        """Return the rows by name. They are valid until other rows are gathered under the same name."""
        if self._kernel.prefers_contiguous:
            return {name: self._gather_contiguous(name, *part) for name, part in parts.items()}
        if not self._kernel.gathers_rows_outermost:
            return dict(zip(parts, gather_all([*parts.values()]), strict=True))
        # The kernel reads any strides of the others.
        dense = [name in ("out", "grad_out") for name in parts]
        return dict(zip(parts, gather_all([*parts.values()], rows_outermost=True, dense=dense), strict=True))

    def _gather_contiguous(self, name: str, tensor: Tensor, rows: DilatedRows) -> Tensor:
        if name == "out":  # Kernel.prefers_contiguous
            view = row_view(tensor, rows)
            if view is not None:
                return view
        if name in self._gathered:
            held_tensor, held_rows, gathered = self._gathered[name]
            if held_tensor is tensor and held_rows == rows:
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
    """The arguments of one kernel call: [B, H, S, D].

    If the heads do not share the streams evenly, every query head gets a key/value head of its own.
    """

    tile: Tile
    query: Tensor
    key: Tensor
    value: Tensor
    key_mask: Tensor | None
    rule: PairRule | None
    others: tuple[Tensor, ...]

    @classmethod
    def gather(
        cls,
        tile: Tile,
        here: LocalRows,
        arrived: WireBuffer | None,
        workspace: _Workspace,
        **of_queries: Tensor,
    ) -> _TileRows:
        """Gather the rows of a tile. ``of_queries`` are further tensors of the query rows, for ``others``."""
        marks: Tensor | None
        words: Tensor | None
        own: dict[str, tuple[Tensor, DilatedRows]] = {"query": (here.query, tile.queries)}
        if isinstance(tile.keys, DilatedRows):
            own |= {"key": (here.key, tile.keys), "value": (here.value, tile.keys)}
        gathered = workspace.gather(own | {name: (tensor, tile.queries) for name, tensor in of_queries.items()})
        if isinstance(tile.keys, DilatedRows):
            key, value = gathered["key"], gathered["value"]
            marks, words = (None if x is None else gather(x, tile.keys) for x in (here.key_marks, here.key_words))
        else:
            assert arrived is not None
            key, value, marks = arrived.rows(tile.keys)
            words = None if here.dropout is None else _key_words(here, tile.keys)
        if not tile.streams_are_grouped:
            index = constant(tile.stream_of_head, key)
            key, value = key.index_select(1, index), value.index_select(1, index)
            marks, words = (None if x is None else x.index_select(1, index) for x in (marks, words))
        query, others = gathered["query"], tuple(gathered[name] for name in of_queries)
        if here.query_documents is None and here.dropout is None:
            return cls(tile, query, key, value, marks, None, others)
        documents, query_words = (
            None if x is None else gather(x, tile.queries) for x in (here.query_documents, here.query_words)
        )
        mask, key_documents = (marks, None) if documents is None else (None, marks)
        rule = PairRule(documents, key_documents, here.dropout, query_words, words)
        return cls(tile, query, key, value, mask, rule, others)

    def sum_over_heads(self, grad: Tensor) -> Tensor:
        """Sum the gradients of the kernel's key/value heads to those of the streams."""
        if self.tile.streams_are_grouped:
            return grad
        index = constant(self.tile.stream_of_head, grad)
        grad = grad.to(statistics_dtype(grad.dtype))
        sums = grad.new_zeros((grad.shape[0], self.tile.keys.num_heads, *grad.shape[2:]))
        return sums.index_add_(1, index, grad)


def _key_words(here: LocalRows, rows: ParcelRows) -> Tensor:
    """The dropout words of keys from another rank, computed from the keys' positions: [B, streams, rows]."""
    streams, row_range = (slice(part.start, part.stop) for part in (rows.streams, rows.row_range))
    return parcel_key_words(here, rows.parcel)[streams, row_range].expand(here.key.shape[0], -1, -1)
