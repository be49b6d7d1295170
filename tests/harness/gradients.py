"""Gradients: dq, dk and dv each equal the exact derivative, for any gradient of the output."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from torch import Tensor

from ring_backends.schedule.layout import LayoutKind
from ring_backends.testing.calls import (
    FP64_TOLERANCE,
    Results,
    call_here,
    check_exact,
    check_results,
    difference,
    expected,
    whole,
)
from ring_backends.testing.capabilities import AdapterSuite, core
from ring_backends.testing.correctness import EDGE_CASES, examples
from ring_backends.testing.rings import FOUR, RingSpec, every_ring_and_layout, every_size_and_layout
from ring_backends.testing.strategies import AttentionCase, attention_cases
from ring_backends.testing.world import World

CASE = AttentionCase(
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
_NAMES = ("query", "key", "value")


def gradients_in_part(adapter: str, needed: tuple[str, ...]) -> list[Tensor | None]:
    """The ``.grad`` of the three inputs, if only the inputs in ``needed`` require gradients."""
    call = call_here(adapter, CASE, gradients=False)
    for name in needed:
        getattr(call, name).requires_grad_()
    call().backward(call.grad_out)
    return [tensor.grad for tensor in call.inputs]


def two_calls(adapter: str, case: AttentionCase, other: AttentionCase, order: tuple[int, ...]) -> list[Results]:
    """Make two calls, then run backwards. ``order`` has the index of the call for each backward."""
    calls = [call_here(adapter, case), call_here(adapter, other)]
    outs = [call(return_lse=True) for call in calls]
    grads = {index: calls[index].gradients(outs[index][0], retain_graph=True) for index in order}
    return [Results(out.detach(), lse, *grads[index]) for index, (out, lse) in enumerate(outs)]


def accumulated_gradients(adapter: str) -> list[Tensor | None]:
    """Run forward and backward twice on the same tensors. Returns their ``.grad``."""
    call = call_here(adapter, CASE)
    for _ in range(2):
        call().backward(call.grad_out)
    return [tensor.grad for tensor in call.inputs]


def one_tensor_for_all(adapter: str) -> tuple[Tensor, Tensor]:
    """Pass one tensor as query, key and value. Returns its gradient, and the sum of the gradients of three copies."""
    call = call_here(adapter, replace(CASE, num_kv_heads=CASE.num_heads))
    attention, x, options = call.attention, call.query, call.options
    (together,) = torch.autograd.grad(attention(x, x, x, **options), x, call.grad_out)
    copies = [x.detach().clone().requires_grad_() for _ in range(3)]
    apart = torch.autograd.grad(attention(*copies, **options), copies, call.grad_out)
    return together, torch.stack(apart).sum(0)


def differentiate_twice(adapter: str) -> None:
    call = call_here(adapter, CASE)
    grads = call.gradients(call(), create_graph=True)
    torch.stack([grad.square().sum() for grad in grads]).sum().backward()


def without_gradients(adapter: str) -> list[tuple[Tensor, bool]]:
    """Outputs of a call with gradients, under no_grad, under inference_mode, and of tensors without requires_grad."""
    call = call_here(adapter, CASE)
    outs = [call()]
    with torch.no_grad():
        outs.append(call())
    with torch.inference_mode():
        outs.append(call())
    outs.append(call_here(adapter, CASE, gradients=False)())
    return [(out.detach(), out.requires_grad) for out in outs]


class GradientTests(AdapterSuite):
    @core
    @every_ring_and_layout
    @given(case=attention_cases(max_n=60, dtypes=[torch.float64]))
    @examples(6)
    def test_random_gradients_match_the_definition(
        self, world: World, rings: RingSpec, layout: LayoutKind, case: AttentionCase
    ) -> None:
        check_exact(world, self.adapter, rings, layout, [case])

    @core
    @every_size_and_layout
    def test_gradients_of_edge_cases_match_the_definition(
        self, world: World, rings: RingSpec, layout: LayoutKind
    ) -> None:
        check_exact(world, self.adapter, rings, layout, list(EDGE_CASES.values()))

    def test_gradients_of_some_edge_cases_match_the_definition(self, world: World) -> None:
        check_exact(world, self.adapter, FOUR, "zigzag", [*EDGE_CASES.values()][::4])

    @core
    @pytest.mark.parametrize(
        "needed", [("query",), ("key",), ("value",), ("key", "value"), ("query", "value")], ids="-".join
    )
    def test_only_some_inputs_need_gradients(self, world: World, needed: tuple[str, ...]) -> None:
        by_input = zip(*world.run(gradients_in_part, self.adapter, needed), strict=True)
        for name, wanted, parts in zip(_NAMES, expected(CASE)[2:5], by_input, strict=True):
            if name in needed:
                assert difference(torch.cat(parts, 1), wanted) <= FP64_TOLERANCE, name
            else:
                assert parts == (None,) * 4, name

    @core
    @pytest.mark.parametrize("order", [(0, 1), (1, 0), (1, 0, 1)], ids=str)
    def test_backwards_in_any_order(self, world: World, order: tuple[int, ...]) -> None:
        cases = (CASE, replace(CASE, is_causal=False, segment_lengths=(24, 13), seed=5))
        by_call = zip(*world.run(two_calls, self.adapter, *cases, order), strict=True)
        for case, results in zip(cases, by_call, strict=True):
            got = whole(results, case.seq_len, "contiguous")
            check_results(got, expected(case), FP64_TOLERANCE, f"{case}, backwards {order}")

    @core
    def test_gradients_accumulate(self, world: World) -> None:
        by_input = zip(*world.run(accumulated_gradients, self.adapter), strict=True)
        for name, wanted, parts in zip(_NAMES, expected(CASE)[2:5], by_input, strict=True):
            assert difference(torch.cat(parts, 1) / 2, wanted) <= FP64_TOLERANCE, name

    @core
    def test_query_key_and_value_may_be_one_tensor(self, world: World) -> None:
        for together, apart in world.run(one_tensor_for_all, self.adapter):
            assert difference(together, apart) <= FP64_TOLERANCE

    @core
    def test_a_second_derivative_is_refused(self, world: World) -> None:
        for outcome in world.run_collect(differentiate_twice, self.adapter):
            outcome.check(RuntimeError, "derivative")

    @core
    def test_calls_without_gradients(self, world: World) -> None:
        for (out, needs_grad), *others in world.run(without_gradients, self.adapter):
            assert needs_grad
            for other, other_needs_grad in others:
                assert torch.equal(other, out)
                assert not other_needs_grad
