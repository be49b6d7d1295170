"""Checks calls of transformers' models with the arguments of :func:`shard_inputs`.

A model whose attention is not a registered one would ignore them, and each rank would attend within its own rows. Only
the model sees such a call. So importing this module adds a check to the calls of transformers' ``PreTrainedModel``.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch

from ring_backends.errors import AdapterUnavailableError
from ring_backends.integrations.transformers.attention import is_probing, registered
from ring_backends.integrations.transformers.probe import probe

try:
    from transformers import PreTrainedModel
except ImportError as error:
    raise AdapterUnavailableError(
        f"transformers cannot be imported ({error}); install it with pip install 'ring-backends[hf]'."
    ) from error

_PROBED: weakref.WeakSet[Any] = weakref.WeakSet()
"""The models that have been probed, and the models within them."""

_call = PreTrainedModel.__call__


def _checked_call(self: Any, *args: Any, **kwargs: Any) -> Any:
    if "seq_len" in kwargs and (torch.compiler.is_compiling() or not is_probing.get()):
        _check_implementation(self, kwargs["seq_len"])
        if not torch.compiler.is_compiling():
            _check(self, kwargs)
    return _call(self, *args, **kwargs)


PreTrainedModel.__call__ = _checked_call  # type: ignore[method-assign]


def _check_implementation(model: Any, seq_len: object) -> None:
    name = model.config._attn_implementation
    if name not in registered and "seq_len" not in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"attn_implementation of {type(model).__name__} = {name!r}: the arguments are this rank's rows (seq_len = "
            f"{seq_len}), and only a registered attention sees those of the other ranks; call register(attention) and "
            "model.set_attn_implementation('ring_dilated')."
        )


def _check(model: Any, arguments: dict[str, Any]) -> None:
    registration = registered.get(model.config._attn_implementation)
    if registration is None or registration.takes_whole_batches:
        return
    ring = registration.attention.ring
    with ring.report_refusals():
        for cache in ("cache", "past_key_values"):
            if arguments.get(cache) is not None:
                raise ValueError(
                    f"{cache} is given: key/value caches are not supported by a ring, except those of generate(); "
                    "leave it out."
                )
        if registration.probes and ring.size > 1 and model not in _PROBED:
            probe(model, "register(attention, probe=False) skips this check")
            _PROBED.update(module for module in model.modules() if isinstance(module, PreTrainedModel))
