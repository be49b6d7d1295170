"""Gather dilated rows from tensors of any memory layout, and scatter them back, through strided views.

The rows of all heads of one lattice (:class:`~ring_backends.schedule.rows.HeadRun`) are one strided view. So a gather
makes one copy or none. A scatter writes through the same view. Tensors need not be contiguous.

Tensors are [batch, seq, heads, …]; gathered rows are [batch * segments, heads, rows, …].
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ring_backends.kernels.merge import merge_
from ring_backends.schedule.rows import DilatedRows

ROWS_AT_ONCE = 512
"""How many dilated rows of a head are copied on the CPU before the next head. Their pages fit into the TLB."""


def views(tensor: Tensor, rows: DilatedRows) -> Iterator[tuple[slice, Tensor]]:
    """Yield (heads, view) for each run. The view of ``tensor`` is [batch, segments, outer, inner, rows, …]."""
    batch, _, _, *rest = tensor.shape
    batch_stride, seq_stride, head_stride, *rest_strides = tensor.stride()
    first_head = 0
    for run in rows.runs:
        view = tensor.as_strided(
            (batch, rows.segments, run.outer, run.inner, rows.rows, *rest),
            (
                batch_stride,
                rows.segment_stride * seq_stride,
                run.outer_head * head_stride + run.outer_phase * seq_stride,
                run.inner_head * head_stride + run.inner_phase * seq_stride,
                rows.rate * seq_stride,
                *rest_strides,
            ),
            tensor.storage_offset() + (rows.start + run.phase) * seq_stride + run.head * head_stride,
        )
        yield slice(first_head, first_head + run.num_heads), view
        first_head += run.num_heads


def gathered_shape(tensor: Tensor, rows: DilatedRows) -> tuple[int, ...]:
    """The shape of the gathered rows: [batch * segments, heads, rows, …]."""
    return (tensor.shape[0] * rows.segments, rows.num_heads, rows.rows, *tensor.shape[3:])


def gather(tensor: Tensor, rows: DilatedRows) -> Tensor:
    """The rows, as [batch * segments, heads, rows, …]: a view where the tensor's strides allow one, else a copy."""
    shape = gathered_shape(tensor, rows)
    if len(rows.runs) == 1:
        ((_, view),) = views(tensor, rows)
        return view.reshape(shape)
    gathered = tensor.new_empty(shape)
    gather_into(gathered, tensor, rows)
    return gathered


def gather_into(destination: Tensor, tensor: Tensor, rows: DilatedRows) -> None:
    """Copy the rows into ``destination``, [batch * segments, heads, rows, …]."""
    for view, part in _paired(tensor, rows, destination):
        part.copy_(view)


def scatter(tensor: Tensor, rows: DilatedRows, values: Tensor) -> None:
    """Copy ``values``, [batch * segments, heads, rows, …], into the rows of ``tensor``."""
    for view, part in _paired(tensor, rows, values):
        view.copy_(part)


def scatter_add(tensor: Tensor, rows: DilatedRows, values: Tensor) -> None:
    """Add ``values``, [batch * segments, heads, rows, …], to the rows of ``tensor``, in place."""
    for view, part in _paired(tensor, rows, values):
        view.add_(part)


def scatter_merge(out: Tensor, lse: Tensor, rows: DilatedRows, tile_out: Tensor, tile_lse: Tensor) -> None:
    """Merge a tile's out and LSE into the rows of ``out``, and of ``lse`` [batch, seq, heads], in place."""
    pairs = zip(_paired(out, rows, tile_out), _paired(lse, rows, tile_lse), strict=True)
    for (out_view, out_part), (lse_view, lse_part) in pairs:
        merge_(out_view, lse_view, out_part, lse_part)


def _paired(tensor: Tensor, rows: DilatedRows, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (view of the tensor's rows, view of the same rows of ``values``) for each run. Both have the same shape.

    On the CPU, dilated rows are split, so that the same rows of all heads are copied before further rows. These rows
    lie on the same pages of memory.
    """
    values = values.unflatten(0, (values.shape[0] // rows.segments, rows.segments))
    at_once = ROWS_AT_ONCE if tensor.device.type == "cpu" and rows.rate > 1 else rows.rows
    for heads, view in views(tensor, rows):
        part = values[:, :, heads].unflatten(2, view.shape[2:4])
        yield from zip(view.split(at_once, 4), part.split(at_once, 4), strict=True)
