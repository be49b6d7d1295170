"""The backward of dilated attention in Triton: one kernel for dQ, and one for dK and dV.

Each program owns one block of rows: queries for dQ, keys for dK and dV. It recomputes the weights P = exp(S − LSE) from
the LSE over all keys. So the gradients of all launches add up, no atomic operation is needed, and results are the same
in every run. The kernel for dQ stores the sum of out × grad_out of each row, its delta, for the other. This module
imports Triton, so it is imported only when a kernel is launched.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ring_backends.kernels.triton_blocks import (
    KEY_COLUMNS,
    LOG2_E,
    ROW_COLUMNS,
    dropout_factors,
    lattice,
    linked,
    load_documents,
    load_key_block,
    load_query_words,
    load_rows,
    owned_block,
    packed_offset,
    packed_rows,
    product,
    row_offsets,
    store_rows,
)


@triton.jit
def load_query_block(
    query,
    grad_out,
    out,
    lse,
    deltas,
    query_documents,
    query_words,
    batch,
    head,
    positions,
    is_row,
    query_strides,
    grad_out_strides,
    out_strides,
    lse_strides,
    delta_strides,
    document_strides,
    word_strides,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MARKS: tl.constexpr,
    DROPOUT: tl.constexpr,
    STORES_DELTAS: tl.constexpr,
):
    """Load a block of queries with all that a backward needs of them. Their deltas are computed and stored, or loaded.

    A row with LSE −inf is not read: q, dO and delta are 0, and the LSE becomes +inf, so that its weights are 0.
    """
    row_lse = tl.load(lse + row_offsets(batch, head, positions, lse_strides), mask=is_row, other=float("-inf"))
    is_row &= row_lse != float("-inf")
    row_lse = tl.where(is_row, row_lse * LOG2_E, float("inf"))
    q = load_rows(
        query, row_offsets(batch, head, positions, query_strides), query_strides[3], is_row, HEAD_DIM, BLOCK_D
    )
    at = row_offsets(batch, head, positions, grad_out_strides)
    do = load_rows(grad_out, at, grad_out_strides[3], is_row, HEAD_DIM, BLOCK_D)
    delta_at = deltas + row_offsets(batch, head, positions, delta_strides)
    if STORES_DELTAS:
        at = row_offsets(batch, head, positions, out_strides)
        o = load_rows(out, at, out_strides[3], is_row, HEAD_DIM, BLOCK_D)
        delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
        tl.store(delta_at, delta, mask=is_row)
    else:
        delta = tl.load(delta_at, mask=is_row, other=0.0)
    documents = load_documents(query_documents, batch, head, positions, is_row, document_strides, MARKS)
    first_words, second_words = load_query_words(query_words, batch, head, positions, is_row, word_strides, DROPOUT)
    return q, do, row_lse, delta, documents, first_words, second_words, is_row


@triton.jit(do_not_specialize=["num_programs", "threshold"])
def grad_query_kernel(
    query,
    key,
    value,
    grad_out,
    out,
    lse,
    deltas,
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
    delta_strides,
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
    head, first, rate, num_rows = lattice(queries, entry, segment, ROW_COLUMNS)
    rows = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    positions = first + rows * rate
    q, do, row_lse, delta, documents, first_words, second_words, has_grad = load_query_block(
        query,
        grad_out,
        out,
        lse,
        deltas,
        query_documents,
        query_words,
        batch,
        head,
        positions,
        rows < num_rows,
        query_strides,
        grad_out_strides,
        out_strides,
        lse_strides,
        delta_strides,
        document_strides,
        query_word_strides,
        HEAD_DIM,
        BLOCK_D,
        MARKS,
        DROPOUT,
        True,
    )
    grad = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for link in range(first_link, end_link):
        key_entry, is_causal = linked(links, link)
        key_head, first_key, key_rate, num_keys = lattice(keys, key_entry, segment, KEY_COLUMNS)
        stop = tl.where(is_causal, tl.minimum(num_keys, (block + 1) * BLOCK_Q), num_keys)
        for start in range(0, stop, BLOCK_K):
            indices = start + tl.arange(0, BLOCK_K)
            k, v, marks, words, is_key = load_key_block(
                key,
                value,
                key_marks,
                key_words,
                keys,
                key_entry,
                batch,
                key_head,
                first_key,
                key_rate,
                indices,
                indices < num_keys,
                key_strides,
                value_strides,
                mark_strides,
                key_word_strides,
                HEAD_DIM,
                BLOCK_D,
                MARKS,
                DROPOUT,
                PACKED,
            )
            seen = has_grad[:, None] & is_key[None, :]
            seen &= (indices[None, :] <= rows[:, None]) | (is_causal == 0)
            if MARKS == 2:
                seen &= documents[:, None] == marks[None, :]
            scores = product(q, tl.trans(k), UPCAST) * (scale * LOG2_E)
            weights = tl.exp2(scores - row_lse[:, None])
            grad_weights = product(do, tl.trans(v), UPCAST)
            if DROPOUT:
                grad_weights *= dropout_factors(
                    first_words[:, None], second_words[:, None], words[None, :], threshold, dropout_weight
                )
            grad_scores = tl.where(seen, weights * (grad_weights - delta[:, None]), 0.0)
            grad += product(grad_scores.to(k.dtype), k, UPCAST)

    grad = tl.where(has_grad[:, None], grad * scale, 0.0)
    at = row_offsets(batch, head, positions, grad_query_strides)
    store_rows(grad_query, at, grad_query_strides[3], rows < num_rows, grad, opens, HEAD_DIM, BLOCK_D, UPCAST)


@triton.jit(do_not_specialize=["num_programs", "threshold"])
def grad_key_value_kernel(
    query,
    key,
    value,
    grad_out,
    out,
    lse,
    deltas,
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
    out_strides,
    lse_strides,
    delta_strides,
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
    head, first, rate, num_keys = lattice(keys, entry, segment, KEY_COLUMNS)
    indices = block * BLOCK_K + tl.arange(0, BLOCK_K)
    k, v, marks, words, is_key = load_key_block(
        key,
        value,
        key_marks,
        key_words,
        keys,
        entry,
        batch,
        head,
        first,
        rate,
        indices,
        indices < num_keys,
        key_strides,
        value_strides,
        mark_strides,
        key_word_strides,
        HEAD_DIM,
        BLOCK_D,
        MARKS,
        DROPOUT,
        PACKED,
    )
    key_grad = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    value_grad = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    for link in range(first_link, end_link):
        query_entry, is_causal = linked(links, link)
        query_head, first_query, query_rate, num_rows = lattice(queries, query_entry, segment, ROW_COLUMNS)
        begin = tl.where(is_causal, block * BLOCK_K // BLOCK_Q * BLOCK_Q, 0)
        for start in range(begin, num_rows, BLOCK_Q):
            rows = start + tl.arange(0, BLOCK_Q)
            q, do, row_lse, delta, documents, first_words, second_words, has_grad = load_query_block(
                query,
                grad_out,
                out,
                lse,
                deltas,
                query_documents,
                query_words,
                batch,
                query_head,
                first_query + rows * query_rate,
                rows < num_rows,
                query_strides,
                grad_out_strides,
                out_strides,
                lse_strides,
                delta_strides,
                document_strides,
                query_word_strides,
                HEAD_DIM,
                BLOCK_D,
                MARKS,
                DROPOUT,
                False,
            )
            # Scores, weights and their gradients are transposed here: [keys, rows].
            seen = is_key[:, None] & has_grad[None, :]
            seen &= (indices[:, None] <= rows[None, :]) | (is_causal == 0)
            if MARKS == 2:
                seen &= marks[:, None] == documents[None, :]
            scores = product(k, tl.trans(q), UPCAST) * (scale * LOG2_E)
            weights = tl.where(seen, tl.exp2(scores - row_lse[None, :]), 0.0)
            grad_weights = product(v, tl.trans(do), UPCAST)
            kept = weights
            if DROPOUT:
                factors = dropout_factors(
                    first_words[None, :], second_words[None, :], words[:, None], threshold, dropout_weight
                )
                kept = weights * factors
                grad_weights *= factors
            value_grad += product(kept.to(do.dtype), do, UPCAST)
            grad_scores = tl.where(seen, weights * (grad_weights - delta[None, :]), 0.0)
            key_grad += product(grad_scores.to(q.dtype), q, UPCAST)

    key_grad = tl.where(is_key[:, None], key_grad * scale, 0.0)
    value_grad = tl.where(is_key[:, None], value_grad, 0.0)
    positions = first + indices * rate
    if PACKED:
        at = packed_rows(keys, entry, batch, positions) * HEAD_DIM
        key_at, value_at = packed_offset(keys, entry, 4, 4) + at, packed_offset(keys, entry, 5, 4) + at
        store_rows(grad_key, key_at, 1, indices < num_keys, key_grad, opens, HEAD_DIM, BLOCK_D, UPCAST)
        store_rows(grad_value, value_at, 1, indices < num_keys, value_grad, opens, HEAD_DIM, BLOCK_D, UPCAST)
    else:
        key_at = row_offsets(batch, head, positions, grad_key_strides)
        value_at = row_offsets(batch, head, positions, grad_value_strides)
        key_step, value_step = grad_key_strides[3], grad_value_strides[3]
        store_rows(grad_key, key_at, key_step, indices < num_keys, key_grad, opens, HEAD_DIM, BLOCK_D, UPCAST)
        store_rows(grad_value, value_at, value_step, indices < num_keys, value_grad, opens, HEAD_DIM, BLOCK_D, UPCAST)
