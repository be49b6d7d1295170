"""Activation checkpointing that keeps what attention gave, so that no hop is made twice.

A checkpointed region is computed again in the backward, and its attention with it: all hops of the forward are made
once more. Kept instead are out and LSE of every call of attention in the region, which is as much memory as one
activation, and the backward makes no hop but its own::

    checkpoint(block, x, use_reentrant=False, context_fn=keep_attention)

A policy of one's own names :func:`attention_operators` among what it saves. A checkpoint that takes no ``context_fn``
(DeepSpeed's, torch's reentrant one) is given a function that remembers::

    deepspeed.checkpointing.checkpoint(remember_attention(block), x)

What a policy is asked about are operators. So every call of attention is one, ``ring_backends::attend``; or, where
``torch.compile`` has made several of it (:mod:`ring_backends.graph`), ``ring_backends::end_forward`` gives the result.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from ring_backends.walk import Inputs

__all__ = ["attention_operators", "keep_attention", "remember_attention"]

Contexts = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]
"""One for the forward of a checkpointed region, one for its recomputation."""

WalkForward = Callable[[Inputs], tuple[Tensor, Tensor, int]]
"""What computes one call of attention: (out, LSE, its number among the ring's calls)."""

Forward = tuple[Tensor, Tensor, int, "Tensor | None"]
"""out, LSE, the call's number, and its dropout's seed: those of the forward that was computed, for its backward."""

_calls: dict[int, WalkForward] = {}
_numbers = itertools.count()


def attention_operators() -> list[Any]:
    """The operators that give the result of a call of attention, for a policy to save or not.

    A list, as ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` takes it, or for a policy that asks
    whether an operator is in it. Whoever saves one of them saves both out and LSE.
    """
    import ring_backends.graph  # noqa: F401, which registers the second; it imports this module itself

    operators = torch.ops.ring_backends
    return [operators.attend.default, operators.end_forward.default]


def keep_attention() -> Contexts:
    """A ``context_fn`` for torch's non-reentrant checkpoint: keep the results of attention, compute all else again.

    Kept of each call are out [batch, local seq, heads, head_dim] in its dtype and LSE [batch, local seq, heads] in
    fp32 (fp64 for fp64). As with every selective checkpoint, a result must not be changed in place, and backward goes
    through the region once. Every rank of a ring checkpoints alike.
    """
    contexts: Contexts = create_selective_checkpoint_contexts(attention_operators())
    return contexts


def remember_attention(
    function: Callable[..., Any], context_fn: Callable[[], Contexts] = keep_attention
) -> Callable[..., Any]:
    """The function, for a checkpoint that takes no ``context_fn``: what is kept of its first call, is used in the next.

    Make one for each checkpointed call: ``checkpoint(remember_attention(block), x, use_reentrant=True)``. A backward
    that goes through the region more than once computes it anew from the second time on, hops included.

    Args:
        function: to be checkpointed; a module, say.
        context_fn: what to keep.

    Raises:
        RuntimeError: by the function, which is called a second time and not by a backward.
    """
    contexts = [*context_fn()]

    def remembering(*args: Any, **kwargs: Any) -> Any:
        # By the number of the backward that runs, as torch's own checkpoint tells.
        if len(contexts) == 1 and torch._C._current_graph_task_id() == -1:
            raise RuntimeError(
                "what remember_attention() made is called a second time, and not by a backward, which would be given "
                "the attention of the first call; make one for each checkpointed call: "
                "checkpoint(remember_attention(block), x)."
            )
        with contexts.pop(0) if contexts else contextlib.nullcontext():
            return function(*args, **kwargs)

    return remembering


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
