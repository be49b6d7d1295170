"""PyTorch FSDP: the ring is an axis of a data × ring DeviceMesh, parameters are sharded over the whole of that mesh.

Hops are torch.distributed's point-to-point operations, on a group of the ring's own, so that they never queue behind
parameter collectives. In a compiled block each of them is a custom operator, and the block stays one graph
(:mod:`ring_backends.engine.compiled`).

Sharding over the data axis alone would leave every ring rank with a gradient of its own part of the sequence, and the
replicas would drift apart in silence; so parameters are always sharded over data × ring. Leave the reducer's divisor
alone (``set_gradient_divide_factor``): it is measured once, and ``state.loss`` undoes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel

from ring_backends.adapters.fsdp.sharding import (
    Strategy,
    check_blocks,
    existing_sharding,
    fsdp1_sharding,
    fully_shard_sharding,
    refuse_sharded_parts,
)
from ring_backends.adapters.fsdp.training import FSDP1Training, FSDP2Training, ShardedTraining
from ring_backends.adapters.native import NativeRingDilatedAttention
from ring_backends.cost.arrangement import AutoOptions, RingSize, arrange
from ring_backends.errors import AdapterUnavailableError
from ring_backends.joining import check_options
from ring_backends.ring.rendezvous import connect, ring_ranks, start_world, world_ring
from ring_backends.ring.ring import Ring
from ring_backends.ring.topology import RingOrder
from ring_backends.schedule.layout import LayoutKind
from ring_backends.training.reducer import check_mixed_precision
from ring_backends.training.state import TrainingState

try:
    import_module("numpy")
except ImportError as error:
    raise AdapterUnavailableError(
        f"the fsdp adapter needs NumPy, with which torch.distributed.checkpoint passes plans between ranks ({error}); "
        "install it with pip install 'ring-backends[fsdp]'."
    ) from error

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["FSDPRingDilatedAttention", "RingDilatedAttention", "initialize", "parallelize"]


def initialize(
    ring_size: RingSize = None,
    layout: LayoutKind = "contiguous",
    group: DeviceMesh | dist.ProcessGroup | None = None,
    timeout: timedelta = timedelta(seconds=300),
    *,
    ring_order: RingOrder = "rank",
    **auto: Unpack[AutoOptions],
) -> Ring:
    """Join a ring; every one of its ranks makes this call, and without ``group`` every rank of the world.

    Args:
        ring_size: ranks per ring; the ring is the axis "ring" of a data × ring DeviceMesh over the world, whose rings
            are neighbouring ranks. None means the whole world; ``"auto"`` chooses.
        layout: how a sequence lies over the ring, ``"contiguous"`` or ``"zigzag"``.
        group: an existing process group, or one axis of a DeviceMesh, whose ranks become the ring.
        timeout: the longest that one call may take to end or to raise, from its first wait for a peer on. Starting up
            has at least 300 s.
        ring_order, auto: as of the native adapter: ``"topology"`` makes neighbours of ranks on one host, and what the
            attention will be called with is for ``ring_size="auto"``. Neither with ``group``.

    Raises:
        ValueError, TypeError: an argument breaks its rule, or no ring fits into the memory.
        RingMismatchError, RingPeerError: where ranks decide together, one asks for something else, or does not come.
    """
    check_options(ring_size, layout, timeout, group, ring_order, auto)
    world_size = start_world(timeout)
    size, order = arrange(ring_size, layout, world_size, ring_order, auto)
    ranks = ring_ranks(size, group, world_size, order)
    if group is None and world_size > 1:
        device_type = "cuda" if "nccl" in dist.get_backend_config() else "cpu"
        rings = torch.tensor(order, device="cpu").view(-1, len(ranks))
        mesh = DeviceMesh(device_type, rings, mesh_dim_names=("data", "ring"))
        ranks = tuple(mesh["ring"].mesh.tolist())
    return connect(ranks, layout, timeout, adapter="fsdp", order=order if group is None else None)


class FSDPRingDilatedAttention(NativeRingDilatedAttention):
    """Ring dilated attention between FSDP's modules: torch.distributed's point-to-point hops, compiled or not."""


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
    """Shard a model over data × ring; in a world of one, over that one.

    All ranks begin with rank 0's parameters. FSDP wants a process group, and gets one in a world of one too.

    Args:
        model: any module, on its device already. One that is a FullyShardedDataParallel already is taken as it is,
            with none of the options below.
        make_optimizer: called once, with the sharded parameters.
        ring: the ring its attention uses.
        max_grad_norm: clip the whole gradient's norm, over all shards, to this before each step.
        accumulation_steps: backward calls per step; only the last one reduces.
        strategy: ``"fsdp2"`` shards by ``fully_shard`` over all ranks; ``"hsdp"`` by ``fully_shard`` over as many ranks
            as a ring has, with a replica per ring; ``"fsdp1"`` by FullyShardedDataParallel, whose parameters are flat
            pieces of each rank's, so that ``make_optimizer`` cannot tell them by their shapes.
        mixed_precision: torch.bfloat16 has parameters and activations in that dtype in forward and backward; gradients
            are reduced, and the optimizer works, in fp32. None leaves the model's own dtype.
        blocks: modules of the model that are sharded each by itself. None means those of one class in an
            nn.ModuleList or nn.Sequential; of a model without any, the whole is one.
        framework_options: for ``fully_shard`` (``mesh``, ``mp_policy``, …) or FullyShardedDataParallel.

    Raises:
        ValueError, TypeError: an argument breaks its rule, or data size × ring size is not the world.
        RuntimeError: the reducer leaves the replicas with different gradients.
    """
    with world_ring(ring).report_refusals():
        if strategy not in get_args(Strategy):
            raise ValueError(f"strategy = {strategy!r}: unknown option; choose 'fsdp2', 'hsdp' or 'fsdp1'.")
        check_mixed_precision(mixed_precision)
        refuse_sharded_parts(model)
        is_wrapped = isinstance(model, FullyShardedDataParallel)
        if is_wrapped and (mixed_precision is not None or blocks is not None or framework_options):
            raise ValueError(
                "model is a FullyShardedDataParallel already, and mixed_precision, blocks or framework_options are "
                "given: these belong to its own wrapping; pass them there, or pass the module inside of it."
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
