"""Gradients that autograd does not compute: of the LSE, and of an out that a rank does not use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ring_backends.testing.reference import reference_attention
from ring_backends.testing.strategies import AttentionCase
from ring_backends.testing.thread_ring import ThreadRing, ThreadRingDilatedAttention, run_in_threads


class NoGradient(torch.autograd.Function):
    """Passes a tensor on. Its backward returns None instead of a gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


@pytest.mark.parametrize("ring_size", [1, 2])
def test_an_absent_gradient_is_zero(ring_size: int) -> None:
    """The last rank's out has no gradient. The rank still takes part in the hops of the backward."""
    case = AttentionCase(seq_len=12, segment_lengths=(4, 12), dilation_rates=(1, 2), dtype=torch.float64)
    *tensors, grad_out, _ = case.tensors()

    def attend(ring: ThreadRing) -> list[Tensor]:
        leaves = [ring.shard(x).detach().requires_grad_() for x in tensors]
        out = ThreadRingDilatedAttention(case.segment_lengths, case.dilation_rates, ring=ring)(*leaves)
        if ring.rank == ring_size - 1:
            out = NoGradient.apply(out)
        return list(torch.autograd.grad(out, leaves, ring.shard(grad_out)))

    leaves = [x.requires_grad_() for x in tensors]
    out, _ = reference_attention(*leaves, **case.options())
    grad_out_of_others = grad_out.clone()
    grad_out_of_others[:, 12 - 12 // ring_size :] = 0
    wanted = torch.autograd.grad(out, leaves, grad_out_of_others)
    for got, right in zip(zip(*run_in_threads(ring_size, attend), strict=True), wanted, strict=True):
        torch.testing.assert_close(torch.cat(got, 1), right, rtol=0, atol=1e-12)
