"""Activation checkpointing that keeps the results of attention, so that no hop is made twice.

A checkpointed region is computed again in the backward. With plain checkpointing its attention makes all hops of the
forward once more. The functions here keep out and LSE of every call of attention in the region instead. That takes as
much memory as one activation, and the backward makes only its own hops::

    checkpoint(block, x, use_reentrant=False, context_fn=keep_attention)

A custom policy saves the :func:`attention_operators`. A checkpoint without ``context_fn`` (DeepSpeed's, torch's
reentrant one) takes a wrapped function::

    deepspeed.checkpointing.checkpoint(remember_attention(block), x)

A policy decides about operators. Every call of attention is one, ``ring_backends::attend``. In a compiled graph a call
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
"""Two context managers: for the forward of a checkpointed region, and for its recomputation."""


def attention_operators() -> list[Any]:
    """The operators that return the result of a call of attention, out and LSE.

    ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` takes this list; a policy function can test whether
    an operator is in it.
    """
    return [recomputation.OPERATOR, compiled.END_FORWARD]


def keep_attention() -> Contexts:
    """A ``context_fn`` for torch's non-reentrant checkpoint: keeps the results of attention, recomputes the rest.

    Of each call it keeps out [batch, local seq, heads, head_dim] in its dtype and LSE [batch, local seq, heads] in fp32
    (fp64 for fp64). As with every selective checkpoint, the results must not be changed in place, and only one backward
    may pass through the region. All ranks of a ring must checkpoint the same regions.
    """
    contexts: Contexts = create_selective_checkpoint_contexts(attention_operators())
    return contexts


def remember_attention(
    function: Callable[..., Any], context_fn: Callable[[], Contexts] = keep_attention
) -> Callable[..., Any]:
    """Wrap a function for a checkpoint without ``context_fn``: its second call reuses what the first one kept.

    Wrap anew for each checkpointed call: ``checkpoint(remember_attention(block), x, use_reentrant=True)``. From the
    second backward through the same region on, everything is computed again, hops included.

    Args:
        function: the function or module to checkpoint.
        context_fn: what to keep, as for torch's checkpoint.

    Raises:
        RuntimeError: when the wrapped function is called a second time outside of a backward.
    """
    contexts = [*context_fn()]

    def remembering(*args: Any, **kwargs: Any) -> Any:
        # As in torch's own checkpoint: -1 where no backward runs.
        if len(contexts) == 1 and torch._C._current_graph_task_id() == -1:
            raise RuntimeError(
                "a function from remember_attention() is called a second time outside of a backward, and would return "
                "the attention of its first call; wrap anew for each checkpointed call: "
                "checkpoint(remember_attention(block), x)."
            )
        with contexts.pop(0) if contexts else contextlib.nullcontext():
            return function(*args, **kwargs)

    return remembering
