"""The backward of dilated attention in Triton, part one: dQ.

Each program owns one block of query rows. It recomputes the weights P = exp(S − LSE) from the LSE over all keys. So the
gradients of all launches add up, no atomic operation is needed, and results are the same in every run. The kernel also
stores two statistics of each row for ``triton_grad_key_value.py``: its LSE, and its delta, which is the sum of
out × grad_out. They are stored by the numbers of the rows, so that a block of them is contiguous. This module imports
Triton, so it is imported only when a kernel is launched.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ring_backends.kernels.triton_blocks import (
    LOG2_E,
    QUERY_COLUMNS,
    dropout_factors,
    earlier_rows,
    keys_at,
    lattice,
    linked,
    load_documents,
    load_key_block,
    load_numbers,
    load_query_words,
    load_rows,
    numbers,
    owned_block,
    product,
    rows_at,
    store_rows,
    visible,
)


@triton.jit
def grad_of_queries(
    grad,
    own_rows,
    keys_here,
    is_causal,
    begin,
    end,
    score_scale,
    threshold,
    dropout_weight,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MARKS: tl.constexpr,
    DROPOUT: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Add the gradients from the keys from number ``begin`` to ``end``. ``IS_WHOLE`` as in the forward.

    ``own_rows`` holds what belongs to the block's queries: the queries, grad_out, LSE, delta, the numbers of the rows,
    whether they have gradients, documents, and dropout words.
    """
    q, do, row_lse, delta, rows, has_grad, documents, first_words, second_words = own_rows
    for start in range(begin, end, BLOCK_K):
        indices = start + tl.arange(0, BLOCK_K)
        k, v, marks, words, is_key = load_key_block(
            keys_here, start, HEAD_DIM, BLOCK_D, BLOCK_K, MARKS, DROPOUT, IS_WHOLE
        )
        scores = product(q, tl.trans(k), UPCAST) * score_scale
        weights = tl.exp2(scores - row_lse[:, None])
        grad_weights = product(do, tl.trans(v), UPCAST)
        if DROPOUT:
            grad_weights *= dropout_factors(
                first_words[:, None], second_words[:, None], words[None, :], threshold, dropout_weight
            )
        grad_scores = weights * (grad_weights - delta[:, None])
        if MARKS != 0 or not IS_WHOLE:
            seen = visible(
                has_grad[:, None] & is_key[None, :],
                rows[:, None],
                indices[None, :],
                documents[:, None],
                marks[None, :],
                is_causal,
                MARKS,
                IS_WHOLE,
            )
            grad_scores = tl.where(seen, grad_scores, 0.0)
        grad += product(grad_scores.to(k.dtype), k, UPCAST)
    return grad


@triton.jit(do_not_specialize=["num_programs", "threshold"])
def grad_query_kernel(
    query,
    key,
    value,
    grad_out,
    out,
    lse,
    statistics,
    grad_query,
    query_documents,
    key_marks,
    query_words,
    key_words,
    queries,
    keys,
    bounds,
    links,
    work,
    query_strides,
    key_strides,
    value_strides,
    grad_out_strides,
    out_strides,
    lse_strides,
    statistics_strides,
    grad_query_strides,
    document_strides,
    mark_strides,
    query_word_strides,
    key_word_strides,
    num_programs,
    scale,
    threshold,
    dropout_weight,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MARKS: tl.constexpr,
    DROPOUT: tl.constexpr,
    PACKED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    batch, entry, segment, block, first_link, end_link, opens = owned_block(work, bounds, num_programs)
    head, first, rate, num_rows = lattice(queries, entry, segment, QUERY_COLUMNS)
    begin = block * BLOCK_Q
    rows = begin + tl.arange(0, BLOCK_Q)
    is_row = rows < num_rows
    at = rows_at(lse, batch, head, first, rate, lse_strides)
    row_lse = load_numbers(at, begin, is_row, float("-inf"), BLOCK_Q, False)
    # A row with LSE −inf has no gradient. With +inf, its weights are 0.
    has_grad = row_lse != float("-inf")
    row_lse = tl.where(has_grad, row_lse * LOG2_E, float("inf"))
    at = rows_at(query, batch, head, first, rate, query_strides)
    q = load_rows(at, begin, has_grad, BLOCK_Q, HEAD_DIM, BLOCK_D, False)
    at = rows_at(grad_out, batch, head, first, rate, grad_out_strides)
    do = load_rows(at, begin, has_grad, BLOCK_Q, HEAD_DIM, BLOCK_D, False)
    at = rows_at(out, batch, head, first, rate, out_strides)
    o = load_rows(at, begin, has_grad, BLOCK_Q, HEAD_DIM, BLOCK_D, False)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    # Numbers that pad the segment get LSE +inf and delta 0: dK and dV load whole blocks without a mask.
    number, num_numbers = numbers(queries, entry, segment, num_rows)
    at = statistics + batch * statistics_strides[0] + number + rows
    tl.store(at, row_lse, mask=rows < num_numbers)
    tl.store(at + statistics_strides[1], delta, mask=rows < num_numbers)
    documents = load_documents(
        query_documents, batch, head, first, rate, begin, has_grad, document_strides, BLOCK_Q, MARKS
    )
    first_words, second_words = load_query_words(
        query_words, batch, head, first, rate, begin, has_grad, query_word_strides, BLOCK_Q, DROPOUT
    )
    own_rows = (q, do, row_lse, delta, rows, has_grad, documents, first_words, second_words)
    grad = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for link in range(first_link, end_link):
        key_entry, is_causal = linked(links, link)
        keys_here = keys_at(
            key,
            value,
            key_marks,
            key_words,
            keys,
            key_entry,
            segment,
            batch,
            key_strides,
            value_strides,
            mark_strides,
            key_word_strides,
            HEAD_DIM,
            MARKS,
            DROPOUT,
            PACKED,
        )
        _, _, _, _, num_keys = keys_here
        stop = tl.where(is_causal, tl.minimum(num_keys, begin + BLOCK_Q), num_keys)
        whole = tl.where(is_causal, tl.minimum(num_keys, begin), num_keys) // BLOCK_K * BLOCK_K
        for is_whole in tl.static_range(1, -1, -1):
            grad = grad_of_queries(
                grad,
                own_rows,
                keys_here,
                is_causal,
                0 if is_whole else whole,
                whole if is_whole else stop,
                scale * LOG2_E,
                threshold,
                dropout_weight,
                HEAD_DIM,
                BLOCK_D,
                BLOCK_K,
                MARKS,
                DROPOUT,
                is_whole,
                UPCAST,
            )

    at = rows_at(grad_query, batch, head, first, rate, grad_query_strides)
    grad = grad * scale + earlier_rows(at, begin, is_row, opens, BLOCK_Q, HEAD_DIM, BLOCK_D)
    store_rows(at, begin, is_row, grad, BLOCK_Q, HEAD_DIM, BLOCK_D, UPCAST)
