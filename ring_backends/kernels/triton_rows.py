"""Gathering, scattering and merging dilated rows in Triton, for kernels that compute one tile at a time.

Each program owns one block of rows of one head in one segment, so results are the same in every run. This module
imports Triton, so it is imported only when a kernel is launched. Offsets of rows are 64-bit integers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ring_backends.kernels import triton_rows_launch
from ring_backends.kernels.triton_blocks import merged_result, row_offsets

HEADER = tl.constexpr(triton_rows_launch.HEADER)
GATHER = tl.constexpr(triton_rows_launch.GATHER)
ADD = tl.constexpr(triton_rows_launch.ADD)


@triton.jit
def owned_rows(table, program, BLOCK_ROWS: tl.constexpr):
    """The rows of this program: in gathered rows (group, head and numbers), and in the tensor."""
    num_rows, rate = tl.load(table), tl.load(table + 1)
    segments, segment_stride = tl.load(table + 2), tl.load(table + 3)
    num_heads = tl.load(table + 4)
    number, rest = program % num_heads, program // num_heads
    num_blocks = tl.cdiv(num_rows, BLOCK_ROWS)
    group = rest // num_blocks
    indices = rest % num_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    entry = table + HEADER + number * 2
    positions = tl.load(entry + 1) + group % segments * segment_stride + indices * rate
    return group, number, indices, group // segments, tl.load(entry), positions, indices < num_rows


@triton.jit
def move_block(
    tensor,
    values,
    table,
    program,
    tensor_strides,
    value_strides,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    MOVE: tl.constexpr,
    SAME_ROWS: tl.constexpr,
):
    group, number, indices, batch, head, positions, is_row = owned_rows(table, program, BLOCK_ROWS)
    dims = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
    wanted = is_row[:, None] & (dims < HEAD_DIM)
    at = tensor + row_offsets(batch, head, positions, tensor_strides)[:, None] + dims * tensor_strides[3]
    if SAME_ROWS:
        value_rows = row_offsets(batch, head, positions, value_strides)
    else:  # gathered rows have their heads before their rows
        value_rows = row_offsets(group, indices, number, value_strides)
    value_at = values + value_rows[:, None] + dims * value_strides[3]
    if MOVE == GATHER:
        tl.store(value_at, tl.load(at, mask=wanted).to(values.dtype.element_ty), mask=wanted)
    else:
        rows = tl.load(value_at, mask=wanted)
        if MOVE == ADD:
            rows = rows.to(tl.float32) + tl.load(at, mask=wanted).to(tl.float32)
        tl.store(at, rows.to(tensor.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize=["num_programs"])
def move_rows_kernel(
    tensors,
    values,
    tables,
    tensor_strides,
    value_strides,
    num_programs,
    BLOCKS: tl.constexpr,
    SAME_ROWS: tl.constexpr,
):
    """Gather or scatter the rows of several tensors. Arguments are tuples with an element for each tensor.

    ``BLOCKS`` holds the head dim, the padded head dim, the rows per program, and whether to gather, store or add.
    """
    program = tl.program_id(0).to(tl.int64)
    for i in tl.static_range(len(BLOCKS)):
        if (program >= 0) & (program < num_programs[i]):
            move_block(
                tensors[i],
                values[i],
                tables[i],
                program,
                tensor_strides[i],
                value_strides[i],
                BLOCKS[i][0],
                BLOCKS[i][1],
                BLOCKS[i][2],
                BLOCKS[i][3],
                SAME_ROWS,
            )
        program -= num_programs[i]


@triton.jit
def merge_rows_kernel(
    out,
    lse,
    tile_out,
    tile_lse,
    table,
    out_strides,
    lse_strides,
    tile_out_strides,
    tile_lse_strides,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    SAME_ROWS: tl.constexpr,
):
    """Merge a tile's out and LSE into the rows of ``out`` and ``lse``."""
    program = tl.program_id(0).to(tl.int64)
    group, number, indices, batch, head, positions, is_row = owned_rows(table, program, BLOCK_ROWS)
    dims = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
    wanted = is_row[:, None] & (dims < HEAD_DIM)
    lse_at = lse + row_offsets(batch, head, positions, lse_strides)
    out_at = out + row_offsets(batch, head, positions, out_strides)[:, None] + dims * out_strides[3]
    if SAME_ROWS:
        new_lse_at = tile_lse + row_offsets(batch, head, positions, tile_lse_strides)
        new_rows = tile_out + row_offsets(batch, head, positions, tile_out_strides)
    else:
        new_lse_at = tile_lse + row_offsets(group, indices, number, tile_lse_strides)
        new_rows = tile_out + row_offsets(group, indices, number, tile_out_strides)
    new_out_at = new_rows[:, None] + dims * tile_out_strides[3]
    merged_out, merged_lse = merged_result(
        tl.load(out_at, mask=wanted, other=0.0).to(tl.float32),
        tl.load(lse_at, mask=is_row, other=float("-inf")),
        tl.load(new_out_at, mask=wanted, other=0.0).to(tl.float32),
        tl.load(new_lse_at, mask=is_row, other=float("-inf")),
    )
    tl.store(out_at, merged_out.to(out.dtype.element_ty), mask=wanted)
    tl.store(lse_at, merged_lse, mask=is_row)
