"""torch's flash attention for CPUs: any float dtype, any head dim, grouped heads, key masks.

The operator has these problems, for which this kernel has workarounds:

- If the last dim of an input is not contiguous, the operator reads out of bounds, without an error.
  :func:`readable` copies such inputs.
- For a row whose keys are all masked, it returns LSE 0. :func:`~ring_backends.kernels.tile.blank_rows` sets −inf.
- A NaN or inf spreads to rows and keys that do not see it (0 × NaN). In fp16 and bf16, some of these rows have a finite
  output, but not a finite LSE. If a tile has fewer keys than a vector register has elements (16 with AVX-512), output
  and LSE of a NaN row are 0. Tiles with a NaN or inf are computed by :mod:`ring_backends.kernels.blockwise`.
- On x86 CPUs without instructions for bf16 or fp16, its backward is several times slower than in fp32.
  :func:`backward_dtype` then chooses fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ring_backends.kernels import blockwise
from ring_backends.kernels.per_tile import PerTileKernel
from ring_backends.kernels.tile import TileInputs, blank_rows, expand_heads, lse_for_backward
from ring_backends.torch_internals import has_values

_FEW_KEYS = 16
_HALF_INSTRUCTIONS = {torch.bfloat16: ("avx512_bf16", "amx_bf16"), torch.float16: ("avx512_fp16", "amx_fp16")}


class AtenCpuFlashKernel(PerTileKernel):
    """``aten::_scaled_dot_product_flash_attention_for_cpu`` and its backward."""

    name = "aten_cpu_flash"
    device_types = ("cpu",)
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    operators = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward")
    prefers_contiguous = True

    def forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        if tile.key.shape[2] < _FEW_KEYS and not all_finite(tile.query, tile.key):
            return blockwise.forward(tile)
        query, key, value = readable(tile.tensors, tile.query.dtype)
        # Unlike torch.ops.aten, torch's own function does not box its arguments. There is none for the backward.
        out, lse = torch._scaled_dot_product_flash_attention_for_cpu(
            query,
            key,
            value,
            0.0,
            tile.is_causal,
            attn_mask=None if tile.key_mask is None else key_bias(tile.key_mask, tile.query),
            scale=tile.scale,
        )
        if not (all_finite(out) if out.dtype.itemsize >= 4 else all_finite(out, lse)):
            return blockwise.forward(tile)
        return blank_rows(out, lse, tile)

    def backward(self, tile: TileInputs, grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inputs = grad_out, *tile.tensors, out
        if tile.key.shape[2] < _FEW_KEYS and not all_finite(*inputs):
            return blockwise.backward(tile, grad_out, out, lse)
        dtype = backward_dtype(tile.query.dtype)
        converted = readable(inputs, dtype)
        if tile.key_mask is not None:  # without one, every row sees a key
            lse = lse_for_backward(lse)
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *converted,
            lse,
            0.0,
            tile.is_causal,
            attn_mask=None if tile.key_mask is None else key_bias(tile.key_mask, converted[1]),
            scale=tile.scale,
        )
        return grads if all_finite(*grads) else blockwise.backward(tile, grad_out, out, lse)


def backward_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the operator's backward computes tiles of ``dtype``.

    On an x86 CPU without instructions for bf16 or fp16, the backward of torch 2.13 takes several times as long in that
    dtype as in fp32: 7 times in bf16 with AVX2.
    """
    instructions = _HALF_INSTRUCTIONS.get(dtype)
    if instructions is None:
        return dtype
    cpu = torch.cpu.get_capabilities()
    if cpu.get("architecture") != "x86_64" or any(cpu.get(name) for name in instructions):
        return dtype
    return torch.float32


def readable(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The tensors in ``dtype``, with a last dim of stride 1: copies of those that are otherwise."""
    # contiguous() would keep the stride of a last dim of size 1.
    return [
        x if x.dtype == dtype and x.stride(-1) == 1 else x.to(dtype, copy=True, memory_format=torch.contiguous_format)
        for x in tensors
    ]


def key_bias(key_mask: Tensor, query: Tensor) -> Tensor:
    """Convert the mask [B, Hk, Sk] to a bias [B, Hq, 1, Sk], since the operator does not support bool masks."""
    mask = expand_heads(key_mask, query.shape[1]).unsqueeze(2)
    return query.new_zeros(mask.shape).masked_fill_(mask, -torch.inf)


def all_finite(*tensors: Tensor) -> bool:
    """Whether no element is NaN or infinite. The tensors are summed, so a sum that overflows counts as infinite."""
    if not has_values(tensors[0]):
        return True
    total = 0.0
    for x in tensors:
        # Sums of fp16 overflow. With another dtype than its own, torch copies a tensor before it sums it.
        total += (x.sum(dtype=torch.float32) if x.dtype == torch.float16 else x.sum()).item()
    return math.isfinite(total)
