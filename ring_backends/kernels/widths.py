"""Tiles whose values have another width than their keys (multi-head latent attention, arXiv 2405.04434).

A kernel that takes only one width gets the narrower rows padded with zeros: zeros in query and key leave the scores as
they are, and zeros in value and grad_out give columns that are cut off. Only the rows of one tile are padded. Inputs,
results, and what travels over the ring keep their widths.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from torch.nn.functional import pad

from ring_backends.kernels.base import Kernel, TileInputs


def forward(kernel: Kernel, tile: TileInputs) -> tuple[Tensor, Tensor]:
    """As :meth:`Kernel.forward`, for any V."""
    head_dim, value_dim = tile.query.shape[3], tile.value.shape[3]
    if kernel.takes_value_dim or head_dim == value_dim:
        return kernel.forward(tile)
    query, key, value = _padded(*tile.tensors)
    out, lse = kernel.forward(replace(tile, query=query, key=key, value=value))
    return out[..., :value_dim], lse


def backward(
    kernel: Kernel, tile: TileInputs, grad_out: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As :meth:`Kernel.backward`, for any V."""
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
