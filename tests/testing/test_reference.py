"""The reference against an independent implementation: a loop over the rows of each segment in pure Python.

Other tests rely on the reference.
"""

from __future__ import annotations

import ast
import itertools
import math
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import ring_backends.testing.reference
from ring_backends.testing.marks import THOROUGH
from ring_backends.testing.reference import dense_attention as dense
from ring_backends.testing.reference import reference_attention, reference_counts
from ring_backends.testing.strategies import DTYPES, AttentionCase, attention_cases

SMALL = {"max_n": 14, "max_heads": 5, "head_dims": (2, 1), "dtypes": (torch.float64,)}


def walked_keys(case: AttentionCase, head: int, query_position: int) -> list[int | None]:
    """The multiset of keys that a query sees, segment by segment; None is a phantom key."""
    n, num_heads = case.seq_len, case.num_heads
    num_branches = len(case.segment_lengths)
    seen: list[int | None] = []
    first_head = 0
    for branch, (w, r) in enumerate(zip(case.segment_lengths, case.dilation_rates, strict=True)):
        if case.head_mode == "grouped":
            group = range(first_head, first_head + len(range(branch, num_heads, num_branches)))
            first_head = group.stop
            if head not in group:
                continue
        rule = case.offset or {"all": "mod", "grouped": "branch"}[case.head_mode]
        heads_per_block = -(-num_heads // r)
        w = n if w is None else min(w, n)
        every = query_position % w % r
        offset = {"mod": head % r, "block": head // heads_per_block, "branch": branch % r, "every": every}[rule]
        window = None if case.window_lengths is None else case.window_lengths[branch]
        for start in range(0, n, w):
            rows = list(range(start + offset, min(start + w, n), r))
            if query_position not in rows:
                continue
            if window is not None:
                rows = [u for u in rows if abs(u - query_position) < window]
            seen += [u for u in rows if not (case.is_causal and u > query_position)]
            if case.padding == "zeros" and start + w >= n and not case.is_causal:
                padded = start + w + -w % r
                seen += [None for u in range(start + offset, padded, r) if u >= n]
    return seen


def walked_attention(case: AttentionCase) -> tuple[Tensor, Tensor]:
    query, key, value, _, mask = case.tensors()
    ids, factors, sinks = case.document_ids(), case.weight_factors(), case.sink_scores()
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    score_mod = case.score_function()
    width = case.dims[1]
    out = torch.zeros(*query.shape[:3], width, dtype=torch.float64)
    lse = torch.full((case.batch, case.num_heads, case.seq_len), -math.inf, dtype=torch.float64)
    for b, h, t in itertools.product(range(case.batch), range(case.num_heads), range(case.seq_len)):
        kv_head = h // (case.num_heads // case.num_kv_heads)
        pairs = []  # score, weight factor and value of each key
        for u in walked_keys(case, h, t):
            if u is None:
                pairs.append((0.0, 1.0, torch.zeros(width)))
                continue
            ignored = mask is not None and mask[b, u]
            elsewhere = ids is not None and (ids[b, t] < 0 or ids[b, t] != ids[b, u])
            if not ignored and not elsewhere:
                score = scale * sum((query[b, t, h] * key[b, u, kv_head]).tolist())
                if score_mod is not None:
                    pair = (torch.tensor(x) for x in (b, h, t, u))
                    score = float(score_mod(torch.tensor(score, dtype=torch.float64), *pair))
                if score != -math.inf:
                    factor = 1.0 if factors is None else float(factors[b, h, t, u])
                    pairs.append((score, factor, value[b, u, kv_head]))
        if sinks is not None:
            pairs.append((float(sinks[h]), 1.0, torch.zeros(width)))
        total = sum(math.exp(score) for score, _, _ in pairs)
        if pairs:
            lse[b, h, t] = math.log(total)
        for score, factor, row in pairs:
            out[b, t, h] += factor * math.exp(score) / total * row
    return out, lse


@THOROUGH
@settings(max_examples=150, deadline=None)
@given(case=attention_cases(**SMALL))
def test_equals_the_loop_over_rows(case):
    found = reference_attention(*case.tensors()[:3], **case.reference_options())
    torch.testing.assert_close(found, walked_attention(case), rtol=1e-12, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(case=attention_cases(**SMALL | {"max_n": 8}))
def test_gradients_are_the_derivative(case):
    *inputs, grad_out, _ = case.tensors()
    for x in inputs:
        x.requires_grad_()

    def out(*qkv: Tensor) -> Tensor:
        return reference_attention(*qkv, **case.reference_options())[0]

    assert torch.autograd.gradcheck(out, inputs, fast_mode=True)
    grads = torch.autograd.grad(out(*inputs), inputs, grad_out)
    assert all(grad.isfinite().all() for grad in grads)


def test_counts_by_hand():
    counts = reference_counts(4, 2, [2, 4], [1, 2])
    assert counts.tolist() == [
        [[2, 1, 1, 0], [1, 1, 0, 0], [1, 0, 2, 1], [0, 0, 1, 1]],
        [[1, 1, 0, 0], [1, 2, 0, 1], [0, 0, 1, 1], [0, 1, 1, 2]],
    ]
    causal = reference_counts(4, 2, [2, 4], [1, 2], is_causal=True)
    assert torch.equal(causal, counts.tril())


@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_attention_in_the_input_dtype(dtype):
    case = AttentionCase(33, (8, 33), (2, 4), num_heads=2, num_kv_heads=2, masked="rows", batch=2, dtype=dtype)
    query, key, value, _, mask = case.tensors()
    counts = reference_counts(33, 2, [8, 33], [2, 4])
    out, lse = dense(query, key, value, counts, key_padding_mask=mask, dtype=dtype)
    exact = reference_attention(query, key, value, **case.options(), key_padding_mask=mask)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    few_roundings = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close((out.double(), lse.double()), exact, rtol=few_roundings, atol=few_roundings)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"head_mode": "some"}, "head_mode"),
        ({"offset": "none"}, "offset"),
        ({"padding": "zero"}, "padding"),
        ({"padding": "zeros", "segment_lengths": [3], "dilation_rates": [2]}, r"segment_lengths\[0\] = 3"),
        ({"head_mode": "grouped", "segment_lengths": [2] * 3, "dilation_rates": [1] * 3}, "2 heads and 3"),
        ({"segment_lengths": [0]}, "at least 1"),
        ({"segment_lengths": [2, 2]}, "one rate"),
        ({"segment_lengths": [], "dilation_rates": []}, "at least one branch"),
    ],
)
def test_undefined_arguments_are_refused(options, named):
    query = torch.zeros(1, 5, 2, 3)
    with pytest.raises(ValueError, match=named):
        reference_attention(query, query, query, **{"segment_lengths": [2], "dilation_rates": [1]} | options)


def test_shares_no_code_with_the_package():
    tree = ast.parse(Path(ring_backends.testing.reference.__file__).read_text())
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(node.module)
        elif isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
    assert {name.partition(".")[0] for name in imported} <= {"torch", *sys.stdlib_module_names}


@settings(max_examples=50, deadline=None)
@given(case=attention_cases())
def test_the_repr_of_a_case_makes_the_same_case(case):
    assert eval(repr(case), {"AttentionCase": AttentionCase, "torch": torch}) == case
    for first, again in zip(case.tensors(), case.tensors(), strict=True):
        assert first is again is None or torch.equal(first, again)
    query, key, value, grad_out, mask = case.tensors()
    of_queries, of_keys = ((case.batch, case.seq_len, heads) for heads in (case.num_heads, case.num_kv_heads))
    head_dim, value_dim = case.dims
    assert (query.shape, grad_out.shape) == ((*of_queries, head_dim), (*of_queries, value_dim))
    assert (key.shape, value.shape) == ((*of_keys, head_dim), (*of_keys, value_dim))
    assert (mask is None) == (case.masked is None)
    reference_attention(query, key, value, **case.options(), key_padding_mask=mask)
