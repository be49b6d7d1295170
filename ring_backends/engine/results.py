"""Collects the results of the tiles of one block of heads, where :mod:`ring_backends.schedule.sums` says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ring_backends.kernels.merge import merge_zero_value_, statistics_dtype
from ring_backends.kernels.rows import (
    Rows,
    add_rows,
    fill_rows,
    merge_rows,
    scatter,
    scatter_many,
    views,
    whole,
)
from ring_backends.kernels.steps import Grads, PackedParcels
from ring_backends.schedule.rank_plan import HeadBlock, Phantom, Tile
from ring_backends.schedule.rows import DilatedRows

Side = Literal["queries", "keys"]


class Result:
    """A contiguous result of the call, allocated when it is first used.

    Args:
        like: a tensor whose device, shape and dtype the result has, unless told otherwise.
        shape: [batch, local seq, heads, …].
    """

    def __init__(self, like: Tensor, shape: torch.Size | None = None, *, dtype: torch.dtype | None = None) -> None:
        self._like, self._shape, self.dtype = like, shape or like.shape, dtype or like.dtype
        self._tensor: Tensor | None = None

    @property
    def tensor(self) -> Tensor:
        if self._tensor is None:
            self._tensor = self._like.new_empty(self._shape, dtype=self.dtype)
        return self._tensor

    def store(self, heads: slice, rows: DilatedRows, values: Tensor) -> None:
        """Store the values of rows of some heads. If they are the whole result in its memory layout, nothing moves."""
        if self._tensor is None and values.dtype == self.dtype:
            self._tensor = whole(values, rows, self._shape)
            if self._tensor is not None:
                return
        scatter(self.tensor[:, :, heads], rows, values)


class Merged(NamedTuple):
    """A result of attention, [batch, local seq, heads, value_dim], and its LSE, [batch, local seq, heads]."""

    out: Tensor
    lse: Tensor


def results_for(query: Tensor, value: Tensor) -> tuple[Result, Result]:
    """out and LSE of a call, not yet allocated."""
    shape = query.shape[:3]
    return Result(query, shape + value.shape[3:]), Result(query, shape, dtype=statistics_dtype(query.dtype))


class BlockOut:
    """out and LSE of one block of heads."""

    def __init__(self, out: Result, lse: Result, block: HeadBlock) -> None:
        self.block, self._out, self._lse = block, out, lse
        self._sums: Merged | None = None

    @property
    def results(self) -> Merged:
        out, lse = self._out.tensor, self._lse.tensor
        if self.block.has_all_heads:
            return Merged(out, lse)
        return Merged(out[:, :, self.block.heads], lse[:, :, self.block.heads])

    @property
    def sums(self) -> Merged:
        if self._sums is None:
            block, (out, lse) = self.block, self.results
            if block.others:
                lse = torch.full_like(lse, -math.inf)
            elif not block.roles.is_opened:
                lse.fill_(-math.inf)
            self._sums = Merged(_sums(block, [(out, "queries")])[0], lse)
        return self._sums

    def of(self, tile: Tile) -> Merged:
        """What the result of a tile is merged into."""
        roles = self.block.roles
        return self.results if tile.branch == roles.base or tile.branch in roles.merged else self.sums

    def merge_tile(self, tile: Tile, tile_out: Tensor, tile_lse: Tensor) -> None:
        if tile.branch == self.block.roles.base:
            self._out.store(self.block.heads, tile.queries, tile_out)
            self._lse.store(self.block.heads, tile.queries, tile_lse)
        elif tile.opens_queries:
            out, lse = self.of(tile)
            scatter_many([Rows(out, tile.queries, tile_out), Rows(lse, tile.queries, tile_lse)])
        else:
            merge_rows(*self.of(tile), tile.queries, tile_out, tile_lse)

    def merge_phantom(self, phantom: Phantom) -> None:
        """Merge zero keys into their queries: their scores and values are 0."""
        for (_, out), (_, lse) in zip(*(views(x, phantom.queries) for x in self.sums), strict=True):
            merge_zero_value_(out, lse, math.log(phantom.count))

    def finish(self) -> None:
        """Merge the sums into the results."""
        # The sums of a row hold all of its branches, so the first that has the row takes them.
        for branch in reversed(self.block.others):
            for rows in branch.queries:
                merge_rows(*self.results, rows, *self.sums, same_rows=True, takes=branch is not self.block.others[0])
        if self.block.roles.base is None and self.sums.out.dtype != self._out.dtype:
            self.results.out.copy_(self.sums.out)


class BlockGrads:
    """The gradients of one block of heads."""

    def __init__(self, query: Result, key: Result, value: Result, block: HeadBlock) -> None:
        self.block = block
        self._results = ((query, block.heads), (key, block.kv_heads), (value, block.kv_heads))
        self._sums: Grads | None = None
        self._unfinished = slice(0, 3)

    @property
    def results(self) -> Grads:
        if self.block.has_all_heads:
            return Grads(*[result.tensor for result, _ in self._results])
        return Grads(*[result.tensor[:, :, heads] for result, heads in self._results])

    @property
    def sums(self) -> Grads:
        if self._sums is None:
            sides: list[Side] = ["queries", "keys", "keys"]
            self._sums = Grads(*_sums(self.block, [*zip(self.results, sides, strict=True)]))
        return self._sums

    def of(self, tile: Tile) -> Grads:
        """What the gradients of a tile are added to."""
        roles = self.block.roles
        return self.results if tile.branch == roles.base or tile.branch in roles.merged else self.sums

    def add_tile(self, tile: Tile, tile_grads: Sequence[Tensor], parcels: PackedParcels | None) -> None:
        """Add the gradients of a tile. Those of keys from another rank are added to the buffer of their parcel."""
        if tile.branch == self.block.roles.base:
            assert isinstance(tile.keys, DilatedRows)
            rows = tile.queries, tile.keys, tile.keys
            for (result, heads), of_result, grad in zip(self._results, rows, tile_grads, strict=True):
                result.store(heads, of_result, grad)
            return
        (grad_query, grad_key, grad_value), into = tile_grads, self.of(tile)
        stored: list[Rows] = []
        added: list[Rows] = []
        (stored if tile.opens_queries else added).append(Rows(into.query, tile.queries, grad_query))
        if isinstance(tile.keys, DilatedRows):
            of_keys = stored if tile.opens_keys else added
            of_keys += Rows(into.key, tile.keys, grad_key), Rows(into.value, tile.keys, grad_value)
        else:
            assert parcels is not None
            parcels.add(tile.keys, grad_key, grad_value)
        scatter_many(stored, added)

    def finish_query(self) -> None:
        """Add the sums to the result of the query, before those of key and value are complete."""
        self._add_sums(slice(0, 1))
        self._unfinished = slice(1, 3)

    def finish(self) -> None:
        """Add the sums to the results."""
        self._add_sums(self._unfinished)

    def _add_sums(self, which: slice) -> None:
        results, all_sums = self.results[which], self.sums[which]
        for branch in reversed(self.block.others):
            sides = [branch.queries, branch.keys, branch.keys][which]
            parts = [
                Rows(result, rows, sums)
                for result, side, sums in zip(results, sides, all_sums, strict=True)
                for rows in side
            ]
            add_rows(parts, takes=branch is not self.block.others[0])
        if self.block.roles.base is None:
            for result, sums in zip(results, all_sums, strict=True):
                if sums.dtype != result.dtype:
                    result.copy_(sums)


def _sums(block: HeadBlock, results: Sequence[tuple[Tensor, Side]]) -> list[Tensor]:
    """The sums of results: the result itself if possible, else new memory. Rows that no tile opens begin with 0."""
    found = []
    for result, _ in results:
        dtype = statistics_dtype(result.dtype)
        is_new = block.others or result.dtype != dtype
        found.append(torch.empty_like(result, dtype=dtype) if is_new else result)
    if not block.roles.is_opened:
        return [sums.zero_() for sums in found]
    opened_later = block.others[1:]  # tiles open the rows of the first
    filled = [
        (sums, rows)
        for sums, (_, side) in zip(found, results, strict=True)
        for branch in opened_later
        for rows in getattr(branch, side)
    ]
    if filled:
        fill_rows(filled, 0.0)
    return found
