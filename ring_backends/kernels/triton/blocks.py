"""What the Triton kernels share: finding rows by the tables of a launch, loading blocks, visibility, dropout.

This module imports Triton, so it is imported only when a kernel is launched. Offsets of rows are 64-bit integers, since
a tensor may have more than 2^31 elements.

Arguments in capitals are known when a kernel is compiled. Six tuples travel from function to function:

- *here*: batch entry, head, position of the first row and dilation rate of an entry in one segment (:func:`lattice`);
- *at*: a pointer to the first of some rows, and the distances of rows and of their elements (:func:`rows_at`);
- *keys here*: the *at* of keys, values, marks and words, and the number of keys (:func:`keys_at`);
- *limits*: whether the :class:`~ring_backends.schedule.bands.Band` of a pair of entries is causal, and its ``below``
  and ``above``, whose sum is not negative. Without ``BANDED``, all bands are causal or None: the code for others would
  need more registers;
- *factors*: the scale of scores to base 2, and the threshold and the weight of dropout;
- *pairs*: what a score_mod gets besides scores and positions: the scale of scores, batch entry, head, and the captured
  tensors. ``SCORE_MOD`` is the function, or None.

``WORDS`` says what the words of queries and keys are: 0 none, 1 those that dropout hashes, 2 global positions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ring_backends.kernels import tile_table

ROW_COLUMNS = tl.constexpr(tile_table.ROW_COLUMNS)
QUERY_COLUMNS = tl.constexpr(tile_table.QUERY_COLUMNS)
NUMBER_ALIGNMENT = tl.constexpr(tile_table.NUMBER_ALIGNMENT)
KEY_COLUMNS = tl.constexpr(tile_table.KEY_COLUMNS)
LINK_COLUMNS = tl.constexpr(tile_table.LINK_COLUMNS)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
IS_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether Triton's interpreter runs the kernels. It truncates to bf16, and its products of bf16 are wrong."""


