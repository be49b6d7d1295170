"""Activation checkpointing: gradients stay the same, and no hop is repeated if the policy keeps attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from ring_backends.activation_checkpointing import attention_operators, keep_attention, remember_attention
from ring_backends.schedule.layout import LayoutKind
from ring_backends.testing.calls import Results, call_here, check_results
from ring_backends.testing.capabilities import AdapterSuite, core
from ring_backends.testing.compiled import Graphs
from ring_backends.testing.gradients import CASE
from ring_backends.testing.rings import FOUR, RingSpec, every_size_and_layout, ring_here
from ring_backends.testing.world import World

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
    if ring_here(adapter, rings) is None:
        return None
    call = call_here(adapter, CASE, rings, layout)
    traffic = call.attention.ring.traffic

    def region(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        first = call.attention(query.sin(), key, value, **call.options)
        out, lse = call.attention(first.sin(), key, value, return_lse=True, **call.options)
        return out + first, lse

    traffic.reset()
    out, lse = WAYS[how](region, *call.inputs)
    forward = traffic.messages, traffic.bytes
    out.backward(call.grad_out)
    results = Results(out.detach(), lse.detach(), *(tensor.grad for tensor in call.inputs))
    return Checkpointed(results, forward, (traffic.messages, traffic.bytes))


@dataclass(frozen=True)
class Compared:
    """Gradients and sent messages of regions with and without checkpointing."""

    gradients: list[Tensor]
    messages: int
    plain_gradients: list[Tensor]
    plain_messages: int


def regions_in_any_order(adapter: str, how: str) -> Compared:
    """Run three regions, and their backwards in another order, with and without checkpointing."""
    call = call_here(adapter, CASE)
    traffic = call.attention.ring.traffic
    found: list[Any] = []
    for way in (how, "plain"):
        traffic.reset()
        inputs = [[x.detach().clone().requires_grad_() for x in call.inputs] for _ in range(3)]
        outs = [
            WAYS[way](partial(call.attention, **call.options), query * (index + 1), key, value)
            for index, (query, key, value) in enumerate(inputs)
        ]
        for index in (1, 2, 0):
            outs[index].backward(call.grad_out)
        found += [x.grad for tensors in inputs for x in tensors], traffic.messages
    return Compared(*found)


def nested(adapter: str) -> Compared:
    """Run a region with a checkpoint within another one, and without checkpointing."""
    call = call_here(adapter, CASE)
    traffic, region = call.attention.ring.traffic, partial(call.attention, **call.options)
    found: list[Any] = []
    for run in (partial(_kept, partial(_kept, region)), region):
        traffic.reset()
        found += call.gradients(run(*call.inputs)), traffic.messages
    return Compared(*found)


def backward_again(adapter: str, how: str) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """The gradients after the first backward of a region, and after the second."""
    call = call_here(adapter, CASE)
    out = WAYS[how](partial(call.attention, **call.options), *call.inputs)
    out.backward(call.grad_out, retain_graph=True)
    once = [None if x.grad is None else x.grad.clone() for x in call.inputs]
    out.backward(call.grad_out)
    return once, [x.grad for x in call.inputs]


def compiled(adapter: str, how: str) -> tuple[Compared, list[Any], int]:
    """Compare a compiled region with an eager one.

    Returns:
        The comparison, the operators of the graphs, and the messages of the eager forward.
    """
    torch.compiler.reset()
    call, graphs = call_here(adapter, CASE), Graphs()
    traffic = call.attention.ring.traffic

    def region(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return call.attention(query.sin(), key, value, **call.options).sin()

    traffic.reset()
    out = region(*call.inputs)
    forward = traffic.messages
    plain = call.gradients(out), traffic.messages
    traffic.reset()
    checkpointed_region = torch.compile(partial(WAYS[how], region), fullgraph=True, backend=graphs.backend)
    grads = call.gradients(checkpointed_region(*call.inputs))
    return Compared(grads, traffic.messages, *plain), graphs.operators(), forward


def _check(compared: Compared, more_messages: int = 0) -> None:
    torch.testing.assert_close(compared.gradients, compared.plain_gradients, rtol=0, atol=1e-12)
    assert compared.messages == compared.plain_messages + more_messages


def check_checkpointed(world: World, adapter: str, rings: RingSpec, layout: LayoutKind, how: str) -> None:
    """Recomputation repeats the messages of the forward. Kept attention sends as much as without checkpointing."""
    plain = world.run(checkpointed, adapter, rings, layout, "plain")
    again = world.run(checkpointed, adapter, rings, layout, how)
    for rank, (got, wanted) in enumerate(zip(again, plain, strict=True)):
        if rings.place(rank) is None:
            continue
        check_results(got.results, wanted.results, 1e-13, f"rank {rank}")
        times = 1 if how in RECOMPUTING else 0
        sent = tuple(both + times * of_forward for both, of_forward in zip(wanted.whole, wanted.forward, strict=True))
        assert got.whole == sent, f"rank {rank}"
        assert got.forward == wanted.forward
    assert any(wanted.forward[0] for wanted in plain if wanted is not None) == (rings.size > 1)


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
        for compared in world.run(regions_in_any_order, self.adapter, how):
            _check(compared)

    def test_kept_attention_in_a_checkpoint_within_another(self, world: World) -> None:
        """The recomputation of the outer region does not consume the results that the inner region keeps."""
        for compared in world.run(nested, self.adapter):
            _check(compared)

    def test_kept_attention_is_for_one_backward(self, world: World) -> None:
        for once, twice in world.run(backward_again, self.adapter, "remembered"):
            torch.testing.assert_close(twice, [2 * x for x in once], rtol=0, atol=1e-12)
        for outcome in world.run_collect(backward_again, self.adapter, "kept"):
            outcome.check(RuntimeError, "backward")

    @pytest.mark.parametrize("how", ["non-reentrant", "kept"])
    def test_a_compiled_region_keeps_attention(self, world: World, how: str) -> None:
        times = 0 if how == "kept" else 1
        for compared, (forward, backward), forward_messages in world.run(compiled, self.adapter, how):
            _check(compared, times * forward_messages)
            assert (forward["ring_forward"], backward["ring_forward"]) == (1, times)
