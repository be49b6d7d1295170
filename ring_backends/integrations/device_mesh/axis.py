"""The ring of a mesh axis, and the sequence that ``context_parallel`` shards over it.

An axis has one ring, which the first style on the axis makes. So all modules of the axis and ``context_parallel`` have
the same layout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ring_backends.registry import load_adapter
from ring_backends.ring.ring import Ring
from ring_backends.schedule.layout import LayoutKind
from ring_backends.torch_internals import internal


@dataclass(eq=False)
class Axis:
    """A mesh axis with a ring.

    Attributes:
        backend: name of the adapter that made the ring.
        seq_len: length of the sequence that an open ``context_parallel`` has sharded; None outside of one. A plain
            attribute, since autograd recomputes activations on another thread, which has no context variables.
        buffers: the tensors that it has sharded.
    """

    ring: Ring
    backend: str
    seq_len: int | None = None
    buffers: list[Tensor] = field(default_factory=list)

    def check_buffers(self) -> None:
        """Check that DistributedDataParallel has not replaced the rows of this rank by those of rank 0.

        Raises:
            RuntimeError: it has.
        """
        if not self.buffers or self.ring.size == 1 or torch.compiler.is_compiling():
            return
        purpose = "the check of sharded buffers"
        model: Any = internal(DistributedDataParallel, "_active_ddp_module", purpose)
        if model is None or not internal(model, "will_sync_module_buffers", purpose)():
            return
        copied = {id(buffer) for buffer in internal(model, "modules_buffers", purpose)}
        if any(id(buffer) in copied for buffer in self.buffers):
            raise RuntimeError(
                "DistributedDataParallel has copied rank 0's rows of a buffer of the model to all ranks, and "
                "context_parallel has sharded the buffer: switch that off by forward_sync_buffers=False, or "
                "broadcast_buffers=False before torch 2.13."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Axis:
        return self


_axes: WeakKeyDictionary[dist.ProcessGroup, Axis] = WeakKeyDictionary()


def join_axis(mesh: DeviceMesh, backend: str, layout: LayoutKind, timeout: timedelta) -> Axis:
    """Return the axis with its ring. The first call for an axis makes the ring; all ranks of the axis make that call.

    Raises:
        TypeError, ValueError: ``mesh`` is not one axis of a DeviceMesh.
        ValueError: the axis has a ring with another backend, layout or timeout.
    """
    group = _group_of(mesh)
    if group not in _axes:
        _axes[group] = Axis(load_adapter(backend).initialize(layout=layout, group=mesh, timeout=timeout), backend)
    axis = _axes[group]
    wanted = {"backend": backend, "layout": layout, "timeout": timeout}
    made = {"backend": axis.backend, "layout": axis.ring.layout_kind, "timeout": axis.ring.timeout}
    for name, value in wanted.items():
        if value != made[name]:
            raise ValueError(
                f"{name} = {value!r}: the ring of this mesh axis has {name} = {made[name]!r}, from the first style; "
                "an axis has one ring, so give all its styles the same value."
            )
    return axis


def ring_of(mesh: DeviceMesh) -> Ring:
    """The ring of a mesh axis, for ``positions``, ``shard``, ``unshard`` and ``pool``.

    Args:
        mesh: one axis of a DeviceMesh, such as ``mesh["ring"]``, on which a :class:`RingDilated` has been applied.

    Raises:
        TypeError: ``mesh`` is not a DeviceMesh.
        ValueError: ``mesh`` has several axes, or no :class:`RingDilated` has been applied on it.
    """
    return _axis_of(mesh).ring


def _axis_of(mesh: DeviceMesh) -> Axis:
    group = _group_of(mesh)
    if group not in _axes:
        names = mesh.mesh_dim_names or ("without a name",)
        raise ValueError(
            f"mesh: no RingDilated has been applied on its axis {names[0]}; call parallelize_module(model, mesh, "
            "{…: RingDilated(…)}) first, with a plan that matches a module."
        )
    return _axes[group]


def _group_of(mesh: object) -> dist.ProcessGroup:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh = {type(mesh).__name__}: expected one axis of a DeviceMesh, such as mesh['ring'].")
    if mesh.ndim != 1:
        raise ValueError(
            f"mesh has {mesh.ndim} axes, {mesh.mesh_dim_names}: expected one; pass the ring's axis alone, such as "
            "mesh['ring']."
        )
    return mesh.get_group()


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
    ``batch[:, 1:]``, may both be buffers, but what is written to a buffer inside the context is lost at its end.

    DistributedDataParallel copies rank 0's buffers to all ranks in each forward. If a buffer of the model is sharded,
    switch that off: ``forward_sync_buffers=False``, or ``broadcast_buffers=False`` before torch 2.13.

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
    axis = _axis_of(mesh)
    with axis.ring.report_refusals():
        buffers, dims = _check_buffers(buffers, buffer_seq_dims)
        kept = {id(buffer) for buffer in no_restore_buffers or ()}
        if not kept <= {id(buffer) for buffer in buffers}:
            raise ValueError("no_restore_buffers has a tensor that is not in buffers: give only buffers.")
        if buffers and axis.seq_len is not None:
            raise ValueError(
                "mesh: a context_parallel of this axis is open: one sequence is sharded at a time; give all buffers to "
                "one context."
            )
    if not buffers:
        yield
        return
    with torch.no_grad():
        shards = [axis.ring.shard(buffer, dim) for buffer, dim in zip(buffers, dims, strict=True)]
    wholes = [None if id(buffer) in kept else buffer.data for buffer in buffers]
    axis.seq_len, axis.buffers = buffers[0].shape[dims[0]], buffers
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
