"""The backward of dilated attention in Triton, part two: dK and dV.

Each program owns one block of keys. It recomputes the weights from the statistics that ``grad_query.py`` stores,
and needs no atomic operation either. This module imports Triton, so it is imported only when a kernel is launched.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ring_backends.kernels.triton.blocks import (
    KEY_COLUMNS,
    LOG2_E,
    QUERY_COLUMNS,
    add_rows,
    blocks_of_band,
    dropout_factors,
    key_rows_at,
    keys_at,
    lattice,
    linked,
    load_key_block,
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
def grads_of_keys(
    grads,
    own,
    queries,
    rows_here,
    limits,
    blocks,
    factors,
    pairs,
    HEAD_DIM,
    VALUE_DIM,
    BLOCK_Q,
    MARKS,
    WORDS,
    SCORE_MOD,
    BANDED,
    IS_WHOLE,
):
    """Add the gradients from blocks of query rows.

    ``own`` holds the block's keys as :func:`load_key_block` returns them, and their numbers. ``rows_here`` says how
    many rows there are, and where their queries, grad_out, LSE and delta lie. ``blocks`` holds where the blocks of rows
    before the whole ones begin, how many are there, where the others begin, and how many all are.

    Scores, weights and their gradients are transposed here: [keys, rows]. With marks, a row that sees no key is not
    read. Without marks, every row sees a key, and loads do not wait for the LSE.
    """
    key_grad, value_grad = grads
    k, v, marks, words, is_key = own[0]
    indices = own[1]
    here, num_rows, query_at, grad_out_at, lse_at, delta_at = rows_here
    begin, num_front, later, num_blocks = blocks
    score_scale, threshold, dropout_weight = factors
    for number in range(0, num_blocks):
        start = later + (number - num_front) * BLOCK_Q
        if not IS_WHOLE:  # whole blocks are one run
            start = tl.where(number < num_front, begin + number * BLOCK_Q, start)
        start = tl.multiple_of(start, BLOCK_Q)
        rows = start + tl.arange(0, BLOCK_Q)
        reads_all: tl.constexpr = IS_WHOLE and MARKS == 0
        is_row = rows < num_rows
        row_lse = tl.load(lse_at + rows)
        delta = tl.load(delta_at + rows)
        if MARKS != 0:
            is_row = row_lse != float("inf")
        q = load_rows(query_at, start, is_row, HEAD_DIM, k.shape[1], reads_all)
        do = load_rows(grad_out_at, start, is_row, VALUE_DIM, v.shape[1], reads_all)
        documents, first_words, second_words = load_pair_inputs(queries, here, start, is_row, MARKS, WORDS)
        products = product(k, tl.trans(q))
        if SCORE_MOD is not None:
            products, slopes = modified_scores(
                products, pairs, first_words[None, :], words[:, None], is_row[None, :], is_key[:, None], SCORE_MOD
            )
        weights = tl.exp2(products * score_scale - row_lse[None, :])
        if MARKS != 0 or not IS_WHOLE:
            # Distances from ``start``, since the pipeline would keep ``rows`` of the next blocks in registers.
            distances = tl.arange(0, BLOCK_Q)
            if MARKS == 0:
                is_row = distances < num_rows - start
            seen = is_row[None, :]
            if MARKS == 1:
                seen = seen & is_key[:, None]
            keys = (indices - start)[:, None]
            distances, documents = distances[None, :], documents[None, :]
            seen = visible(seen, distances, keys, documents, marks[:, None], limits, MARKS, BANDED, IS_WHOLE)
            weights = tl.where(seen, weights, 0.0)
        grad_weights = product(v, tl.trans(do))
        kept = weights
        if WORDS == 1:
            first_words, second_words = first_words[None, :], second_words[None, :]
            dropped = dropout_factors(first_words, second_words, words[:, None], threshold, dropout_weight)
            kept = weights * dropped
            grad_weights *= dropped
        value_grad += product(kept.to(do.dtype), do)
        grad_scores = weights * (grad_weights - delta[None, :])
        if SCORE_MOD is not None:
            grad_scores = tl.where(weights == 0.0, 0.0, grad_scores * slopes)
        key_grad += product(grad_scores.to(q.dtype), q)
    return key_grad, value_grad


@triton.jit(do_not_specialize=["num_programs", "threshold", "first_head"])
def grad_key_value_kernel(
    queries,
    keys,
    grad_out,
    statistics,
    grad_key,
    grad_value,
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
    keys_here = keys_at(keys, batch, entry, segment, HEAD_DIM, VALUE_DIM, MARKS, WORDS, PACKED)
    first_key = block * BLOCK_K
    own_keys = load_key_block(keys_here, first_key, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_V, BLOCK_K, MARKS, WORDS, False)
    num_keys = keys_here[4]
    own = (own_keys, first_key + tl.arange(0, BLOCK_K))
    factors = (LOG2_E if SCORE_MOD is not None else scale * LOG2_E, threshold, dropout_weight)
    grads = (tl.zeros([BLOCK_K, BLOCK_D], tl.float32), tl.zeros([BLOCK_K, BLOCK_V], tl.float32))
    for link in range(first_link, end_link):
        query_entry, limits = linked(owners, link)
        here, num_rows = lattice(queries.table, batch, query_entry, segment, QUERY_COLUMNS)
        pairs = (scale, batch, first_head + here[1], captured)
        is_causal, below, above = limits
        if BANDED:
            both, edges = blocks_of_band(first_key, BLOCK_K, above, below, num_rows, BLOCK_Q)
            whole, later, _, _ = both
            begin, end, turn, _ = edges
            num_front = (turn - begin) // BLOCK_Q
            num_edges = tl.cdiv(end - begin, BLOCK_Q)
        else:
            # Blocks of rows on the diagonal, then whole blocks, then a block with the last rows.
            begin = tl.where(is_causal, first_key // BLOCK_Q * BLOCK_Q, 0)
            whole = tl.where(is_causal, tl.cdiv(first_key + BLOCK_K, BLOCK_Q) * BLOCK_Q, 0)
            later = tl.maximum(whole, num_rows // BLOCK_Q * BLOCK_Q)
            num_front = (tl.minimum(whole, tl.cdiv(num_rows, BLOCK_Q) * BLOCK_Q) - begin) // BLOCK_Q
            num_edges = num_front + tl.where(num_rows > later, 1, 0)
        number = numbers(queries, query_entry, segment, num_rows)[0]
        lse_at = statistics.pointer + batch * statistics.strides[0] + number
        delta_at = lse_at + statistics.strides[1]
        rows_here = (here, num_rows, rows_at(queries.query, here), rows_at(grad_out, here), lse_at, delta_at)
        for is_whole in tl.static_range(2):
            whole_blocks = (begin, 0, whole, (later - whole) // BLOCK_Q)
            blocks = whole_blocks if is_whole else (begin, num_front, later, num_edges)
            grads = grads_of_keys(
                grads,
                own,
                queries,
                rows_here,
                limits,
                blocks,
                factors,
                pairs,
                HEAD_DIM,
                VALUE_DIM,
                BLOCK_Q,
                MARKS,
                WORDS,
                SCORE_MOD,
                BANDED,
                is_whole,
            )

    key_grad, value_grad = grads
    # A difference, since the compiler would keep which numbers are below ``num_keys`` in registers during the loops.
    is_row = tl.arange(0, BLOCK_K) < num_keys - first_key
    here, _ = lattice(keys.table, batch, entry, segment, KEY_COLUMNS)
    key_at = key_rows_at(grad_key, keys, entry, here, 4, HEAD_DIM, PACKED)
    value_at = key_rows_at(grad_value, keys, entry, here, 5, VALUE_DIM, PACKED)
    add_rows(value_at, first_key, is_row, value_grad, opens, VALUE_DIM)
    add_rows(key_at, first_key, is_row, key_grad * scale, opens, HEAD_DIM)
