"""The kernel that runs every call, on every device. ``"auto"`` chooses it last."""

from __future__ import annotations

import torch
from torch import Tensor

from ring_backends.kernels import blockwise
from ring_backends.kernels.per_tile import PerTileKernel
from ring_backends.kernels.tile import TileInputs


class MathKernel(PerTileKernel):
    """Attention from matrix products of torch (:mod:`ring_backends.kernels.blockwise`)."""

    name = "math"
    device_types = None
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    has_dropout = True
    has_score_mod = True
    takes_value_dim = True
    takes_bands = True

    def forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        return blockwise.forward(tile)

    def backward(self, tile: TileInputs, grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return blockwise.backward(tile, grad_out, out, lse)
