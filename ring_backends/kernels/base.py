"""The interface of a kernel: it computes a step, forward and backward, and gives the reasons why it cannot run.

A step is a list of tiles, each of which is some query rows against some key rows
(:class:`~ring_backends.schedule.rank_plan.Tile`). The kernel adds the results of a step to those of earlier steps. Most
kernels compute one tile at a time: :mod:`ring_backends.kernels.per_tile` makes a step of their tiles.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar

import torch
from torch import Tensor

from ring_backends.kernels.operators import operator_reasons
from ring_backends.kernels.rows import RowMemory
from ring_backends.kernels.score_mod import ScoreMod
from ring_backends.kernels.steps import PackedParcels, SavedRows, StepGrads, StepOut, StepRows
from ring_backends.kernels.tile import TileInputs
from ring_backends.schedule.rank_plan import Tile

TILE_SPAN = "ring_backends::tile"
"""The name under which torch.profiler shows the computation of one tile, including its merge.

If the kernel computes all tiles of a step at once, it shows the step.
"""

RAN_ON_ONE_GPU = (
    "of all GPUs, the tests have run it on an H100 with torch 2.11; to test it on another, run pytest --gpu"
)


@dataclass(frozen=True)
class KernelInputs:
    """The properties of a call of attention by which a kernel decides whether it can run it.

    Attributes:
        device, dtype: of query, key and value.
        head_dim: D, in elements.
        has_key_mask: whether tiles may have a key mask.
        needs_grad: whether the backward may be called.
        has_dropout: whether the call has dropout.
        has_documents: whether the call has document ids.
        score_mod: the score_mod of the call; None without.
        rows: rows per head in a segment, w / r, of the branch with the most work; None if unknown. It only decides
            which kernel is fastest, and not which can run.
        is_dilated: whether the kernel is for branches with a dilation rate above 1. Like ``rows``, it only decides
            which kernel is fastest.
        has_window: whether the branch with the most work has a window, whose tiles kernels without bands get in pieces.
            It only decides which kernel is fastest.
        is_step: whether the call is a step of decoding, whose tiles have another number of keys each time. It only
            decides which kernel is fastest.
        value_dim: V, in elements; None if it is D.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    has_key_mask: bool = False
    needs_grad: bool = True
    has_dropout: bool = False
    has_documents: bool = False
    score_mod: ScoreMod | None = None
    rows: int | None = None
    is_dilated: bool = False
    has_window: bool = False
    is_step: bool = False
    value_dim: int | None = None

    @property
    def has_score_mod(self) -> bool:
        return self.score_mod is not None

    @property
    def dims(self) -> tuple[int, int]:
        """D and V."""
        return self.head_dim, self.head_dim if self.value_dim is None else self.value_dim

    @property
    def widest(self) -> str:
        """The name of the larger of D and V, for messages."""
        return "value_dim" if self.dims[1] > self.dims[0] else "head_dim"

    def __str__(self) -> str:
        mask = "with" if self.has_key_mask else "without"
        grad = "with" if self.needs_grad else "without"
        documents = ", documents" if self.has_documents else ""
        dropout = ", dropout" if self.has_dropout else ""
        score_mod = ", score_mod" if self.has_score_mod else ""
        value_dim = "" if self.value_dim in (None, self.head_dim) else f"value_dim={self.value_dim}, "
        return (
            f"device={self.device}, dtype={self.dtype}, head_dim={self.head_dim}, {value_dim}{mask} key mask, "
            f"{grad} gradient{documents}{dropout}{score_mod}"
        )


