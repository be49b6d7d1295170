"""A call of attention as one operator, so that activation checkpointing can keep its result.

A policy of selective activation checkpointing decides for each operator whether to keep its result. While a policy is
active, every forward runs as the operator ``ring_backends::attend``. So the policy can keep the result, and the forward
is not computed again. A call with a score_mod is always computed again.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.library import custom_op

from ring_backends.engine.inputs import TENSORS, AttentionInputs
from ring_backends.torch_internals import has_values, in_dispatch_mode, version_of, without_dispatch_modes

Forward = Callable[[AttentionInputs], "tuple[Tensor, Tensor, int]"]
"""Computes one call. Returns out, LSE, and the number of the call in its ring."""

_forwards: dict[int, tuple[Forward, AttentionInputs]] = {}
_numbers = itertools.count()


def attend_as_operator(forward: Forward, inputs: AttentionInputs) -> tuple[Tensor, Tensor, int, AttentionInputs]:
    """Run ``forward`` as an operator, so that a checkpointing policy can return an earlier result instead.

    Returns:
        out, LSE, the call's number, and the inputs. Number and dropout seed are those of the forward that computed out.

    Raises:
        RuntimeError: a tensor of the call has been changed in place since that forward.
    """
    if not in_dispatch_mode() or not has_values(inputs.query):  # no policy is active
        return *forward(inputs), inputs
    if inputs.score_mod is not None:  # an operator cannot run torch.vmap, which evaluates the score_mod
        with without_dispatch_modes():  # or a policy would keep the results of the kernels, which have all pairs
            return *forward(inputs), inputs
    number = next(_numbers)
    _forwards[number] = forward, inputs
    try:
        out, lse, numbers = _operator(inputs.tensors, number)
    finally:
        del _forwards[number]
    call_number, _, *versions = numbers.tolist()
    changed = [name for name, *pair in zip(TENSORS, versions, _versions(inputs), strict=True) if pair[0] != pair[1]]
    if changed:
        raise RuntimeError(
            f"{' and '.join(changed)} of an attention has been changed in place since the forward of a checkpointed "
            "region. The region keeps the attention's result from before the change, so the gradient would be wrong: "
            "give the region a clone(), or change the tensor after the backward."
        )
    if inputs.dropout_seed is not None:
        inputs = replace(inputs, dropout_seed=numbers[1:2])
    return out, lse, call_number, inputs


def _versions(inputs: AttentionInputs) -> list[int]:
    """How often each tensor of a call has been changed in place. Autograd counts this."""
    return [-1 if x is None else version_of(x) for x in inputs.tensors]


def _attend(tensors: Sequence[Tensor | None], number: int) -> tuple[Tensor, Tensor, Tensor]:
    forward, inputs = _forwards[number]
    out, lse, call_number = forward(AttentionInputs.of(tensors, inputs.options))
    # These numbers are part of the result, since a backward needs those of the forward that computed out.
    seed = 0 if inputs.dropout_seed is None else int(inputs.dropout_seed)
    return out, lse, torch.tensor([call_number, seed, *_versions(inputs)], dtype=torch.int64, device="cpu")


# The operator has no autograd formula, since the autograd.Function around it has the backward.
_operator = custom_op("ring_backends::attend", _attend, mutates_args=())
OPERATOR = torch.ops.ring_backends.attend.default

# The function is also the operator's decomposition. Modes that decompose operators, such as torch's FlopCounterMode,
# see the operators of the kernels. If torch removes these private names, such a mode sees one operator.
with contextlib.suppress(AttributeError):
    OPERATOR.py_impl(torch._C.DispatchKey.CompositeImplicitAutograd)(_attend)
