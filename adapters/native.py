"""Native torch.distributed: point-to-point hops on the ring's own process group, training by DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ring_backends.attention import RingDilatedAttention as _RingDilatedAttention
from ring_backends.joining import initializer
from ring_backends.ring.ring import Ring
from ring_backends.ring.transfer import Transfer
from ring_backends.training.replicated import ReplicatedTraining
from ring_backends.training.state import TrainingState

# TrainingState broadcasts buffers after each step, so the forward need not. torch 2.13 renamed the option.
_PARAMETERS = signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _PARAMETERS else "broadcast_buffers"

__all__ = ["NativeRingDilatedAttention", "RingDilatedAttention", "initialize", "parallelize"]


initialize = initializer("native")


class NativeRingDilatedAttention(_RingDilatedAttention):
    """Ring dilated attention whose hops are torch.distributed's own point-to-point operations."""

    def ring_pass(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], tag: int) -> Transfer:
        return self.ring.post(outgoing, incoming, tag)


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
    """Replicate a model over data × ring with DistributedDataParallel. A world of one rank uses the plain model.

    Args:
        model: any module, already on its device.
        make_optimizer: called once with ``model.parameters()``; returns the optimizer.
        ring: the ring of the model's attention.
        max_grad_norm: clip the gradient's global norm to this before each step.
        accumulation_steps: backward calls per step.
        mixed_precision: torch.bfloat16 or torch.float16 runs the forward under autocast; parameters and gradients keep
            their dtype. With torch.float16, the loss is scaled (:class:`torch.amp.GradScaler`), and a step whose
            gradient is not finite on some rank is left out.
        framework_options: passed to DistributedDataParallel.

    Raises:
        ValueError: an argument is invalid, or data size × ring size is not the world size.
        RuntimeError: the reducer leaves the replicas with different gradients.
    """

    def wrap(module: nn.Module) -> nn.Module:
        options = {_SYNC_BUFFERS: False, **framework_options}
        return DistributedDataParallel(module, **options) if dist.is_initialized() else module

    return ReplicatedTraining(
        model, make_optimizer, ring, wrap, max_grad_norm, accumulation_steps, mixed_precision, framework_options
    )
