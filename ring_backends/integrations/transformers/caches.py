"""The caches of a model that generates.

Keys and values lie on all ranks of a ring. The states of recurrent layers and the last inputs of convolutions are
small: every rank keeps them, and computes the same new tokens from them.
"""

from __future__ import annotations

import inspect
from contextvars import ContextVar, Token
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from ring_backends.attention import RingDilatedAttention
from ring_backends.engine.cache import KeyValueCache
from ring_backends.ring.collectives import broadcast
from ring_backends.ring.ring import Ring

try:
    from transformers.cache_utils import LinearAttentionLayer
except ImportError:  # before 5.17, where no model with such layers runs on a ring
    LinearAttentionLayer = CacheLayerMixin

_MIN_ROWS = 2
"""Prompts with fewer tokens per rank are not distributed."""

current_generation: ContextVar[Generation | None] = ContextVar("current_generation", default=None)
"""The call of :func:`~ring_backends.integrations.transformers.generate` whose caches a running call of a model got."""


class Generation:
    """One call of ``generate``: its caches, and the hooks of those calls of the model that get them.

    A logits processor may call the same model, or another one on the same ring, between two tokens. Such a call does
    not get the caches of this generation, and computes what it computes at other times.

    Args:
        max_len: as in :meth:`~ring_backends.RingDilatedAttention.new_cache`.

    Attributes:
        caches: the caches of each layer, by its ``layer_idx``. A layer may call the attention several times in one call
            of the model. Each of these calls has a cache of its own.
        cache: the model's argument that tells transformers of the caches, by its name.
        linear_states: the states of lightning attention (MiniMax) after the tokens so far, by ``layer_idx``.
        layers: the model and all modules in it.
        is_padded: whether the prompt has padding.
        seq_len: the length of the prompt, while the model gets this rank's rows of it. None while the model gets new
            tokens, the same on every rank.
    """

    def __init__(self, inner: Any, ring: Ring, max_len: int | None) -> None:
        self.ring, self.max_len = ring, max_len
        self.caches: list[list[KeyValueCache]] = [[] for _ in range(inner.config.get_text_config().num_hidden_layers)]
        # transformers 5.24 has renamed the argument, which Mamba called "cache_params".
        taken = inspect.signature(inner.forward).parameters
        name = next((name for name in ("cache", "cache_params") if name in taken), "past_key_values")
        self.cache = {name: _cache_class(inner)(self, _layers_of(inner, self))}
        self.linear_states: dict[int, Tensor] = {}
        self.layers = frozenset(inner.modules())
        self.is_padded = False
        self.seq_len: int | None = None
        self._num_tokens = 0
        self._tokens: list[Token[Generation | None]] = []

    def _is_given(self, arguments: dict[str, Any]) -> bool:
        """Whether a call of the model gets these caches."""
        return all(arguments.get(name) is cache for name, cache in self.cache.items())

    def _begin(self) -> None:
        """Begin a call of the model."""
        self._num_calls = [0] * len(self.caches)

    @property
    def num_cached(self) -> int:
        """The number of tokens in the caches."""
        lengths = [cache.seq_len for caches in self.caches for cache in caches]
        return max(lengths) if lengths else self._num_tokens

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
        num_cached = self.num_cached
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
        self._num_tokens += length
        last = {name: value[:, length:] for name, value in rows.items() if name != "attention_mask"}
        if not any(self.caches):  # layers without an attention would take the mask for that of the last token
            last["attention_mask"] = None
        if kwargs.get("cache_position") is not None:
            last["cache_position"] = kwargs["cache_position"][length:]
        return args, {**kwargs, **last}

    def after(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        """End a call of the model that got these caches."""
        if self._is_given(kwargs):
            current_generation.reset(self._tokens.pop())
            self._num_tokens += kwargs["input_ids"].shape[1] if outputs is not None else 0

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


def from_last_row(ring: Ring, seq_len: int, tensor: Tensor) -> Tensor:
    """The tensor of the rank that has the last row of a sequence, on every rank."""
    tensor = tensor.contiguous().clone()
    broadcast(ring, "the states of a layer", [tensor], int(ring.layout(seq_len).chunk_ranks()[-1]))
    return tensor


def _has_rows(value: object, input_ids: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == input_ids.shape[1]


class _RingCache(Cache):
    """What transformers' loop needs to know of the caches of a model."""

    def __init__(self, generation: Generation, layers: list[Any]) -> None:
        Cache.__init__(self, layers=layers)
        self.generation = generation
        self.linear_cache: list[Tensor] = []  # that of MiniMaxCache, which this class may inherit from

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The keys and values of the new tokens alone, also of layers that the configuration does not count."""
        return key_states, value_states

    def get_seq_length(self, *args: Any, **kwargs: Any) -> int:
        return self.generation.num_cached

    def get_mask_sizes(self, new: Any, layer_idx: int) -> tuple[int, int]:
        """(number of keys, 0), also if no layer has an attention."""
        layer = self.layers[layer_idx]
        if isinstance(layer, _RingLayer):
            return layer.get_mask_sizes(new)
        return self.get_seq_length() + (new if isinstance(new, int) else len(new)), 0

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        return None if self.generation.seq_len is not None else self.generation.linear_states.get(layer_idx)

    def set_linear_cache(self, layer_idx: int, state: Tensor) -> None:
        if self.generation.seq_len is None:  # else it is that of this rank's rows alone
            self.generation.linear_states[layer_idx] = state

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for layer in self.layers:
            layer.reorder_cache(beam_idx)
        states = self.generation.linear_states
        states |= {index: state.index_select(0, beam_idx.to(state.device)) for index, state in states.items()}


def _cache_class(model: Any) -> type[_RingCache]:
    """The class of a model's cache. MiniMax insists on one of its own."""
    own = inspect.unwrap(type(model.base_model).forward).__globals__.get("MiniMaxCache")
    return _RingCache if own is None else type("_RingCache", (_RingCache, own), {})


def _layers_of(model: Any, generation: Generation) -> list[Any]:
    """The caches of the layers: of keys and values, of states, or of both."""
    config = model.config.get_text_config()
    own = DynamicCache(config=config).layers
    layers: list[Any] = []
    for index, caches in enumerate(generation.caches):
        of_layer = own[index] if index < len(own) else None
        if not isinstance(of_layer, LinearAttentionLayer) or LinearAttentionLayer is CacheLayerMixin:
            layers.append(_RingLayer(caches))
        elif isinstance(of_layer, CacheLayerMixin):
            layers.append(_RingHybridLayer(generation, caches, of_layer.number_of_states))
        else:
            layers.append(_RingStates(generation, of_layer.number_of_states))
    return layers


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


class _RingStates(LinearAttentionLayer):
    """The states of a recurrent layer, the same on every rank, and the last inputs of its convolutions."""

    is_compileable = False

    def __init__(self, generation: Generation, number_of_states: int) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        self.generation = generation

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        """Keep the last inputs of the sequence, [batch, channels, positions]. Returns those that a layer computes."""
        generation, arguments = self.generation, {"conv_kernel_size": conv_kernel_size, **kwargs}
        if generation.seq_len is None:
            known: Tensor = super().update_conv_state(conv_states, state_idx, **arguments)
            return known
        ring, width = generation.ring, conv_kernel_size or conv_states.shape[-1]
        before = ring.halo(conv_states, width, 2, generation.seq_len)
        last_piece = ring.layout(generation.seq_len).pieces(ring.rank)[-1]
        rows = conv_states[:, :, conv_states.shape[2] - len(last_piece) :]
        last = torch.cat([before[:, :, -width:], rows], 2)[:, :, -width:]
        super().update_conv_state(from_last_row(ring, generation.seq_len, last), state_idx, **arguments)
        return conv_states


class _RingHybridLayer(_RingStates, _RingLayer):
    """The caches of a layer with an attention and a recurrence side by side."""

    def __init__(self, generation: Generation, caches: list[KeyValueCache], number_of_states: int) -> None:
        _RingLayer.__init__(self, caches)
        _RingStates.__init__(self, generation, number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        if kwargs:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return _RingLayer.update(self, key_states, value_states, *args, **kwargs)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        _RingStates.reorder_cache(self, beam_idx)
        _RingLayer.reorder_cache(self, beam_idx)
