"""The backward of dilated attention in Triton, part two: dK and dV.

Each program owns one block of keys. It recomputes the weights from the statistics that ``triton_grad_query.py`` stores,
and needs no atomic operation either. This module imports Triton, so it is imported only when a kernel is launched.
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
    keys_at,
    lattice,
    linked,
    load_documents,
    load_key_block,
    load_query_words,
    load_rows,
    numbers,
    owned_block,
    packed_rows_at,
    product,
    rows_at,
    store_rows,
    visible,
)


@triton.jit
def grads_of_keys(
    key_grad,
    value_grad,
    own_keys,
    indices,
    rows_here,
    query_documents,
    query_words,
    document_strides,
    word_strides,
    batch,
    lattice_here,
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

    ``own_keys`` holds the block's keys as :func:`load_key_block` returns them, and ``indices`` their numbers.
    ``rows_here`` says where the queries, grad_out, LSE and delta of the rows lie. Scores, weights and their gradients
    are transposed here: [keys, rows]. With marks, a row that sees no key is not read. Without marks, every row sees a
    key, and loads do not wait for the LSE.
    """
    k, v, marks, words, is_key = own_keys
    query_at, grad_out_at, lse_at, delta_at = rows_here
    head, first, rate, num_rows = lattice_here
    for number in range(0, num_blocks):
        start = later + (number - num_diagonal) * BLOCK_Q
        if not IS_WHOLE:  # whole blocks have no diagonal
            start = tl.where(number < num_diagonal, begin + number * BLOCK_Q, start)
        start = tl.multiple_of(start, BLOCK_Q)
        rows = start + tl.arange(0, BLOCK_Q)
        reads_all: tl.constexpr = IS_WHOLE and MARKS == 0
        is_row = rows < num_rows
        row_lse = tl.load(lse_at + rows)
        delta = tl.load(delta_at + rows)
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
            # Distances from ``start``, since the pipeline would keep ``rows`` of the next blocks in registers.
            distances = tl.arange(0, BLOCK_Q)
            if MARKS == 0:
                is_row = distances < num_rows - start
            seen = is_row[None, :]
            if MARKS == 1:
                seen = seen & is_key[:, None]
            seen = visible(
                seen,
                distances[None, :],
                (indices - start)[:, None],
                documents[None, :],
                marks[:, None],
                is_causal,
                MARKS,
                IS_WHOLE,
            )
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
    keys_here = keys_at(
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
    own_keys = load_key_block(keys_here, first_key, HEAD_DIM, BLOCK_D, BLOCK_K, MARKS, DROPOUT, False)
    _, _, _, _, num_keys = keys_here
    key_grad = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    value_grad = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    for link in range(first_link, end_link):
        query_entry, is_causal = linked(links, link)
        lattice_here = lattice(queries, query_entry, segment, QUERY_COLUMNS)
        query_head, first_query, query_rate, num_rows = lattice_here
        # Blocks of rows on the diagonal, then whole blocks, then a block with the last rows.
        begin = tl.where(is_causal, first_key // BLOCK_Q * BLOCK_Q, 0)
        whole = tl.where(is_causal, tl.cdiv(first_key + BLOCK_K, BLOCK_Q) * BLOCK_Q, 0)
        end = tl.maximum(whole, num_rows // BLOCK_Q * BLOCK_Q)
        num_diagonal = (tl.minimum(whole, tl.cdiv(num_rows, BLOCK_Q) * BLOCK_Q) - begin) // BLOCK_Q
        has_rest = tl.where(num_rows > end, 1, 0)
        number = numbers(queries, query_entry, segment, num_rows)[0]
        statistics_at = statistics + batch * statistics_strides[0] + number
        rows_here = (
            rows_at(query, batch, query_head, first_query, query_rate, query_strides),
            rows_at(grad_out, batch, query_head, first_query, query_rate, grad_out_strides),
            statistics_at,
            statistics_at + statistics_strides[1],
        )
        for is_whole in tl.static_range(2):
            key_grad, value_grad = grads_of_keys(
                key_grad,
                value_grad,
                own_keys,
                indices,
                rows_here,
                query_documents,
                query_words,
                document_strides,
                query_word_strides,
                batch,
                lattice_here,
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

    # A difference, since the compiler would keep ``indices < num_keys`` in registers during the loops.
    is_row = tl.arange(0, BLOCK_K) < num_keys - first_key
    if PACKED:
        key_at = packed_rows_at(grad_key, keys, entry, batch, first, 4, HEAD_DIM, 4)
        value_at = packed_rows_at(grad_value, keys, entry, batch, first, 5, HEAD_DIM, 4)
    else:
        key_at = rows_at(grad_key, batch, head, first, rate, grad_key_strides)
        value_at = rows_at(grad_value, batch, head, first, rate, grad_value_strides)
    value_grad += earlier_rows(value_at, first_key, is_row, opens, BLOCK_K, HEAD_DIM, BLOCK_D)
    store_rows(value_at, first_key, is_row, value_grad, BLOCK_K, HEAD_DIM, BLOCK_D, UPCAST)
    key_grad = key_grad * scale + earlier_rows(key_at, first_key, is_row, opens, BLOCK_K, HEAD_DIM, BLOCK_D)
    store_rows(key_at, first_key, is_row, key_grad, BLOCK_K, HEAD_DIM, BLOCK_D, UPCAST)
