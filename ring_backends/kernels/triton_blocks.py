"""What the Triton kernels share: finding rows by the tables of a launch, loading blocks, visibility, dropout.

This module imports Triton, so it is imported only when a kernel is launched. Offsets of rows are 64-bit integers, since
a tensor may have more than 2^31 elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ring_backends.kernels import tile_table

ROW_COLUMNS = tl.constexpr(tile_table.ROW_COLUMNS)
QUERY_COLUMNS = tl.constexpr(tile_table.QUERY_COLUMNS)
NUMBER_ALIGNMENT = tl.constexpr(tile_table.NUMBER_ALIGNMENT)
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
def numbers(queries, entry, segment, num_rows):
    """The number of the first row of a query entry in one segment, and how many numbers the segment has."""
    padded = tl.cdiv(num_rows, NUMBER_ALIGNMENT) * NUMBER_ALIGNMENT
    number = tl.load(queries + entry * QUERY_COLUMNS + ROW_COLUMNS) + segment * padded
    return tl.multiple_of(number, NUMBER_ALIGNMENT), padded


@triton.jit
def rows_at(pointer, batch, head, first, rate, strides):
    """Where the rows of an entry lie: a pointer to the first one, and the distances of rows and of their elements."""
    return pointer + row_offsets(batch, head, first, strides), rate * strides[1], strides[3]


@triton.jit
def packed_rows_at(pointer, keys, entry, batch, first, SLICE: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr):
    """As :func:`rows_at`, for rows of ``WIDTH`` elements in a slice [batch, streams, rows] of a parcel.

    Slices begin at multiples of ``ALIGNED`` elements of the buffer.
    """
    offset = tl.multiple_of(tl.load(keys + entry * KEY_COLUMNS + ROW_COLUMNS + 1 + SLICE), ALIGNED)
    row = batch * tl.load(keys + entry * KEY_COLUMNS + ROW_COLUMNS) + first
    return pointer + offset + row * WIDTH, tl.full([], WIDTH, tl.int64), 1


@triton.jit
def block_pointers(at, start, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers to the rows [BLOCK, BLOCK_D] from number ``start`` on. Only their common base depends on ``start``."""
    pointer, row_step, dim_step = at
    rows, dims = tl.arange(0, BLOCK).to(tl.int64), tl.arange(0, BLOCK_D).to(tl.int64)
    return pointer + row_step * start + ((rows * row_step)[:, None] + (dims * dim_step)[None, :])