class Kernel(ABC):
    """One implementation of tile attention. It has no state: the registry holds one instance of each.

    Attributes:
        name: value of the argument ``kernel`` that selects it.
        device_types: the device types it runs on; None means any.
        dtypes: the dtypes it supports.
        operators: the private operators of torch that it calls, as in :mod:`ring_backends.kernels.operators`.
        unverified: a sentence about what the project's tests have not run; None if they run everything.
        reads_in_place: whether it reads the rows of a step where they lie. Tiles then need no memory, and are not cut.
        has_dropout: whether it can run calls with dropout.
        has_score_mod: whether it can run calls with a score_mod, at least with some.
        takes_value_dim: whether V may differ from D. For other kernels, the narrower rows are padded with zeros.
        takes_bands: whether it runs tiles with any band. Other kernels run full and causal tiles.
        reads_ignored_keys: whether a NaN in a key that ``key_mask`` ignores would reach results. The engine then sets
            ignored keys and values to 0.
    """

    name: ClassVar[str]
    device_types: ClassVar[tuple[str, ...] | None]
    dtypes: ClassVar[tuple[torch.dtype, ...]]
    operators: ClassVar[tuple[str, ...]] = ()
    unverified: ClassVar[str | None] = None
    reads_in_place: ClassVar[bool] = False
    has_dropout: ClassVar[bool] = False
    has_score_mod: ClassVar[bool] = False
    takes_value_dim: ClassVar[bool] = False
    takes_bands: ClassVar[bool] = False
    reads_ignored_keys: ClassVar[bool] = False

    def not_supported_reasons(self, inputs: KernelInputs) -> list[str]:
        """Return the reasons why this kernel cannot run such a call, one sentence each; empty if it can.

        Tensors on device "meta" stand for tensors on any device, so there the device is never a reason.
        """
        reasons = operator_reasons(self.operators)
        if self.device_types is not None and inputs.device.type not in (*self.device_types, "meta"):
            reasons.append(f"it runs on {' and '.join(self.device_types)} tensors only")
        if inputs.dtype not in self.dtypes:
            reasons.append(f"it supports {', '.join(str(dtype) for dtype in self.dtypes)} only")
        if inputs.has_dropout and not self.has_dropout:
            reasons.append("its dropout would depend on how the sequence is sharded")
        if inputs.has_score_mod and not self.has_score_mod:
            reasons.append("it cannot call a score_mod")
        return reasons

    def auto_order(self, inputs: KernelInputs) -> int | None:
        """Where ``"auto"`` tries this kernel for such a call: lower numbers first; None if it never chooses it."""
        return 1

    @abstractmethod
    def forward_step(
        self, tiles: Sequence[Tile], rows: StepRows, arrived: PackedParcels | None, out: StepOut, memory: RowMemory
    ) -> None:
        """Merge the results of all tiles of a step into those of their block of heads, without gradient tracking.

        Args:
            tiles: the tiles of one step. If the kernel has ``reads_in_place``, those of one branch are not cut. Then
                two of them have the same query rows of a head or no query row in common. The same holds for their keys.
            rows: this rank's rows.
            arrived: the parcels of K, V and marks that tiles with keys of other ranks read.
            out: takes the results. Those of a tile with ``opens_queries`` are stored, and not merged.
            memory: for copies of rows.
        """

    @abstractmethod
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
        """Add up the gradients of all tiles of a step. Those of keys of other ranks are added to ``passed_on``.

        Args:
            tiles, rows, arrived, memory: as in :meth:`forward_step`.
            saved: the gradient of out, and the out and LSE of the softmax over *all* keys.
            grads: takes the gradients of this rank's rows. Those of tiles with ``opens_queries`` or ``opens_keys`` are
                stored, and not added.
            passed_on: the parcels of dK and dV; None if no tile has keys of other ranks.
        """

    @abstractmethod
    def forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        """Attend from every query row to the keys of a single tile.

        Returns:
            (out, lse): out [B, Hq, Sq, V] in the dtype of query; lse [B, Hq, Sq] in the statistics dtype. A row whose
            visible keys are all masked has out = 0 and lse = −inf.
        """

    @abstractmethod
    def backward(self, tile: TileInputs, grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the contribution of a single tile to the gradients of the global softmax.

        Args:
            grad_out, out: [B, Hq, Sq, V], any float dtype.
            lse: [B, Hq, Sq]. ``out`` and ``lse`` belong to the *global* softmax, over this tile's keys and all others.

        Returns:
            (grad_query, grad_key, grad_value), shaped as query, key and value, in the dtype of the inputs or in the
            statistics dtype. A row with lse = −inf has gradient 0 and contributes 0 to every key.
        """


def by_kernel(
    tiles: Sequence[Tile], kernel: Kernel, in_place: Mapping[int, Kernel]
) -> Sequence[tuple[Kernel, Sequence[Tile]]]:
    """Split the tiles of a step by the kernel that computes them.

    Args:
        kernel: computes the tiles.
        in_place: the kernels that compute some branches instead, by the branch's index.
    """
    if not in_place:
        return ((kernel, tiles),) if tiles else ()
    groups = groupby(tiles, key=lambda tile: in_place.get(tile.branch, kernel))
    return [(of_branch, tuple(group)) for of_branch, group in groups]
