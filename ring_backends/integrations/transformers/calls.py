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
from ring_backends.integrations.transformers.attention import Registration, is_probing, registered
from ring_backends.integrations.transformers.inputs import PADDED_BEFORE
from ring_backends.integrations.transformers.probe import Findings, probe

try:
    from transformers import PreTrainedModel
except ImportError as error:
    raise AdapterUnavailableError(
        f"transformers cannot be imported ({error}); install it with pip install 'ring-backends[hf]'."
    ) from error

_found: weakref.WeakKeyDictionary[Any, Findings] = weakref.WeakKeyDictionary()
"""The findings about the models that have been probed, and about the models within them."""

_call = PreTrainedModel.__call__


def _checked_call(self: Any, *args: Any, **kwargs: Any) -> Any:
    if "seq_len" in kwargs:
        _check_implementation(self, kwargs["seq_len"])
        _check(self, kwargs)
    return _call(self, *args, **kwargs)


PreTrainedModel.__call__ = _checked_call  # type: ignore[method-assign, unused-ignore]


def _check_implementation(model: Any, seq_len: object) -> None:
    if model.config._attn_implementation in registered:
        return
    # Only a part of a model may be on the ring, such as its text model.
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    if any(part.config._attn_implementation in registered for part in parts):
        return
    if "seq_len" not in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"attn_implementation of {type(model).__name__} = {model.config._attn_implementation!r}: the arguments are "
            f"this rank's rows (seq_len = {seq_len}), and only a registered attention sees those of the other ranks; "
            "call register(attention) and model.set_attn_implementation('ring_dilated')."
        )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _check(model: Any, arguments: dict[str, Any]) -> None:
    registration = registered.get(model.config._attn_implementation)
    if is_probing.get() or registration is None or registration.takes_whole_batches:
        return
    with registration.attention.ring.report_refusals():
        for cache in ("cache", "past_key_values"):
            if arguments.get(cache) is not None:
                raise ValueError(
                    f"{cache} is given: key/value caches are not supported by a ring, except those of generate(); "
                    "leave it out."
                )
        findings = probe_once(model, registration)
        if findings is not None:
            _check_arguments(model, arguments, findings)


def _check_arguments(model: Any, arguments: dict[str, Any], findings: Findings) -> None:
    is_shifted = "shift_labels" in arguments
    if "labels" in arguments and findings.labels_of and ("next" if is_shifted else "own") not in findings.labels_of:
        raise ValueError(
            f"labels are {'shifted' if is_shifted else 'not shifted'}, and the loss of {type(model).__name__} is not "
            f"that of such labels; call shard_inputs(…, next_token_labels={not is_shifted})."
        )
    if findings.skips_padding and PADDED_BEFORE in arguments:
        raise ValueError(
            f"attention_mask has padding before tokens: {type(model).__name__} counts positions from the first token "
            "that is no padding; pad on the right, or give shard_inputs() position_ids that do so."
        )


def probe_once(model: Any, registration: Registration) -> Findings | None:
    """Probe a model before its first call on several ranks, unless the registration or ``use_ring`` decides otherwise.

    Returns:
        The findings; None without a probe.

    Raises:
        ValueError: as :func:`probe`.
    """
    if not registration.probes or registration.attention.ring.size == 1:
        return None
    if model not in _found:
        findings = probe(model, "register(attention, probe=False) skips this check")
        _found.update((part, findings) for part in model.modules() if isinstance(part, PreTrainedModel))
    return _found[model]
