"""What the Triton kernels share: finding rows by the tables of a launch, loading blocks, visibility, dropout.

This module imports Triton, so it is imported only when a kernel is launched. Offsets of rows are 64-bit integers, since
a tensor may have more than 2^31 elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ring_backends.kernels import tile_table

ROW_COLUMNS = tl.constexpr(tile_table.ROW_COLUMNS)
KEY_COLUMNS = tl.constexpr(tile_table.KEY_COLUMNS)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def owned_block(work, bounds, num_programs):
    """Batch entry, table entry, segment and block of this program, and the first and last link of its entry."""
    program = tl.program_id(0)
    batch = (program // num_programs).to(tl.int64)
    at = work + (program % num_programs).to(tl.int64) * 3
    entry = tl.load(at).to(tl.int64)
    bound = bounds + entry * 3
    return batch, entry, tl.load(at + 1), tl.load(at + 2), tl.load(bound), tl.load(bound + 1), tl.load(bound + 2)


@triton.jit
def linked(links, link):
    """The entry of a link, and whether the causal diagonal limits the pair."""
    at = links + link * 2
    return tl.load(at).to(tl.int64), tl.load(at + 1) != 0


@triton.jit
def lattice(table, entry, segment, COLUMNS: tl.constexpr):
    """Head, position of the first row, dilation rate, and number of rows of an entry in one segment."""
    at = table + entry * COLUMNS
    first = tl.load(at + 1) + segment * tl.load(at + 2)
    return tl.load(at), first, tl.load(at + 3), tl.load(at + 4).to(tl.int32)


@triton.jit
def row_offsets(batch, head, positions, strides):
    """Offsets of rows in a tensor [batch, seq, heads, ...]."""
    return batch * strides[0] + positions * strides[1] + head * strides[2]


@triton.jit
def packed_offset(keys, entry, SLICE: tl.constexpr, ALIGNED: tl.constexpr):
    """Offset of a slice of a parcel in the buffer. ``ALIGNED`` elements are the alignment of slices."""
    return tl.multiple_of(tl.load(keys + entry * KEY_COLUMNS + ROW_COLUMNS + 1 + SLICE), ALIGNED)


@triton.jit
def packed_rows(keys, entry, batch, indices):
    """Numbers of rows in the slices of a parcel, [batch, streams, rows]."""
    return batch * tl.load(keys + entry * KEY_COLUMNS + ROW_COLUMNS) + indices


@triton.jit
def load_rows(pointer, offsets, dim_stride, is_row, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load rows [rows, BLOCK_D]. Rows that are not wanted, and the padding of the head dim, are 0."""
    dims = tl.arange(0, BLOCK_D).to(tl.int64)
    at = pointer + offsets[:, None] + dims[None, :] * dim_stride
    if BLOCK_D == HEAD_DIM:
        return tl.load(at, mask=is_row[:, None], other=0.0)
    return tl.load(at, mask=is_row[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def store_rows(
    pointer,
    offsets,
    dim_stride,
    is_row,
    rows,
    opens,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Store rows [rows, BLOCK_D] if this launch opens them. Otherwise, add them to what is there."""
    dims = tl.arange(0, BLOCK_D).to(tl.int64)
    at = pointer + offsets[:, None] + dims[None, :] * dim_stride
    wanted = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    rows += tl.load(at, mask=wanted & (opens == 0), other=0.0).to(tl.float32)
    tl.store(at, rounded(rows, pointer.dtype.element_ty, UPCAST), mask=wanted)


@triton.jit
def load_key_block(
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
    is_key,
    key_strides,
    value_strides,
    mark_strides,
    word_strides,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MARKS: tl.constexpr,
    DROPOUT: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Load a block of keys and values, their marks and their dropout words.

    Ignored keys are not read, so that a NaN in one of them reaches nothing. They are removed from ``is_key``.
    """
    positions = first + indices * rate
    rows = positions
    if PACKED:
        rows = packed_rows(keys, entry, batch, positions)
    marks = tl.zeros_like(indices)
    if MARKS != 0:
        if PACKED:
            mark_offsets = packed_offset(keys, entry, 2, 1) + rows
        else:
            mark_offsets = row_offsets(batch, head, positions, mark_strides)
        if MARKS == 1:
            is_key &= tl.load(key_marks + mark_offsets, mask=is_key, other=1) == 0
        else:
            marks = tl.load(key_marks + mark_offsets, mask=is_key, other=-1)
            is_key &= marks >= 0
    words = tl.zeros_like(indices)
    if DROPOUT:
        if PACKED:
            word_offsets = packed_offset(keys, entry, 3, 1) + positions
        else:
            word_offsets = row_offsets(batch, head, positions, word_strides)
        words = tl.load(key_words + word_offsets, mask=is_key, other=0)
    if PACKED:
        aligned: tl.constexpr = 128 // key.dtype.element_ty.primitive_bitwidth
        k = load_rows(key, packed_offset(keys, entry, 0, aligned) + rows * HEAD_DIM, 1, is_key, HEAD_DIM, BLOCK_D)
        v = load_rows(value, packed_offset(keys, entry, 1, aligned) + rows * HEAD_DIM, 1, is_key, HEAD_DIM, BLOCK_D)
    else:
        k = load_rows(key, row_offsets(batch, head, positions, key_strides), key_strides[3], is_key, HEAD_DIM, BLOCK_D)
        at = row_offsets(batch, head, positions, value_strides)
        v = load_rows(value, at, value_strides[3], is_key, HEAD_DIM, BLOCK_D)
    return k, v, marks, words, is_key


@triton.jit
def load_documents(query_documents, batch, head, positions, is_row, strides, MARKS: tl.constexpr):
    """The document number of each query; zeros without documents."""
    documents = tl.zeros_like(positions)
    if MARKS == 2:
        documents = tl.load(query_documents + row_offsets(batch, head, positions, strides), mask=is_row, other=-2)
    return documents


@triton.jit
def load_query_words(query_words, batch, head, positions, is_row, strides, DROPOUT: tl.constexpr):
    """The two dropout words of each query; zeros without dropout."""
    first = tl.zeros_like(positions).to(tl.int32)
    second = first
    if DROPOUT:
        at = query_words + row_offsets(batch, head, positions, strides)
        first = tl.load(at, mask=is_row, other=0)
        second = tl.load(at + strides[3], mask=is_row, other=0)
    return first, second


@triton.jit
def dropout_factors(first_words, second_words, key_words, threshold, weight):
    """The factor of each pair, 0 or ``weight``. The words broadcast. See kernels/dropout.py for the hash."""
    word = first_words.to(tl.uint32, bitcast=True) ^ key_words.to(tl.uint32, bitcast=True)
    word ^= word >> 16
    word *= 0x7FEB352D
    word ^= word >> 15
    word += second_words.to(tl.uint32, bitcast=True)
    word *= 0x846CA68B
    return tl.where((word >> 1).to(tl.int32, bitcast=True) < threshold, weight, 0.0)


@triton.jit
def rounded(x, dtype: tl.constexpr, UPCAST: tl.constexpr):
    """fp32 rounded to another dtype. ``UPCAST`` is for Triton's interpreter, which truncates to bf16."""
    if UPCAST and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def product(a, b, UPCAST: tl.constexpr):
    """Matrix product with fp32 sums. ``UPCAST`` is for Triton's interpreter, whose products of bf16 are wrong."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def merged_result(out, lse, other_out, other_lse):
    """Merge two results, as :mod:`ring_backends.kernels.merge` does. All are in fp32."""
    largest = tl.maximum(lse, other_lse)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    weight = tl.exp2((lse - shift) * LOG2_E)
    other_weight = tl.exp2((other_lse - shift) * LOG2_E)
    total = weight + other_weight
    divisor = tl.where(total == 0.0, 1.0, total)
    merged = (out * weight[:, None] + other_out * other_weight[:, None]) / divisor[:, None]
    merged_lse = tl.where(total == 0.0, float("-inf"), shift + tl.log2(divisor) * LN_2)
    return merged, merged_lse
