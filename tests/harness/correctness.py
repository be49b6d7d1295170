"""Correctness: out, LSE and gradients equal the reference on every ring, in every layout, for every option.

dq, dk and dv each equal the exact derivative, for any gradient of the output.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from ring_backends.schedule.layout import LayoutKind
from ring_backends.testing import calls
from ring_backends.testing.calls import FP64_TOLERANCE, Results, check_exact, check_results, check_rounding, join
from ring_backends.testing.capabilities import AdapterSuite, core
from ring_backends.testing.failing_calls import ending
from ring_backends.testing.marks import THOROUGH, matrix_but, needs_gpu
from ring_backends.testing.rings import (
    ALL_RINGS,
    FOUR,
    IN_GROUPS,
    LAYOUTS,
    ONE,
    THREE,
    TWO,
    RingSpec,
    backend,
    every_layout,
    in_every_layout,
)
from ring_backends.testing.strategies import AttentionCase, attention_cases
from ring_backends.testing.world import World, on_every_rank

NEW_EXAMPLES = "RING_BACKENDS_NEW_EXAMPLES"
"""Environment variable: the number of new random examples per random test. Unset: fixed examples."""


def examples(number: int) -> settings:
    """Hypothesis settings for tests on a world. Examples are fixed unless :data:`NEW_EXAMPLES` is set."""
    new_examples = int(os.environ.get(NEW_EXAMPLES, "0"))
    return settings(
        max_examples=new_examples or number,
        deadline=None,
        derandomize=not new_examples,
        print_blob=bool(new_examples),
        database=None,
        suppress_health_check=[
            HealthCheck.differing_executors,  # many classes inherit the tests of a suite
            HealthCheck.function_scoped_fixture,
            HealthCheck.too_slow,
            HealthCheck.large_base_example,
        ],
    )


_CASE = AttentionCase(seq_len=26, segment_lengths=(26,), dilation_rates=(1,), num_heads=4, dtype=torch.float64)


def _case(
    segment_lengths: tuple[int | None, ...] = (26,), dilation_rates: tuple[int, ...] = (1,), **changes: Any
) -> AttentionCase:
    return replace(_CASE, segment_lengths=segment_lengths, dilation_rates=dilation_rates, **changes)


EDGE_CASES = {
    "one token": _case(seq_len=1, num_kv_heads=4),
    "fewer tokens than ranks": _case(seq_len=3, num_kv_heads=2, is_causal=True),
    "rate longer than the segment": _case((5,), (7,), num_heads=6),
    "nothing divides anything": _case((7, 19, 31), (2, 3, 5), seq_len=53, num_heads=5, num_kv_heads=5),
    "grouped queries": _case((26,), (3,), num_heads=6, num_kv_heads=2, is_causal=True, offset="block"),
    "a branch twice": _case((9, 9), (2, 2), num_kv_heads=4),
    "a group of heads per branch": _case((8, 26, 13), (1, 2, 4), head_mode="grouped", num_heads=5),
    "zero keys at the end": _case((12, 40), (4, 3), offset="block", padding="zeros", num_kv_heads=2),
    "random keys ignored": _case((26,), (2,), batch=2, masked="random", num_kv_heads=2),
    "ends ignored": _case(batch=3, masked="rows", is_causal=True, num_kv_heads=4),
    "all keys ignored": _case(masked="all", batch=2),
    "rows that no branch covers": _case((12,), (5,), num_heads=3),
    "a negative scale": _case(scale=-0.5, num_kv_heads=4),
    "documents, causal, masked": _case(documents="some", batch=2, is_causal=True, masked="random"),
    "documents in no order": _case((26,), (2,), documents="shuffled", num_kv_heads=4),
    "documents that go on later": _case((None,), seq_len=150, documents="resumed", num_kv_heads=4, is_causal=True),
    "dropout": _case((16, 26), (1, 2), dropout_p=0.4, batch=2, num_kv_heads=2),
    "dropout of a key seen twice": _case((9, 9), (2, 2), dropout_p=0.5),
    "a window to both sides": _case((None,), window_lengths=(11,), num_kv_heads=4),
    "a window longer than a shard": _case((None,), (2,), seq_len=53, window_lengths=(37,), is_causal=True),
    "strides in a window, causal": _case((None, 13), (3, 4), window_lengths=(10, None), offset="every", is_causal=True),
    "dropout in a window": _case((None,), dropout_p=0.3, window_lengths=(9,), is_causal=True, masked="random", batch=2),
    "sinks, causal, masked": _case(sinks=True, is_causal=True, masked="all", batch=2, num_kv_heads=4),
    "sinks beside zero keys": _case((12, 40), (4, 3), sinks=True, padding="zeros"),
    "sinks in a window, as in gpt-oss": _case(
        (None,), sinks=True, window_lengths=(8,), is_causal=True, num_kv_heads=2, dropout_p=0.2
    ),
    "a soft cap": _case(score_mod="softcap", num_kv_heads=2, is_causal=True, masked="random"),
    "ALiBi in a window": _case((None, 12), (2, 3), score_mod="alibi", window_lengths=(9, None), batch=2),
    "distances on a slide": _case((12, 40), (4, 3), score_mod="distance", padding="zeros", num_kv_heads=2),
    "even distances with dropout and sinks": _case(
        score_mod="parity", dropout_p=0.3, sinks=True, documents="some", batch=2, offset="every", num_kv_heads=4
    ),
    "wide values": _case((9, 26), (2, 3), value_dim=7, num_kv_heads=2, batch=2),
    "narrow values, causal, masked": _case(
        head_dim=6, value_dim=3, is_causal=True, masked="random", sinks=True, num_kv_heads=4
    ),
    "groups of four, causal": _case(
        ulysses_size=4, is_causal=True, num_kv_heads=2, sinks=True, masked="random", value_dim=5, score_mod="parity"
    ),
    "groups of two": _case(
        (9, 26), (2, 3), ulysses_size=2, batch=2, num_kv_heads=1, documents="some", dropout_p=0.3, scale=-0.5
    ),
    "an empty batch in groups": _case(batch=0, ulysses_size=2, num_kv_heads=2, masked="random", documents="some"),
}

_LONGER = AttentionCase(163, (163,), (1,), num_heads=4, num_kv_heads=4, head_dim=16)

# The sequences are long, so that the largest error of plain attention is not small by chance.
ROUNDED_CASES = (
    _LONGER,
    replace(_LONGER, is_causal=True, num_kv_heads=2, seed=1),
    replace(_LONGER, segment_lengths=(48, 101, 163), dilation_rates=(1, 2, 3), is_causal=True, batch=2, seed=2),
    replace(_LONGER, segment_lengths=(64, 163), dilation_rates=(1, 4), head_mode="grouped", masked="random", seed=3),
    replace(_LONGER, segment_lengths=(64, 163), dilation_rates=(2, 4), offset="block", padding="zeros", seed=4),
    replace(_LONGER, segment_lengths=(80,), dilation_rates=(1,), scale=1.0, masked="rows", batch=4, seed=5),
    replace(_LONGER, segment_lengths=(80, 163), dilation_rates=(1, 2), documents="some", batch=2, seed=6),
    replace(_LONGER, is_causal=True, dropout_p=0.3, num_kv_heads=2, seed=7),
    replace(_LONGER, is_causal=True, head_dim=24, value_dim=16, num_kv_heads=2, seed=8),
    replace(_LONGER, segment_lengths=(None,), window_lengths=(48,), is_causal=True, num_kv_heads=2, seed=8),
    replace(_LONGER, segment_lengths=(None,), window_lengths=(48,), is_causal=True, sinks=True, seed=10),
    replace(_LONGER, segment_lengths=(None,), is_causal=True, score_mod="softcap", seed=11),
    replace(_LONGER, segment_lengths=(None, None), dilation_rates=(1, 4), window_lengths=(24, 101), batch=2, seed=9),
)

CASE = AttentionCase(
    41, (16, 41), (1, 2), batch=2, num_heads=4, num_kv_heads=2, is_causal=True, masked="random", dtype=torch.float64
)


class EdgeCaseTests(AdapterSuite):
    """The correctness that the quick command tests with every adapter."""

    @pytest.mark.parametrize("rings", [FOUR, TWO], ids=str)
    def test_some_edge_cases_match_the_definition(self, world: World, rings: RingSpec) -> None:
        """The calls of the two rings of two ranks differ."""
        cases = [*EDGE_CASES.values()]
        check_exact(world, self.adapter, rings, "zigzag", cases[::4] if rings == FOUR else cases[2::16])


@core
class CorrectnessTests(AdapterSuite):
    @pytest.mark.parametrize("gradients", matrix_but(True, of=(True, False)), ids=["gradients", "no gradients"])
    @in_every_layout("rings", ALL_RINGS, quick_every=3)
    @given(case=attention_cases(max_n=70, dtypes=[torch.float64]))
    @examples(6)
    def test_random_calls_match_the_definition(
        self, world: World, rings: RingSpec, layout: LayoutKind, case: AttentionCase, gradients: bool
    ) -> None:
        check_exact(world, self.adapter, rings, layout, [case], gradients=gradients)

    @in_every_layout("rings", (THREE, ONE, TWO, FOUR), core=(ONE, TWO, THREE), quick_every=4)
    def test_edge_cases_match_the_definition(self, world: World, rings: RingSpec, layout: LayoutKind) -> None:
        check_exact(world, self.adapter, rings, layout, list(EDGE_CASES.values()))

    @THOROUGH
    @pytest.mark.parametrize(
        "dtype", matrix_but(torch.bfloat16, of=(torch.float32, torch.bfloat16, torch.float16)), ids=str
    )
    @pytest.mark.parametrize("layout", matrix_but("zigzag", of=LAYOUTS))
    def test_rounding_is_bounded_by_plain_attention(self, world: World, layout: LayoutKind, dtype: torch.dtype) -> None:
        cases = [replace(case, dtype=dtype) for case in ROUNDED_CASES]
        check_rounding(world, self.adapter, FOUR, layout, cases)

    @pytest.mark.parametrize("layout", matrix_but("zigzag", of=LAYOUTS))
    @pytest.mark.parametrize("case", ROUNDED_CASES[1:4], ids=["full", "dilated", "grouped"])
    @on_every_rank
    def test_a_repeated_call_gives_the_same_bits(self, layout: LayoutKind, case: AttentionCase) -> None:
        first, second = (self.call(case, layout=layout).results() for _ in range(2))
        torch.testing.assert_close(first.computed(), second.computed(), rtol=0, atol=0)

    @on_every_rank
    def test_seq_len_defaults_to_equal_shards(self) -> None:
        call = self.call(replace(_CASE, seq_len=24, is_causal=True), layout="zigzag")
        torch.testing.assert_close(call(seq_len=None, return_lse=True), call(return_lse=True), rtol=0, atol=0)

    @on_every_rank
    def test_lse_is_returned_on_request(self) -> None:
        call = self.call(replace(_CASE, batch=2, dtype=torch.bfloat16))
        out, (same_out, lse) = call(), call(return_lse=True)
        assert torch.equal(out, same_out)
        assert out.requires_grad
        assert not lse.requires_grad
        found = out.dtype, lse.dtype, lse.shape
        assert found == (torch.bfloat16, torch.float32, (2, 4, out.shape[1])), found

    @on_every_rank
    def test_autocast_casts_as_for_torch_attention(self) -> None:
        call = self.call(replace(_CASE, dtype=torch.float32))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = call()
        grads = torch.autograd.grad(out, call.inputs, call.grad_out.to(out.dtype))
        exact, *exact_grads = (x.float() for x in (call.expected().out, *call.expected()[2:5]) if x is not None)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), exact, rtol=0, atol=0.02)
        torch.testing.assert_close(list(grads), exact_grads, rtol=0, atol=0.1)

    @on_every_rank
    def test_no_ring_is_a_ring_of_one(self) -> None:
        case = replace(_CASE, dilation_rates=(2,))
        attention = backend(self.adapter).RingDilatedAttention(case.segment_lengths, case.dilation_rates)
        query, key, value, _, _ = case.tensors()
        check_results(Results(*attention(query, key, value, return_lse=True)), calls.expected(case), 1e-12)

    @needs_gpu
    @pytest.mark.parametrize("rings", [FOUR, TWO], ids=str)
    @every_layout
    def test_ranks_that_share_a_gpu(self, world: World, rings: RingSpec, layout: LayoutKind) -> None:
        cases = list(EDGE_CASES.values())
        answers = calls.run_cases(world, self.adapter, rings, layout, cases, device="cuda")
        alone = calls.run_cases(world, self.adapter, rings, layout, cases)
        for case, on_gpu, on_cpu in zip(cases, answers, alone, strict=True):
            got, wanted = (join(by_ring[0], case.seq_len, layout) for by_ring in (on_gpu, on_cpu))
            check_results(got, wanted, 1e-10, case)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            shorter = [replace(case, dtype=dtype) for case in ROUNDED_CASES]
            check_rounding(world, self.adapter, rings, layout, shorter, device="cuda")

    @pytest.mark.parametrize("rings", matrix_but(FOUR, of=(FOUR, IN_GROUPS)), ids=str)
    @pytest.mark.parametrize(
        "needed", [("query",), ("key",), ("value",), ("key", "value"), ("query", "value")], ids="-".join
    )
    @on_every_rank
    def test_only_some_inputs_need_gradients(self, needed: tuple[str, ...], rings: RingSpec) -> None:
        call = self.call(CASE, rings, gradients=False)
        for name in needed:
            getattr(call, name).requires_grad_()
        call().backward(call.grad_out)
        for name, x, wanted in zip(("query", "key", "value"), call.inputs, call.expected()[2:5], strict=True):
            torch.testing.assert_close(x.grad, wanted if name in needed else None, rtol=0, atol=FP64_TOLERANCE)

    @pytest.mark.parametrize("order", [(0, 1), (1, 0), (1, 0, 1)], ids=str)
    @on_every_rank
    def test_backwards_in_any_order(self, order: tuple[int, ...]) -> None:
        other = replace(CASE, is_causal=False, segment_lengths=(24, 13), seed=5)
        calls = [self.call(CASE), self.call(other)]
        outs = [call(return_lse=True) for call in calls]
        grads = {index: calls[index].gradients(outs[index][0], retain_graph=True) for index in order}
        for index, (out, lse) in enumerate(outs):
            got = Results(out.detach(), lse, *grads[index])
            check_results(got, calls[index].expected(), FP64_TOLERANCE, f"call {index}, backwards {order}")

    @on_every_rank
    def test_gradients_accumulate(self) -> None:
        call = self.call(CASE)
        for _ in range(2):
            call().backward(call.grad_out)
        halves = [x.grad / 2 for x in call.inputs if x.grad is not None]
        torch.testing.assert_close(halves, list(call.expected()[2:5]), rtol=0, atol=FP64_TOLERANCE)

    @on_every_rank
    def test_query_key_and_value_may_be_one_tensor(self) -> None:
        """Its gradient is the sum of the gradients of three copies."""
        call = self.call(replace(CASE, num_kv_heads=CASE.num_heads))
        attention, x, options = call.attention, call.query, call.options
        (together,) = torch.autograd.grad(attention(x, x, x, **options), x, call.grad_out)
        copies = [x.detach().clone().requires_grad_() for _ in range(3)]
        apart = torch.autograd.grad(attention(*copies, **options), copies, call.grad_out)
        torch.testing.assert_close(together, torch.stack(apart).sum(0), rtol=0, atol=FP64_TOLERANCE)

    @on_every_rank
    def test_a_second_derivative_is_refused(self) -> None:
        call = self.call(CASE)
        grads = call.gradients(call(), create_graph=True)
        squares = torch.stack([grad.square().sum() for grad in grads]).sum()
        ending(squares.backward).check(RuntimeError, "derivative")

    @on_every_rank
    def test_calls_without_gradients(self) -> None:
        call = self.call(CASE)
        out = call()
        assert out.requires_grad
        others = [self.call(CASE, gradients=False)()]
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                others.append(call())
        for other in others:
            assert torch.equal(other, out)
            assert not other.requires_grad
