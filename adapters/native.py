"""Native torch.distributed: hops by ``batch_isend_irecv`` on a group of the ring's own, training by DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ring_backends.attention import RingDilatedAttention as _RingDilatedAttention
from ring_backends.cost.arrangement import AutoOptions, RingSize
from ring_backends.joining import join_ring
from ring_backends.ring.ring import Ring
from ring_backends.ring.topology import RingOrder
from ring_backends.ring.transfer import Transfer, post_batch, post_works
from ring_backends.schedule.layout import LayoutKind
from ring_backends.training.state import ReplicatedTraining, TrainingState

if TYPE_CHECKING:
    from typing_extensions import Unpack

# What each forward would do to buffers is done after each step, with every adapter. torch 2.13 has renamed the option.
_SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in signature(DistributedDataParallel).parameters
)

__all__ = ["NativeRingDilatedAttention", "RingDilatedAttention", "initialize", "parallelize"]


def initialize(
    ring_size: RingSize = None,
    layout: LayoutKind = "contiguous",
    group: DeviceMesh | dist.ProcessGroup | None = None,
    timeout: timedelta = timedelta(seconds=300),
    *,
    ring_order: RingOrder = "rank",
    **auto: Unpack[AutoOptions],
) -> Ring:
    """Join a ring; every one of its ranks makes this call.

    Args:
        ring_size: ranks per ring; the world is cut into rings of neighbouring ranks. None means the whole world.
            ``"auto"`` chooses among the sizes that divide the world: the smallest ring of several ranks that fits into
            their memory and is faster than one device, or where none is, the smallest that fits.
        layout: how a sequence lies over the ring, ``"contiguous"`` or ``"zigzag"``.
        group: an existing process group, or one axis of a DeviceMesh, whose ranks become the ring.
        timeout: the longest that one call may take to end or to raise, from its first wait for a peer on. Starting up
            has at least 300 s.
        ring_order: ``"rank"``: rings are cut from the ranks in the order of their numbers. ``"topology"``: ordered so
            that neighbours are on one host (by name, or what RING_BACKENDS_HOST in a rank's environment says instead)
            and there linked by NVLink. Not with ``group``.
        auto: for ``ring_size="auto"``, what the attention will be called with (:class:`~ring_backends.AutoOptions`):
            seq_len, segment_lengths, dilation_rates, num_heads, head_dim, and more. All ranks of the world measure
            tiles and hops for a second or two, and rank 0 decides.

    Raises:
        ValueError, TypeError: an argument breaks its rule, or no ring fits into the memory.
        RingMismatchError, RingPeerError: where ranks decide together, one asks for something else, or does not come.
    """
    return join_ring("native", ring_size, layout, group, timeout, ring_order, auto)


class NativeRingDilatedAttention(_RingDilatedAttention):
    """Ring dilated attention whose hops are torch.distributed's own point-to-point operations."""

    def ring_pass(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], tag: int) -> Transfer:
        group = self.ring.group
        assert group is not None
        return post_works(group, lambda out, into: post_batch(group, out, into, tag), outgoing, incoming)


RingDilatedAttention = NativeRingDilatedAttention


def parallelize(
    model: nn.Module,
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    ring: Ring,
    *,
    max_grad_norm: float | None = None,
    accumulation_steps: int = 1,
    mixed_precision: torch.dtype | None = None,
    **framework_options: Any,
) -> TrainingState:
    """Replicate a model over data × ring with DistributedDataParallel; in a world of one, leave it as it is.

    Args:
        model: any module, on its device already.
        make_optimizer: called once with the parameters to train.
        ring: the ring its attention uses.
        max_grad_norm: clip the gradient's global norm to this before each step.
        accumulation_steps: backward calls per step.
        mixed_precision: torch.bfloat16 runs the forward under autocast; parameters and gradients keep their dtype.
        framework_options: for DistributedDataParallel.

    Raises:
        ValueError: an argument breaks its rule, or data size × ring size is not the world.
        RuntimeError: the reducer leaves the replicas with different gradients.
    """

    def wrap(module: nn.Module) -> nn.Module:
        options = {_SYNC_BUFFERS: False, **framework_options}
        return DistributedDataParallel(module, **options) if dist.is_initialized() else module

    return ReplicatedTraining(
        model, make_optimizer, ring, wrap, max_grad_norm, accumulation_steps, mixed_precision, framework_options
    )
