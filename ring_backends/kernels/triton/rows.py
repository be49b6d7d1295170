"""Gathering, scattering and merging dilated rows in Triton, for kernels that compute one tile at a time.

Each program owns one block of rows of one head in one segment, so results are the same in every run. This module
imports Triton, so it is imported only when a kernel is launched. Offsets of rows are 64-bit integers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ring_backends.kernels import rows as dilated
from ring_backends.kernels.triton.blocks import ROW_COLUMNS, merged_result, row_pointers

GATHER = tl.constexpr(dilated.GATHER)
STORE = tl.constexpr(dilated.STORE)
TAKE = tl.constexpr(dilated.TAKE)


@triton.jit
def owned_rows(table, program, BLOCK_ROWS, SAME_ROWS):
    """Where the rows of this program are in the tensor and in ``values``; which of them exist.

    With ``SAME_ROWS``, the rows of ``values`` have the same places as those of the tensor.
    """
    num_heads = tl.load(table)
    number, rest = program % num_heads, program // num_heads
    entry = table + 1 + number * ROW_COLUMNS
    num_rows, segments = tl.load(entry + 4), tl.load(entry + 5)
    num_blocks = tl.cdiv(num_rows, BLOCK_ROWS)
    group = rest // num_blocks
    indices = rest % num_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    positions = tl.load(entry + 1) + group % segments * tl.load(entry + 2) + indices * tl.load(entry + 3)
    place = (group // segments, tl.load(entry), positions)
    # Gathered rows have their heads before their rows.
    value_place = place if SAME_ROWS else (group, indices, number)
    return place, value_place, indices < num_rows


@triton.jit
def element_pointers(source, place, BLOCK_D):
    """Pointers to the elements [BLOCK_ROWS, BLOCK_D] of rows; ``place`` is their batch entry, head and positions."""
    dims = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
    return row_pointers(source, place)[:, None] + dims * source.strides[3]


@triton.jit
def move_block(source, values, table, program, HEAD_DIM, BLOCK_D, BLOCK_ROWS, MOVE, SAME_ROWS):
    place, value_place, is_row = owned_rows(table, program, BLOCK_ROWS, SAME_ROWS)
    at, value_at = element_pointers(source, place, BLOCK_D), element_pointers(values, value_place, BLOCK_D)
    wanted = is_row[:, None] & (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    if MOVE == GATHER:
        tl.store(value_at, tl.load(at, mask=wanted).to(value_at.dtype.element_ty), mask=wanted)
    else:
        rows = tl.load(value_at, mask=wanted)
        if MOVE == TAKE:
            tl.store(value_at, tl.zeros_like(rows), mask=wanted)
        if MOVE != STORE:
            rows = rows.to(tl.float32) + tl.load(at, mask=wanted).to(tl.float32)
        tl.store(at, rows.to(at.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize=["num_programs"])
def move_rows_kernel(sources, values, tables, num_programs, BLOCKS: tl.constexpr, SAME_ROWS: tl.constexpr):
    """Gather or scatter the rows of several tensors. Arguments are tuples with an element for each tensor.

    ``BLOCKS`` holds the head dim, the padded head dim, the rows per program, and how they move.
    """
    program = tl.program_id(0).to(tl.int64)
    for i in tl.static_range(len(BLOCKS)):
        if (program >= 0) & (program < num_programs[i]):
            block: tl.constexpr = BLOCKS[i]
            move_block(sources[i], values[i], tables[i], program, block[0], block[1], block[2], block[3], SAME_ROWS)
        program -= num_programs[i]


@triton.jit
def add_parts_kernel(into, summands, table, sources, work, BLOCK: tl.constexpr):
    """Add one or several stretches of ``summands`` to each stretch of ``into``."""
    program = tl.program_id(0).to(tl.int64)
    entry = table + tl.load(work + 2 * program).to(tl.int64) * 4
    start, count, first, num_sources = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    elements = tl.load(work + 2 * program + 1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    wanted = elements < count
    total = tl.load(into + start + elements, mask=wanted)
    for number in range(num_sources):
        source = summands + tl.load(sources + first + number) + elements
        total += tl.load(source, mask=wanted).to(total.dtype)
    tl.store(into + start + elements, total, mask=wanted)


@triton.jit
def merge_rows_kernel(
    out,
    lse,
    tile_out,
    tile_lse,
    table,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SAME_ROWS: tl.constexpr,
    TAKES: tl.constexpr,
):
    """Merge a tile's out and LSE into the rows of ``out`` and ``lse``. With ``TAKES``, its LSE is then −inf."""
    program = tl.program_id(0).to(tl.int64)
    place, tile_place, is_row = owned_rows(table, program, BLOCK_ROWS, SAME_ROWS)
    wanted = is_row[:, None] & (tl.arange(0, BLOCK_D) < HEAD_DIM)[None, :]
    out_at = element_pointers(out, place, BLOCK_D)
    lse_at, tile_lse_at = row_pointers(lse, place), row_pointers(tile_lse, tile_place)
    merged_out, merged_lse = merged_result(
        tl.load(out_at, mask=wanted, other=0.0).to(tl.float32),
        tl.load(lse_at, mask=is_row, other=float("-inf")),
        tl.load(element_pointers(tile_out, tile_place, BLOCK_D), mask=wanted, other=0.0).to(tl.float32),
        tl.load(tile_lse_at, mask=is_row, other=float("-inf")),
    )
    tl.store(out_at, merged_out.to(out_at.dtype.element_ty), mask=wanted)
    tl.store(lse_at, merged_lse, mask=is_row)
    if TAKES:
        tl.store(tile_lse_at, tl.full(merged_lse.shape, float("-inf"), tl.float32), mask=is_row)
