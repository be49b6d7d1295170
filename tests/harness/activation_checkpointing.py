"""Activation checkpointing: gradients stay the same, and no hop is repeated if the policy keeps attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ring_backends.activation_checkpointing import attention_operators, keep_attention, remember_attention
from ring_backends.schedule.layout import LayoutKind
from ring_backends.testing.calls import LocalCall
from ring_backends.testing.capabilities import AdapterSuite, core
from ring_backends.testing.correctness import CASE
from ring_backends.testing.failing_calls import ending
from ring_backends.testing.marks import matrix_but
from ring_backends.testing.rings import RingSpec, every_size_and_layout, ring_here
from ring_backends.testing.world import on_every_rank

Region = Callable[..., Any]
Run = Callable[..., Any]
"""(region, *inputs) -> the outputs of the region, with or without checkpointing."""


def keep_attention_and_sines() -> Any:
    """A policy that saves the results of attention and of ``sin``."""

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = operator in attention_operators() or operator == torch.ops.aten.sin.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


_kept = partial(checkpoint, use_reentrant=False, context_fn=keep_attention)


RECOMPUTING: dict[str, Run] = {
    "non-reentrant": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
}
KEEPING: dict[str, Run] = {
    "kept": _kept,
    "remembered": lambda region, *inputs: checkpoint(remember_attention(region), *inputs, use_reentrant=True),
}
ALSO_KEEPING: dict[str, Run] = {
    "own policy": partial(checkpoint, use_reentrant=False, context_fn=keep_attention_and_sines),
}
WAYS: dict[str, Run] = {"plain": lambda region, *inputs: region(*inputs), **RECOMPUTING, **KEEPING, **ALSO_KEEPING}


Sent = tuple[int, int]
"""Numbers of messages and bytes."""


def run(call: LocalCall, region: Region, way: Run) -> tuple[list[Tensor], Sent, Sent]:
    """The outputs and gradients of a region, and what its forward sent, and forward and backward together."""
    traffic = call.attention.ring.traffic
    traffic.reset()
    for x in call.inputs:
        x.grad = None
    outs = way(region, *call.inputs)
    outs = outs if isinstance(outs, tuple) else (outs,)
    forward = traffic.messages, traffic.bytes
    outs[0].backward(call.grad_out)
    grads = [x.grad for x in call.inputs if x.grad is not None]
    return [*(out.detach() for out in outs), *grads], forward, (traffic.messages, traffic.bytes)


def check(call: LocalCall, region: Region, way: Run, repeats: bool, tolerance: float = 1e-12) -> None:
    """Compare a region with and without checkpointing. If it ``repeats``, backward sends the messages of forward."""
    wanted, forward, whole = run(call, region, WAYS["plain"])
    got, *sent = run(call, region, way)
    torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance)
    if repeats:
        whole = whole[0] + forward[0], whole[1] + forward[1]
    assert sent == [forward, whole], (sent, forward, whole)
    ring = call.attention.ring  # causal attention on contiguous shards: the last of several ranks sends nothing
    assert (forward[0] > 0) == (ring.size > 1) or ring.rank == ring.size - 1 > 0, forward


def check_two_calls(call: LocalCall, how: str, tolerance: float = 1e-13) -> None:
    """Check a region with two calls of attention."""

    def region(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        first = call.attention(query.sin(), key, value, **call.options)
        out, lse = call.attention(first.sin(), key, value, return_lse=True, **call.options)
        return out + first, lse

    check(call, region, WAYS[how], how in RECOMPUTING, tolerance)


@core
class ActivationCheckpointTests(AdapterSuite):
    @pytest.mark.parametrize("how", [*RECOMPUTING, *KEEPING])
    @every_size_and_layout
    @on_every_rank
    def test_activation_checkpointing(self, rings: RingSpec, layout: LayoutKind, how: str) -> None:
        if ring_here(self.adapter, rings) is not None:
            check_two_calls(self.call(CASE, rings, layout), how)

    @pytest.mark.parametrize("how", matrix_but("kept", of=(*RECOMPUTING, *KEEPING)))
    @on_every_rank
    def test_gradients_in_bf16_on_the_wire_of_groups(self, how: str) -> None:
        """Results are bitwise equal. Exchanges are repeated as hops are."""
        case = replace(CASE, dtype=torch.bfloat16, ulysses_size=2)
        check_two_calls(self.call(case, grad_wire_dtype=torch.bfloat16), how, tolerance=0)

    @pytest.mark.parametrize("how", ALSO_KEEPING)
    @on_every_rank
    def test_other_ways_to_keep_attention(self, how: str) -> None:
        check_two_calls(self.call(CASE), how)

    @on_every_rank
    def test_kept_attention_in_a_checkpoint_within_another(self) -> None:
        """The recomputation of the outer region does not consume the results that the inner region keeps."""
        call = self.call(CASE)
        region = partial(call.attention, **call.options)
        check(call, region, lambda region, *inputs: _kept(partial(_kept, region), *inputs), repeats=False)

    @pytest.mark.parametrize("how", ["kept", "remembered"])
    @on_every_rank
    def test_kept_attention_is_for_one_backward(self, how: str) -> None:
        call = self.call(CASE)
        out = WAYS[how](partial(call.attention, **call.options), *call.inputs)
        out.backward(call.grad_out, retain_graph=True)
        twice = [2 * x.grad for x in call.inputs if x.grad is not None]
        again = ending(lambda: out.backward(call.grad_out))
        if how == "kept":
            again.check(RuntimeError, "backward")
        else:
            torch.testing.assert_close([x.grad for x in call.inputs], twice, rtol=0, atol=1e-12)
