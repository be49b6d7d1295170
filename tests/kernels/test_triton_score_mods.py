"""score_mods in Triton: every operator that has a translation, against dense attention in fp64; and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from triton_interpreter import interpreted, patch_interpreter

from ring_backends import dilated_attention, score_mods
from ring_backends.kernels import triton_score_mod
from ring_backends.kernels.triton_score_mod import UntranslatableError, translate
from ring_backends.testing.calls import difference
from ring_backends.testing.reference import reference_attention

patch_interpreter()

N, HEADS = 21, 4
BIASES = torch.randn(HEADS, N, generator=torch.Generator().manual_seed(0))
GROUPS = torch.arange(N, dtype=torch.int32) // 4
SEEN = torch.rand(HEADS, N, generator=torch.Generator().manual_seed(1)) < 0.7
FACTOR = torch.tensor(1.25, dtype=torch.float64)

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def smooth(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
    bounded = torch.sigmoid(score) * torch.exp(-score.abs()) + torch.sin(score) * torch.cos(score)
    return bounded + torch.erf(score) - torch.exp2(-(score**2)) + torch.tanh(score / 3)


def roots(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
    square = score * score + 1
    found = square.sqrt() - (score**4 + 1).rsqrt() + square.log() + square.log2() - torch.log1p(score.square())
    return found + square.reciprocal() - square**-0.5 + square**-2 - 1 / (2 + torch.cos(score)) + square**3 / 100


def pieces(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
    later = torch.maximum(score, score * 0.1) + torch.minimum(torch.zeros_like(score), score)
    limited = score.clamp(-1.0, 0.5) + score.clamp(min=-0.2) + torch.clamp(score, max=0.3) + score.clamp(0.2, 0.1)
    later = later.masked_fill(q - k == 3, 0.7) + torch.maximum(FACTOR, score) - torch.minimum(score, -score)
    return torch.where(q >= k, limited, later) + torch.relu(score) + torch.floor(score) + torch.ceil(score)


def integers(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
    is_near = ((q // 3) % 2 == (k // 3) % 2) | (torch.abs(q - k) < 4) & ~(head > 2)
    bits = ((q ^ k) & 3) + ((q | 1) << 1) - (k >> 1) + (~q & 5) + torch.remainder(q - k, 5)
    bits = bits + torch.div(q - k, 4, rounding_mode="floor")
    return score.masked_fill(torch.logical_not(is_near), -1.5) + 0.01 * bits * (1 + batch)


def loads(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
    score = score * FACTOR + BIASES[head, k] - BIASES[-1 - head, q].to(torch.bfloat16).float() * 0
    is_visible = SEEN[head, k] & (GROUPS[q] == GROUPS[k]) | (q == k)
    return torch.where(is_visible, score, -float("inf"))


def in_place(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
    score = score * 2
    score.add_(1)
    rest = 1 - score - torch.exp(torch.zeros_like(score)) + torch.full_like(score, 0.5) * torch.ones_like(q)
    is_finite = torch.logical_not(torch.isnan(rest) | torch.isinf(rest))
    return torch.where(torch.logical_xor(is_finite, head != head), -rest * 2.0 ** -(head + 1.0), rest)


def hypotenuse(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return torch.hypot(score, 0.5 + (q - k).to(score.dtype)) * torch.where((q < k) ^ (head <= 1), 1.0, -0.5)


def constant_parts(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
    gate = torch.sigmoid(score.detach())
    with torch.no_grad():
        factor = torch.tanh(score * score)
    return score * gate + factor + torch.floor(score) * score


NAMED = (smooth, roots, pieces, integers, loads, in_place, hypotenuse, constant_parts)
FUNCTIONS: dict[str, ScoreMod] = {
    **{function.__name__: function for function in NAMED},
    "without_score": lambda score, batch, head, q, k: BIASES[head, q] * BIASES[head, k],
    "unchanged": lambda score, batch, head, q, k: score,
    "relative": score_mods.relative(torch.randn(8, HEADS)),
}


@interpreted
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_translations_equal_the_function(function: ScoreMod) -> None:
    generator = torch.Generator().manual_seed(2)
    query, key, value, grad_out = torch.randn(4, 2, N, HEADS, 8, generator=generator, dtype=torch.float64)
    places = torch.arange(2)[:, None, None, None], torch.arange(HEADS)[:, None, None]
    positions = torch.arange(N)[:, None], torch.arange(N)

    def modified(scores: Tensor) -> Tensor:
        return function(scores.clone(), *places, *positions).expand(scores.shape)

    exact = [x.clone().requires_grad_() for x in (query, key, value)]
    wanted, wanted_lse = reference_attention(*exact, [N, 7], [2, 1], modified_scores=modified)
    rounded = [x.float().requires_grad_() for x in (query, key, value)]
    out, lse = dilated_attention(*rounded, [N, 7], [2, 1], kernel="triton_dilated", score_mod=function, return_lse=True)
    found = [out, lse, *torch.autograd.grad(out, rounded, grad_out.float())]
    expected = [wanted, wanted_lse, *torch.autograd.grad(wanted, exact, grad_out, materialize_grads=True)]
    for x, y in zip(found, expected, strict=True):
        assert difference(x, y) <= 2e-5 * (1 + float(y[y.isfinite()].abs().max()))


def scaled_by(factor: float) -> ScoreMod:
    captured = torch.tensor(factor)
    return lambda score, batch, head, q, k: score * captured


def test_lengths_and_captured_numbers_do_not_change_the_source() -> None:
    """Triton compiles each source anew."""
    first, second = (translate(score_mods.distance(torch.zeros(1, n, 2), torch.zeros(HEADS))) for n in (30, 47))
    assert first.source == second.source
    assert [x.shape for x in second.tensors] == [(1, 47), (1, 47), (HEADS,)]
    assert first.numbers != second.numbers
    first, second = (translate(scaled_by(factor)) for factor in (2.0, 3.0))
    assert (first.source, first.numbers, second.numbers) == (second.source, (2.0,), (3.0,))
    assert translate(score_mods.softcap(3.0)).source != translate(score_mods.softcap(4.0)).source


def biased_by(table: Tensor, factor: float, function: Any = torch.tanh) -> ScoreMod:
    return lambda score, batch, head, q, k: function(score) + factor * table[head]


def test_a_translation_is_kept_for_functions_that_read_alike() -> None:
    """It loads from the tensors of the function. A function that calls others is translated anew."""
    first, second, wide = torch.rand(HEADS), torch.rand(HEADS), torch.rand(HEADS, 2)[:, 0]
    triton_score_mod._kept.clear()
    with mock.patch.object(triton_score_mod, "_translated", side_effect=triton_score_mod._translated) as translated:
        found = [translate(biased_by(table, 2.0)) for table in (first, second)]
        assert translated.call_count == 1
        assert found[0].source == found[1].source
        assert [x.tensors[0] is table for x, table in zip(found, (first, second), strict=True)] == [True, True]
        assert translate(biased_by(first, 3.0)).source != found[0].source
        assert translate(biased_by(wide, 2.0)).numbers != found[0].numbers
        assert translated.call_count == 3
        for _ in range(2):
            translate(biased_by(first, 2.0, lambda score: score * 2))
            translate(scaled_by(2.0))
        assert translated.call_count == 7


def power(exponent: float) -> ScoreMod:
    return lambda score, batch, head, q, k: (score * score) ** exponent


@interpreted
def test_a_call_with_known_code_that_has_no_translation() -> None:
    """What a function captures decides which operators it applies, and so which kernels can run it."""
    rows = torch.randn(1, N, HEADS, 8)
    options: dict[str, Any] = {"segment_lengths": [N], "dilation_rates": [1]}
    for _ in range(2):
        dilated_attention(rows, rows, rows, **options, kernel="triton_dilated", score_mod=power(2))
        with pytest.raises(ValueError, match=r"it cannot translate the score_mod: torch\.ops\.aten\.pow"):
            dilated_attention(rows, rows, rows, **options, kernel="triton_dilated", score_mod=power(1.7))


def changed_view(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
    score = score * 2
    score.view(()).mul_(2)
    return score


REFUSED: dict[str, tuple[ScoreMod, str]] = {
    "a branch": (lambda score, b, h, q, k: score if q > k else -score, "RuntimeError: .* meta tensors"),
    "a row": (lambda score, b, h, q, k: score + BIASES[h].sum(), "index does not return one number"),
    "another operator": (lambda score, *_: torch.lgamma(score), "torch.ops.aten.lgamma has no translation"),
    "a factor": (lambda score, b, h, q, k: torch.add(score, q, alpha=2), "torch.ops.aten.add has an alpha"),
    "narrow integers": (lambda score, b, h, q, k: score + (GROUPS[q] - GROUPS[k]), "it computes in torch.int32"),
    "sums of bools": (
        lambda score, b, h, q, k: torch.where((q > 1) + (k > 1), score, -score),
        "torch.ops.aten.add returns a bool",
    ),
    "a copied tensor": (
        lambda score, b, h, q, k: score + BIASES.to(score.device)[h, k],
        "a tensor on the device of the score",
    ),
    "a changed view": (changed_view, "shares memory with another"),
    "limits": (lambda score, *_: torch.clamp(score, min=FACTOR), "torch.ops.aten.clamp has tensors as limits"),
    "complex numbers": (lambda score, *_: torch.view_as_real(score * 1j)[0], "complex numbers"),
}


@pytest.mark.parametrize(("function", "why"), REFUSED.values(), ids=REFUSED)
def test_functions_that_have_no_translation(function: ScoreMod, why: str) -> None:
    with pytest.raises(UntranslatableError, match=why):
        translate(function)
