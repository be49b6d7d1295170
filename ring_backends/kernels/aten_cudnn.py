"""The fused attention of cuDNN in CUDA builds of torch."""

from __future__ import annotations

import os
from functools import cache

import torch
from torch import Tensor

from ring_backends.kernels.aten_cuda import (
    MAX_ENTRIES,
    AtenCudaFlashKernel,
    AtenCudaPartsKernel,
    aligned,
    unused_dropout_state,
    with_strides,
)
from ring_backends.kernels.base import Kernel, KernelInputs
from ring_backends.kernels.math import MathKernel
from ring_backends.kernels.operators import replaced_flash
from ring_backends.torch_internals import has_values

_lse_dims: dict[tuple[torch.device, bool], int] = {}


class AtenCudaCudnnKernel(AtenCudaPartsKernel):
    """``aten::_scaled_dot_product_cudnn_attention``. It supports grouped heads, and rows of any strides.

    cuDNN refuses tiles of a single key, and on some GPUs those of a single query. Another kernel runs them. torch
    caches cuDNN's plans by the strides of query, key and value only, so out and grad_out always get the layout of the
    query. From torch 2.14 on, the backward may check that gradients, which have no gaps, have the strides of query, key
    and value. So rows with gaps are copied there.

    No GPU has run it with a V other than D yet: the tests replace the operator by a model of MHA.cpp.
    """

    name = "aten_cuda_cudnn"
    reads_strided_rows = True
    operators = ("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward")
    unverified = f"{AtenCudaPartsKernel.unverified}; no GPU has run it with a value_dim other than head_dim"
    takes_value_dim = True
    max_head_dim = 128
    latent_dims = (192, 128)
    """D and V of multi-head latent attention, which cuDNN supports on some GPUs."""
    min_version = 91501
    """cuDNN 9.15.1. Older versions may give wrong results for lengths not divisible by 128 (torch issue 169849)."""

    def device_reasons(self, inputs: KernelInputs, capability: tuple[int, int]) -> list[str]:
        reasons = super().device_reasons(inputs, capability)
        if inputs.dims == self.latent_dims and capability not in ((9, 0), (10, 0), (10, 3)):
            reasons.append(f"head_dim must be at most {self.max_head_dim} on this GPU")
        version = torch.backends.cudnn.version()
        if version is None or version < self.min_version:
            reasons.append(f"it needs cuDNN 9.15.1 ({self.min_version}), this is {version}")
        if torch.are_deterministic_algorithms_enabled():
            reasons.append("its backward is not deterministic, and torch.use_deterministic_algorithms is on")
        if os.environ.get("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "0") not in ("", "0"):
            reasons.append("it does not support TORCH_CUDNN_SDPA_AVOID_RECOMPILE, with which the LSE has other strides")
        return reasons

    def _dims_reason(self, inputs: KernelInputs) -> str | None:
        has_own_plan = inputs.dims == self.latent_dims
        if has_own_plan or all(dim % 8 == 0 and dim <= self.max_head_dim for dim in inputs.dims):
            return None
        return f"head_dim and value_dim must be multiples of 8 and at most {self.max_head_dim}, or 192 and 128"

    def _kernel_instead(self, query: Tensor, key: Tensor, value: Tensor) -> Kernel | None:
        if min(query.shape[2], key.shape[2]) > 1:
            return None
        return _kernel_of_single_rows(query.device, query.dtype, query.shape[3], value.shape[3], replaced_flash())

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float
    ) -> tuple[Tensor, ...]:
        out, lse = self._run_forward(query, key, value, is_causal, scale)
        return out, lse.reshape(query.shape[:-1])

    def _differentiate(self, *tensors: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, ...]:
        grad_out, query, key, value, out, lse = tensors
        unused = unused_dropout_state(query)
        query, key, value = map(aligned, (query, key, value))
        if _refuses_gaps(torch.__version__):
            query, key, value = (_in_layout_of(x, x) for x in (query, key, value))
        row_lse = lse.contiguous()
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(  # type: ignore[no-any-return]
            _in_layout_of(query, grad_out),
            query,
            key,
            value,
            _in_layout_of(query, out),
            row_lse.unsqueeze(-1) if self._lse_has_unit_dim(query) else row_lse,
            unused,
            unused,
            None,
            None,
            None,
            query.shape[2],
            key.shape[2],
            0.0,
            is_causal,
            scale=scale,
        )

    def _size_of_backward(self, query: Tensor, key: Tensor) -> tuple[int, int]:
        return MAX_ENTRIES, key.shape[1]

    def _lse_has_unit_dim(self, query: Tensor) -> bool:
        """Whether the operator's LSE is [B, H, S, 1], and not [B, H, S]. This depends on the release of torch."""
        known = query.device, has_values(query)
        if known not in _lse_dims:
            probe = query.new_zeros(1, 1, 64, 64)
            _lse_dims[known] = self._run_forward(probe, probe, probe, False, 1.0)[1].dim()
        return _lse_dims[known] == 4

    def _run_forward(
        self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            aligned(query), aligned(key), aligned(value), None, True, 0.0, is_causal, False, scale=scale
        )
        return out, lse


@cache
def _kernel_of_single_rows(
    device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int, in_place_of_flash: str | None
) -> Kernel:
    """The kernel for tiles of a single query or key, which cuDNN refuses.

    Args:
        in_place_of_flash: ``replaced_flash()``, on which FlashAttention's reasons depend.
    """
    flash = AtenCudaFlashKernel()
    inputs = KernelInputs(device, dtype, head_dim, value_dim=value_dim)
    return MathKernel() if flash.not_supported_reasons(inputs) else flash


@cache
def _refuses_gaps(release: str) -> bool:
    """Whether the backward of a release of torch may refuse rows with gaps. Cached: torch parses what it compares."""
    return release >= "2.14"


def _in_layout_of(query: Tensor, x: Tensor) -> Tensor:
    """Return ``x`` without gaps, its dims in the order of those of ``query`` in memory, copied if needed."""
    strides = torch.empty_like(query, device="meta").stride()
    outer_to_inner = sorted(range(4), key=lambda dim: strides[dim], reverse=True)
    return with_strides(x, torch.empty_permuted(x.shape, outer_to_inner, device="meta").stride())
