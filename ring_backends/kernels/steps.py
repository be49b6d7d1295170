"""What the kernel of a step reads and writes: this rank's rows, parcels of other ranks' rows, and results.

Tensors are [batch, local seq, heads, …]; LSE is [batch, local seq, heads]. Keys that arrived from another rank lie in
one buffer of packed parcels (:class:`PackedParcels`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ring_backends.kernels.constants import constant
from ring_backends.kernels.dropout import Dropout
from ring_backends.kernels.score_mod import ScoreMod, TranslatedScoreMod
from ring_backends.kernels.triton_score_mod import Translation, translate
from ring_backends.schedule.rank_plan import HeadBlock, Parcel, ParcelPart, ParcelRows, Tile
from ring_backends.torch_internals import mode_of


@dataclass(frozen=True)
class StepRows:
    """Query, key and value of this rank, and marks of their rows. The marks are the same for every head.

    Attributes:
        query: multiplied by the sign of the call's scale.
        scale: positive factor on the scores (:func:`split_scale`).
        key_marks: [batch, local seq, key/value heads]. Without documents, it is bool, and True for a key to ignore.
            With documents, it holds the document number of each key, or −1 for a key to ignore.
        query_documents: [batch, local seq, heads], the document number of each query, or −2 for none.
        dropout_seed: seed of this call's dropout.
        query_words, key_words: the 32-bit words of each query and key that ``dropout`` hashes.
        score_mod: the score_mod of the call; None without.
        positions: int64 [local seq], the global positions of the rows; None without dropout and score_mod.
        first_head: the first query head of the block.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    key_marks: Tensor | None = None
    query_documents: Tensor | None = None
    dropout: Dropout | None = None
    dropout_seed: int = 0
    query_words: Tensor | None = None
    key_words: Tensor | None = None
    score_mod: ScoreMod | None = None
    positions: Tensor | None = None
    first_head: int = 0

    def key_words_at(self, positions: Tensor) -> Tensor:
        """The words of the keys at these positions that dropout hashes: int32, shaped as ``positions``."""
        assert self.dropout is not None
        return self.dropout.key_words(self.dropout_seed, positions)

    @cached_property
    def translation(self) -> Translation | None:
        """The score_mod for Triton kernels; None without."""
        if self.score_mod is None:
            return None
        found = self.score_mod
        return found.translation if isinstance(found, TranslatedScoreMod) else translate(found)

    def block(self, block: HeadBlock) -> StepRows:
        """The rows of the heads of one block."""
        if block.has_all_heads:
            return self
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
            first_head=self.first_head + heads.start,
        )


def _heads(tensor: Tensor | None, heads: slice) -> Tensor | None:
    return None if tensor is None else tensor[:, :, heads]


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

    def block(self, block: HeadBlock) -> SavedRows:
        """The rows of the heads of one block."""
        if block.has_all_heads:
            return self
        return SavedRows(*(x[:, :, block.heads] for x in (self.out, self.lse, self.grad_out)))


class Grads(NamedTuple):
    """Gradients of query, key and value: results, or sums in the statistics dtype that tiles are added to."""

    query: Tensor
    key: Tensor
    value: Tensor


class PackedParcels(Protocol):
    """Parcels in one buffer of bytes, each as contiguous slices [batch, streams, rows, …]."""

    @property
    def buffer(self) -> Tensor: ...

    @property
    def layout(self) -> object:
        """Equal for buffers in which the same parcels have their slices at the same places."""
        ...

    def slice_offsets(self, parcel: Parcel) -> tuple[int, ...]:
        """The byte offsets of the slices of ``parcel``: of K, V and their marks, or of dK and dV."""
        ...

    def rows(self, rows: ParcelRows) -> tuple[Tensor, Tensor, Tensor | None]:
        """K, V and the marks of the rows, [batch, streams, rows, …]."""
        ...

    def add(self, rows: ParcelRows, grad_key: Tensor, grad_value: Tensor) -> None:
        """Add dK and dV, [batch, streams, rows, …], to those of the rows."""
        ...


class StepOut(Protocol):
    """out and LSE of one block of heads, which take the results of tiles."""

    def of(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """The out and LSE that the results of a tile are merged into, in place.

        out: sums in the statistics dtype, or the result in the dtype of the inputs. LSE is in the statistics dtype.
        """
        ...

    def merge_tile(self, tile: Tile, tile_out: Tensor, tile_lse: Tensor) -> None:
        """Merge the results of a tile, [batch * segments, heads, rows, …]."""
        ...


class StepGrads(Protocol):
    """The gradients of one block of heads, which take those of tiles."""

    def of(self, tile: Tile) -> Grads:
        """What the gradients of a tile are added to, in place."""
        ...

    def add_tile(self, tile: Tile, tile_grads: Sequence[Tensor], parcels: PackedParcels | None) -> None:
        """Add the gradients of a tile, [batch * segments, heads, rows, …]: of other ranks' keys, to ``parcels``."""
        ...


@lru_cache
def split_scale(scale: float) -> tuple[float, float]:
    """Split a factor on the scores into a sign for the queries (1, −1 or 0) and a positive factor for kernels.

    Many kernels set the score of a hidden pair to −inf before they scale it, so any other factor would give NaN. A
    factor that is 0 in fp32 counts as 0.
    """
    if abs(scale) < torch.finfo(torch.float32).tiny:
        return 0.0, 1.0
    return math.copysign(1.0, scale), abs(scale)


def part_positions(part: ParcelPart, like: Tensor) -> Tensor:
    """The global positions of the keys of a part of a parcel: int64 [streams, rows], on the device of ``like``."""
    parcel, rows = part.parcel, part.row_range
    first = constant(tuple(parcel.first_positions[stream] for stream in part.streams), like)[:, None]
    with mode_of(first):
        return first + parcel.source.rate * torch.arange(rows.start, rows.stop, device=first.device)
