"""Activation checkpointing: gradients stay the same, and no hop is repeated if the policy keeps attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from ring_backends.activation_checkpointing import attention_operators, keep_attention, remember_attention
from ring_backends.schedule.layout import LayoutKind
from ring_backends.testing.calls import Results, case_of_ring, check_results, local_call, new_attention
from ring_backends.testing.capabilities import AdapterSuite, core
from ring_backends.testing.compiled import Graphs
from ring_backends.testing.rings import FOUR, RingSpec, every_size_and_layout, ring_here
from ring_backends.testing.strategies import AttentionCase
from ring_backends.testing.world import World

_CASE = AttentionCase(
    seq_len=41,
    segment_lengths=(16, 41),
    dilation_rates=(1, 2),
    batch=2,
    num_heads=4,
    num_kv_heads=2,
    is_causal=True,
    masked="random",
    dtype=torch.float64,
)

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


def _kept_to_the_end(region: Region, *inputs: Tensor) -> Any:
    with set_checkpoint_early_stop(False):
        return _kept(region, *inputs)


RECOMPUTING: dict[str, Run] = {
    "non-reentrant": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
}
KEEPING: dict[str, Run] = {
    "kept": _kept,
    "remembered": lambda region, *inputs: checkpoint(remember_attention(region), *inputs, use_reentrant=True),
}
ALSO_KEEPING: dict[str, Run] = {
    "kept to the end": _kept_to_the_end,
    "own policy": partial(checkpoint, use_reentrant=False, context_fn=keep_attention_and_sines),
    "remembered, non-reentrant": lambda region, *inputs: checkpoint(
        remember_attention(region), *inputs, use_reentrant=False
    ),
}
WAYS: dict[str, Run] = {"plain": lambda region, *inputs: region(*inputs), **RECOMPUTING, **KEEPING, **ALSO_KEEPING}


@dataclass(frozen=True)
class Checkpointed:
    """The results of a region, and (messages, bytes) sent by its forward and by forward and backward together."""

    results: Results
    forward: tuple[int, int]
    whole: tuple[int, int]


def checkpointed(adapter: str, rings: RingSpec, layout: LayoutKind, how: str) -> Checkpointed | None:
    """Run a checkpointed region with two calls of attention."""
    ring, place = ring_here(adapter, rings), rings.place(dist.get_rank())
    if ring is None or place is None:
        return None
    ring = ring.with_layout(layout)
    case = case_of_ring(_CASE, place[0])
    call = local_call(adapter, ring, case, attention=new_attention(adapter, ring, case))

    def region(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        first = call.attention(query.sin(), key, value, **call.options)
        out, lse = call.attention(first.sin(), key, value, return_lse=True, **call.options)
        return out + first, lse

    inputs = [call.query, call.key, call.value]
    ring.traffic.reset()
    out, lse = WAYS[how](region, *inputs)
    forward = ring.traffic.messages, ring.traffic.bytes
    out.backward(call.grad_out)
    results = Results(out.detach(), lse.detach(), *(tensor.grad for tensor in inputs))
    return Checkpointed(results, forward, (ring.traffic.messages, ring.traffic.bytes))


def regions_in_any_order(adapter: str, how: str) -> tuple[list[Tensor], list[Tensor], int, int]:
    """Run three regions, and their backwards in another order, with and without checkpointing.

    Returns:
        Gradients with and without checkpointing; messages with and without checkpointing.
    """
    ring = ring_here(adapter, FOUR)
    assert ring is not None
    call = local_call(adapter, ring, _CASE)
    found = []
    for way in ("plain", how):
        ring.traffic.reset()
        inputs = [[x.detach().clone().requires_grad_() for x in (call.query, call.key, call.value)] for _ in range(3)]
        outs = [
            WAYS[way](partial(call.attention, **call.options), query * (index + 1), key, value)
            for index, (query, key, value) in enumerate(inputs)
        ]
        for index in (1, 2, 0):
            outs[index].backward(call.grad_out)
        found.append(([x.grad for tensors in inputs for x in tensors], ring.traffic.messages))
    (wanted, plain), (got, kept) = found
    return got, wanted, kept, plain  # type: ignore[return-value]


def nested(adapter: str) -> tuple[list[Tensor], list[Tensor], int, int]:
    """Run a checkpointed region within another one.

    Returns:
        Gradients with and without checkpointing; messages with and without checkpointing.
    """
    ring = ring_here(adapter, FOUR)
    assert ring is not None
    call = local_call(adapter, ring, _CASE)
    inputs = [call.query, call.key, call.value]
    region = partial(call.attention, **call.options)
    ring.traffic.reset()
    wanted = list(torch.autograd.grad(region(*inputs), inputs, call.grad_out))
    plain = ring.traffic.messages
    ring.traffic.reset()
    got = list(torch.autograd.grad(_kept(partial(_kept, region), *inputs), inputs, call.grad_out))
    return got, wanted, ring.traffic.messages, plain


def backward_again(adapter: str, how: str) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """The gradients after the first backward of a region, and after the second."""
    ring = ring_here(adapter, FOUR)
    assert ring is not None
    call = local_call(adapter, ring, _CASE)
    inputs = [call.query, call.key, call.value]
    out = WAYS[how](partial(call.attention, **call.options), *inputs)
    out.backward(call.grad_out, retain_graph=True)
    once = [None if x.grad is None else x.grad.clone() for x in inputs]
    out.backward(call.grad_out)
    return once, [x.grad for x in inputs]


def compiled(adapter: str, how: str) -> tuple[list[Tensor], list[Tensor], list[Any], int, int, int]:
    """Compare a compiled region with an eager one.

    Returns:
        Gradients of the compiled and of the eager region; the operators of the graphs; messages of the compiled
        region, of the eager forward, and of the eager forward and backward.
    """
    torch.compiler.reset()
    ring = ring_here(adapter, FOUR)
    assert ring is not None
    call, graphs = local_call(adapter, ring, _CASE), Graphs()
    inputs = [call.query, call.key, call.value]

    def region(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return call.attention(query.sin(), key, value, **call.options).sin()

    ring.traffic.reset()
    out = region(*inputs)
    forward = ring.traffic.messages
    wanted = list(torch.autograd.grad(out, inputs, call.grad_out))
    plain = ring.traffic.messages
    ring.traffic.reset()
    checkpointed_region = torch.compile(partial(WAYS[how], region), fullgraph=True, backend=graphs.backend)
    got = list(torch.autograd.grad(checkpointed_region(*inputs), inputs, call.grad_out))
    return got, wanted, graphs.operators(), ring.traffic.messages, forward, plain


def _check_close(got: list[Tensor], wanted: list[Tensor]) -> None:
    for one, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, right, rtol=0, atol=1e-12)


def check_checkpointed(world: World, adapter: str, rings: RingSpec, layout: LayoutKind, how: str) -> None:
    """Recomputation repeats the messages of the forward. Kept attention sends as much as without checkpointing."""
    plain = world.run(checkpointed, adapter, rings, layout, "plain")
    again = world.run(checkpointed, adapter, rings, layout, how)
    for rank in (rank for ranks in rings.rings for rank in ranks):
        check_results(again[rank].results, plain[rank].results, 1e-13, f"rank {rank}")
        wanted = plain[rank].whole
        if how in RECOMPUTING:
            wanted = wanted[0] + plain[rank].forward[0], wanted[1] + plain[rank].forward[1]
        assert again[rank].whole == wanted, f"rank {rank}"
        assert again[rank].forward == plain[rank].forward
    sent = sum(plain[rank].forward[0] for ranks in rings.rings for rank in ranks)
    assert (sent > 0) == (rings.size > 1)


@core
class ActivationCheckpointTests(AdapterSuite):
    @pytest.mark.parametrize("how", [*RECOMPUTING, *KEEPING])
    @every_size_and_layout
    def test_activation_checkpointing(self, world: World, rings: RingSpec, layout: LayoutKind, how: str) -> None:
        check_checkpointed(world, self.adapter, rings, layout, how)

    @pytest.mark.parametrize("how", ALSO_KEEPING)
    def test_other_ways_to_keep_attention(self, world: World, how: str) -> None:
        check_checkpointed(world, self.adapter, FOUR, "contiguous", how)

    @pytest.mark.parametrize("how", ["kept", "remembered"])
    def test_kept_attention_with_backwards_in_any_order(self, world: World, how: str) -> None:
        for got, wanted, kept, plain in world.run(regions_in_any_order, self.adapter, how):
            _check_close(got, wanted)
            assert kept == plain

    def test_kept_attention_in_a_checkpoint_within_another(self, world: World) -> None:
        """The recomputation of the outer region does not consume the results that the inner region keeps."""
        for got, wanted, kept, plain in world.run(nested, self.adapter):
            _check_close(got, wanted)
            assert kept == plain

    def test_kept_attention_is_for_one_backward(self, world: World) -> None:
        for once, twice in world.run(backward_again, self.adapter, "remembered"):
            for one, both in zip(once, twice, strict=True):
                assert one is not None
                torch.testing.assert_close(both, 2 * one, rtol=0, atol=1e-12)
        for outcome in world.run_collect(backward_again, self.adapter, "kept"):
            assert outcome.raised(RuntimeError), outcome
            assert "backward" in outcome.message, outcome

    @pytest.mark.parametrize("how", ["non-reentrant", "kept"])
    def test_a_compiled_region_keeps_attention(self, world: World, how: str) -> None:
        times = 0 if how == "kept" else 1
        for got, wanted, operators, messages, forward_messages, plain in world.run(compiled, self.adapter, how):
            _check_close(got, wanted)
            forward, backward = operators
            assert (forward["ring_forward"], backward["ring_forward"]) == (1, times)
            assert messages == plain + times * forward_messages
