"""Gradients that FSDP2 reduces: parameters that a rank has not used, and the dtype of accumulated gradients.

FSDP2 leaves parameters that a rank has not used in a step, such as those of an expert that got no tokens there, out of
this rank's reduce-scatter. Other ranks include them, so gradients of different parameters would be added. Every rank
must reduce zeros instead. torch 2.13 has a setting for that, but its zeros have the dtype of the parameters: see below.

In mixed precision, FSDP2 accumulates gradients over micro-batches in the dtype of the reduction. It leaves gradients
that the last micro-batch is the first to give, and zeros, in the dtype of the parameters. It then refuses to reduce
them together with accumulated gradients. So they are cast before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ring_backends.torch_internals import internal

_PURPOSE = "training with FSDP2"


def reduce_gradients_of_all_parameters(model: nn.Module) -> None:
    """Make FSDP2 reduce a gradient of every trained parameter, in one dtype: zeros if this rank has not used it."""
    for part in model.modules():
        if isinstance(part, FSDPModule):
            for group in _groups(part):
                group.post_backward = partial(_reduce_all, group, group.post_backward)


def _groups(part: FSDPModule) -> list[Any]:
    """The groups of parameters that FSDP2 reduces together. Before torch 2.13, a module has at most one."""
    state = internal(part, "_get_fsdp_state", _PURPOSE)()
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return groups
    group = internal(state, "_fsdp_param_group", _PURPOSE)
    return [] if group is None else [group]


def _reduce_all(group: Any, reduce: Callable[..., None], *unused: Any) -> None:
    """Set missing gradients before ``reduce``, FSDP2's own reduction of one group after its backward."""
    if group.reduce_grads:
        # A parameter that no forward has gathered yet has no such attribute.
        parameters = [parameter for parameter in group.fsdp_params if hasattr(parameter, "_unsharded_param")]
        missing = [parameter for parameter in parameters if parameter.unsharded_accumulated_grad is None]
        is_accumulated = len(missing) < len(parameters)
        for parameter in missing:
            whole = parameter.unsharded_param
            if whole.requires_grad and whole.grad is None:
                whole.grad = torch.zeros_like(whole)
            if is_accumulated:
                parameter.to_accumulated_grad_if_needed()
    reduce(*unused)