@triton.jit
def owned_block(owners, num_programs):
    """Batch entry, table entry, segment and block of this program, and the first and last link of its entry."""
    program = tl.program_id(0)
    batch = (program // num_programs).to(tl.int64)
    at = owners.work + (program % num_programs).to(tl.int64) * 3
    entry = tl.load(at).to(tl.int64)
    bound = owners.bounds + entry * 3
    return batch, entry, tl.load(at + 1), tl.load(at + 2), tl.load(bound), tl.load(bound + 1), tl.load(bound + 2)


@triton.jit
def linked(owners, link):
    """The entry of a link, and the limits of the pair."""
    at = owners.links + link * LINK_COLUMNS
    return tl.load(at).to(tl.int64), (tl.load(at + 1) != 0, tl.load(at + 2), tl.load(at + 3))


@triton.jit
def lattice(table, batch, entry, segment, COLUMNS):
    """Batch entry, head, position of the first row and dilation rate of an entry in one segment; its number of rows."""
    at = table + entry * COLUMNS
    first = tl.load(at + 1) + segment * tl.load(at + 2)
    return (batch, tl.load(at), first, tl.load(at + 3)), tl.load(at + 4).to(tl.int32)


@triton.jit
def numbers(queries, entry, segment, num_rows):
    """The number of the first row of a query entry in one segment, and how many numbers the segment has."""
    padded = tl.cdiv(num_rows, NUMBER_ALIGNMENT) * NUMBER_ALIGNMENT
    number = tl.load(queries.table + entry * QUERY_COLUMNS + ROW_COLUMNS) + segment * padded
    return tl.multiple_of(number, NUMBER_ALIGNMENT), padded


@triton.jit
def row_pointers(source, place):
    """Pointers to rows of a tensor [batch, seq, heads, ...]; ``place`` is their batch entry, head and positions."""
    batch, head, positions = place
    strides = source.strides
    return source.pointer + (batch * strides[0] + positions * strides[1] + head * strides[2])


@triton.jit
def rows_at(source, here):
    """Where the rows of an entry lie: a pointer to the first one, and the distances of rows and of their elements."""
    batch, head, first, rate = here
    return row_pointers(source, (batch, head, first)), rate * source.strides[1], source.strides[3]


@triton.jit
def key_rows_at(source, keys, entry, here, SLICE, WIDTH, PACKED):
    """As :func:`rows_at`, for rows of ``WIDTH`` elements of a key entry.

    With ``PACKED``, they lie in slice [batch, streams, rows] number ``SLICE`` of a parcel. Slices of vectors begin at
    multiples of 16 bytes. Words, in slice 3, are the same for every batch entry.
    """
    if not PACKED:
        return rows_at(source, here)
    aligned: tl.constexpr = 1 if WIDTH == 1 else 128 // source.pointer.dtype.element_ty.primitive_bitwidth
    batch, _, first, _ = here
    columns = keys.table + entry * KEY_COLUMNS + ROW_COLUMNS
    offset = tl.multiple_of(tl.load(columns + 1 + SLICE), aligned)
    row = (batch * 0 if SLICE == 3 else batch) * tl.load(columns) + first
    return source.pointer + offset + row * WIDTH, tl.full([], WIDTH, tl.int64), 1


@triton.jit
def block_pointers(at, start, BLOCK, BLOCK_D):
    """Pointers to the rows [BLOCK, BLOCK_D] from number ``start`` on. Only their common base depends on ``start``."""
    pointer, row_step, dim_step = at
    rows, dims = tl.arange(0, BLOCK).to(tl.int64), tl.arange(0, BLOCK_D).to(tl.int64)
    return pointer + row_step * start + ((rows * row_step)[:, None] + (dims * dim_step)[None, :])


@triton.jit
def load_rows(at, start, is_row, HEAD_DIM, BLOCK_D, IS_WHOLE):
    """Load rows [BLOCK, BLOCK_D] from number ``start`` on. Rows that are not wanted, and padding of D, are 0.

    With ``IS_WHOLE``, all rows are wanted.
    """
    pointers = block_pointers(at, start, is_row.shape[0], BLOCK_D)
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
def load_numbers(at, start, is_row, other, IS_WHOLE):
    """Load the numbers [BLOCK] of rows from number ``start`` on; ``other`` for rows that are not wanted."""
    pointer, row_step, _ = at
    pointers = pointer + row_step * start + tl.arange(0, is_row.shape[0]).to(tl.int64) * row_step
    if IS_WHOLE:
        return tl.load(pointers)
    return tl.load(pointers, mask=is_row, other=other)


@triton.jit
def add_rows(at, start, is_row, rows, opens, HEAD_DIM):
    """Add rows [BLOCK, BLOCK_D] to the sums of earlier launches. They are stored instead if this launch opens them."""
    BLOCK_D: tl.constexpr = rows.shape[1]
    earlier = tl.zeros(rows.shape, tl.float32)
    if opens == 0:
        earlier += load_rows(at, start, is_row, HEAD_DIM, BLOCK_D, False)
    rows += earlier
    pointers = block_pointers(at, start, rows.shape[0], BLOCK_D)
    is_dim = (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    tl.store(pointers, rounded(rows, pointers.dtype.element_ty), mask=is_row[:, None] & is_dim)


@triton.jit
def keys_at(keys, batch, entry, segment, HEAD_DIM, VALUE_DIM, MARKS, WORDS, PACKED):
    """Where the keys of an entry lie in one segment, their values, marks and words, and the number of keys.

    Without marks or words, the keys stand in their place.
    """
    here, num_keys = lattice(keys.table, batch, entry, segment, KEY_COLUMNS)
    key_at = key_rows_at(keys.key, keys, entry, here, 0, HEAD_DIM, PACKED)
    value_at = key_rows_at(keys.value, keys, entry, here, 1, VALUE_DIM, PACKED)
    mark_at, word_at = key_at, key_at
    if MARKS != 0:
        mark_at = key_rows_at(keys.marks, keys, entry, here, 2, 1, PACKED)
    if WORDS != 0:
        word_at = key_rows_at(keys.words, keys, entry, here, 3, 1, PACKED)
    return key_at, value_at, mark_at, word_at, num_keys


@triton.jit
def keys_of_link(
    owners, link, keys, batch, segment, begin, BLOCK_Q, BLOCK_K, HEAD_DIM, VALUE_DIM, MARKS, WORDS, PACKED, BANDED
):
    """The keys of a link, as :func:`keys_at`, for a block of queries from number ``begin`` on.

    Also the limits of the pair, and the blocks of keys, as :func:`blocks_of_band`.
    """
    entry, limits = linked(owners, link)
    keys_here = keys_at(keys, batch, entry, segment, HEAD_DIM, VALUE_DIM, MARKS, WORDS, PACKED)
    is_causal, below, above = limits
    num_keys = keys_here[4]
    if BANDED:
        whole, edges = blocks_of_band(begin, BLOCK_Q, below, above, num_keys, BLOCK_K)
    else:
        end = tl.where(is_causal, tl.minimum(num_keys, begin), num_keys) // BLOCK_K * BLOCK_K
        stop = tl.where(is_causal, tl.minimum(num_keys, begin + BLOCK_Q), num_keys)
        whole, edges = (0, end, end, 0), (end, stop, stop, 0)
    return keys_here, limits, whole, edges


@triton.jit
def blocks_of_band(first, SIZE, before, after, count, BLOCK):
    """Which blocks of ``BLOCK`` others the ``SIZE`` rows from number ``first`` on see.

    There are ``count`` others, and row i sees those from number i − ``before`` to i + ``after``.

    Returns:
        The blocks that every row sees, and those at the two edges of the band. Both are (begin, end, turn, jump): a
        loop goes from ``begin`` to ``end``, and from ``turn`` on it visits the blocks ``jump`` later. So one loop
        visits both edges.
    """
    begin = tl.maximum(first - before, 0) // BLOCK * BLOCK
    whole = tl.cdiv(tl.maximum(first + SIZE - 1 - before, 0), BLOCK) * BLOCK
    later = tl.maximum(tl.minimum(first + after + 1, count) // BLOCK * BLOCK, whole)
    stop = tl.minimum(first + SIZE + after, count)
    turn = begin + tl.cdiv(tl.maximum(tl.minimum(whole, stop) - begin, 0), BLOCK) * BLOCK
    end = turn + tl.maximum(stop - later, 0)
    return (whole, later, later, 0), (begin, end, turn, later - turn)


@triton.jit
def load_key_block(keys_here, start, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_V, BLOCK_K, MARKS, WORDS, IS_WHOLE):
    """Load a block of keys from number ``start`` on: keys, values, marks, words, and which of them exist.

    Ignored keys are not read, so that a NaN in one of them reaches nothing. They count as keys that do not exist.
    """
    key_at, value_at, mark_at, word_at, num_keys = keys_here
    is_key = start + tl.arange(0, BLOCK_K) < num_keys
    marks = tl.zeros([BLOCK_K], tl.int64)
    if MARKS == 1:
        is_key &= load_numbers(mark_at, start, is_key, 1, IS_WHOLE) == 0
    if MARKS == 2:
        marks = load_numbers(mark_at, start, is_key, -1, IS_WHOLE)
        is_key &= marks >= 0
    words = tl.zeros([BLOCK_K], tl.int32)
    if WORDS != 0:
        words = load_numbers(word_at, start, is_key, 0, IS_WHOLE)
    reads_all: tl.constexpr = IS_WHOLE and MARKS == 0
    k = load_rows(key_at, start, is_key, HEAD_DIM, BLOCK_D, reads_all)
    v = load_rows(value_at, start, is_key, VALUE_DIM, BLOCK_V, reads_all)
    return k, v, marks, words, is_key


@triton.jit
def load_pair_inputs(queries, here, start, is_row, MARKS, WORDS):
    """The document number and the two words of each query; zeros without. A position is the first of two words."""
    documents = tl.zeros(is_row.shape, tl.int64)
    if MARKS == 2:
        documents = load_numbers(rows_at(queries.documents, here), start, is_row, -2, False)
    first_words = tl.zeros(is_row.shape, tl.int32)
    second_words = first_words
    if WORDS == 2:
        first_words = load_numbers(rows_at(queries.words, here), start, is_row, 0, False)
    if WORDS == 1:
        pointer, row_step, word_step = rows_at(queries.words, here)
        first_words = load_numbers((pointer, row_step, word_step), start, is_row, 0, False)
        second_words = load_numbers((pointer + word_step, row_step, word_step), start, is_row, 0, False)
    return documents, first_words, second_words


@triton.jit
def visible(seen, rows, keys, row_documents, key_documents, limits, MARKS, BANDED, IS_WHOLE):
    """The pairs of ``seen`` that the band and the documents leave.

    All arguments broadcast to the block of pairs. ``rows`` and ``keys`` are numbers, or distances from one number. With
    ``IS_WHOLE``, every row may see every key of the block.
    """
    is_causal, below, above = limits
    if IS_WHOLE:
        pass
    elif not BANDED:
        seen = seen & ((keys <= rows) | (is_causal == 0))
    else:
        # One comparison for both limits: as an unsigned integer, a negative number is large.
        distance, width = keys - (rows - below), below + above
        seen = seen & (distance.to(tl.uint32, bitcast=True) <= width.to(tl.uint32, bitcast=True))
    if MARKS == 2:
        seen = seen & (row_documents == key_documents)
    return seen


@triton.jit
def modified_scores(products, pairs, queries, keys, is_row, is_key, SCORE_MOD):
    """The scores that a score_mod makes of products of queries and keys, and their derivatives.

    ``queries`` and ``keys`` are positions. They, and which rows and keys exist, broadcast to the block of pairs.
    """
    scale, batch, head, captured = pairs
    return SCORE_MOD(products * scale, batch, head, queries, keys, is_row, is_key, is_row & is_key, captured)


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
def rounded(x, dtype):
    """fp32 rounded to another dtype."""
    if IS_INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def product(a, b):
    """Matrix product with fp32 sums."""
    if IS_INTERPRETED:
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
