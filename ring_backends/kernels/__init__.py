"""Block-attention kernels: one interface, several implementations, chosen by what each says it can run."""

from __future__ import annotations

from ring_backends.kernels.base import Kernel, KernelInputs, PairRule
from ring_backends.kernels.dtype import auto_dtype, resolve_dtype
from ring_backends.kernels.registry import available_kernels, kernel_names, kernels, select_kernel

__all__ = [
    "Kernel",
    "KernelInputs",
    "PairRule",
    "auto_dtype",
    "available_kernels",
    "kernel_names",
    "kernels",
    "resolve_dtype",
    "select_kernel",
]
