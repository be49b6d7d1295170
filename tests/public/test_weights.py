"""Attention weights of chosen queries: weights times values equal the output, on one rank and on a ring."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from native_ranks import ADAPTER, assert_near, on_ring
from torch import Tensor

from ring_backends import DilatedPattern, Ring, RingMismatchError, RingPeerError
from ring_backends.adapters import native
from ring_backends.testing.calls import expected, new_attention
from ring_backends.testing.failing_calls import AT_ONCE, Ended, ending
from ring_backends.testing.marks import THOROUGH
from ring_backends.testing.reference import reference_counts
from ring_backends.testing.strategies import AttentionCase, attention_cases
from ring_backends.testing.world import World
from ring_backends.weights import attention_weights, draw_pattern, draw_weights

CASE = AttentionCase(37, (8, 37), (2, 3), batch=2, num_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float64)
CHOSEN = (36, 0, 17, 17)


def weights_of(ring: Ring, case: AttentionCase = CASE, positions: Any = CHOSEN) -> Tensor:
    """The weights of this rank's keys."""
    query, key, _, _, mask = case.tensors()
    call = {"is_causal": case.is_causal, "seq_len": case.seq_len}
    call |= {"sinks": case.sink_scores(), "score_mod": case.score_function()}
    for name, marks in (("key_padding_mask", mask), ("document_ids", case.document_ids())):
        call[name] = None if marks is None else ring.shard(marks)
    attention = new_attention(ADAPTER, ring, case)
    return attention_weights(attention, ring.shard(query), ring.shard(key), positions, **call)


def check(weights: Tensor, case: AttentionCase, positions: Any) -> None:
    value, out = case.tensors()[2], expected(case, gradients=False).out
    value = value.repeat_interleave(case.num_heads // case.num_kv_heads, 2).double()
    got = torch.einsum("bhmn,bnhd->bmhd", weights.double(), value)
    assert_near(got, out[:, [*positions]].double(), 1e-9)
    assert (weights >= 0).all()
    assert (weights.sum(3) <= 1 + 1e-9).all()


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(attention_cases(max_n=40, dropout_ps=[0.0]))
def test_weights_times_values_are_the_output(case: AttentionCase) -> None:
    case = replace(case, dtype=torch.float64)
    positions = tuple(range(case.seq_len))
    check(weights_of(Ring(), case, positions), case, positions)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(attention_cases(max_n=40, masks=[None], documents=[None], dropout_ps=[0.0], paddings=["masked"]))
def test_weights_of_equal_scores_are_counts(case: AttentionCase) -> None:
    options = case.pattern_options()
    attention = native.RingDilatedAttention(**options)
    del options["padding"]
    counts = reference_counts(case.seq_len, case.num_heads, is_causal=case.is_causal, **options).double()
    zeros = torch.zeros(1, case.seq_len, case.num_heads, 1, dtype=torch.float64)
    weights = attention_weights(attention, zeros, zeros, range(case.seq_len), is_causal=case.is_causal)
    assert_near(weights[0], counts / counts.sum(2, keepdim=True).clamp(min=1), 1e-12)


def whole_weights(ring: Ring, case: AttentionCase, positions: Any = CHOSEN) -> Tensor:
    return ring.unshard(weights_of(ring, case, positions), dim=3, seq_len=case.seq_len)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize(
    "case",
    [
        CASE,
        replace(CASE, is_causal=True, masked="random"),
        replace(CASE, documents="some"),
        replace(CASE, segment_lengths=(8, None), window_lengths=(None, 12), offset="every"),
        replace(CASE, segment_lengths=(8, 40), dilation_rates=(2, 5), padding="zeros", offset="block"),
        replace(CASE, is_causal=True, ulysses_size=2),
    ],
    ids=["all", "causal, masked", "documents", "windows", "zero padding", "groups"],
)
def test_weights_on_a_ring(pair: World, case: AttentionCase, layout: str) -> None:
    for whole in pair.run(on_ring, whole_weights, case, layout=layout):
        check(whole, case, CHOSEN)


SHORT = replace(CASE, seq_len=1, segment_lengths=(8, 1), score_mod="distance")


@pytest.mark.parametrize(("case", "positions"), [(SHORT, (0,)), (SHORT, ()), (CASE, ())], ids=str)
def test_no_rows_and_no_positions(pair: World, case: AttentionCase, positions: Any) -> None:
    """A sequence of one token, of which rank 1 has no rows, with a function of positions; and no chosen query."""
    case = replace(case, score_mod="distance")
    for whole in pair.run(on_ring, whole_weights, case, positions):
        check(whole, case, positions)


def errors_here() -> list[Ended]:
    """Rank 0 runs out of memory in a call of attention_weights, and then in a step of decoding."""
    ended = []
    for place in ("ring_backends.weights._counts", "ring_backends.engine.decoding.Step.local_result"):
        module = native.RingDilatedAttention([8], [1], ring=native.initialize())
        x, cache = torch.ones(1, 1, 2, 4), module.new_cache()
        failing = mock.patch(place, side_effect=MemoryError("no memory"))
        with failing if module.ring.rank == 0 else contextlib.nullcontext():
            call = partial(module.decode, x, x, x, cache) if ended else partial(attention_weights, module, x, x, [0])
            ended.append(ending(call))
    return ended


def test_an_error_of_one_rank_reaches_the_other() -> None:
    with World(2) as ranks:
        for own, other in zip(*ranks.run(errors_here), strict=True):
            own.check(MemoryError)
            other.check(RingPeerError, "MemoryError: no memory", within=AT_ONCE)


def check_different_positions(ring: Ring) -> None:
    with pytest.raises(RingMismatchError, match=r"positions \(rank 0: \[0\], rank 1: \[1\]\)"):
        weights_of(ring, positions=(ring.rank,))


def test_invalid_positions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"positions has 37: the sequence has positions 0 … 36"):
        weights_of(Ring(), positions=(37,))
    with pytest.raises(TypeError, match=r"positions has 1\.0"):
        weights_of(Ring(), positions=(1.0,))


