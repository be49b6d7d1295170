"""Activation checkpointing that keeps what attention gave, so that no hop is made twice.

A checkpointed region is computed again in the backward, and its attention with it: all hops of the forward are made
once more. Kept instead are out and LSE of every call of attention in the region, which is as much memory as one
activation, and the backward makes no hop but its own::

    checkpoint(block, x, use_reentrant=False, context_fn=keep_attention)

A policy of one's own names :func:`attention_operators` among what it saves. A checkpoint that takes no ``context_fn``
(DeepSpeed's, torch's reentrant one) is given a function that remembers::

    deepspeed.checkpointing.checkpoint(remember_attention(block), x)

A policy is asked about operators. Every call of attention is one, ``ring_backends::attend``. In a compiled graph a call
is several operators (:mod:`ring_backends.engine.compiled`), of which ``ring_backends::end_forward`` gives the result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from ring_backends.engine import compiled, recomputation

__all__ = ["attention_operators", "keep_attention", "remember_attention"]

Contexts = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]
"""One for the forward of a checkpointed region, one for its recomputation."""


def attention_operators() -> list[Any]:
    """The operators that give the result of a call of attention, for a policy to save or not.

    A list, as ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` takes it, or for a policy that asks
    whether an operator is in it. Whoever saves one of them saves both out and LSE.
    """
    return [recomputation.OPERATOR, compiled.END_FORWARD]


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
