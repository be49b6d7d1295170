"""The forward of dilated attention in Triton: each program owns one block of query rows of one head.

It reads dilated rows where they lie, and merges out and LSE into the sums in place, as
:mod:`ring_backends.kernels.merge` does. The matrix products have the dtype of the inputs, and sums and statistics are
in fp32. This module imports Triton, so it is imported only when a kernel is launched.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ring_backends.kernels.triton_blocks import (
    KEY_COLUMNS,
    LN_2,
    LOG2_E,
    ROW_COLUMNS,
    dropout_factors,
    lattice,
    linked,
    load_documents,
    load_key_block,
    load_query_words,
    load_rows,
    merged_result,
    owned_block,
    product,
    rounded,
    row_offsets,
)


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
    head, first, rate, num_rows = lattice(queries, entry, segment, ROW_COLUMNS)
    rows = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
    is_row = rows < num_rows
    positions = first + rows * rate
    q = load_rows(
        query, row_offsets(batch, head, positions, query_strides), query_strides[3], is_row, HEAD_DIM, BLOCK_D
    )
    documents = load_documents(query_documents, batch, head, positions, is_row, document_strides, MARKS)
    first_words, second_words = load_query_words(
        query_words, batch, head, positions, is_row, query_word_strides, DROPOUT
    )
    maximum = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    weighted = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
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
            # Causal rows and keys of a pair have the same numbers.
            seen = is_key[None, :] & ((indices[None, :] <= rows[:, None]) | (is_causal == 0))
            if MARKS == 2:
                seen &= documents[:, None] == marks[None, :]
            scores = product(q, tl.trans(k), UPCAST) * (scale * LOG2_E)
            scores = tl.where(seen, scores, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(scores, 1))
            # For a row that has seen no key yet, -inf + inf would be NaN.
            shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            weights = tl.exp2(scores - shift[:, None])
            rescale = tl.exp2(maximum - shift)
            total = total * rescale + tl.sum(weights, 1)
            if DROPOUT:
                weights *= dropout_factors(
                    first_words[:, None], second_words[:, None], words[None, :], threshold, dropout_weight
                )
            weighted = weighted * rescale[:, None] + product(weights.to(v.dtype), v, UPCAST)
            maximum = new_maximum

    is_blind = total == 0.0
    tile_out = tl.where(is_blind[:, None], 0.0, weighted / tl.where(is_blind, 1.0, total)[:, None])
    tile_lse = tl.where(is_blind, float("-inf"), (maximum + tl.log2(tl.where(is_blind, 1.0, total))) * LN_2)

    # Merge. Memory that this launch opens holds no numbers yet, so it is not read.
    dims = tl.arange(0, BLOCK_D).to(tl.int64)
    lse_at = lse + row_offsets(batch, head, positions, lse_strides)
    out_at = out + row_offsets(batch, head, positions, out_strides)[:, None] + dims[None, :] * out_strides[3]
    wanted = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    old_lse = tl.load(lse_at, mask=is_row & (opens == 0), other=float("-inf"))
    old_out = tl.load(out_at, mask=wanted & (opens == 0), other=0.0).to(tl.float32)
    merged, merged_lse = merged_result(old_out, old_lse, tile_out, tile_lse)
    tl.store(out_at, rounded(merged, out.dtype.element_ty, UPCAST), mask=wanted)
    tl.store(lse_at, merged_lse, mask=is_row)
