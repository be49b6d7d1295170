"""FairScale: hops are ``PipeMessage``s on a ``Transport``; training by OSS and ShardedDataParallel, or by its FSDP.

If ``fairscale.nn.model_parallel`` is initialised, its pipeline-parallel group is the ring. The ring gets a process
group of its own, so that its hops never queue behind FairScale's collectives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_backends.attention import RingDilatedAttention as _RingDilatedAttention
from ring_backends.cost.arrangement import RingSize, refuse_arrangement
from ring_backends.errors import importing
from ring_backends.joining import initializer
from ring_backends.ring.rendezvous import start_world_of_one, world_ring
from ring_backends.ring.ring import Ring
from ring_backends.ring.topology import RingOrder
from ring_backends.ring.transfer import Transfer
from ring_backends.training.state import MakeOptimizer, TrainingState

with importing("the fairscale adapter cannot import FairScale", "fairscale"):
    from fairscale.nn.model_parallel import initialize as model_parallel

    from ring_backends.adapters.fairscale.ring_pass import RingTransport, post_hop
    from ring_backends.adapters.fairscale.training import FairScaleTraining, FullyShardedTraining, ShardedTraining

__all__ = ["FairScaleRingDilatedAttention", "RingDilatedAttention", "RingTransport", "initialize", "parallelize"]


def _pipeline_group(ring_size: RingSize, ring_order: RingOrder) -> dist.ProcessGroup | None:
    """Where ``fairscale.nn.model_parallel`` is initialised, its pipeline-parallel group is the ring.

    ``ring_size`` is then optional, and ``ring_size="auto"`` and ``ring_order="topology"`` are not allowed.
    """
    if not model_parallel.model_parallel_is_initialized():
        return None
    refuse_arrangement(
        "fairscale.nn.model_parallel already fixes the ring's ranks and their order", ring_size, ring_order
    )
    pipeline: dist.ProcessGroup = model_parallel.get_pipeline_parallel_group()
    if ring_size not in (None, pipeline.size()):
        raise ValueError(
            f"ring_size = {ring_size}: fairscale.nn.model_parallel is initialised with a ring of {pipeline.size()} "
            f"ranks, its pipeline-parallel group; leave ring_size out, initialise model_parallel with {ring_size} "
            "pipeline stages, or pass a group of your own."
        )
    return pipeline


initialize = initializer("fairscale", own_group=_pipeline_group)


class FairScaleRingDilatedAttention(_RingDilatedAttention):
    """Ring dilated attention whose hops are made of ``PipeMessage`` objects, carried by :class:`RingTransport`."""

    def ring_pass(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], tag: int) -> Transfer:
        return post_hop(self.ring, outgoing, incoming, tag)


RingDilatedAttention = FairScaleRingDilatedAttention


def parallelize(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    ring: Ring,
    *,
    max_grad_norm: float | None = None,
    accumulation_steps: int = 1,
    strategy: Literal["sharded_ddp", "fsdp"] = "sharded_ddp",
    mixed_precision: torch.dtype | None = None,
    **framework_options: Any,
) -> TrainingState:
    """Shard optimizer and gradients over data × ring with OSS and ShardedDataParallel, or parameters too with FSDP.

    OSS builds its own optimizer from a class and arguments. It gets the class of the optimizer that ``make_optimizer``
    returns, its parameter groups with all their values, and its ``defaults`` as constructor arguments. Every
    constructor argument must be in ``defaults``. Attach schedulers and hooks to ``state.optimizer``, not to the
    optimizer that ``make_optimizer`` returned.

    Args:
        model: any module, already on its device. For FSDP, blocks of it may already be wrapped in
            FullyShardedDataParallel. This function wraps the whole model.
        make_optimizer: called once with ``model.parameters()``; returns the optimizer. With FSDP these parameters are
            the rank's flat shards.
        ring: the ring of the model's attention.
        max_grad_norm: clip the gradient's global norm to this before each step.
        accumulation_steps: backward calls per step.
        strategy: ``"sharded_ddp"`` uses OSS and ShardedDataParallel. ``"fsdp"`` uses FairScale's
            FullyShardedDataParallel, which needs a GPU.
        mixed_precision: torch.bfloat16 or torch.float16 runs the forward under autocast; parameters and gradients keep
            their dtype. With torch.float16, the loss is scaled (:class:`torch.amp.GradScaler`), and a step whose
            gradient is not finite on some rank is left out.
        framework_options: passed by name to OSS and ShardedDataParallel, or to FullyShardedDataParallel.

    Raises:
        ValueError, TypeError: an argument is invalid, data size × ring size is not the world size, FairScale's model
            parallelism splits the model, or the strategy cannot run on this machine.
        RuntimeError: the reducer leaves the replicas with different gradients.
    """
    strategies: dict[str, type[FairScaleTraining]] = {"sharded_ddp": ShardedTraining, "fsdp": FullyShardedTraining}
    with world_ring(ring).report_refusals():
        if strategy not in strategies:
            raise ValueError(f"strategy = {strategy!r}: must be one of {', '.join(map(repr, strategies))}.")
        _check_model_parallel(ring)
    start_world_of_one()  # OSS and FSDP need a process group
    return strategies[strategy](
        model, make_optimizer, ring, max_grad_norm, accumulation_steps, mixed_precision, framework_options
    )


def _check_model_parallel(ring: Ring) -> None:
    if not model_parallel.model_parallel_is_initialized():
        return
    size = model_parallel.get_model_parallel_world_size()
    stages = tuple(model_parallel.get_pipeline_parallel_ranks())
    if size > 1 or (len(stages) > 1 and stages != ring.ranks):
        raise ValueError(
            f"fairscale.nn.model_parallel is initialised with {size} ranks per layer and {len(stages)} pipeline "
            "stages: training would average ranks that hold different parts of the model; initialise it with one rank "
            "per layer, and with no pipeline except the ring."
        )
