"""The reference against an independent implementation: a loop over the rows of each segment in pure Python.

Other tests rely on the reference. Its own tests therefore use small cases that can be checked by hand.
"""

from __future__ import annotations

import ast
import itertools
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor

import ring_backends.testing.reference
from ring_backends.testing.marks import THOROUGH
from ring_backends.testing.reference import dense_attention as dense
from ring_backends.testing.reference import reference_attention, reference_counts, reference_phantom_counts
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


def leaves(case: AttentionCase) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """Query, key and value, the gradient of the output, and the mask."""
    *inputs, grad_out, mask = case.tensors()
    return [x.requires_grad_() for x in inputs], grad_out, mask


@THOROUGH
@settings(max_examples=150, deadline=None)
@given(case=attention_cases(**SMALL))
def test_equals_the_loop_over_rows(case):
    found = reference_attention(*case.tensors()[:3], **case.reference_options())
    torch.testing.assert_close(found, walked_attention(case), rtol=1e-12, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(case=attention_cases(**SMALL | {"max_n": 8}))
def test_gradients_are_the_derivative(case):
    inputs, grad_out, _ = leaves(case)

    def out(*qkv: Tensor) -> Tensor:
        return reference_attention(*qkv, **case.reference_options())[0]

    assert torch.autograd.gradcheck(out, inputs, fast_mode=True)
    grads = torch.autograd.grad(out(*inputs), inputs, grad_out)
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("is_causal", [False, True])
def test_one_whole_branch_is_plain_attention(is_causal):
    query, key, value, *_ = AttentionCase(11, (11,), (1,), batch=2, num_heads=4, num_kv_heads=2).tensors()
    out, lse = reference_attention(query, key, value, [11], [1], is_causal=is_causal)
    q, k, v = (x.double().transpose(1, 2) for x in (query, key, value))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    torch.testing.assert_close(out, expected.transpose(1, 2))
    # One more key with score 0 and value 0 makes the LSE a factor of the output.
    counts, one_more = reference_counts(11, 4, [11], [1], is_causal=is_causal), torch.ones(4, 11, dtype=torch.int64)
    with_zero = dense(query, key, value, counts, phantom_counts=one_more)[0]
    torch.testing.assert_close(with_zero, out * torch.sigmoid(lse).transpose(1, 2)[..., None])


@pytest.mark.parametrize("padding", ["masked", "zeros"])
def test_a_repeated_branch_only_adds_ln_2_to_the_lse(padding):
    query, key, value, *_ = AttentionCase(10, (4,), (2,), num_heads=2).tensors()
    once = reference_attention(query, key, value, [4], [2], padding=padding)
    twice = reference_attention(query, key, value, [4, 4], [2, 2], padding=padding)
    torch.testing.assert_close(twice, (once[0], once[1] + math.log(2)))


def test_counts_by_hand():
    counts = reference_counts(4, 2, [2, 4], [1, 2])
    assert counts.tolist() == [
        [[2, 1, 1, 0], [1, 1, 0, 0], [1, 0, 2, 1], [0, 0, 1, 1]],
        [[1, 1, 0, 0], [1, 2, 0, 1], [0, 0, 1, 1], [0, 1, 1, 2]],
    ]
    causal = reference_counts(4, 2, [2, 4], [1, 2], is_causal=True)
    assert torch.equal(causal, counts.tril())


def test_positions_past_the_last_full_stride_of_a_segment():
    # w = 5, r = 2 covers local rows 0, 2, 4 of segments 0..4 and 5..7: positions 0, 2, 4 and 5, 7.
    counts = reference_counts(8, 1, [5], [2])
    assert counts[0].sum(1).tolist() == [3, 0, 3, 0, 3, 2, 0, 2]


def test_head_groups_by_hand():
    counts = reference_counts(4, 3, [2, 4], [1, 2], head_mode="grouped")
    pairs = [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
    odd = [[0, 0, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0], [0, 1, 0, 1]]
    assert counts.tolist() == [pairs, pairs, odd]


@pytest.mark.parametrize(
    ("offset", "by_head"),
    [(None, [0, 1, 2, 0, 1]), ("mod", [0, 1, 2, 0, 1]), ("block", [0, 0, 1, 1, 2]), ("branch", [0, 0, 0, 0, 0])],
)
def test_offsets_by_hand(offset, by_head):
    counts = reference_counts(3, 5, [3], [3], offset=offset)
    assert [int(head.diagonal().argmax()) for head in counts] == by_head


def test_an_uncovered_row_is_zero_and_has_no_gradient():
    inputs, grad_out, _ = leaves(AttentionCase(8, (4,), (2,), dtype=torch.float64))
    out, lse = reference_attention(*inputs, [4], [2])
    assert not lse.requires_grad
    assert (out[:, 1::2] == 0).all()
    assert (lse[..., 1::2] == -math.inf).all()
    assert lse[..., ::2].isfinite().all()
    for grad in torch.autograd.grad(out, inputs, grad_out):
        assert (grad[:, 1::2] == 0).all()
        assert (grad[:, ::2] != 0).all()


@pytest.mark.parametrize("padding", ["masked", "zeros"])
def test_a_row_whose_keys_are_all_ignored_is_uncovered(padding):
    case = AttentionCase(5, (4,), (1,), padding=padding, masked="all", dtype=torch.float64)
    inputs, grad_out, mask = leaves(case)
    out, lse = reference_attention(*inputs, **case.options(), key_padding_mask=mask)
    assert (out == 0).all()
    assert all((grad == 0).all() for grad in torch.autograd.grad(out, inputs, grad_out))
    assert (lse[..., :4] == -math.inf).all()
    # Zero padding fills the segment of position 4 with positions 5, 6 and 7. The mask does not cover them.
    torch.testing.assert_close(lse[0, 0, 4].item(), math.log(3) if padding == "zeros" else -math.inf)


@pytest.mark.parametrize(
    ("n", "w", "r", "by_head"),
    [
        # Segment 4..7 has one query, at position 4. Offset 0 adds phantom 6. Offset 1 (5, 7) has no query.
        (5, 4, 2, [[0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]),
        (6, 4, 2, [[0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 1]]),
        # w is clamped to 5 and padded to 6. Position 5 has offset 1.
        (5, 9, 2, [[0, 0, 0, 0, 0], [0, 1, 0, 1, 0]]),
        (8, 4, 2, [[0] * 8, [0] * 8]),
        (1, 1, 7, [[0], [0]]),
    ],
)
def test_phantom_keys_by_hand(n, w, r, by_head):
    assert reference_phantom_counts(n, 2, [w], [r]).tolist() == by_head
    assert not reference_phantom_counts(n, 2, [w], [r], is_causal=True).any()


def test_any_input_is_cast_to_fp64():
    query, key, value, *_ = AttentionCase(9, (4, 9), (2, 3), dtype=torch.bfloat16, num_heads=3).tensors()
    out, lse = reference_attention(query, key, value, [4, 9], [2, 3])
    assert out.dtype == lse.dtype == torch.float64
    same = reference_attention(query.double(), key.double(), value.double(), [4, 9], [2, 3])
    assert all(map(torch.equal, (out, lse), same))


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


def test_an_empty_batch():
    query = torch.randn(0, 5, 2, 3, requires_grad=True)
    mask = torch.zeros(0, 5, dtype=torch.bool)
    out, lse = reference_attention(query, query, query, [2], [1], padding="zeros", key_padding_mask=mask)
    assert out.shape == (0, 5, 2, 3)
    assert lse.shape == (0, 2, 5)
    out.sum().backward()
    assert query.grad is not None


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
