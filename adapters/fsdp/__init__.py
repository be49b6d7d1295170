"""PyTorch FSDP: the ring is an axis of a data × ring DeviceMesh, over which parameters are sharded.

Hops go between coordinates of the mesh's ring axis. They have their own process group, so that they never queue behind
FSDP's parameter collectives (:mod:`ring_backends.adapters.fsdp.ring_pass`). In a compiled block, a call with all its
hops is one operator, so the block stays one graph (:mod:`ring_backends.engine.operators`).

Gradients are always reduced over data × ring. Parameters are sharded over all of it, or with ``strategy="hsdp"`` within
groups of as many ranks as a ring has. If gradients were reduced over the data axis alone, every ring rank would keep
the gradient of its own part of the sequence, and the replicas would drift apart without an error. Do not call
``set_gradient_divide_factor``: the reducer's divisor is measured once, and ``state.loss`` multiplies by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel

from ring_backends.adapters.fsdp.ring_pass import post_hop
from ring_backends.adapters.fsdp.sharding import (
    Strategy,
    check_blocks,
    existing_sharding,
    fsdp1_sharding,
    fully_shard_sharding,
    refuse_sharded_parts,
)
from ring_backends.adapters.fsdp.training import FSDP1Training, FSDP2Training, ShardedTraining
from ring_backends.attention import RingDilatedAttention as _RingDilatedAttention
from ring_backends.errors import importing
from ring_backends.joining import initializer
from ring_backends.ring.rendezvous import connect, world_ring
from ring_backends.ring.ring import Ring
from ring_backends.ring.transfer import Transfer
from ring_backends.schedule.layout import LayoutKind
from ring_backends.training.state import TrainingState

with importing("the fsdp adapter cannot import NumPy, which torch.distributed.checkpoint needs", "fsdp"):
    import_module("numpy")

__all__ = ["FSDPRingDilatedAttention", "RingDilatedAttention", "initialize", "parallelize"]


def _connect_mesh_axis(
    ranks: tuple[int, ...],
    layout: LayoutKind,
    timeout: timedelta,
    adapter: str,
    order: tuple[int, ...] | None,
) -> Ring:
    """Join the ring of these ranks. If ``order`` covers the world, make the world's data × ring mesh first."""
    if order is not None and len(order) > 1:
        device_type = "cuda" if "nccl" in dist.get_backend_config() else "cpu"
        rings = torch.tensor(order, device="cpu").view(-1, len(ranks))
        mesh = DeviceMesh(device_type, rings, mesh_dim_names=("data", "ring"))
        ranks = tuple(mesh["ring"].mesh.tolist())
    return connect(ranks, layout, timeout, adapter, order)


initialize = initializer("fsdp", connect=_connect_mesh_axis)


class FSDPRingDilatedAttention(_RingDilatedAttention):
    """Ring dilated attention whose hops go between coordinates of a DeviceMesh axis, on a CUDA stream of their own."""

    def ring_pass(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], tag: int) -> Transfer:
        return post_hop(self.ring, outgoing, incoming, tag)


RingDilatedAttention = FSDPRingDilatedAttention


def parallelize(
    model: nn.Module,
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    ring: Ring,
    *,
    max_grad_norm: float | None = None,
    accumulation_steps: int = 1,
    strategy: Strategy = "fsdp2",
    mixed_precision: torch.dtype | None = None,
    blocks: Sequence[nn.Module] | None = None,
    **framework_options: Any,
) -> TrainingState:
    """Shard a model over data × ring.

    All ranks start with rank 0's parameters. A world of one also gets a process group, because FSDP needs one.

    Args:
        model: any module, already on its device. A FullyShardedDataParallel is not wrapped again;
            ``mixed_precision``, ``blocks`` and ``framework_options`` are not allowed with it.
        make_optimizer: called once, with the sharded parameters.
        ring: the ring of the model's attention.
        max_grad_norm: clip the norm of the whole gradient, over all shards, to this before each step.
        accumulation_steps: backward calls per step; only the last one reduces.
        strategy: ``"fsdp2"`` shards with ``fully_shard`` over all ranks. ``"hsdp"`` shards with ``fully_shard`` over
            groups of as many ranks as a ring has; each group holds one replica. ``"fsdp1"`` uses
            FullyShardedDataParallel. Its parameters are flat, so ``make_optimizer`` cannot group them by shape.
        mixed_precision: torch.bfloat16 or torch.float16 runs forward and backward in this dtype. Gradients are reduced
            in fp32, and the optimizer updates the parameters in their own dtype. The model's inputs keep their dtype,
            and a call with fp32 inputs runs under autocast (:mod:`ring_backends.adapters.fsdp.precision`). With
            torch.float16, the loss is scaled (:class:`torch.amp.GradScaler`), and a step whose gradient is not finite
            on some rank is left out. None computes in the model's own dtype.
        blocks: modules of the model. Each is sharded as one unit. None takes repeated modules: those of one class in an
            nn.ModuleList or nn.Sequential. If there are none, the whole model is one unit.
        framework_options: passed to ``fully_shard`` (``mesh``, ``mp_policy``, …) or FullyShardedDataParallel.

    Raises:
        ValueError, TypeError: an argument is invalid, or data size × ring size is not the world size.
        RuntimeError: the reducer leaves the replicas with different gradients.
    """
    with world_ring(ring).report_refusals():
        if strategy not in get_args(Strategy):
            raise ValueError(f"strategy = {strategy!r}: unknown option; choose 'fsdp2', 'hsdp' or 'fsdp1'.")
        refuse_sharded_parts(model)
        is_wrapped = isinstance(model, FullyShardedDataParallel)
        if is_wrapped and (mixed_precision is not None or blocks is not None or framework_options):
            raise ValueError(
                "model is a FullyShardedDataParallel already, and mixed_precision, blocks or framework_options are "
                "given: pass these to its own constructor, or pass the module inside of it."
            )
        blocks = check_blocks(blocks, model)
    training: type[ShardedTraining] = FSDP2Training
    if isinstance(model, FullyShardedDataParallel):
        training, wrap = FSDP1Training, partial(existing_sharding, model)
    elif strategy == "fsdp1":
        training, wrap = FSDP1Training, partial(fsdp1_sharding, model, mixed_precision, framework_options)
    else:
        wrap = partial(fully_shard_sharding, model, ring, strategy, mixed_precision, framework_options)
    names = {id(part): name for name, part in model.named_modules()}
    options = {
        **framework_options,
        "strategy": strategy,
        "mixed_precision": mixed_precision,
        "blocks": [names[id(block)] for block in blocks],
    }
    return training(model, make_optimizer, ring, wrap, blocks, max_grad_norm, accumulation_steps, options)