def test_nan_reaches_only_dependent_rows_and_autocast_computes_in_fp32() -> None:
    case = replace(CASE, is_causal=True, dtype=torch.float32)
    spoiled = replace(case, spoiled=(("key", 30, float("nan")),))
    clean, weights = (weights_of(Ring(), one) for one in (case, spoiled))
    assert_near(weights[:, :, 1:], clean[:, :, 1:], 0)
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = weights_of(Ring(), case)
    assert under_autocast.dtype == torch.float32
    torch.testing.assert_close(under_autocast, clean, rtol=0.1, atol=0.02)


def check_refusal_on_rank_0(ring: Ring) -> None:
    weights_of(ring)
    with pytest.raises(RingMismatchError if ring.rank else ValueError, match="positions has 99"):
        weights_of(ring, positions=CHOSEN if ring.rank else (99,))


@pytest.mark.parametrize("check", [check_different_positions, check_refusal_on_rank_0])
def test_positions_of_one_rank_are_reported(pair: World, check: Any) -> None:
    pair.run(on_ring, check)


@THOROUGH
def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pattern = DilatedPattern(CASE.segment_lengths, CASE.dilation_rates)
    draw_pattern(tmp_path / "pattern.svg", pattern, 37, 4, heads=(0, 3))
    assert "head 3, w = 37, r = 3" in (tmp_path / "pattern.svg").read_text()
    windowed = DilatedPattern([8, None], [2, 3], offset="every", window_lengths=[None, 12])
    draw_pattern(tmp_path / "windows.svg", windowed, 37, 4)
    for text in ("head 0, w = 8, r = 2 -", "head 0, w = all, r = 3, W = 12 -"):
        assert text in (tmp_path / "windows.svg").read_text()  # matplotlib writes the text it draws as a comment
    weights = weights_of(Ring())
    draw_weights(tmp_path / "weights.svg", weights[0], CHOSEN)
    assert "query 36" in (tmp_path / "weights.svg").read_text()
    with pytest.raises(ValueError, match=r"weights is \[2, 4, 4, 37\] with 4 positions"):
        draw_weights(tmp_path / "weights.svg", weights, CHOSEN)
