"""DeepSpeed: hops by ``deepspeed.comm``, training by ``deepspeed.initialize`` with ZeRO 0 to 3.

Sharding, reduction, clipping and checkpoint files are DeepSpeed's own. The user's ``config`` reaches DeepSpeed, and the
arguments of :func:`parallelize` set some entries of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ring_backends.attention import RingDilatedAttention as _RingDilatedAttention
from ring_backends.cost.arrangement import AutoOptions, RingSize, refuse_arrangement
from ring_backends.errors import importing
from ring_backends.joining import as_timedelta, check_options, join_ring, show_auto_options
from ring_backends.ring.rendezvous import start_world, world_ring
from ring_backends.ring.ring import Ring
from ring_backends.ring.topology import RingOrder, UlyssesSize
from ring_backends.ring.transfer import Transfer
from ring_backends.schedule.layout import LayoutKind
from ring_backends.training.state import TrainingState

with importing("the deepspeed adapter cannot import DeepSpeed", "deepspeed"):
    from ring_backends.adapters.deepspeed.ring_pass import post_hop, start_deepspeed
    from ring_backends.adapters.deepspeed.settings import engine_settings
    from ring_backends.adapters.deepspeed.training import DeepSpeedTraining

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["DeepSpeedRingDilatedAttention", "RingDilatedAttention", "initialize", "parallelize"]


@show_auto_options
def initialize(
    ring_size: RingSize = None,
    layout: LayoutKind = "contiguous",
    group: DeviceMesh | dist.ProcessGroup | None = None,
    timeout: timedelta | float = timedelta(seconds=300),
    *,
    mpu: Any = None,
    ring_order: RingOrder = "rank",
    buffer_bytes: int | None = None,
    ulysses_size: UlyssesSize = 1,
    **auto: Unpack[AutoOptions],
) -> Ring:
    """Join a ring, and start ``deepspeed.comm`` unless it runs already. Every rank of the ring makes this call.

    For the other arguments and the errors, see :func:`ring_backends.joining.join_ring`.

    Args:
        mpu: names the ring's ranks in place of ``group``. It is a ProcessGroup, or an object whose
            ``get_sequence_parallel_group()`` returns one. ``deepspeed.runtime.sequence_parallel.parallel_state_sp`` is
            such an object once it is initialised. Not allowed with ``ring_size="auto"`` or ``ring_order="topology"``.
    """
    options = ring_order, buffer_bytes, ulysses_size
    check_options(ring_size, layout, timeout, group, *options, auto)
    if mpu is not None:
        refuse_arrangement("mpu already fixes the ring's ranks and their order", ring_size, ring_order)
    start_world(as_timedelta(timeout))  # an mpu may create its group when it is asked for it
    if dist.is_initialized():
        start_deepspeed()
    if mpu is not None:
        group = _sequence_parallel_group(group, mpu)
    return join_ring("deepspeed", ring_size, layout, group, timeout, *options, auto)


def _sequence_parallel_group(group: DeviceMesh | dist.ProcessGroup | None, mpu: Any) -> dist.ProcessGroup:
    if group is not None:
        raise ValueError(f"group = {group!r} and mpu = {mpu!r}: both name the ring's ranks; pass one of them.")
    if isinstance(mpu, dist.ProcessGroup):
        return mpu
    if not hasattr(mpu, "get_sequence_parallel_group"):
        raise TypeError(
            f"mpu = {mpu!r}: expected a ProcessGroup or an object with get_sequence_parallel_group(), such as "
            "deepspeed.runtime.sequence_parallel.parallel_state_sp."
        )
    return cast(dist.ProcessGroup, mpu.get_sequence_parallel_group())


class DeepSpeedRingDilatedAttention(_RingDilatedAttention):
    """Ring dilated attention whose hops are deepspeed.comm's point-to-point operations."""

    def ring_pass(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], tag: int) -> Transfer:
        return post_hop(self.ring, outgoing, incoming, tag)


RingDilatedAttention = DeepSpeedRingDilatedAttention


def parallelize(
    model: nn.Module,
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    ring: Ring,
    *,
    max_grad_norm: float | None = None,
    accumulation_steps: int = 1,
    zero_stage: int | None = None,
    config: Mapping[str, Any] | None = None,
    mpu: Any = None,
    mixed_precision: torch.dtype | None = None,
    **framework_options: Any,
) -> TrainingState:
    """Train a model with a DeepSpeed engine, which replicates or shards it over data × ring as the ZeRO stage says.

    Args:
        model: any module whose parameters are all fp32 or all bf16. DeepSpeed keeps fp32 master weights for bf16
            parameters. It moves the model to its accelerator. ZeRO 3 shards the model in place.
        make_optimizer: called once with ``model.parameters()``; returns the optimizer.
        ring: the ring of the model's attention.
        max_grad_norm: clip the gradient's global norm to this before each step; None does not clip.
        accumulation_steps: backward calls per step.
        zero_stage: the ZeRO stage, 0 to 3. None takes the stage from ``config``; the default there is 0.
        config: DeepSpeed's configuration, without the entries that other arguments set. ``train_batch_size`` is not
            allowed in it: DeepSpeed computes this entry, and counts ring ranks as data ranks.
        mpu: a sequence-parallel mpu. DeepSpeed takes the groups for sharding and reduction from it.
        mixed_precision: torch.bfloat16 runs the forward under autocast. Parameters and reduction stay in fp32. For
            bf16 parameters with fp32 master weights, pass ``config={"bf16": {"enabled": True}}`` instead.
        framework_options: passed to ``deepspeed.initialize``.

    Raises:
        ValueError, TypeError: an argument is invalid, ``config`` contradicts an argument, or data size × ring size is
            not the world size.
        RuntimeError: the reducer leaves the replicas with different gradients.
    """
    with world_ring(ring).report_refusals():
        settings = engine_settings(model, config, zero_stage, accumulation_steps, max_grad_norm, mixed_precision)
    options = settings, mpu, framework_options, mixed_precision
    return DeepSpeedTraining(model, make_optimizer, ring, max_grad_norm, accumulation_steps, *options)
