"""Activation checkpointing that keeps the results of attention, so that a recomputation makes no hops.

A checkpointed region is computed again in the backward, and with plain checkpointing, the attention in the region
repeats all hops of its forward. The functions here keep the out and LSE of every attention call in the region. This
takes the memory of one activation per call, and the backward makes only its own hops. A call with a ``score_mod`` is
not kept: it is computed again, with its hops. For example::

    checkpoint(block, x, use_reentrant=False, context_fn=keep_attention)

A custom policy can save the operators that :func:`attention_operators` returns. For a checkpoint without
``context_fn``, such as DeepSpeed's or torch's reentrant one, wrap the function::

    deepspeed.checkpointing.checkpoint(remember_attention(block), x)

A policy decides for each operator whether to save its result. Outside of compiled graphs, every attention call is one
operator, ``ring_backends::attend``. In a compiled graph, ``ring_backends::attend_forward`` returns the result on one
device without dropout, and else ``ring_backends::ring_forward`` (:mod:`ring_backends.engine.operators`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, cast

from torch.utils.checkpoint import create_selective_checkpoint_contexts

from ring_backends.engine.operators import RESULT_OPERATORS
from ring_backends.torch_internals import in_backward

__all__ = ["attention_operators", "keep_attention", "remember_attention"]

Contexts = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]
"""Two context managers: for the forward of a checkpointed region, and for its recomputation."""


def attention_operators() -> list[Any]:
    """The operators that return the result of a call of attention, out and LSE.

    ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` takes this list; a policy function can test whether
    an operator is in it.
    """
    return [*RESULT_OPERATORS]


def keep_attention() -> Contexts:
    """A ``context_fn`` for torch's non-reentrant checkpoint: keeps the results of attention, recomputes the rest.

    For each call it keeps out [batch, local seq, heads, value_dim] in its dtype, and LSE [batch, local seq, heads] in
    fp32 (fp64 for fp64). As with every selective checkpoint, the results must not be changed in place, and only one
    backward may pass through the region. All ranks of a ring must checkpoint the same regions.
    """
    return cast(Contexts, create_selective_checkpoint_contexts(attention_operators()))


def remember_attention(
    function: Callable[..., Any], context_fn: Callable[[], Contexts] = keep_attention
) -> Callable[..., Any]:
    """Wrap a function for a checkpoint without ``context_fn``: its second call reuses the attention of the first.

    Wrap the function again for each checkpointed call:
    ``checkpoint(remember_attention(block), x, use_reentrant=True)``. The first backward through the region reuses the
    attention. Every later backward computes everything again, including the hops.

    Args:
        function: the function or module to checkpoint.
        context_fn: as for torch's checkpoint. The default keeps the results of attention.

    Raises:
        RuntimeError: when the wrapped function is called a second time outside of a backward.
    """
    contexts = [*context_fn()]

    def remembering(*args: Any, **kwargs: Any) -> Any:
        if len(contexts) == 1 and not in_backward():
            raise RuntimeError(
                "a function from remember_attention() was called a second time outside of a backward: it would return "
                "the attention of its first call; wrap the function again for each checkpointed call: "
                "checkpoint(remember_attention(block), x)."
            )
        with contexts.pop(0) if contexts else contextlib.nullcontext():
            return function(*args, **kwargs)

    return remembering
