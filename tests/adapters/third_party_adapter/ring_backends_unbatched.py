"""An adapter that posts each ``isend`` and ``irecv`` separately, and trains with DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ring_backends
from ring_backends import Ring, Transfer, WorkTransfer
from ring_backends.joining import initializer
from ring_backends.training import MakeOptimizer, ReplicatedTraining, TrainingState

initialize = initializer("unbatched")


class UnbatchedRingDilatedAttention(ring_backends.RingDilatedAttention):
    def ring_pass(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], tag: int) -> Transfer:
        group = self.ring.group
        receives = [dist.irecv(buffer, group=group, group_src=peer, tag=tag) for peer, buffer in incoming.items()]
        sends = [dist.isend(buffer, group=group, group_dst=peer, tag=tag) for peer, buffer in outgoing.items()]
        return WorkTransfer([*receives, *sends], [*outgoing.values(), *incoming.values()])


RingDilatedAttention = UnbatchedRingDilatedAttention


def parallelize(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    ring: Ring,
    *,
    max_grad_norm: float | None = None,
    accumulation_steps: int = 1,
    mixed_precision: torch.dtype | None = None,
) -> TrainingState:
    def wrap(module: nn.Module) -> nn.Module:
        return DistributedDataParallel(module, broadcast_buffers=False) if dist.is_initialized() else module

    return ReplicatedTraining(model, make_optimizer, ring, wrap, max_grad_norm, accumulation_steps, mixed_precision)
