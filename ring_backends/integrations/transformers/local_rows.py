"""Models that get this rank's rows (:func:`shard_inputs`), through an attention that is registered.

Only the model sees that it is called with these rows. So a model that is given to :func:`register` gets hooks that
check its calls: if its attention were not a registered one, it would ignore the arguments of :func:`shard_inputs`, and
each rank would attend within its own rows.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from ring_backends.attention import RingDilatedAttention
from ring_backends.integrations.transformers.attention import (
    Registration,
    attention_on,
    check_layerdrop,
    is_probing,
    register_as,
    registered,
)
from ring_backends.integrations.transformers.inner_arguments import pass_down
from ring_backends.integrations.transformers.inputs import PADDED_BEFORE
from ring_backends.integrations.transformers.probe import (
    Findings,
    hooks_of,
    inner_model,
    models_of,
    probe_once,
    takes_use_cache,
)
from ring_backends.integrations.transformers.recurrent import RecurrentLayers, recurrent_layers_of
from ring_backends.ring.ring import Ring


def register(
    attention: RingDilatedAttention | Ring,
    name: str = "ring_dilated",
    *,
    model: nn.Module | None = None,
    probe: bool = True,
) -> None:
    """Register ``attention`` under ``attn_implementation=name``, for all layers and their masks.

    Every layer computes its own attention as the model configures it: causal or not, with a sliding window, chunks, a
    scale, a soft cap, sinks, grouped key/value heads, values of another width and attention dropout. The pattern of
    ``attention`` takes the place of full attention only. Padding masks and packed sequences are supported. For other
    masks, biases of scores, returned attention weights, cross-attention and key/value caches, the forward raises an
    error that names the option. On a ring of several ranks, it also raises an error for layers that mix positions in
    other ways (convolutions, states), for encoder-decoders, and for rotary embeddings that depend on the length
    (dynamic, longrope).

    Args:
        attention: a RingDilatedAttention of any adapter; or a ring, and full attention stays as it is. Every layer of a
            model gets a copy of the attention.
        name: value of ``attn_implementation``. An existing name is replaced.
        model: a model of transformers, or a ``PeftModel`` of one. It gets the attention, and its calls are checked
            until :func:`remove_ring`. Without it, models get the attention by their ``attn_implementation``. What
            they do outside of the attention is not checked, and their first call on several ranks warns.
        probe: whether ``model`` is tried with short random sequences first
            (:mod:`ring_backends.integrations.transformers.probe`).

    Raises:
        TypeError: ``attention`` is not a RingDilatedAttention or a ring, or ``name`` is not a string.
        ValueError: ``attention`` has dropout (the model's configuration decides about it); or ``model`` takes whole
            batches already (:func:`use_ring`), or the probe has found that it cannot run on a ring of several ranks.
    """
    registration = Registration(attention_on(attention), probes=probe, warns=probe and model is None)
    inner = None if model is None else inner_model(model)
    current = None if inner is None else registered.get(inner.config._attn_implementation)
    if current is not None and current.takes_whole_batches:
        raise ValueError(
            f"model = {type(inner).__name__}: is on a ring already, and takes whole batches; call remove_ring(model) "
            "first."
        )
    register_as(name, registration)
    if inner is not None:
        for before in hooks_of(inner, LocalRows):
            before.remove()
        local = LocalRows(inner, registration)
        try:
            with registration.ring.report_refusals():
                inner.set_attn_implementation(name)
                if not any(parameter.is_meta for parameter in inner.parameters()):
                    probe_once(inner, registration)
        except Exception:
            local.remove()
            raise


class LocalRows:
    """The hooks of one model that check its calls."""

    def __init__(self, inner: Any, registration: Registration) -> None:
        self.inner, self.own_implementation = inner, inner.config._attn_implementation
        self.recurrent = RecurrentLayers(inner, registration) if recurrent_layers_of(inner) else None
        self.hooks = pass_down(inner)
        for part in models_of(inner):
            self.hooks.append(part.register_forward_pre_hook(self.check, with_kwargs=True))
            if self.recurrent is not None:
                self.hooks.append(part.register_forward_hook(self.end, always_call=True))

    def check(self, model: Any, args: Any, arguments: dict[str, Any]) -> Any:
        """Check a call of the model, or of one within it."""
        if "seq_len" not in arguments:
            return None
        _check(model, arguments)
        if self.recurrent is None:
            return None
        self.recurrent.begin(arguments)
        changes: dict[str, Any] = {"num_passing": len(self.recurrent.layers)}
        if takes_use_cache(model):
            changes["use_cache"] = False  # else layers give convolutions further rows, for the cache
        return args, {**arguments, **changes}

    def end(self, model: Any, args: Any, output: Any) -> None:
        """End a call of the model, or of one within it."""
        if self.recurrent is not None:
            self.recurrent.called = {}

    def remove(self) -> None:
        """Take the hooks off the model, and give it its own attention back."""
        if self.recurrent is not None:
            self.recurrent.remove()
        for hook in self.hooks:
            hook.remove()
        self.inner.set_attn_implementation(self.own_implementation)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _check(model: Any, arguments: dict[str, Any]) -> None:
    implementation = model.config._attn_implementation
    registration = registered.get(implementation)
    if registration is None:
        # Only a part of a model may be on the ring, such as its text model.
        is_on_ring = any(part.config._attn_implementation in registered for part in models_of(model))
        if not is_on_ring and "seq_len" not in inspect.signature(model.forward).parameters:
            raise ValueError(
                f"attn_implementation of {type(model).__name__} = {implementation!r}: the arguments are this rank's "
                f"rows (seq_len = {arguments['seq_len']}), and only a registered attention sees those of the other "
                "ranks; call register(attention, model=model)."
            )
        return
    if is_probing.get() or registration.takes_whole_batches:
        return
    with registration.attention.ring.report_refusals():
        if registration.attention.ring.size > 1:
            check_layerdrop(models_of(model))
        for cache in ("cache", "past_key_values"):
            if arguments.get(cache) is not None:
                raise ValueError(
                    f"{cache} is given: key/value caches are not supported by a ring, except those of generate(); "
                    "leave it out."
                )
        if arguments.get("use_cache") and recurrent_layers_of(model):
            raise ValueError("use_cache = True: not supported by a ring; leave it out. generate() sets it.")
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
            "that is not padding; pad on the right, or give shard_inputs() position_ids that do so."
        )
