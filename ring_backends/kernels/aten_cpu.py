"""The ATen flash attention of CPU builds: any float dtype, any head dim, grouped heads, key masks.

Measured on torch 2.13: inputs whose last dim is not contiguous are read wrongly, out of bounds and without an
error, hence `unit_stride`. A row whose keys are all masked comes back with LSE 0, hence `blank_rows`. A NaN
or inf in a key or value reaches rows that do not see it (masked keys, later keys of the same block): only the
math kernel keeps those apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ring_backends.kernels.base import Kernel, KernelInputs, blank_rows, check_tile, lse_for_backward


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
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            unit_stride(query),
            unit_stride(key),
            unit_stride(value),
            0.0,
            is_causal,
            attn_mask=key_bias(key_mask, query),
            scale=scale,
        )
        return (out, lse) if key_mask is None else blank_rows(out, lse, key_mask, is_causal)

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
        grad_query, grad_key, grad_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
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
        return grad_query, grad_key, grad_value


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
