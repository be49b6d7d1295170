"""A call of attention as one operator, whose result activation checkpointing may keep.

A policy of selective activation checkpointing decides about operators. While such a policy is active, every forward is
the operator ``ring_backends::attend``, so that the policy can keep its result instead of computing it again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.library import custom_op
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ring_backends.engine.inputs import AttentionInputs

Forward = Callable[[AttentionInputs], "tuple[Tensor, Tensor, int]"]
"""Computes one call's out, LSE and number among the ring's calls."""

_forwards: dict[int, tuple[Forward, AttentionInputs]] = {}
_numbers = itertools.count()


def attend_as_operator(forward: Forward, inputs: AttentionInputs) -> tuple[Tensor, Tensor, int, AttentionInputs]:
    """Run ``forward`` where a checkpointing policy sees it and may return an earlier result instead.

    Returns:
        out, LSE, the call's number, and the inputs. Number and dropout seed are those of the forward that computed out.
    """
    if not is_in_torch_dispatch_mode():  # no policy is active
        return *forward(inputs), inputs
    number = next(_numbers)
    _forwards[number] = forward, inputs
    try:
        out, lse, numbers = _operator(inputs.tensors, number)
    finally:
        del _forwards[number]
    if inputs.dropout_seed is not None:
        inputs = replace(inputs, dropout_seed=numbers[1:])
    return out, lse, int(numbers[0]), inputs


def _attend(tensors: Sequence[Tensor | None], number: int) -> tuple[Tensor, Tensor, Tensor]:
    forward, inputs = _forwards[number]
    out, lse, call_number = forward(AttentionInputs.of(tensors, inputs.options))
    # These two are part of the result: a backward belongs to the forward that computed out.
    seed = 0 if inputs.dropout_seed is None else int(inputs.dropout_seed)
    return out, lse, torch.tensor([call_number, seed], dtype=torch.int64, device="cpu")


# Without an autograd formula: the autograd.Function around it has the backward.
_operator = custom_op("ring_backends::attend", _attend, mutates_args=())
# Lets modes that decompose operators, such as torch's FlopCounterMode, see those of the kernels.
torch.ops.ring_backends.attend.default.py_impl(torch._C.DispatchKey.CompositeImplicitAutograd)(_attend)

OPERATOR = torch.ops.ring_backends.attend.default
