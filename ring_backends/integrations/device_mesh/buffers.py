"""``context_parallel``: shards tensors in place over a mesh axis."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ring_backends.integrations.device_mesh.axis import axis_of


@contextlib.contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Collection[Tensor] | None = None,
) -> Iterator[None]:
    """Shard tensors in place over a mesh axis, and restore them at the end.

    The arguments are those of ``torch.distributed.tensor.experimental.context_parallel``. Inside the context each
    buffer holds this rank's rows, as ``ring_of(mesh).shard`` cuts them, and the modules on the axis know the length of
    the whole sequence. The sequence may have any length. Every rank of the axis enters with the same whole tensors.

    Call ``backward`` inside the context. Outside of it, autograd raises an error, since the buffers are whole again.

    Inside the context a buffer has other memory than outside. So two views of one tensor, such as ``batch[:, :-1]`` and
    ``batch[:, 1:]``, may both be buffers. What the context writes to a buffer is lost at its end.

    DistributedDataParallel copies rank 0's buffers to all ranks in each forward. Switch that off if a buffer of the
    model is sharded: ``forward_sync_buffers=False``, or ``broadcast_buffers=False`` before torch 2.13.

    Args:
        mesh: one axis of a DeviceMesh, on which a :class:`RingDilated` has been applied.
        buffers: tensors that hold the whole sequence, such as tokens, labels, masks and rotary tables, of any shapes
            and dtypes. With None, the context does nothing.
        buffer_seq_dims: the sequence dimension of each buffer.
        no_restore_buffers: buffers that keep this rank's rows at the end.

    Raises:
        TypeError: ``mesh`` is not a DeviceMesh, or an argument is not a list of plain tensors or dimensions.
        ValueError: no style has been applied on the axis; a buffer is a Parameter, requires a gradient, or is given
            twice; the buffers differ in length, or in number from ``buffer_seq_dims``; ``no_restore_buffers`` has a
            tensor that is not in ``buffers``; or a context of this axis is open.
        RuntimeError: from a call of attention: DistributedDataParallel has overwritten a buffer.
    """
    axis = axis_of(mesh)
    with axis.ring.report_refusals():
        buffers, dims = _check_buffers(buffers, buffer_seq_dims)
        kept = _check_kept(buffers, no_restore_buffers)
        if buffers and axis.seq_len is not None:
            raise ValueError(
                "mesh: a context_parallel of this axis is open: one sequence is sharded at a time; give all buffers to "
                "one context."
            )
    if not buffers:
        yield
        return
    seq_len = buffers[0].shape[dims[0]]
    with torch.no_grad():
        shards = [axis.ring.shard(buffer, dim) for buffer, dim in zip(buffers, dims, strict=True)]
    wholes = [None if id(buffer) in kept else buffer.data for buffer in buffers]
    axis.seq_len, axis.buffers = seq_len, buffers
    try:
        for buffer, shard in zip(buffers, shards, strict=True):
            buffer.data = shard
        increment_version(buffers)
        yield
    finally:
        axis.seq_len, axis.buffers = None, []
        for buffer, whole in zip(buffers, wholes, strict=True):
            if whole is not None:
                buffer.data = whole
                increment_version(buffer)


def _check_buffers(buffers: Any, dims: Any) -> tuple[list[Tensor], list[int]]:
    """The buffers, and their sequence dimensions counted from 0."""
    for name, value in {"buffers": buffers, "buffer_seq_dims": dims}.items():
        if value is not None and (isinstance(value, Tensor) or not isinstance(value, Sequence)):
            raise TypeError(f"{name} = {type(value).__name__}: expected a list.")
    buffers, dims = list(buffers or ()), list(dims or ())
    if len(buffers) != len(dims):
        raise ValueError(
            f"buffers has {len(buffers)} tensors and buffer_seq_dims {len(dims)} numbers: give one number per buffer."
        )
    for index, (buffer, dim) in enumerate(zip(buffers, dims, strict=True)):
        _check_buffer(f"buffers[{index}]", buffer)
        if not isinstance(dim, int) or isinstance(dim, bool) or not -buffer.dim() <= dim < buffer.dim():
            raise ValueError(
                f"buffer_seq_dims[{index}] = {dim!r}: expected a dimension of buffers[{index}], which is "
                f"{list(buffer.shape)}."
            )
        if any(buffer is other for other in buffers[:index]):
            raise ValueError(f"buffers[{index}] is in the list twice, and would be sharded twice; give it once.")
    dims = [dim % buffer.dim() for buffer, dim in zip(buffers, dims, strict=True)]
    lengths = [buffer.shape[dim] for buffer, dim in zip(buffers, dims, strict=True)]
    if len(set(lengths)) > 1 or 0 in lengths:
        raise ValueError(
            f"buffers have the lengths {lengths} along buffer_seq_dims = {dims}: expected one length, at least 1; "
            "index a longer table with positions, and shard the positions."
        )
    return buffers, dims


def _check_buffer(name: str, buffer: object) -> None:
    if not isinstance(buffer, Tensor) or isinstance(buffer, DTensor):
        raise TypeError(f"{name} = {type(buffer).__name__}: expected a plain torch.Tensor of the whole sequence.")
    if isinstance(buffer, nn.Parameter):
        raise ValueError(
            f"{name} is a Parameter {list(buffer.shape)}: parameters are not sharded along the sequence; index it with "
            "positions, and shard the positions."
        )
    if buffer.requires_grad:
        raise ValueError(
            f"{name} requires a gradient, which would be that of this rank's rows; shard it with "
            "ring_of(mesh).shard, which is differentiable."
        )


def _check_kept(buffers: Sequence[Tensor], no_restore: Collection[Tensor] | None) -> set[int]:
    """The ids of the buffers that are not restored."""
    kept = {id(buffer) for buffer in no_restore or ()}
    if not kept <= {id(buffer) for buffer in buffers}:
        raise ValueError("no_restore_buffers has a tensor that is not in buffers: give only buffers.")
    return kept
