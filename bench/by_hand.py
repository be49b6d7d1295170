"""Dilated attention over two branches on one device, written by hand: views, two kernel calls, a merge."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class TwoBranches(torch.autograd.Function):
    """Attend causally through a branch of rate 1 and one of rate r over the whole sequence, for r heads and batch 1.

    Head j has the offset j. Query, key and value are [1, seq, r, head_dim].
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, length: int) -> Tensor:
        out, lse = attend(query, key, value, length)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.length = length
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        tensors = (grad_out, query, key, value, out)
        whole = [segments(x, ctx.length) for x in tensors]
        grads = _BACKWARD(*whole, segments(lse, ctx.length), 0.0, True)
        grads = [x.transpose(1, 2).reshape(query.shape) for x in grads]
        dilated = [every(x) for x in tensors]
        for grad, of_dilated in zip(grads, _BACKWARD(*dilated, every(lse), 0.0, True), strict=True):
            every(grad).add_(of_dilated)
        return *grads, None


def attend(query: Tensor, key: Tensor, value: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """out and LSE, [1, seq, r, …]."""
    out, lse = _FORWARD(*(segments(x, length) for x in (query, key, value)), 0.0, True)
    out, lse = out.transpose(1, 2).reshape(query.shape), lse.transpose(1, 2).reshape(query.shape[:3])
    dilated_out, dilated_lse = _FORWARD(*(every(x) for x in (query, key, value)), 0.0, True)
    merged = torch.logaddexp(every(lse), dilated_lse)
    every(out).lerp_(dilated_out, (dilated_lse - merged).exp_().unsqueeze(-1))
    every(lse).copy_(merged)
    return out, lse


def segments(x: Tensor, length: int) -> Tensor:
    """[1, seq, heads, …] as [segments, heads, length, …]."""
    return x.view(-1, length, *x.shape[2:]).transpose(1, 2)


def every(x: Tensor) -> Tensor:
    """Every r-th row from row j on of each head j, [1, r heads, rows, …] of [1, seq, r heads, …]."""
    rows = x.unflatten(1, (-1, x.shape[2])).diagonal(0, 2, 3)  # [1, rows, …, heads]
    return rows.movedim(-1, 1)
