"""The optional part of a kernel's interface: all tiles of one step at once, in place.

A kernel of this kind reads the rows of a step where they lie and adds its results to the sums of a block of heads. So
nothing is gathered, scattered or merged outside of the kernel, and tiles are not cut.

Tensors are [batch, local seq, heads, head_dim]; LSE is [batch, local seq, heads]. Keys that arrived from
another rank lie in one buffer of packed parcels (:class:`PackedParcels`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ring_backends.kernels.base import Kernel
from ring_backends.kernels.constants import constant
from ring_backends.kernels.dropout import Dropout
from ring_backends.schedule.rank_plan import Parcel, Tile
from ring_backends.torch_internals import mode_of


class StepRows(Protocol):
    """This rank's rows of one block of heads: the fields of :class:`~ring_backends.engine.local_rows.LocalRows`."""

    @property
    def query(self) -> Tensor: ...
    @property
    def key(self) -> Tensor: ...
    @property
    def value(self) -> Tensor: ...
    @property
    def key_marks(self) -> Tensor | None: ...
    @property
    def query_documents(self) -> Tensor | None: ...
    @property
    def dropout(self) -> Dropout | None: ...
    @property
    def dropout_seed(self) -> int: ...
    @property
    def query_words(self) -> Tensor | None: ...
    @property
    def key_words(self) -> Tensor | None: ...


class GradSums(Protocol):
    """What the dQ, dK and dV of one block of heads are added to: sums in the statistics dtype, or the results."""

    @property
    def query(self) -> Tensor: ...
    @property
    def key(self) -> Tensor: ...
    @property
    def value(self) -> Tensor: ...


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
        sums: GradSums,
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
    first = constant(parcel.first_positions, rows.key)[:, None]
    with mode_of(first):
        positions = first + parcel.source.rate * torch.arange(parcel.rows, device=first.device)
    return rows.dropout.key_words(rows.dropout_seed, positions)
