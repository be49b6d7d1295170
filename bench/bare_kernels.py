"""A baseline: only the calls of the attention kernel, on contiguous rows.

There is one call per branch, over all segments and heads. Each call has as many rows as the dilated branch. The
baseline does not gather rows, merge results or write them. The overhead of dilation is the additional time that dilated
attention needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from case import Case
from torch import Tensor

from ring_backends.kernels import KernelInputs, TileInputs, select_kernel


@dataclass(frozen=True)
class BareKernels:
    """One tile per branch. A tile is query, key, value and grad_out: [segments, heads, rows, head_dim] each."""

    tiles: list[tuple[Tensor, Tensor, Tensor, Tensor]]
    operator: Callable[..., tuple[Tensor, Tensor]]
    operator_backward: Callable[..., tuple[Tensor, Tensor, Tensor]]

    @classmethod
    def of(cls, case: Case, dtype: torch.dtype, device: torch.device) -> BareKernels:
        """Make the tiles of ``case``, with normally distributed values.

        Raises:
            ValueError: a segment length does not divide the sequence length, or a dilation rate does not divide its
                segment length. The tiles of such a branch would differ in size.
        """
        tiles = []
        for index, (_, rate) in enumerate(case.branches):
            length = case.pattern.segment_length(index, case.seq_len)
            if case.seq_len % length or length % rate:
                raise ValueError(
                    f"branches: ({length}, {rate}) cuts {case.seq_len} tokens into unequal tiles; use a segment "
                    "length that divides the sequence and is a multiple of its rate."
                )
            tiles.append(
                tuple(
                    torch.randn(case.seq_len // length, heads, length // rate, case.head_dim, device=device).to(dtype)
                    for heads in (case.num_heads, case.kv_heads, case.kv_heads, case.num_heads)
                )
            )
        return cls(tiles, *_operators(case, dtype, device))

    def forward(self) -> list[tuple[Tensor, Tensor]]:
        return [self.operator(query, key, value) for query, key, value, _ in self.tiles]

    def backward(self, results: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor, Tensor]]:
        return [
            self.operator_backward(grad_out, query, key, value, out, lse)
            for (query, key, value, grad_out), (out, lse) in zip(self.tiles, results, strict=True)
        ]


def _operators(case: Case, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    """Return the functions for forward and backward: ATen's operators on the CPU, else those of the selected kernel."""
    scale = case.head_dim**-0.5
    if device.type == "cpu":
        aten = torch.ops.aten
        return (
            lambda *tile: aten._scaled_dot_product_flash_attention_for_cpu(*tile, 0.0, case.causal, scale=scale),
            lambda *tile: aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *tile, 0.0, case.causal, scale=scale
            ),
        )
    kernel = select_kernel("auto", KernelInputs(device, dtype, case.head_dim))

    def forward(*rows: Tensor) -> tuple[Tensor, Tensor]:
        return kernel.forward(TileInputs(*rows, scale, case.causal))

    def backward(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *results: Tensor) -> Any:
        return kernel.backward(TileInputs(query, key, value, scale, case.causal), grad_out, *results)

    return forward, backward
