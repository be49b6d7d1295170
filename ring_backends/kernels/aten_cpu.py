"""The ATen flash attention of CPU builds: any float dtype, any head dim, grouped heads, key masks.

Measured on torch 2.13: inputs whose last dim is not contiguous are read wrongly, out of bounds and without an
error, hence `unit_stride`. A row whose keys are all masked comes back with LSE 0, hence `blank_rows`. A NaN
or inf reaches rows and keys that have no part in it (masked keys, later keys of the same block), as 0 * NaN; and a row
that is NaN itself comes back as 0 where it meets fewer keys than fit a vector register (16, at most, of AVX-512). The
math kernel, which keeps all that apart, takes over where there is one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ring_backends.kernels.base import Kernel, KernelInputs, blank_rows, check_tile, lse_for_backward
from ring_backends.kernels.math import MathKernel
from ring_backends.kernels.merge import statistics_dtype

_KEEPS_APART = MathKernel()
_FEW_KEYS = 64


class AtenCpuFlashKernel(Kernel):
    """aten::_scaled_dot_product_flash_attention_for_cpu and its backward."""

    name = "aten_cpu_flash"
    device_types = ("cpu",)
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    prefers_contiguous = True

    def not_supported_reasons(self, inputs: KernelInputs) -> list[str]:
        reasons = super().not_supported_reasons(inputs)
        if not hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"):
            reasons.append(f"torch {torch.__version__} has no CPU flash attention")
        return reasons

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool,
        scale: float,
        key_mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        check_tile(query, key, value, is_causal, key_mask)
        options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "key_mask": key_mask}
        if key.shape[2] < _FEW_KEYS and not all_finite(query, key):
            return _KEEPS_APART.forward(query, key, value, **options)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            unit_stride(query),
            unit_stride(key),
            unit_stride(value),
            0.0,
            is_causal,
            attn_mask=key_bias(key_mask, query),
            scale=scale,
        )
        if key_mask is not None:
            out, lse = blank_rows(out, lse, key_mask, is_causal)
        return (out, lse) if all_finite(out) else _KEEPS_APART.forward(query, key, value, **options)

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        is_causal: bool,
        scale: float,
        key_mask: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        check_tile(query, key, value, is_causal, key_mask)
        options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "key_mask": key_mask}
        if key.shape[2] < _FEW_KEYS and not all_finite(grad_out, query, key, value, out):
            return _KEEPS_APART.backward(grad_out, query, key, value, out, lse, **options)
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            unit_stride(grad_out.to(query.dtype)),
            unit_stride(query),
            unit_stride(key),
            unit_stride(value),
            unit_stride(out.to(query.dtype)),
            lse_for_backward(lse),
            0.0,
            is_causal,
            attn_mask=key_bias(key_mask, query),
            scale=scale,
        )
        if not all_finite(*grads):
            return _KEEPS_APART.backward(grad_out, query, key, value, out, lse, **options)
        return grads


def unit_stride(x: Tensor) -> Tensor:
    """x with stride 1 in its last dim; the other strides are free. A copy only where it has to be."""
    # contiguous() would keep a free stride in a last dim of size 1.
    return x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)


def key_bias(key_mask: Tensor | None, query: Tensor) -> Tensor | None:
    """The mask [B, Hk, Sk] as an additive one, [B, Hq, 1, Sk]: the operator takes no bool mask."""
    if key_mask is None:
        return None
    mask = key_mask.repeat_interleave(query.shape[1] // key_mask.shape[1], dim=1).unsqueeze(2)
    return query.new_zeros(mask.shape).masked_fill_(mask, -torch.inf)


def all_finite(*tensors: Tensor) -> bool:
    """Whether no number is NaN or infinite: one pass over each tensor, and no memory. A sum that overflows says no."""
    return all(bool(x.sum(dtype=statistics_dtype(x.dtype)).isfinite()) for x in tensors)
