"""Correctness: out and LSE equal the reference on every ring, in every layout, for every option."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from ring_backends.schedule.layout import LayoutKind
from ring_backends.testing.calls import (
    Results,
    call_here,
    check_exact,
    check_results,
    check_rounding,
    difference,
    join,
    run_cases,
    whole,
)
from ring_backends.testing.capabilities import AdapterSuite, core
from ring_backends.testing.marks import matrix_but, needs_gpu
from ring_backends.testing.rings import FOUR, SIZES, TWO, RingSpec, every_layout, every_ring_and_layout
from ring_backends.testing.strategies import AttentionCase, attention_cases
from ring_backends.testing.world import World

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

EDGE_CASES = {
    "one token": replace(_CASE, seq_len=1, num_kv_heads=4),
    "fewer tokens than ranks": replace(_CASE, seq_len=3, num_kv_heads=2, is_causal=True),
    "segments longer than the sequence": replace(_CASE, segment_lengths=(1000,), dilation_rates=(3,)),
    "segments of one token": replace(_CASE, segment_lengths=(1, 26), dilation_rates=(1, 2)),
    "rate longer than the segment": replace(_CASE, segment_lengths=(5,), dilation_rates=(7,), num_heads=6),
    "nothing divides anything": replace(
        _CASE, seq_len=53, segment_lengths=(7, 19, 31), dilation_rates=(2, 3, 5), num_heads=5, num_kv_heads=5
    ),
    "heads beyond the rates": replace(_CASE, segment_lengths=(13,), dilation_rates=(4,), num_heads=6, num_kv_heads=3),
    "grouped queries": replace(_CASE, num_heads=6, num_kv_heads=2, is_causal=True, offset="block", dilation_rates=(3,)),
    "one key head": replace(_CASE, num_heads=3, dilation_rates=(2,)),
    "a branch twice": replace(_CASE, segment_lengths=(9, 9), dilation_rates=(2, 2), num_kv_heads=4),
    "a group of heads per branch": replace(
        _CASE, segment_lengths=(8, 26, 13), dilation_rates=(1, 2, 4), head_mode="grouped", num_heads=5
    ),
    "offsets by branch": replace(_CASE, segment_lengths=(8, 26), dilation_rates=(3, 2), offset="branch"),
    "zero keys at the end": replace(
        _CASE, segment_lengths=(12, 40), dilation_rates=(4, 3), offset="block", padding="zeros", num_kv_heads=2
    ),
    "random keys ignored": replace(_CASE, batch=2, masked="random", num_kv_heads=2, dilation_rates=(2,)),
    "ends ignored": replace(_CASE, batch=3, masked="rows", is_causal=True, num_kv_heads=4),
    "all keys ignored": replace(_CASE, masked="all", batch=2),
    "all keys ignored but zero keys": replace(_CASE, masked="all", padding="zeros", segment_lengths=(40,)),
    "rows that no branch covers": replace(_CASE, segment_lengths=(12,), dilation_rates=(5,), num_heads=3),
    "a scale": replace(_CASE, scale=1.7, num_kv_heads=4),
    "a negative scale": replace(_CASE, scale=-0.5, num_kv_heads=4),
    "documents": replace(
        _CASE, documents="some", batch=2, num_kv_heads=2, segment_lengths=(16, 26), dilation_rates=(1, 2)
    ),
    "documents, causal, masked": replace(_CASE, documents="some", batch=2, is_causal=True, masked="random"),
    "documents in no order": replace(_CASE, documents="shuffled", num_kv_heads=4, dilation_rates=(2,)),
    "dropout": replace(_CASE, dropout_p=0.4, batch=2, num_kv_heads=2, segment_lengths=(16, 26), dilation_rates=(1, 2)),
    "dropout, causal, masked": replace(_CASE, dropout_p=0.2, is_causal=True, masked="random", num_kv_heads=4),
    "dropout of a key seen twice": replace(_CASE, dropout_p=0.5, segment_lengths=(9, 9), dilation_rates=(2, 2)),
    "dropout in documents": replace(_CASE, dropout_p=0.3, documents="some", batch=2, masked="random"),
    "a window": replace(_CASE, segment_lengths=(None,), window_lengths=(7,), is_causal=True, num_kv_heads=2),
    "a window to both sides": replace(_CASE, segment_lengths=(None,), window_lengths=(11,), num_kv_heads=4),
    "a window of one token": replace(_CASE, segment_lengths=(None, 9), dilation_rates=(1, 2), window_lengths=(1, None)),
    "a window longer than a shard": replace(
        _CASE, seq_len=53, segment_lengths=(None,), dilation_rates=(2,), window_lengths=(37,), is_causal=True
    ),
    "windows within segments": replace(
        _CASE, segment_lengths=(17, 26), dilation_rates=(1, 3), window_lengths=(5, 14), masked="random", batch=2
    ),
    "strides": replace(_CASE, segment_lengths=(None,), dilation_rates=(5,), offset="every", num_kv_heads=2),
    "strides in a window, causal": replace(
        _CASE,
        segment_lengths=(None, 13),
        dilation_rates=(3, 4),
        window_lengths=(10, None),
        offset="every",
        is_causal=True,
    ),
    "documents in a window": replace(
        _CASE, documents="some", batch=2, segment_lengths=(None,), window_lengths=(8,), is_causal=True, num_kv_heads=4
    ),
    "dropout in a window": replace(
        _CASE, dropout_p=0.3, segment_lengths=(None,), window_lengths=(9,), is_causal=True, masked="random", batch=2
    ),
    "sinks": replace(_CASE, sinks=True, batch=2, num_kv_heads=2, segment_lengths=(12,), dilation_rates=(5,)),
    "sinks, causal, masked": replace(_CASE, sinks=True, is_causal=True, masked="all", batch=2, num_kv_heads=4),
    "sinks beside zero keys": replace(
        _CASE, sinks=True, segment_lengths=(12, 40), dilation_rates=(4, 3), padding="zeros"
    ),
    "sinks in a window, as in gpt-oss": replace(
        _CASE, sinks=True, segment_lengths=(None,), window_lengths=(8,), is_causal=True, num_kv_heads=2, dropout_p=0.2
    ),
    "a soft cap": replace(_CASE, score_mod="softcap", num_kv_heads=2, is_causal=True, masked="random"),
    "ALiBi in a window": replace(
        _CASE, score_mod="alibi", segment_lengths=(None, 12), dilation_rates=(2, 3), window_lengths=(9, None), batch=2
    ),
    "distances on a slide": replace(
        _CASE, score_mod="distance", segment_lengths=(12, 40), dilation_rates=(4, 3), padding="zeros", num_kv_heads=2
    ),
    "even distances with dropout and sinks": replace(
        _CASE, score_mod="parity", dropout_p=0.3, sinks=True, documents="some", batch=2, offset="every", num_kv_heads=4
    ),
    "wide values": replace(_CASE, value_dim=7, num_kv_heads=2, segment_lengths=(9, 26), dilation_rates=(2, 3), batch=2),
    "narrow values, causal, masked": replace(
        _CASE, head_dim=6, value_dim=3, is_causal=True, masked="random", sinks=True, num_kv_heads=4
    ),
    "wide values of documents in a window": replace(
        _CASE, value_dim=9, documents="some", segment_lengths=(None,), window_lengths=(8,), is_causal=True, batch=2
    ),
    "narrow values with dropout and a soft cap": replace(
        _CASE, value_dim=1, dropout_p=0.3, score_mod="softcap", offset="every", num_kv_heads=2, dilation_rates=(3,)
    ),
    "one component per head": replace(_CASE, head_dim=1, batch=2, num_kv_heads=2),
}

_LONGER = AttentionCase(
    seq_len=163, segment_lengths=(163,), dilation_rates=(1,), num_heads=4, num_kv_heads=4, head_dim=16
)

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


def attend_once(adapter: str, layout: LayoutKind, case: AttentionCase, how: str) -> Any:
    """Make the call that ``how`` names. Returns the results of this rank."""
    call = call_here(adapter, case, layout=layout)
    if how == "without seq_len":
        return call(seq_len=None, return_lse=True)
    if how == "under autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = call()
        return out, torch.autograd.grad(out, call.inputs, call.grad_out.to(out.dtype))
    if how == "out alone":
        return call(), call(return_lse=True)
    assert how == "no ring"
    attention = type(call.attention)(case.segment_lengths, case.dilation_rates)
    query, key, value, _, _ = case.tensors()
    return attention(query, key, value, is_causal=case.is_causal, return_lse=True)


def bits_differ(adapter: str, layout: LayoutKind, case: AttentionCase) -> list[str]:
    """Make a call twice. Returns the names of the results of this rank that are not bitwise equal."""
    first, second = (call_here(adapter, case, layout=layout).results() for _ in range(2))
    return [name for name, tensor in first.computed().items() if not torch.equal(tensor, getattr(second, name))]


@core
class CorrectnessTests(AdapterSuite):
    @every_ring_and_layout
    @given(case=attention_cases(max_n=70, dtypes=[torch.float64]))
    @examples(6)
    def test_random_calls_match_the_definition(
        self, world: World, rings: RingSpec, layout: LayoutKind, case: AttentionCase
    ) -> None:
        check_exact(world, self.adapter, rings, layout, [case], gradients=False)

    @pytest.mark.parametrize(
        "dtype", matrix_but(torch.float32, torch.bfloat16, of=(torch.float32, torch.bfloat16, torch.float16)), ids=str
    )
    @every_layout
    def test_rounding_is_bounded_by_plain_attention(self, world: World, layout: LayoutKind, dtype: torch.dtype) -> None:
        cases = [replace(case, dtype=dtype) for case in ROUNDED_CASES]
        check_rounding(world, self.adapter, FOUR, layout, cases)

    @every_layout
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_results_do_not_depend_on_the_ring_size(self, world: World, layout: LayoutKind, is_causal: bool) -> None:
        case = replace(_LONGER, segment_lengths=(64, 401, 2048), dilation_rates=(1, 3, 4), num_kv_heads=2)
        case = replace(case, seq_len=1003, is_causal=is_causal, masked="random", dtype=torch.float64)
        alone: Results | None = None
        for rings in SIZES:
            if rings.capability in self.without:
                continue
            ((answers, *_),) = run_cases(world, self.adapter, rings, layout, [case])
            got = join(answers, case.seq_len, layout)
            if alone is None:
                alone = got
            check_results(got, alone, 1e-12, rings)

    @every_layout
    @pytest.mark.parametrize("case", ROUNDED_CASES[1:4], ids=["full", "dilated", "grouped"])
    def test_a_repeated_call_gives_the_same_bits(self, world: World, layout: LayoutKind, case: AttentionCase) -> None:
        assert world.run(bits_differ, self.adapter, layout, case) == [[]] * 4

    def test_seq_len_defaults_to_equal_shards(self, world: World) -> None:
        case = replace(_CASE, seq_len=24, is_causal=True)
        assumed = world.run(attend_once, self.adapter, "zigzag", case, "without seq_len")
        got = whole([Results(*answer) for answer in assumed], 24, "zigzag")
        ((answers,),) = run_cases(world, self.adapter, FOUR, "zigzag", [case], gradients=False)
        check_results(got, join(answers, 24, "zigzag"), 0)

    def test_lse_is_returned_on_request(self, world: World) -> None:
        case = replace(_CASE, batch=2, dtype=torch.bfloat16)
        for out, (same_out, lse) in world.run(attend_once, self.adapter, "contiguous", case, "out alone"):
            assert torch.equal(out, same_out)
            assert out.requires_grad
            assert out.dtype == torch.bfloat16
            assert lse.dtype == torch.float32
            assert lse.shape == (2, 4, out.shape[1])
            assert not lse.requires_grad

    def test_autocast_casts_as_for_torch_attention(self, world: World) -> None:
        case = replace(_CASE, dtype=torch.float32)
        exact = join(run_cases(world, self.adapter, FOUR, "contiguous", [case])[0][0], 26)
        outs, grads = zip(*world.run(attend_once, self.adapter, "contiguous", case, "under autocast"), strict=True)
        assert {out.dtype for out in outs} == {torch.bfloat16}
        assert {grad.dtype for rank_grads in grads for grad in rank_grads} == {torch.float32}
        assert difference(torch.cat(outs, 1), exact.out) < 0.02
        for name, parts in zip(("grad_query", "grad_key", "grad_value"), zip(*grads, strict=True), strict=True):
            assert difference(torch.cat(parts, 1), getattr(exact, name)) < 0.1, name

    def test_no_ring_is_a_ring_of_one(self, world: World) -> None:
        case = replace(_CASE, dilation_rates=(2,))
        wanted = join(run_cases(world, self.adapter, FOUR, "contiguous", [case], gradients=False)[0][0], 26)
        for alone in world.run(attend_once, self.adapter, "contiguous", case, "no ring"):
            check_results(Results(*alone), wanted, 1e-12)

    @needs_gpu
    @pytest.mark.parametrize("rings", [FOUR, TWO], ids=str)
    @every_layout
    def test_ranks_that_share_a_gpu(self, world: World, rings: RingSpec, layout: LayoutKind) -> None:
        cases = list(EDGE_CASES.values())
        answers = run_cases(world, self.adapter, rings, layout, cases, device="cuda")
        alone = run_cases(world, self.adapter, rings, layout, cases)
        for case, on_gpu, on_cpu in zip(cases, answers, alone, strict=True):
            got, wanted = (join(by_ring[0], case.seq_len, layout) for by_ring in (on_gpu, on_cpu))
            check_results(got, wanted, 1e-10, case)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            shorter = [replace(case, dtype=dtype) for case in ROUNDED_CASES]
            check_rounding(world, self.adapter, rings, layout, shorter, device="cuda")
