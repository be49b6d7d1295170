"""Text generation by transformers' own loop on a ring."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ring_backends.integrations.transformers.attention import check_config, registered
from ring_backends.integrations.transformers.caches import Generation
from ring_backends.integrations.transformers.probe import hooks_of, inner_model, probe_once
from ring_backends.integrations.transformers.recurrent import RecurrentLayers, recurrent_layers_of
from ring_backends.ring.collectives import agree
from ring_backends.ring.describe import describe
from ring_backends.ring.ring import Ring

_REFUSED = {
    "cache": "the ring has caches of its own",
    "past_key_values": "the ring has caches of its own",
    "cache_implementation": "the ring has caches of its own",
    "inputs_embeds": "give input_ids",
    "assistant_model": "assisted generation is not supported",
    "assistant_early_exit": "assisted generation is not supported",
    "prompt_lookup_num_tokens": "assisted generation is not supported",
    "custom_generate": "only the loops of transformers itself are supported",
    "guidance_scale": "it would call the model with another prompt",
    "prefill_chunk_size": "the prompt is computed in one pass, on all ranks",
    "max_time": "the clocks of the ranks differ; use max_new_tokens",
    "output_attentions": "a ring has no matrix of attention weights",
    "output_hidden_states": "each rank has only its rows of them",
}
"""Options of generate() that must be absent. Each maps to the reason, or to what the user can do."""


def generate(
    model: nn.Module,
    ring: Ring,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    **generation_options: Any,
) -> Any:
    """Continue a text as ``model.generate`` does, with the keys and values of the text on all ranks of a ring.

    Every rank makes the same call, and gets the same result. Each rank computes its rows of the prompt. The following
    tokens are computed on every rank, but each rank attends to its own keys only, and an exchange merges the results.
    Greedy search, sampling, beams, logits processors and stopping criteria are those of transformers. To sample, seed
    torch with the same number on every rank. The ranks compare all options but ``streamer``: numbers, strings, tensors,
    functions, and the attributes of objects, such as processors.

    Args:
        model: a causal language model whose ``attn_implementation`` is a registered one, in evaluation mode.
        ring: the ring of the registered attention.
        input_ids: int64 [batch, prompt], the same on every rank.
        attention_mask: [batch, prompt], 0 where a token is padding. Pad on the left, as for ``model.generate``.
        generation_options: other arguments of ``model.generate``.

    Returns:
        What ``model.generate`` returns: int64 [batch, prompt + new tokens] by default.

    Raises:
        TypeError, ValueError: an argument is invalid or not supported.
        RingMismatchError: the ranks' prompts or tokens differ.
        RingPeerError: a rank died, stalled or left.
    """
    with ring.report_refusals():
        inner = _check(model, ring, input_ids, attention_mask, generation_options)
        given = {"input_ids": input_ids, "attention_mask": attention_mask, **generation_options}
        given.pop("streamer", None)  # only shows the tokens, usually on one rank
        described = describe(given)
    agree(ring, "generate", described)
    max_new = generation_options.get("max_new_tokens")
    max_len = input_ids.shape[1] + max_new if isinstance(max_new, int) else None
    generation = Generation(inner, ring, max_len)
    hooks = [
        inner.register_forward_pre_hook(generation.before, with_kwargs=True, prepend=True),  # before those of use_ring
        inner.register_forward_hook(generation.after, with_kwargs=True, always_call=True),
    ]
    generating: Any = model
    options = {"attention_mask": attention_mask, **generation.cache, **generation_options}
    options["use_cache"] = True  # the model's configuration may say otherwise
    try:
        with torch.no_grad():
            return generating.generate(input_ids=input_ids, **options)
    finally:
        for hook in hooks:
            hook.remove()


def _check(model: nn.Module, ring: Ring, input_ids: object, mask: object, options: dict[str, Any]) -> Any:
    inner = inner_model(model)
    name = inner.config._attn_implementation
    if name not in registered:
        raise ValueError(
            f"attn_implementation = {name!r}: expected a registered one; call "
            "register(attention, model=model), or use_ring(model, attention)."
        )
    registration = registered[name]
    own = registration.attention.ring
    if own is not ring:
        raise ValueError(
            f"ring = a {ring.layout_kind} ring of {ring.size}: expected that of the registered attention, a "
            f"{own.layout_kind} ring of {own.size}; pass attention.ring."
        )
    check_config(inner.config, sum(bool(hooks_of(layer, RecurrentLayers)) for layer in recurrent_layers_of(inner)))
    if model.training:
        raise ValueError("model is in training mode: its dropout would change the text; call model.eval() first.")
    if not isinstance(input_ids, Tensor):
        raise TypeError(f"input_ids = {type(input_ids).__name__}: expected int64 [batch, prompt].")
    if input_ids.dtype not in (torch.int64, torch.int32) or input_ids.dim() != 2 or not input_ids.numel():
        what = f"{input_ids.dtype} {[*input_ids.shape]}"
        raise ValueError(f"input_ids is {what}: expected int64 [batch, prompt] with at least one token.")
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != input_ids.shape):
        given = [*mask.shape] if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask is {given}: expected {[*input_ids.shape]}, as input_ids.")
    for name, instead in _REFUSED.items():
        configured = (
            getattr(config, name, None) for config in (options.get("generation_config"), inner.generation_config)
        )
        if any(value is not None and value is not False for value in (options.get(name), *configured)):
            raise ValueError(f"{name} is given: not supported by a ring; {instead}.")
    if options.get("use_cache") is False:
        raise ValueError("use_cache = False: a ring generates with its caches; leave it out.")
    probe_once(inner, registration)
    return inner
