"""Launches the Triton kernels that gather, scatter and merge rows.

This module itself does not import Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ring_backends.kernels import triton_launch
from ring_backends.kernels.constants import keep_if_captured
from ring_backends.kernels.triton_launch import Source
from ring_backends.schedule.rows import DilatedRows
from ring_backends.torch_internals import has_values, untraced

GATHER, STORE, ADD = range(3)

HEADER = 5
"""Integers at the start of a table: rows, dilation rate, segments, segment stride, heads.

Two integers for each head follow: its index, and the position of its first row.
"""

BLOCK_ELEMENTS = 4096
MAX_TENSORS = 8
"""Tensors per launch. Triton compiles the kernel for each number of tensors."""


class Rows(NamedTuple):
    """Dilated rows of a tensor [batch, seq, heads, …], and as gathered ``values`` [batch * segments, heads, rows, …].

    ``…`` is the head dim or nothing. Strides are free.
    """

    tensor: Tensor
    rows: DilatedRows
    values: Tensor


def can_launch(*tensors: Tensor) -> bool:
    """Whether the kernels serve these tensors: on a CUDA device that Triton supports, with values, not in fp64."""
    return tensors[0].is_cuda and all(
        tensor.is_cuda
        and tensor.dtype not in (torch.float64, torch.complex64, torch.complex128)
        and has_values(tensor)
        and _is_supported(tensor.device)
        for tensor in tensors
    )


@cache
def _is_supported(device: torch.device) -> bool:
    return not triton_launch.device_reasons(device) and triton_launch.import_failure() is None


def move_rows(moves: Sequence[tuple[Rows, int]], *, same_rows: bool = False) -> None:
    """Gather, store or add the rows of up to :data:`MAX_TENSORS` tensors per launch.

    Args:
        moves: rows, with :data:`GATHER`, :data:`STORE` or :data:`ADD`. No two may write the same element.
        same_rows: whether values are in the same rows of another tensor [batch, seq, heads, …], and not gathered.
    """
    moves = [(rows, move) for rows, move in moves if rows.values.numel()]
    for start in range(0, len(moves), MAX_TENSORS):
        _move_rows(moves[start : start + MAX_TENSORS], same_rows)


def _move_rows(moves: Sequence[tuple[Rows, int]], same_rows: bool) -> None:
    blocks = [(*_block(part.tensor), move) for part, move in moves]
    num_programs = tuple(
        _num_programs(part.tensor, part.rows, block) for (part, _), (*_, block, _) in zip(moves, blocks, strict=True)
    )
    arguments = (
        tuple(Source.of(part.tensor) for part, _ in moves),
        tuple(Source.of(part.values) for part, _ in moves),
        tuple(rows_table(part.rows, part.tensor.device) for part, _ in moves),
        num_programs,
    )
    constants = {"BLOCKS": tuple(blocks), "SAME_ROWS": same_rows}
    kernel = triton_launch.kernels().move_rows
    triton_launch.launch(kernel, sum(num_programs), moves[0][0].tensor.device, arguments, constants)


def merge_rows(
    out: Tensor, lse: Tensor, rows: DilatedRows, tile_out: Tensor, tile_lse: Tensor, *, same_rows: bool = False
) -> None:
    """Merge another out and LSE into the rows of ``out`` and ``lse``, in place. LSEs are in fp32.

    Args:
        tile_out, tile_lse: gathered rows, or with ``same_rows`` tensors that hold the same rows where they are.
    """
    head_dim, padded, block = _block(out)
    if not tile_lse.numel():
        return
    arguments = (*map(Source.of, (out, lse, tile_out, tile_lse)), rows_table(rows, out.device))
    constants = {"HEAD_DIM": head_dim, "BLOCK_D": padded, "BLOCK_ROWS": block, "SAME_ROWS": same_rows}
    kernel = triton_launch.kernels().merge_rows
    triton_launch.launch(kernel, _num_programs(out, rows, block), out.device, arguments, constants)


def rows_table(rows: DilatedRows, device: torch.device) -> Tensor:
    """The rows as int64 numbers, as :data:`HEADER` describes. Nobody may change the tensor."""
    return keep_if_captured(_rows_table(rows, device), device)


@lru_cache(maxsize=4096)
@untraced
def _rows_table(rows: DilatedRows, device: torch.device) -> Tensor:
    heads = (pair for run in rows.runs for pair in run.heads_and_phases())
    entries = [number for head, phase in heads for number in (head, rows.start + phase)]
    header = [rows.rows, rows.rate, rows.segments, rows.segment_stride, rows.num_heads]
    return torch.tensor([*header, *entries], dtype=torch.int64, device="cpu").to(device)


def _block(tensor: Tensor) -> tuple[int, int, int]:
    """The head dim, or 1 without one; the power of two that holds it; and the rows per program."""
    head_dim = tensor.shape[3] if tensor.dim() > 3 else 1
    padded = 1 << (head_dim - 1).bit_length()
    return head_dim, padded, max(1, min(1024, BLOCK_ELEMENTS // padded))


def _num_programs(tensor: Tensor, rows: DilatedRows, block: int) -> int:
    return tensor.shape[0] * rows.segments * rows.num_heads * -(-rows.rows // block)
