"""The forward of dilated attention in Triton: each program owns one block of query rows of one head.

It reads dilated rows where they lie, and merges out and LSE into the sums in place, as
:mod:`ring_backends.kernels.merge` does. The matrix products have the dtype of the inputs, and sums and statistics are
in fp32. This module imports Triton, so it is imported only when a kernel is launched.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ring_backends.kernels.triton_blocks import (
    LN_2,
    LOG2_E,
    QUERY_COLUMNS,
    block_pointers,
    dropout_factors,
    keys_at,
    lattice,
    linked,
    load_documents,
    load_key_block,
    load_numbers,
    load_query_words,
    load_rows,
    merged_result,
    owned_block,
    product,
    rounded,
    row_offsets,
    rows_at,
    visible,
)


@triton.jit
def attend(
    maximum,
    total,
    weighted,
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
    """Attend to the keys from number ``begin`` to ``end``. With ``IS_WHOLE``, all exist, and every row may see them.

    ``own_rows`` holds the queries of the block, the numbers of their rows, their documents, and their dropout words.
    ``score_scale`` is positive, so the largest product of a row gives its largest score.
    """
    q, rows, documents, first_words, second_words = own_rows
    for start in range(begin, end, BLOCK_K):
        indices = start + tl.arange(0, BLOCK_K)
        k, v, marks, words, is_key = load_key_block(
            keys_here, start, HEAD_DIM, BLOCK_D, BLOCK_K, MARKS, DROPOUT, IS_WHOLE
        )
        products = product(q, tl.trans(k), UPCAST)
        if MARKS != 0 or not IS_WHOLE:
            seen = visible(
                is_key[None, :],
                rows[:, None],
                indices[None, :],
                documents[:, None],
                marks[None, :],
                is_causal,
                MARKS,
                IS_WHOLE,
            )
            products = tl.where(seen, products, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(products, 1) * score_scale)
        # For a row that has seen no key yet, -inf + inf would be NaN.
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(products * score_scale - shift[:, None])
        rescale = tl.exp2(maximum - shift)
        total = total * rescale + tl.sum(weights, 1)
        if DROPOUT:
            weights *= dropout_factors(
                first_words[:, None], second_words[:, None], words[None, :], threshold, dropout_weight
            )
        weighted = weighted * rescale[:, None] + product(weights.to(v.dtype), v, UPCAST)
        maximum = new_maximum
    return maximum, total, weighted


@triton.jit(do_not_specialize=["num_programs", "threshold"])
def forward_kernel(
    query,
    key,
    value,
    out,
    lse,
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
    out_strides,
    lse_strides,
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
    at = rows_at(query, batch, head, first, rate, query_strides)
    q = load_rows(at, begin, is_row, BLOCK_Q, HEAD_DIM, BLOCK_D, False)
    documents = load_documents(
        query_documents, batch, head, first, rate, begin, is_row, document_strides, BLOCK_Q, MARKS
    )
    first_words, second_words = load_query_words(
        query_words, batch, head, first, rate, begin, is_row, query_word_strides, BLOCK_Q, DROPOUT
    )
    own_rows = (q, rows, documents, first_words, second_words)
    maximum = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    weighted = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
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
            maximum, total, weighted = attend(
                maximum,
                total,
                weighted,
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

    is_blind = total == 0.0
    tile_out = tl.where(is_blind[:, None], 0.0, weighted / tl.where(is_blind, 1.0, total)[:, None])
    tile_lse = tl.where(is_blind, float("-inf"), (maximum + tl.log2(tl.where(is_blind, 1.0, total))) * LN_2)

    # Merge. Memory that this launch opens holds no numbers yet, so it is not read.
    lse_at = rows_at(lse, batch, head, first, rate, lse_strides)
    pointers = block_pointers(rows_at(out, batch, head, first, rate, out_strides), begin, BLOCK_Q, BLOCK_D)
    wanted = is_row[:, None] & (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    old_lse = load_numbers(lse_at, begin, is_row & (opens == 0), float("-inf"), BLOCK_Q, False)
    old_out = tl.load(pointers, mask=wanted & (opens == 0), other=0.0).to(tl.float32)
    merged, merged_lse = merged_result(old_out, old_lse, tile_out, tile_lse)
    tl.store(pointers, rounded(merged, out.dtype.element_ty, UPCAST), mask=wanted)
    tl.store(lse + row_offsets(batch, head, first + rows * rate, lse_strides), merged_lse, mask=is_row)
