"""The backward of dilated attention in Triton, part one: dQ.

Each program owns one block of query rows. It recomputes the weights P = exp(S − LSE) from the LSE over all keys. So the
gradients of all launches add up, no atomic operation is needed, and results are the same in every run. The kernel also
stores two statistics of each row for ``grad_key_value.py``: its LSE, and its delta, which is the sum of
out × grad_out. They are stored by the numbers of the rows, so that a block of them is contiguous. This module imports
Triton, so it is imported only when a kernel is launched.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ring_backends.kernels.triton.blocks import (
    LOG2_E,
    QUERY_COLUMNS,
    add_rows,
    dropout_factors,
    keys_of_link,
    lattice,
    load_key_block,
    load_numbers,
    load_pair_inputs,
    load_rows,
    modified_scores,
    numbers,
    owned_block,
    product,
    rows_at,
    visible,
)


@triton.jit
def grad_of_queries(
    grad,
    own,
    keys_here,
    limits,
    blocks,
    factors,
    pairs,
    HEAD_DIM,
    VALUE_DIM,
    BLOCK_K,
    MARKS,
    WORDS,
    SCORE_MOD,
    BANDED,
    IS_WHOLE,
):
    """Add the gradients from blocks of keys.

    ``limits``, ``blocks`` and ``IS_WHOLE`` are as in the forward. ``own`` holds the same as ``own_rows`` there; and
    grad_out of the block, and as columns LSE, delta, and whether the rows have gradients.
    """
    q, rows, documents, first_words, second_words = own[0]
    do, row_lse, delta, has_grad = own[1]
    score_scale, threshold, dropout_weight = factors
    begin, end, turn, jump = blocks
    for number in range(begin, end, BLOCK_K):
        start = number
        if BANDED and not IS_WHOLE:
            start += tl.where(number < turn, 0, jump)
        keys = (start + tl.arange(0, BLOCK_K))[None, :]
        k, v, marks, words, is_key = load_key_block(
            keys_here, start, HEAD_DIM, q.shape[1], VALUE_DIM, do.shape[1], BLOCK_K, MARKS, WORDS, IS_WHOLE
        )
        products = product(q, tl.trans(k))
        if SCORE_MOD is not None:
            products, slopes = modified_scores(
                products, pairs, first_words, words[None, :], has_grad, is_key[None, :], SCORE_MOD
            )
        weights = tl.exp2(products * score_scale - row_lse)
        grad_weights = product(do, tl.trans(v))
        if WORDS == 1:
            grad_weights *= dropout_factors(first_words, second_words, words[None, :], threshold, dropout_weight)
        grad_scores = weights * (grad_weights - delta)
        if SCORE_MOD is not None:  # a hidden pair may have any derivative
            grad_scores = tl.where(weights == 0.0, 0.0, grad_scores * slopes)
        if MARKS != 0 or not IS_WHOLE:
            seen = has_grad & is_key[None, :]
            seen = visible(seen, rows, keys, documents, marks[None, :], limits, MARKS, BANDED, IS_WHOLE)
            grad_scores = tl.where(seen, grad_scores, 0.0)
        grad += product(grad_scores.to(k.dtype), k)
    return grad


@triton.jit(do_not_specialize=["num_programs", "threshold", "first_head"])
def grad_query_kernel(
    queries,
    keys,
    grad_out,
    out,
    lse,
    statistics,
    grad_query,
    owners,
    num_programs,
    scale,
    threshold,
    dropout_weight,
    first_head,
    captured,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MARKS: tl.constexpr,
    WORDS: tl.constexpr,
    SCORE_MOD: tl.constexpr,
    PACKED: tl.constexpr,
    BANDED: tl.constexpr,
):
    batch, entry, segment, block, first_link, end_link, opens = owned_block(owners, num_programs)
    here, num_rows = lattice(queries.table, batch, entry, segment, QUERY_COLUMNS)
    begin = block * BLOCK_Q
    rows = begin + tl.arange(0, BLOCK_Q)
    is_row = rows < num_rows
    row_lse = load_numbers(rows_at(lse, here), begin, is_row, float("-inf"), False)
    # A row with LSE −inf has no gradient. With +inf, its weights are 0.
    has_grad = row_lse != float("-inf")
    row_lse = tl.where(has_grad, row_lse * LOG2_E, float("inf"))
    q = load_rows(rows_at(queries.query, here), begin, has_grad, HEAD_DIM, BLOCK_D, False)
    do = load_rows(rows_at(grad_out, here), begin, has_grad, VALUE_DIM, BLOCK_V, False)
    o = load_rows(rows_at(out, here), begin, has_grad, VALUE_DIM, BLOCK_V, False)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    # Numbers that pad the segment get LSE +inf and delta 0: dK and dV load whole blocks without a mask.
    number, num_numbers = numbers(queries, entry, segment, num_rows)
    at = statistics.pointer + batch * statistics.strides[0] + number + rows
    tl.store(at, row_lse, mask=rows < num_numbers)
    tl.store(at + statistics.strides[1], delta, mask=rows < num_numbers)
    documents, first_words, second_words = load_pair_inputs(queries, here, begin, has_grad, MARKS, WORDS)
    own_rows = (q, rows[:, None], documents[:, None], first_words[:, None], second_words[:, None])
    own = (own_rows, (do, row_lse[:, None], delta[:, None], has_grad[:, None]))
    factors = (LOG2_E if SCORE_MOD is not None else scale * LOG2_E, threshold, dropout_weight)
    pairs = (scale, batch, first_head + here[1], captured)
    grad = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for link in range(first_link, end_link):
        keys_here, limits, whole, edges = keys_of_link(
            owners,
            link,
            keys,
            batch,
            segment,
            begin,
            BLOCK_Q,
            BLOCK_K,
            HEAD_DIM,
            VALUE_DIM,
            MARKS,
            WORDS,
            PACKED,
            BANDED,
        )
        for is_whole in tl.static_range(1, -1, -1):
            blocks = whole if is_whole else edges
            grad = grad_of_queries(
                grad,
                own,
                keys_here,
                limits,
                blocks,
                factors,
                pairs,
                HEAD_DIM,
                VALUE_DIM,
                BLOCK_K,
                MARKS,
                WORDS,
                SCORE_MOD,
                BANDED,
                is_whole,
            )

    add_rows(rows_at(grad_query, here), begin, is_row, grad * scale, opens, HEAD_DIM)