@triton.jit
def load_rows(
    at,
    start,
    is_row,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """Load rows [BLOCK, BLOCK_D] from number ``start`` on. Rows that are not wanted, and padding of D, are 0.

    With ``IS_WHOLE``, all rows are wanted.
    """
    pointers = block_pointers(at, start, BLOCK, BLOCK_D)
    is_dim = (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    if IS_WHOLE and BLOCK_D == HEAD_DIM:
        return tl.load(pointers)
    elif IS_WHOLE:
        return tl.load(pointers, mask=is_dim, other=0.0)
    elif BLOCK_D == HEAD_DIM:
        return tl.load(pointers, mask=is_row[:, None], other=0.0)
    else:
        return tl.load(pointers, mask=is_row[:, None] & is_dim, other=0.0)


@triton.jit
def load_numbers(at, start, is_row, other, BLOCK: tl.constexpr, IS_WHOLE: tl.constexpr):
    """Load the numbers [BLOCK] of rows from number ``start`` on; ``other`` for rows that are not wanted."""
    pointer, row_step, _ = at
    pointers = pointer + row_step * start + tl.arange(0, BLOCK).to(tl.int64) * row_step
    if IS_WHOLE:
        return tl.load(pointers)
    return tl.load(pointers, mask=is_row, other=other)


@triton.jit
def earlier_rows(at, start, is_row, opens, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """The sums [BLOCK, BLOCK_D] of earlier launches, in fp32; 0 if this launch opens the rows."""
    rows = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    if opens == 0:
        rows += load_rows(at, start, is_row, BLOCK, HEAD_DIM, BLOCK_D, False)
    return rows


@triton.jit
def store_rows(
    at,
    start,
    is_row,
    rows,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Store rows [BLOCK, BLOCK_D]."""
    pointers = block_pointers(at, start, BLOCK, BLOCK_D)
    is_dim = (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    tl.store(pointers, rounded(rows, pointers.dtype.element_ty, UPCAST), mask=is_row[:, None] & is_dim)


@triton.jit
def keys_at(
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
    word_strides,
    HEAD_DIM: tl.constexpr,
    MARKS: tl.constexpr,
    DROPOUT: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Where the keys of an entry lie in one segment, their values, marks and dropout words, and the number of keys.

    Without marks or words, the keys stand in their place. :func:`load_key_block` takes the result as a whole.
    """
    head, first, rate, num_keys = lattice(keys, entry, segment, KEY_COLUMNS)
    if PACKED:
        aligned: tl.constexpr = 128 // key.dtype.element_ty.primitive_bitwidth
        key_at = packed_rows_at(key, keys, entry, batch, first, 0, HEAD_DIM, aligned)
        value_at = packed_rows_at(value, keys, entry, batch, first, 1, HEAD_DIM, aligned)
    else:
        key_at = rows_at(key, batch, head, first, rate, key_strides)
        value_at = rows_at(value, batch, head, first, rate, value_strides)
    mark_at, word_at = key_at, key_at
    if MARKS != 0:
        if PACKED:
            mark_at = packed_rows_at(key_marks, keys, entry, batch, first, 2, 1, 1)
        else:
            mark_at = rows_at(key_marks, batch, head, first, rate, mark_strides)
    if DROPOUT:
        if PACKED:  # the words are the same for every batch entry
            word_at = packed_rows_at(key_words, keys, entry, batch * 0, first, 3, 1, 1)
        else:
            word_at = rows_at(key_words, batch, head, first, rate, word_strides)
    return key_at, value_at, mark_at, word_at, num_keys


@triton.jit
def load_key_block(
    at,
    start,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MARKS: tl.constexpr,
    DROPOUT: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """Load a block of keys from number ``start`` on: keys, values, marks, dropout words, and which of them exist.

    Ignored keys are not read, so that a NaN in one of them reaches nothing. They count as keys that do not exist.
    """
    key_at, value_at, mark_at, word_at, num_keys = at
    is_key = start + tl.arange(0, BLOCK_K) < num_keys
    marks = tl.zeros([BLOCK_K], tl.int64)
    if MARKS == 1:
        is_key &= load_numbers(mark_at, start, is_key, 1, BLOCK_K, IS_WHOLE) == 0
    if MARKS == 2:
        marks = load_numbers(mark_at, start, is_key, -1, BLOCK_K, IS_WHOLE)
        is_key &= marks >= 0
    words = tl.zeros([BLOCK_K], tl.int32)
    if DROPOUT:
        words = load_numbers(word_at, start, is_key, 0, BLOCK_K, IS_WHOLE)
    reads_all: tl.constexpr = IS_WHOLE and MARKS == 0
    k = load_rows(key_at, start, is_key, BLOCK_K, HEAD_DIM, BLOCK_D, reads_all)
    v = load_rows(value_at, start, is_key, BLOCK_K, HEAD_DIM, BLOCK_D, reads_all)
    return k, v, marks, words, is_key


@triton.jit
def visible(seen, rows, keys, row_documents, key_documents, is_causal, MARKS: tl.constexpr, IS_WHOLE: tl.constexpr):
    """The pairs of ``seen`` that the causal mask and the documents leave.

    All arguments broadcast to the block of pairs. ``rows`` and ``keys`` are numbers, or distances from one number. Rows
    and keys of a causal pair of entries have the same numbers. With ``IS_WHOLE``, every row may see every key of the
    block.
    """
    if not IS_WHOLE:
        seen = seen & ((keys <= rows) | (is_causal == 0))
    if MARKS == 2:
        seen = seen & (row_documents == key_documents)
    return seen


@triton.jit
def load_documents(pointer, batch, head, first, rate, start, is_row, strides, BLOCK: tl.constexpr, MARKS: tl.constexpr):
    """The document number of each query; zeros without documents."""
    documents = tl.zeros([BLOCK], tl.int64)
    if MARKS == 2:
        documents = load_numbers(rows_at(pointer, batch, head, first, rate, strides), start, is_row, -2, BLOCK, False)
    return documents


@triton.jit
def load_query_words(
    pointer, batch, head, first, rate, start, is_row, strides, BLOCK: tl.constexpr, DROPOUT: tl.constexpr
):
    """The two dropout words of each query; zeros without dropout."""
    first_words = tl.zeros([BLOCK], tl.int32)
    second_words = first_words
    if DROPOUT:
        at = rows_at(pointer, batch, head, first, rate, strides)
        first_words = load_numbers(at, start, is_row, 0, BLOCK, False)
        at = rows_at(pointer + strides[3], batch, head, first, rate, strides)
        second_words = load_numbers(at, start, is_row, 0, BLOCK, False)
    return first_words, second_words


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
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
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
