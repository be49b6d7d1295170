"""The ring of a mesh axis.

An axis has one ring, which the first style on the axis makes. So all modules of the axis and ``context_parallel`` have
the same layout.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
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


def axis_of(mesh: DeviceMesh) -> Axis:
    """Return the axis, on which a style has been applied. For the errors, see :func:`ring_of`."""
    group = _group_of(mesh)
    if group not in _axes:
        names = mesh.mesh_dim_names or ("without a name",)
        raise ValueError(
            f"mesh: no RingDilated has been applied on its axis {names[0]}; call parallelize_module(model, mesh, "
            "{…: RingDilated(…)}) first, with a plan that matches a module."
        )
    return _axes[group]


def ring_of(mesh: DeviceMesh) -> Ring:
    """The ring of a mesh axis, for ``positions``, ``shard``, ``unshard`` and ``pool``.

    Args:
        mesh: one axis of a DeviceMesh, such as ``mesh["ring"]``, on which a :class:`RingDilated` has been applied.

    Raises:
        TypeError: ``mesh`` is not a DeviceMesh.
        ValueError: ``mesh`` has several axes, or no :class:`RingDilated` has been applied on it.
    """
    return axis_of(mesh).ring


def _group_of(mesh: object) -> dist.ProcessGroup:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh = {type(mesh).__name__}: expected one axis of a DeviceMesh, such as mesh['ring'].")
    if mesh.ndim != 1:
        raise ValueError(
            f"mesh has {mesh.ndim} axes, {mesh.mesh_dim_names}: expected one; pass the ring's axis alone, such as "
            "mesh['ring']."
        )
    return mesh.get_group()
