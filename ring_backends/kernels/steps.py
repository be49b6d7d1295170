"""The optional part of a kernel's interface: all tiles of one step at once, in place.

A kernel of this kind reads the rows of a step where they lie and adds its results to the sums of a block of heads. So
nothing is gathered, scattered or merged outside of the kernel, and tiles are not cut.

Tensors are [batch, local seq, heads, …]; LSE is [batch, local seq, heads]. Keys that arrived from another rank lie in
one buffer of packed parcels (:class:`PackedParcels`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ring_backends.kernels.base import Kernel
from ring_backends.kernels.constants import constant
from ring_backends.kernels.dropout import Dropout
from ring_backends.kernels.score_mod import ScoreMod, TranslatedScoreMod
from ring_backends.kernels.triton_score_mod import Translation, translate
from ring_backends.schedule.rank_plan import HeadBlock, Parcel, Tile
from ring_backends.torch_internals import mode_of


@dataclass(frozen=True)
class StepRows:
    """Query, key and value of this rank, and marks of their rows. The marks are the same for every head.

    Attributes:
        query: multiplied by the sign of the call's scale.
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
    key_marks: Tensor | None = None
    query_documents: Tensor | None = None
    dropout: Dropout | None = None
    dropout_seed: int = 0
    query_words: Tensor | None = None
    key_words: Tensor | None = None
    score_mod: ScoreMod | None = None
    positions: Tensor | None = None
    first_head: int = 0

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
            first_head=heads.start,
        )


def _heads(tensor: Tensor | None, heads: slice) -> Tensor | None:
    return None if tensor is None else tensor[:, :, heads]


class Grads(NamedTuple):
    """Gradients of query, key and value: results, or sums in the statistics dtype that tiles are added to."""

    query: Tensor
    key: Tensor
    value: Tensor


class PackedParcels(Protocol):
    """Parcels in one buffer of bytes, each as contiguous slices [batch, streams, rows, …]."""

    @property
    def buffer(self) -> Tensor: ...

    def slice_offsets(self, parcel: Parcel) -> tuple[int, ...]:
        """The byte offsets of the slices of ``parcel``: of K, V and their marks, or of dK and dV."""
        ...


class StepKernel(Kernel):
    """A kernel that computes all tiles of a step at once.

    The tiles of a step that belong to the same branch must not be cut. Then two of them have the same query rows of a
    head or no query row in common. The same holds for their keys.
    """

    @abstractmethod
    def forward_into(
        self,
        tiles: Sequence[Tile],
        rows: StepRows,
        arrived: PackedParcels | None,
        out: Tensor,
        lse: Tensor,
        *,
        scale: float,
    ) -> None:
        """Merge the results of all tiles into ``out`` and ``lse`` of their block of heads, in place.

        The results of a tile with ``opens_queries`` are stored, and not merged.

        Args:
            tiles: the tiles of one step.
            rows: this rank's rows.
            arrived: the parcels of K, V and marks that tiles with remote keys read.
            out: sums in the statistics dtype, or the result in the dtype of the inputs.
            lse: in the statistics dtype.
            scale: positive factor on the scores.
        """

    @abstractmethod
    def backward_into(
        self,
        tiles: Sequence[Tile],
        rows: StepRows,
        arrived: PackedParcels | None,
        grad_out: Tensor,
        out: Tensor,
        lse: Tensor,
        sums: Grads,
        passed_on: PackedParcels | None,
        *,
        scale: float,
    ) -> None:
        """Add the gradients of all tiles to ``sums``, and those of remote keys to ``passed_on``, in place.

        The gradients of tiles with ``opens_queries`` or ``opens_keys`` are stored, and not added.

        Args:
            tiles, rows, arrived, scale: as in :meth:`forward_into`.
            grad_out, out, lse: those of the global softmax, of the block's heads.
            sums: the gradients of this rank's rows.
            passed_on: the parcels of dK and dV; None if no tile has remote keys.
        """


def parcel_key_words(rows: StepRows, parcel: Parcel) -> Tensor:
    """Compute the words of a parcel's keys that dropout hashes, from their positions: int32 [streams, rows]."""
    assert rows.dropout is not None
    return rows.dropout.key_words(rows.dropout_seed, parcel_positions(parcel, rows.key))


def parcel_positions(parcel: Parcel, like: Tensor) -> Tensor:
    """The global positions of a parcel's keys: int64 [streams, rows], on the device of ``like``."""
    first = constant(parcel.first_positions, like)[:, None]
    with mode_of(first):
        return first + parcel.source.rate * torch.arange(parcel.rows, device=first.device)
