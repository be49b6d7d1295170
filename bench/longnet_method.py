"""Dilated attention as LongNet describes it (arXiv 2307.02486, equations 5 to 10), with a fused kernel per branch.

Each branch copies its rows of Q, K and V, attends, and scatters out and LSE into tensors of the full size. A softmax of
the branches' LSEs weights the outputs. As in LongNet, the weights have no gradient, so only the forward is that of
``dilated_attention``. Every segment length divides the sequence, and is a multiple of its dilation rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ring_backends.kernels import Kernel, KernelInputs, TileInputs, select_kernel


def longnet_method(
    query: Tensor, key: Tensor, value: Tensor, branches: Sequence[tuple[int, int]], *, is_causal: bool
) -> Tensor:
    """Attend with offset ``head % rate``. Tensors are [batch, seq, heads, head_dim].

    Raises:
        ValueError: a segment length does not divide the sequence, or a rate does not divide its segment length.
    """
    inputs = KernelInputs(query.device, query.dtype, query.shape[3])
    kernel = select_kernel("auto", inputs)
    repeats = query.shape[2] // key.shape[2]
    key, value = (x.repeat_interleave(repeats, dim=2) for x in (key, value))  # a head's rows depend on its offset
    outs, lses = [], []
    for length, rate in branches:
        if query.shape[1] % length or length % rate:
            raise ValueError(
                f"branches: ({length}, {rate}) does not divide {query.shape[1]} tokens evenly; use a segment length "
                "that divides the sequence and is a multiple of its rate."
            )
        rows = [_rows(x, length, rate).contiguous().transpose(2, 3).flatten(0, 1) for x in (query, key, value)]
        out, lse = _Attend.apply(kernel, is_causal, *rows)  # type: ignore[no-untyped-call]
        outs.append(_scattered(out, query, length, rate, 0.0))
        lses.append(_scattered(lse.unsqueeze(-1), query, length, rate, -torch.inf))
    with torch.no_grad():
        weights = torch.stack(lses).softmax(0).nan_to_num(0.0).to(query.dtype)
    return sum((out * weight for out, weight in zip(outs, weights, strict=True)), torch.zeros_like(query))


def _rows(tensor: Tensor, length: int, rate: int) -> Tensor:
    """The rows of each head, as a view: [batch, segments, rows, heads, …]. Head h has offset h % rate."""
    heads = tensor.shape[2]
    segments = tensor.unflatten(1, (-1, length // rate, rate))  # [batch, segments, rows, phase, heads, …]
    if heads <= rate:
        return segments[:, :, :, :heads].diagonal(0, 3, 4).movedim(-1, 3)
    if heads % rate:
        raise ValueError(f"{heads} heads: must be a multiple of the rate {rate}, or fewer; use another rate.")
    grouped = segments.unflatten(4, (-1, rate)).diagonal(0, 3, 5)  # [batch, segments, rows, groups, …, phase]
    return grouped.movedim(-1, 4).flatten(3, 4)


def _scattered(values: Tensor, query: Tensor, length: int, rate: int, fill: float) -> Tensor:
    """Put values [batch * segments, heads, rows, …] into a tensor [batch, seq, heads, …] that is ``fill`` elsewhere."""
    full = values.new_full((*query.shape[:3], values.shape[-1]), fill)
    segments = query.shape[1] // length
    by_segment = values.transpose(1, 2).unflatten(0, (-1, segments))
    heads = query.shape[2]
    view = full.unflatten(1, (-1, length // rate, rate))
    if heads <= rate:
        view[:, :, :, :heads].diagonal(0, 3, 4).copy_(by_segment.movedim(3, -1))
    else:
        grouped = view.unflatten(4, (-1, rate)).diagonal(0, 3, 5)
        grouped.copy_(by_segment.unflatten(3, (-1, rate)).movedim(4, -1))
    return full


class _Attend(torch.autograd.Function):
    """One kernel call with its own softmax. The LSE has no gradient."""

    @staticmethod
    def forward(ctx: Any, kernel: Kernel, is_causal: bool, query: Tensor, key: Tensor, value: Tensor) -> Any:
        ctx.kernel, ctx.options = kernel, (query.shape[-1] ** -0.5, is_causal)
        out, lse = kernel.forward(TileInputs(query, key, value, *ctx.options))
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        grads = ctx.kernel.backward(TileInputs(query, key, value, *ctx.options), grad_out, out, lse)
        return None, None, *(grad.to(query.dtype) for grad in grads)
