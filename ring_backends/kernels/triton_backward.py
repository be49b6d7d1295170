"""The backward of dilated attention in Triton: one kernel for dQ, and one for dK and dV.

Each program owns one block of rows: queries for dQ, keys for dK and dV. It recomputes the weights P = exp(S − LSE) from
the LSE over all keys. So the gradients of all launches add up, no atomic operation is needed, and results are the same
in every run. The kernel for dQ stores two statistics of each row for the other: its LSE, and its delta, which is the
sum of out × grad_out. They are stored by the numbers of the rows, so that a block of them is contiguous. This module
imports Triton, so it is imported only when a kernel is launched.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ring_backends.kernels.triton_blocks import (
    KEY_COLUMNS,
    LOG2_E,
    QUERY_COLUMNS,
    dropout_factors,
    earlier_rows,
    first_number,
    keys_at,
    lattice,
    linked,
    load_documents,
    load_key_block,
    load_numbers,
    load_query_words,
    load_rows,
    owned_block,
    packed_rows_at,
    product,
    rows_at,
    store_rows,
)


@triton.jit
def grad_of_queries(
    grad,
    q,
    do,
    row_lse,
    delta,
    rows,
    has_grad,
    documents,
    first_words,
    second_words,
    key_at,
    value_at,
    mark_at,
    word_at,
    num_keys,
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
    """Add the gradients from the keys from number ``begin`` to ``end``. ``IS_WHOLE`` as in the forward."""
    for start in range(begin, end, BLOCK_K):
        indices = start + tl.arange(0, BLOCK_K)
        k, v, marks, words, is_key = load_key_block(
            key_at,
            value_at,
            mark_at,
            word_at,
            start,
            indices < num_keys,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_K,
            MARKS,
            DROPOUT,
            IS_WHOLE,
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
            seen = has_grad[:, None] & is_key[None, :]
            if not IS_WHOLE:
                seen = seen & ((indices[None, :] <= rows[:, None]) | (is_causal == 0))
            if MARKS == 2:
                seen = seen & (documents[:, None] == marks[None, :])
            grad_scores = tl.where(seen, grad_scores, 0.0)
        grad += product(grad_scores.to(k.dtype), k, UPCAST)
    return grad


@triton.jit
def grads_of_keys(
    key_grad,
    value_grad,
    k,
    v,
    is_key,
    marks,
    words,
    indices,
    query_at,
    grad_out_at,
    lse_at,
    delta_at,
    query_documents,
    query_words,
    batch,
    head,
    first,
    rate,
    document_strides,
    word_strides,
    num_rows,
    is_causal,
    begin,
    num_diagonal,
    later,
    num_blocks,
    score_scale,
    threshold,
    dropout_weight,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    MARKS: tl.constexpr,
    DROPOUT: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Add the gradients from blocks of query rows: ``num_diagonal`` from number ``begin`` on, the rest from ``later``.

    Scores, weights and their gradients are transposed here: [keys, rows]. With marks, a row that sees no key is not
    read. Without marks, every row sees a key, and loads do not wait for the LSE.
    """
    for number in range(0, num_blocks):
        start = later + (number - num_diagonal) * BLOCK_Q
        if not IS_WHOLE:  # whole blocks have no diagonal
            start = tl.where(number < num_diagonal, begin + number * BLOCK_Q, start)
        start = tl.multiple_of(start, BLOCK_Q)
        rows = start + tl.arange(0, BLOCK_Q)
        reads_all: tl.constexpr = IS_WHOLE and MARKS == 0
        is_row = rows < num_rows
        if IS_WHOLE:
            row_lse = tl.load(lse_at + rows)
            delta = tl.load(delta_at + rows)
        else:
            row_lse = tl.load(lse_at + rows, mask=is_row, other=float("inf"))
            delta = tl.load(delta_at + rows, mask=is_row, other=0.0)
        if MARKS != 0:
            is_row = row_lse != float("inf")
        q = load_rows(query_at, start, is_row, BLOCK_Q, HEAD_DIM, BLOCK_D, reads_all)
        do = load_rows(grad_out_at, start, is_row, BLOCK_Q, HEAD_DIM, BLOCK_D, reads_all)
        documents = load_documents(
            query_documents, batch, head, first, rate, start, is_row, document_strides, BLOCK_Q, MARKS
        )
        first_words, second_words = load_query_words(
            query_words, batch, head, first, rate, start, is_row, word_strides, BLOCK_Q, DROPOUT
        )
        scores = product(k, tl.trans(q), UPCAST) * score_scale
        weights = tl.exp2(scores - row_lse[None, :])
        if MARKS != 0 or not IS_WHOLE:
            seen = is_row[None, :]
            if MARKS == 1:
                seen = seen & is_key[:, None]
            if not IS_WHOLE:
                seen = seen & ((indices[:, None] <= rows[None, :]) | (is_causal == 0))
            if MARKS == 2:
                seen = seen & (marks[:, None] == documents[None, :])
            weights = tl.where(seen, weights, 0.0)
        grad_weights = product(v, tl.trans(do), UPCAST)
        kept = weights
        if DROPOUT:
            factors = dropout_factors(
                first_words[None, :], second_words[None, :], words[:, None], threshold, dropout_weight
            )
            kept = weights * factors
            grad_weights *= factors
        value_grad += product(kept.to(do.dtype), do, UPCAST)
        grad_scores = weights * (grad_weights - delta[None, :])
        key_grad += product(grad_scores.to(q.dtype), q, UPCAST)
    return key_grad, value_grad


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
    at = statistics + batch * statistics_strides[0] + first_number(queries, entry, segment, num_rows) + rows
    tl.store(at, row_lse, mask=is_row)
    tl.store(at + statistics_strides[1], delta, mask=is_row)
    documents = load_documents(
        query_documents, batch, head, first, rate, begin, has_grad, document_strides, BLOCK_Q, MARKS
    )
    first_words, second_words = load_query_words(
        query_words, batch, head, first, rate, begin, has_grad, query_word_strides, BLOCK_Q, DROPOUT
    )
    grad = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for link in range(first_link, end_link):
        key_entry, is_causal = linked(links, link)
        key_at, value_at, mark_at, word_at, num_keys = keys_at(
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
        stop = tl.where(is_causal, tl.minimum(num_keys, begin + BLOCK_Q), num_keys)
        whole = tl.where(is_causal, tl.minimum(num_keys, begin), num_keys) // BLOCK_K * BLOCK_K
        for is_whole in tl.static_range(1, -1, -1):
            grad = grad_of_queries(
                grad,
                q,
                do,
                row_lse,
                delta,
                rows,
                has_grad,
                documents,
                first_words,
                second_words,
                key_at,
                value_at,
                mark_at,
                word_at,
                num_keys,
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


@triton.jit(do_not_specialize=["num_programs", "threshold"])
def grad_key_value_kernel(
    query,
    key,
    value,
    grad_out,
    statistics,
    grad_key,
    grad_value,
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
    statistics_strides,
    grad_key_strides,
    grad_value_strides,
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
    head, first, rate, _ = lattice(keys, entry, segment, KEY_COLUMNS)
    key_at, value_at, mark_at, word_at, num_keys = keys_at(
        key,
        value,
        key_marks,
        key_words,
        keys,
        entry,
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
    first_key = block * BLOCK_K
    indices = first_key + tl.arange(0, BLOCK_K)
    k, v, marks, words, is_key = load_key_block(
        key_at,
        value_at,
        mark_at,
        word_at,
        first_key,
        indices < num_keys,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_K,
        MARKS,
        DROPOUT,
        False,
    )
    is_row = indices < num_keys
    if PACKED:
        key_at = packed_rows_at(grad_key, keys, entry, batch, first, 4, HEAD_DIM, 4)
        value_at = packed_rows_at(grad_value, keys, entry, batch, first, 5, HEAD_DIM, 4)
    else:
        key_at = rows_at(grad_key, batch, head, first, rate, grad_key_strides)
        value_at = rows_at(grad_value, batch, head, first, rate, grad_value_strides)
    key_grad = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    value_grad = earlier_rows(value_at, first_key, is_row, opens, BLOCK_K, HEAD_DIM, BLOCK_D)
    for link in range(first_link, end_link):
        query_entry, is_causal = linked(links, link)
        query_head, first_query, query_rate, num_rows = lattice(queries, query_entry, segment, QUERY_COLUMNS)
        # Blocks of rows on the diagonal, then whole blocks, then a block with the last rows.
        begin = tl.where(is_causal, first_key // BLOCK_Q * BLOCK_Q, 0)
        whole = tl.where(is_causal, tl.cdiv(first_key + BLOCK_K, BLOCK_Q) * BLOCK_Q, 0)
        end = tl.maximum(whole, num_rows // BLOCK_Q * BLOCK_Q)
        num_diagonal = (tl.minimum(whole, tl.cdiv(num_rows, BLOCK_Q) * BLOCK_Q) - begin) // BLOCK_Q
        has_rest = tl.where(num_rows > end, 1, 0)
        number = first_number(queries, query_entry, segment, num_rows)
        statistics_at = statistics + batch * statistics_strides[0] + number
        for is_whole in tl.static_range(2):
            key_grad, value_grad = grads_of_keys(
                key_grad,
                value_grad,
                k,
                v,
                is_key,
                marks,
                words,
                indices,
                rows_at(query, batch, query_head, first_query, query_rate, query_strides),
                rows_at(grad_out, batch, query_head, first_query, query_rate, grad_out_strides),
                statistics_at,
                statistics_at + statistics_strides[1],
                query_documents,
                query_words,
                batch,
                query_head,
                first_query,
                query_rate,
                document_strides,
                query_word_strides,
                num_rows,
                is_causal,
                begin,
                0 if is_whole else num_diagonal,
                whole if is_whole else end,
                (end - whole) // BLOCK_Q if is_whole else num_diagonal + has_rest,
                scale * LOG2_E,
                threshold,
                dropout_weight,
                HEAD_DIM,
                BLOCK_D,
                BLOCK_Q,
                MARKS,
                DROPOUT,
                is_whole,
                UPCAST,
            )

    store_rows(value_at, first_key, is_row, value_grad, BLOCK_K, HEAD_DIM, BLOCK_D, UPCAST)
    key_grad = key_grad * scale + earlier_rows(key_at, first_key, is_row, opens, BLOCK_K, HEAD_DIM, BLOCK_D)
    store_rows(key_at, first_key, is_row, key_grad, BLOCK_K, HEAD_DIM, BLOCK_D, UPCAST)
