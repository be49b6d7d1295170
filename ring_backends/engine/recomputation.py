"""A call of attention as one operator, which a policy of activation checkpointing may save.

Selective activation checkpointing asks its policy about operators. So where it looks on, every call of attention is
``ring_backends::attend``, whose result the policy may keep instead of computing it again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import fields

import torch
from torch import Tensor
from torch.library import custom_op
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ring_backends.engine.walk import Inputs

WalkForward = Callable[[Inputs], tuple[Tensor, Tensor, int]]
"""What computes one call of attention: (out, LSE, its number among the ring's calls)."""

Forward = tuple[Tensor, Tensor, int, "Tensor | None"]
"""out, LSE, the call's number, and its dropout's seed: those of the forward that was computed, for its backward."""

_calls: dict[int, WalkForward] = {}
_numbers = itertools.count()


def attend_as_operator(walk_forward: WalkForward, inputs: Inputs) -> Forward:
    """Compute one call of attention where a policy sees it, which may hand out an earlier result instead."""
    if not is_in_torch_dispatch_mode():  # nobody looks on
        return *walk_forward(inputs), inputs.dropout_seed
    number = next(_numbers)
    _calls[number] = walk_forward
    try:
        out, lse, numbers = _operator(*(getattr(inputs, field.name) for field in fields(inputs)), number)
    finally:
        del _calls[number]
    return out, lse, int(numbers[0]), None if inputs.dropout_seed is None else numbers[1:]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    document_ids: Tensor | None,
    dropout_seed: Tensor | None,
    number: int,
) -> tuple[Tensor, Tensor, Tensor]:
    out, lse, call_number = _calls[number](Inputs(query, key, value, key_padding_mask, document_ids, dropout_seed))
    # Results too: the backward of a call that was not computed again belongs to the forward that was.
    seed = 0 if dropout_seed is None else int(dropout_seed)
    return out, lse, torch.tensor([call_number, seed], dtype=torch.int64, device="cpu")


# Without an autograd formula: it runs within an autograd.Function, which has the backward.
_operator = custom_op("ring_backends::attend", _attend, mutates_args=())
# What takes operators apart, as torch's FlopCounterMode does, finds those of the kernels.
torch.ops.ring_backends.attend.default.py_impl(torch._C.DispatchKey.CompositeImplicitAutograd)(_attend)

OPERATOR = torch.ops.ring_backends.attend.default
