"""Computes a step, forward and backward: kernels, gathering and scattering of rows, merging, documents, dropout.

Every kernel implements the same interface. A kernel itself gives the reasons why it cannot run a call. This package
does not choose the tiles of a rank, and does not communicate.
"""

from __future__ import annotations

from ring_backends.kernels.base import Kernel, KernelInputs
from ring_backends.kernels.dtype import auto_dtype, resolve_dtype
from ring_backends.kernels.registry import available_kernels, explain_choice, kernel_names, kernels, select_kernel
from ring_backends.kernels.tile import PairRule, TileInputs

__all__ = [
    "Kernel",
    "KernelInputs",
    "PairRule",
    "TileInputs",
    "auto_dtype",
    "available_kernels",
    "explain_choice",
    "kernel_names",
    "kernels",
    "resolve_dtype",
    "select_kernel",
]
