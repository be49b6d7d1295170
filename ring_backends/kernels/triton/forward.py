"""The forward of dilated attention in Triton: each program owns one block of query rows of one head.

It reads dilated rows where they lie, and merges out and LSE into the sums in place, as
:mod:`ring_backends.kernels.merge` does. The matrix products have the dtype of the inputs, and sums and statistics are
in fp32. This module imports Triton, so it is imported only when a kernel is launched.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ring_backends.kernels.triton.blocks import (
    LN_2,
    LOG2_E,
    QUERY_COLUMNS,
    block_pointers,
    dropout_factors,
    keys_of_link,
    lattice,
    load_key_block,
    load_numbers,
    load_pair_inputs,
    load_rows,
    merged_result,
    modified_scores,
    owned_block,
    product,
    rounded,
    row_pointers,
    rows_at,
    visible,
)


@triton.jit
def attend(
    sums,
    own_rows,
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
    """Attend to blocks of keys. With ``IS_WHOLE``, all exist, and every row may see them.

    ``limits`` and ``blocks`` are as :func:`keys_of_link` returns them. ``sums`` holds the largest score of each row,
    and the sums of its weights and of its weighted values. ``own_rows`` holds the queries of the block, and as columns
    their numbers, documents and words, and whether they exist. The scale of scores is positive, so the largest product
    of a row gives its largest score.
    """
    maximum, total, weighted = sums
    q, rows, documents, first_words, second_words, is_row = own_rows
    score_scale, threshold, dropout_weight = factors
    begin, end, turn, jump = blocks
    for number in range(begin, end, BLOCK_K):
        start = number
        if BANDED and not IS_WHOLE:
            start += tl.where(number < turn, 0, jump)
        keys = (start + tl.arange(0, BLOCK_K))[None, :]
        k, v, marks, words, is_key = load_key_block(
            keys_here, start, HEAD_DIM, q.shape[1], VALUE_DIM, weighted.shape[1], BLOCK_K, MARKS, WORDS, IS_WHOLE
        )
        products = product(q, tl.trans(k))
        if SCORE_MOD is not None:
            products, _ = modified_scores(
                products, pairs, first_words, words[None, :], is_row, is_key[None, :], SCORE_MOD
            )
        if MARKS != 0 or not IS_WHOLE:
            seen = visible(is_key[None, :], rows, keys, documents, marks[None, :], limits, MARKS, BANDED, IS_WHOLE)
            products = tl.where(seen, products, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(products, 1) * score_scale)
        # For a row that has seen no key yet, -inf + inf would be NaN.
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(products * score_scale - shift[:, None])
        rescale = tl.exp2(maximum - shift)
        total = total * rescale + tl.sum(weights, 1)
        if WORDS == 1:
            weights *= dropout_factors(first_words, second_words, words[None, :], threshold, dropout_weight)
        weighted = weighted * rescale[:, None] + product(weights.to(v.dtype), v)
        maximum = new_maximum
    return maximum, total, weighted


@triton.jit(do_not_specialize=["num_programs", "threshold", "first_head"])
def forward_kernel(
    queries,
    keys,
    out,
    lse,
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
    _, head, first, rate = here
    begin = block * BLOCK_Q
    rows = begin + tl.arange(0, BLOCK_Q)
    is_row = rows < num_rows
    q = load_rows(rows_at(queries.query, here), begin, is_row, HEAD_DIM, BLOCK_D, False)
    documents, first_words, second_words = load_pair_inputs(queries, here, begin, is_row, MARKS, WORDS)
    own_rows = (q, rows[:, None], documents[:, None], first_words[:, None], second_words[:, None], is_row[:, None])
    factors = (LOG2_E if SCORE_MOD is not None else scale * LOG2_E, threshold, dropout_weight)
    pairs = (scale, batch, first_head + head, captured)
    no_key = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    sums = (no_key, tl.zeros([BLOCK_Q], tl.float32), tl.zeros([BLOCK_Q, BLOCK_V], tl.float32))
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
            sums = attend(
                sums,
                own_rows,
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

    maximum, total, weighted = sums
    is_blind = total == 0.0
    tile_out = tl.where(is_blind[:, None], 0.0, weighted / tl.where(is_blind, 1.0, total)[:, None])
    tile_lse = tl.where(is_blind, float("-inf"), (maximum + tl.log2(tl.where(is_blind, 1.0, total))) * LN_2)

    # Merge. Memory that this launch opens holds no numbers yet, so it is not read.
    pointers = block_pointers(rows_at(out, here), begin, BLOCK_Q, BLOCK_V)
    wanted = is_row[:, None] & (tl.arange(0, BLOCK_V) < VALUE_DIM)[None, :]
    old_lse = load_numbers(rows_at(lse, here), begin, is_row & (opens == 0), float("-inf"), False)
    old_out = tl.load(pointers, mask=wanted & (opens == 0), other=0.0).to(tl.float32)
    merged, merged_lse = merged_result(old_out, old_lse, tile_out, tile_lse)
    tl.store(pointers, rounded(merged, pointers.dtype.element_ty), mask=wanted)
    tl.store(row_pointers(lse, (batch, head, first + rows * rate)), merged_lse, mask=is_row)
