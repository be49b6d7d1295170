"""Parameters that a rank has not used in a step, such as those of an expert that got no tokens there.

FSDP2 leaves such parameters out of this rank's reduce-scatter. Other ranks include them, so gradients of different
parameters would be added. Every rank must reduce zeros instead.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ring_backends.torch_internals import internal


def reduce_zeros_of_unused_parameters(model: nn.Module) -> None:
    """Make FSDP2 reduce zeros for parameters that this rank has not used."""
    set_on_all_blocks = getattr(model, "set_reduce_scatter_unused_params", None)  # torch 2.13 and later
    if set_on_all_blocks is not None:
        set_on_all_blocks(True)
        return
    for part in model.modules():
        if isinstance(part, FSDPModule):
            state = internal(part, "_get_fsdp_state", "FSDP2 before torch 2.13")()
            group = internal(state, "_fsdp_param_group", "FSDP2 before torch 2.13")
            if group is not None:
                group.post_backward = partial(_reduce_with_zeros, group, group.post_backward)


def _reduce_with_zeros(group: Any, reduce: Callable[..., None], *unused: Any) -> None:
    """Set zero gradients before ``reduce``, FSDP2's own reduction of one block after its backward."""
    if group.reduce_grads:
        for parameter in group.fsdp_params:
            if not hasattr(parameter, "_unsharded_param") or parameter.unsharded_accumulated_grad is not None:
                continue
            whole = parameter.unsharded_param
            if whole.requires_grad and whole.grad is None:
                whole.grad = torch.zeros_like(whole)
    reduce(*unused)
