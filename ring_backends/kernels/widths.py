"""Tiles whose values have another width than their keys (multi-head latent attention, arXiv 2405.04434).

A kernel that takes only one width gets the narrower rows padded with zeros: zeros in query and key leave the scores as
they are, and zeros in value and grad_out give columns that are cut off. Only the rows of one tile are padded. Inputs,
results, and what travels over the ring keep their widths.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from ring_backends.kernels.base import Kernel


def forward(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """As :meth:`Kernel.forward`, for any V."""
    head_dim, value_dim = query.shape[3], value.shape[3]
    if kernel.takes_value_dim or head_dim == value_dim:
        return kernel.forward(query, key, value, **options)
    out, lse = kernel.forward(*_padded(query, key, value), **options)
    return out[..., :value_dim], lse


def backward(
    kernel: Kernel,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """As :meth:`Kernel.backward`, for any V."""
    head_dim, value_dim = query.shape[3], value.shape[3]
    if kernel.takes_value_dim or head_dim == value_dim:
        return kernel.backward(grad_out, query, key, value, out, lse, **options)
    grad_out, query, key, value, out = _padded(grad_out, query, key, value, out)
    grad_query, grad_key, grad_value = kernel.backward(grad_out, query, key, value, out, lse, **options)
    return grad_query[..., :head_dim], grad_key[..., :head_dim], grad_value[..., :value_dim]


def _padded(*tensors: Tensor) -> list[Tensor]:
    """The tensors [B, H, S, …], each as wide as the widest."""
    width = max(x.shape[3] for x in tensors)
    return [x if x.shape[3] == width else pad(x, (0, width - x.shape[3])) for x in tensors]
