"""Computes tiles: gathers the rows of a tile, calls the kernel, and merges the results.

Tensors are [batch, local seq, heads, head_dim]; LSE is [batch, local seq, heads]; gathered rows are [B, H, S, D].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from ring_backends.engine.local_rows import LocalRows
from ring_backends.engine.wire_buffers import WireBuffer
from ring_backends.kernels import Kernel, PairRule, pairwise
from ring_backends.kernels.gather_rows import gather, gather_into, gathered_shape, scatter, scatter_merge
from ring_backends.kernels.merge import statistics_dtype
from ring_backends.kernels.steps import StepKernel
from ring_backends.schedule.rank_plan import ParcelRows, Phantom, Tile
from ring_backends.schedule.rows import DilatedRows
from ring_backends.torch_internals import has_values

TILE_SPAN = "ring_backends::tile"
"""The name under which torch.profiler shows the computation of one tile, including its merge.

If the kernel computes all tiles of a step at once, it shows the step.
"""


class TileRunner:
    """Computes the tiles of one forward or backward with one kernel."""

    def __init__(self, kernel: Kernel, scale: float) -> None:
        self.kernel, self.scale = kernel, scale
        self._workspace = _Workspace(is_contiguous=kernel.prefers_contiguous)

    def forward(self, tile: Tile, here: LocalRows, arrived: WireBuffer | None) -> tuple[Tensor, Tensor]:
        """Compute out and LSE of one tile. ``here`` holds this rank's rows of the tile's block of heads."""
        rows = _TileRows.gather(tile, here, arrived, self._workspace)
        tensors = rows.query, rows.key, rows.value
        if rows.rule is not None:
            return pairwise.forward(self.kernel, rows.rule, *tensors, **self._options(rows))
        return self.kernel.forward(*tensors, **self._options(rows))

    def forward_into(
        self, tiles: Sequence[Tile], here: LocalRows, arrived: WireBuffer | None, out: Tensor, lse: Tensor
    ) -> None:
        """Compute the tiles of one step, and merge them into ``out`` and ``lse`` of their block of heads."""
        if isinstance(self.kernel, StepKernel):
            with record_function(TILE_SPAN):
                self.kernel.forward_into(tiles, here, arrived, out, lse, scale=self.scale)
            return
        for tile in tiles:
            with record_function(TILE_SPAN):
                merge_tile(tile, out, lse, *self.forward(tile, here, arrived))

    def backward(
        self, tile: Tile, here: LocalRows, arrived: WireBuffer | None, out: Tensor, lse: Tensor, grad_out: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute dQ, dK and dV of one tile from the global ``out``, ``lse`` and ``grad_out`` of the block's heads."""
        rows = _TileRows.gather(tile, here, arrived, self._workspace)
        tensors = (
            self._workspace.gather("grad_out", grad_out, tile.queries),
            rows.query,
            rows.key,
            rows.value,
            self._workspace.gather("out", out, tile.queries),
            self._workspace.gather("lse", lse, tile.queries),
        )
        if rows.rule is not None:
            grads = pairwise.backward(self.kernel, rows.rule, *tensors, **self._options(rows))
        else:
            grads = self.kernel.backward(*tensors, **self._options(rows))
        grad_query, grad_key, grad_value = grads
        return grad_query, rows.sum_over_heads(grad_key), rows.sum_over_heads(grad_value)

    def _options(self, rows: _TileRows) -> dict[str, Any]:
        return {"is_causal": rows.tile.is_causal, "scale": self.scale, "key_mask": rows.key_mask}


def accumulator(tensor: Tensor) -> Tensor:
    """Return ``tensor`` if it has the statistics dtype, else an empty tensor of its shape in the statistics dtype."""
    dtype = statistics_dtype(tensor.dtype)
    return tensor if tensor.dtype == dtype else torch.empty_like(tensor, dtype=dtype)


def merge_tile(tile: Tile, out: Tensor, lse: Tensor, tile_out: Tensor, tile_lse: Tensor) -> None:
    """Merge a tile's out and LSE into those of its block of heads."""
    if tile.opens_queries:
        scatter(out, tile.queries, tile_out)
        scatter(lse, tile.queries, tile_lse)
    else:
        scatter_merge(out, lse, tile.queries, tile_out, tile_lse)


def merge_phantom(out: Tensor, lse: Tensor, phantom: Phantom) -> None:
    """Merge the zero keys of a phantom into its queries: their scores and values are 0."""
    rows = phantom.queries
    shape = (out.shape[0] * rows.segments, rows.num_heads, rows.rows)
    zeros = out.new_zeros(()).expand(*shape, out.shape[-1])
    scatter_merge(out, lse, rows, zeros, lse.new_tensor(math.log(phantom.count)).expand(shape))


class _Workspace:
    """Gathers the rows of tiles. If the kernel prefers contiguous rows, all tiles use the same memory."""

    def __init__(self, *, is_contiguous: bool) -> None:
        self._contiguous = is_contiguous
        self._buffers: dict[str, Tensor] = {}
        self._gathered: dict[str, tuple[Tensor, DilatedRows, Tensor]] = {}

    def gather(self, name: str, tensor: Tensor, rows: DilatedRows) -> Tensor:
        """Return the rows. They are valid until other rows are gathered under this name."""
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
    """The arguments of one kernel call: [B, H, S, D].

    If the heads do not share the streams evenly, every query head gets a key/value head of its own.
    """

    tile: Tile
    query: Tensor
    key: Tensor
    value: Tensor
    key_mask: Tensor | None
    rule: PairRule | None

    @classmethod
    def gather(cls, tile: Tile, here: LocalRows, arrived: WireBuffer | None, workspace: _Workspace) -> _TileRows:
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
            index = _stream_index(tile, key)
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
        """Sum the gradients of the kernel's key/value heads to those of the streams."""
        if self.tile.streams_are_grouped:
            return grad
        index = _stream_index(self.tile, grad)
        grad = grad.to(statistics_dtype(grad.dtype))
        sums = grad.new_zeros((grad.shape[0], self.tile.keys.num_heads, *grad.shape[2:]))
        return sums.index_add_(1, index, grad)


def _stream_index(tile: Tile, like: Tensor) -> Tensor:
    """The stream of each query head of a tile, int64 [heads], on the device of ``like``."""
    if not has_values(like):
        return like.new_empty(len(tile.stream_of_head), dtype=torch.int64)
    return torch.tensor(tile.stream_of_head, device=like.device)


def _key_words(here: LocalRows, rows: ParcelRows) -> Tensor | None:
    """The dropout words of keys from another rank, computed from the keys' positions: [B, streams, rows]."""
    if here.dropout is None:
        return None
    first = torch.tensor(rows.parcel.first_positions, device=here.key.device)[rows.streams.start : rows.streams.stop]
    indices = torch.arange(rows.row_range.start, rows.row_range.stop, device=here.key.device)
    words = here.dropout.key_words(here.dropout_seed, first[:, None] + rows.parcel.source.rate * indices)
    return words.expand(here.key.shape[0], -1, -1)
