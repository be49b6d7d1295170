"""Text generation: transformers' own loop, with keys and values that lie on all ranks of a ring."""

from __future__ import annotations

import inspect
from contextvars import Token
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin

from ring_backends.attention import RingDilatedAttention
from ring_backends.engine.cache import KeyValueCache
from ring_backends.integrations.transformers.attention import check_config, current_generation, registered
from ring_backends.integrations.transformers.probe import probe_once
from ring_backends.integrations.transformers.whole_batches import inner_model
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

_MIN_ROWS = 2
"""Prompts with fewer tokens per rank are not distributed."""


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
            f"attn_implementation = {name!r}: expected a registered one; call register(attention) and "
            "model.set_attn_implementation('ring_dilated'), or use_ring(model, attention)."
        )
    registration = registered[name]
    own = registration.attention.ring
    if own is not ring:
        raise ValueError(
            f"ring = a {ring.layout_kind} ring of {ring.size}: expected that of the registered attention, a "
            f"{own.layout_kind} ring of {own.size}; pass attention.ring."
        )
    check_config(inner.config)
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


class Generation:
    """One call of :func:`generate`: its caches, and the hooks of those calls of the model that get them.

    A logits processor may call the same model, or another one on the same ring, between two tokens. Such a call does
    not get the caches of this generation, and computes what it computes at other times.

    Args:
        max_len: as in :meth:`~ring_backends.RingDilatedAttention.new_cache`.

    Attributes:
        caches: the caches of each layer, by its ``layer_idx``. A layer may call the attention several times in one call
            of the model. Each of these calls has a cache of its own.
        cache: the model's argument that tells transformers of the caches, by its name.
        layers: the model and all modules in it.
        is_padded: whether the prompt has padding.
        seq_len: the length of the prompt, while the model gets this rank's rows of it. None while the model gets new
            tokens, the same on every rank.
    """

    def __init__(self, inner: Any, ring: Ring, max_len: int | None) -> None:
        self.ring, self.max_len = ring, max_len
        self.caches: list[list[KeyValueCache]] = [[] for _ in range(inner.config.get_text_config().num_hidden_layers)]
        # transformers 5.24 has renamed the argument.
        name = "cache" if "cache" in inspect.signature(inner.forward).parameters else "past_key_values"
        self.cache = {name: _RingCache(layers=[_RingLayer(caches) for caches in self.caches])}
        self.layers = frozenset(inner.modules())
        self.is_padded = False
        self.seq_len: int | None = None
        self._tokens: list[Token[Generation | None]] = []

    def _is_given(self, arguments: dict[str, Any]) -> bool:
        """Whether a call of the model gets these caches."""
        return all(arguments.get(name) is cache for name, cache in self.cache.items())

    def _begin(self) -> None:
        """Begin a call of the model."""
        self._num_calls = [0] * len(self.caches)

    def attend(
        self,
        attention: RingDilatedAttention,
        layer: nn.Module,
        tensors: list[Tensor],
        padding: Tensor | None,
        options: dict[str, Any],
    ) -> Any:
        """out of one layer; ``tensors`` are query, key and value, [batch, seq, heads, …]."""
        if layer not in self.layers:
            raise ValueError(
                f"{type(layer).__name__} is of another model than the one that generates, which has called it: call "
                "other models between two tokens, as a logits processor does."
            )
        index: Any = getattr(layer, "layer_idx", None)
        if index is None or index >= len(self.caches):
            raise ValueError(f"{type(layer).__name__} has layer_idx = {index}: expected 0 … {len(self.caches) - 1}.")
        caches, call = self.caches[index], self._num_calls[index]
        self._num_calls[index] += 1
        if call == len(caches):
            caches.append(attention.new_cache(self.max_len))
        options = {"key_padding_mask": None if padding is None else ~padding, **options}
        arguments = *tensors, caches[call]
        if self.seq_len is not None:
            return attention.prefill(*arguments, seq_len=self.seq_len, **options)
        return attention.decode(*arguments, **options)

    def before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute all tokens of the prompt but the last on all ranks. The model then gets the last, on every rank."""
        if not self._is_given(kwargs):
            return args, kwargs
        self._tokens.append(current_generation.set(self))
        if self.seq_len is not None:  # base_model of a model without a head is the model itself
            return args, kwargs
        input_ids: Any = kwargs.get("input_ids")
        num_cached = max((cache.seq_len for caches in self.caches for cache in caches), default=0)
        self._check(input_ids, kwargs, num_cached)
        self._begin()
        mask = kwargs.get("attention_mask")  # transformers makes one of the padding tokens
        if not num_cached and isinstance(mask, Tensor):
            self.is_padded = not bool(mask.all())
        if num_cached or input_ids.shape[1] <= _MIN_ROWS * self.ring.size:
            return args, kwargs
        length = input_ids.shape[1] - 1
        rows = {name: value for name, value in kwargs.items() if _has_rows(value, input_ids)}
        local = {name: self.ring.shard(value[:, :length]) for name, value in rows.items()}
        row_numbers = self.ring.positions(length).to(input_ids.device).expand(len(input_ids), -1)
        local.setdefault("position_ids", row_numbers)
        if "kwargs" in inspect.signature(module.base_model.forward).parameters:
            local["row_numbers"] = row_numbers
        if local.get("attention_mask") is None:
            local["attention_mask"] = torch.ones_like(local["input_ids"])
        self.seq_len = length
        try:
            module.base_model(**local, **self.cache, use_cache=True)
        finally:
            self.seq_len = None
        self._begin()
        last = {name: value[:, length:] for name, value in rows.items() if name != "attention_mask"}
        if kwargs.get("cache_position") is not None:
            last["cache_position"] = kwargs["cache_position"][length:]
        return args, {**kwargs, **last}

    def after(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        """End a call of the model that got these caches."""
        if self._is_given(kwargs):
            current_generation.reset(self._tokens.pop())

    def _check(self, input_ids: object, kwargs: dict[str, Any], num_cached: int) -> None:
        """Check that the loop passes only what follows the tokens in the caches."""
        with self.ring.report_refusals():
            if not isinstance(input_ids, Tensor):
                raise ValueError("input_ids is not given: the model generates from other inputs; use a text model.")
            mask = kwargs.get("attention_mask")
            if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] != num_cached + input_ids.shape[1]:
                raise ValueError(
                    f"attention_mask is {[*mask.shape]}: expected {num_cached} tokens of the caches and "
                    f"{input_ids.shape[1]} new ones; this way of generating does not work with a ring."
                )
            for name, value in kwargs.items():
                is_known = name in ("cache_position", "attention_mask") or _has_rows(value, input_ids)
                if isinstance(value, Tensor) and value.dim() and not is_known:
                    raise ValueError(f"{name} is given: only tensors [batch, tokens, …] are supported; leave it out.")


def _has_rows(value: object, input_ids: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == input_ids.shape[1]


class _RingCache(Cache):
    """What transformers' loop needs to know of the caches of a model."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The keys and values of the new tokens alone, also of layers that the configuration does not count."""
        return key_states, value_states


class _RingLayer(CacheLayerMixin):
    """What transformers' loop needs to know of the caches of one layer. The attention itself uses the caches."""

    is_sliding = False

    def __init__(self, caches: list[KeyValueCache]) -> None:
        super().__init__()
        self.caches = caches

    def lazy_initialization(self, *tensors: Tensor) -> None:
        """The first call of the attention makes the memory."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The keys and values of the new tokens alone. The attention adds them to the caches."""
        return key_states, value_states

    def get_seq_length(self, *args: Any) -> int:
        return self.caches[0].seq_len if self.caches else 0

    def get_mask_sizes(self, new: Any, *args: Any) -> tuple[int, int]:
        """(number of keys, 0). ``new`` is the number of new tokens, or their positions in older releases."""
        return self.get_seq_length() + (new if isinstance(new, int) else len(new)), 0

    def get_max_cache_shape(self) -> int:
        return -1

    get_max_length = get_max_cache_shape

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for cache in self.caches:
            cache.select_batch(beam_idx)
