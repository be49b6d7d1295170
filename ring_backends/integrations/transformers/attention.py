"""The attention implementation that is registered with transformers: one RingDilatedAttention for all layers."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import replace
from itertools import product
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function

from ring_backends.adapters import native
from ring_backends.attention import RingDilatedAttention
from ring_backends.engine.call import AttentionInputs, autocast, check_tensors
from ring_backends.integrations.transformers.caches import current_generation
from ring_backends.integrations.transformers.inputs import leading_padding_of
from ring_backends.integrations.transformers.layers import (
    ANY_LENGTH,
    FULL_ATTENTION,
    LayerAttention,
    RingMask,
    documents_of_chunks,
    read_layer,
    read_mask,
    with_temperatures,
)
from ring_backends.ring.ring import Ring

_POSITIONS_AFTER_PADDING = {
    *("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "roberta-prelayernorm", "data2vec-text", "xmod"),
    *("ibert", "longformer", "luke", "mpnet", "esm"),
}
"""Model types whose first position is ``pad_token_id + 1``."""


registered: dict[str, Registration] = {}
"""What is registered, by name."""

is_probing: ContextVar[bool] = ContextVar("is_probing", default=False)
"""Whether the layers compute :func:`_attend_alone`, for :mod:`ring_backends.integrations.transformers.probe`."""

_HOW_TO_CALL = {
    False: "call the model with shard_inputs(ring, input_ids=…)",
    True: (
        "use_ring() cuts the batch in a call of the model that it was given. Call model(…), not model.forward(…) or a "
        "model inside of it. After get_peft_model(), merge_and_unload() or a copy of the configuration, call "
        "use_ring() on the result"
    ),
}
"""What to do if the layers are called without the arguments of a shard, by ``takes_whole_batches``."""


class Registration:
    """An attention that is registered under one name: what transformers calls for each layer, and for its mask.

    Args:
        attention: the attention of which every layer gets a copy, with the layer's own pattern where it has one.
        probes: whether a model is probed before its first call.
        takes_whole_batches: whether hooks of the model cut its arguments, as those of ``use_ring`` do.
        warns: whether the first call on several ranks warns that the model was not probed.

    Raises:
        TypeError, ValueError: as in :func:`register`.

    Attributes:
        layers: what each layer has computed in its first call, in words.
    """

    def __init__(
        self,
        attention: RingDilatedAttention,
        *,
        probes: bool = True,
        takes_whole_batches: bool = False,
        warns: bool = False,
    ) -> None:
        if not isinstance(attention, RingDilatedAttention):
            raise TypeError(
                f"attention = {type(attention).__name__}: expected a RingDilatedAttention of an adapter, or a ring; "
                "make one with backend.RingDilatedAttention(segment_lengths, dilation_rates, ring=ring)."
            )
        if attention.dropout_p:
            raise ValueError(
                f"dropout_p = {attention.dropout_p}: the model's configuration decides about dropout; make the "
                "attention with dropout_p=0, and set the model's attention_dropout (BERT: "
                "attention_probs_dropout_prob)."
            )
        self.attention, self.ring = attention, attention.ring
        self.probes, self.takes_whole_batches, self.warns = probes, takes_whole_batches, warns
        self.layers: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._copies: dict[Any, RingDilatedAttention] = {}

    def _attention_of(self, layer: nn.Module, what: LayerAttention) -> RingDilatedAttention:
        """Return the layer's own copy. If ranks call layers in different orders, they then raise an error."""
        index: Any = getattr(layer, "layer_idx", None)
        kind = index, what.window, what.chunk, what.scale
        has_own = what.pattern is not None or what.scale is not None
        if kind not in self._copies:
            if not has_own and (index is None or torch.compiler.is_compiling()):
                return self.attention
            name = "" if index is None else f"layer {index}"
            self._make_copy(kind, what, f"{name}, {what}" if has_own else name)
        return self._copies[kind]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _make_copy(self, kind: Any, what: LayerAttention, name: str) -> None:
        own = self._copies[kind] = self.attention._copy_for(name)
        own.pattern = what.pattern or own.pattern
        own.scale = own.scale if what.scale is None else what.scale

    def forward(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        seq_len: int | None = None,
        has_padding: bool = True,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        ring_layout: str | None = None,
        row_numbers: Tensor | None = None,
        leading_padding: Tensor | None = None,
        num_passing: int = 0,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """q, k and v are [batch, heads, local seq, …]; out is [batch, local seq, heads, …], as wide as v."""
        generation, ring = current_generation.get(), self.ring
        with ring.report_refusals():
            mask = _check_mask(attention_mask, is_causal)
            what = read_layer(module, query, key, mask, scaling, self.attention.scale, options)
            if generation is not None and not mask.is_causal:
                raise ValueError("the model is not causal: it cannot generate; use a causal language model.")
            if generation is not None and generation.is_padded and what.chunk is not None:
                raise ValueError(
                    f"attention_mask has padding: {type(module).__name__} has chunks of {what.chunk} tokens that begin "
                    "after it, and those of a cache begin with the sequence; generate from texts of one length."
                )
        query = with_temperatures(module, query, row_numbers)
        if not torch.compiler.is_compiling() and module not in self.layers:
            is_replaced = what.pattern is None and self.attention.pattern != FULL_ATTENTION
            self.layers[module] = f"{what}{f', replaced by {self.attention.pattern}' if is_replaced else ''}"
        rows = [tensor.transpose(1, 2) for tensor in (query, key, value)]
        if is_probing.get():
            self._attention_of(module, what)  # made here, since a graph cannot make it
            query, key, value = map(autocast, rows)
            check_tensors(AttentionInputs(query, key, value))
            if seq_len is None:
                raise ValueError(
                    f"{type(module).__name__} does not pass the arguments of the model on to its attention, so the "
                    "attention cannot know the length of the sequence (seq_len)."
                )
            return _attend_alone(query, key, value), None
        has_chunks = what.chunk is not None and generation is None  # those of a cache begin with the sequence
        if has_chunks and ring.size == 1 and row_numbers is None and mask.padding is not None:
            seq_len = query.shape[2]
            row_numbers = torch.arange(seq_len, device=query.device).expand_as(mask.padding)
            leading_padding = leading_padding_of(mask.padding)
        has_parts = has_chunks and (document_ids is not None or leading_padding is not None)
        own = self._attention_of(module, replace(what, chunk=ANY_LENGTH) if has_parts else what)
        if own.dropout_p != dropout:  # the model passes 0 after its eval()
            own.dropout_p = dropout
            own.train()
        if generation is not None:
            return generation.attend(own, module, rows, mask.padding, what.options), None
        with ring.report_refusals():
            config = getattr(module, "config", None)
            if ring.size > 1:
                if seq_len is None:
                    how_to_call = _HOW_TO_CALL[self.takes_whole_batches]
                    raise ValueError(
                        "seq_len is not given, so the attention does not know the length of the sequence; "
                        f"{how_to_call}."
                    )
                check_config(config, num_passing)
            if ring_layout not in (None, ring.layout_kind):
                raise ValueError(
                    f"the arguments are rows of a {ring_layout} layout, and the attention is on a {ring.layout_kind} "
                    "ring; pass the attention's ring to shard_inputs(attention.ring, …)."
                )
            if position_ids is not None and document_ids is None:
                _check_positions(position_ids, mask.padding, ring, query.shape[2], seq_len, config)
            if has_parts and what.chunk is not None:
                document_ids = documents_of_chunks(what.chunk, document_ids, row_numbers, leading_padding, seq_len)
        out = own(
            *rows,
            is_causal=mask.is_causal,
            seq_len=seq_len,
            # Passed even if this rank has no padding, since either all ranks or no rank must pass a mask.
            key_padding_mask=~mask.padding if has_padding and mask.padding is not None else None,
            document_ids=document_ids,
            **what.options,
        )
        return out, None

    def make_mask(
        self,
        batch_size: int,
        *,
        kv_length: int,
        q_length: int | None = None,
        cache_position: Tensor | None = None,
        kv_offset: int = 0,
        mask_function: Any = causal_mask_function,
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> RingMask:
        ring = self.ring
        if self.warns and ring.size > 1 and current_generation.get() is None and not torch.compiler.is_compiling():
            self.warns = False
            warnings.warn(
                "the model was not given to register(), so nothing checks that its layers outside of the attention "
                "can run on a ring; call register(attention, model=model), or register(attention, probe=False).",
                stacklevel=2,
            )
        # Some releases of transformers pass the positions of the queries, others their number.
        num_queries = q_length if cache_position is None else len(cache_position)
        with ring.report_refusals():
            assert num_queries is not None
            if current_generation.get() is not None and attention_mask is not None:
                attention_mask = attention_mask[:, -num_queries:]  # that of the cached keys is in the cache
            elif current_generation.get() is None and (num_queries != kv_length or kv_offset):
                raise ValueError(
                    f"a mask of {num_queries} queries and {kv_length} keys: key/value caches and cross-attention are "
                    "not supported by a ring; call the model on whole sequences, with use_cache=False."
                )
            padding = None if attention_mask is None else attention_mask.bool()
            if ring.size == 1 and padding is not None and not torch.compiler.is_compiling() and bool(padding.all()):
                padding = None
        return read_mask(mask_function, padding)


def attention_on(attention: RingDilatedAttention | Ring) -> RingDilatedAttention:
    """The attention itself, or full attention on a ring."""
    return native.RingDilatedAttention([None], [1], ring=attention) if isinstance(attention, Ring) else attention


def register_as(name: str, registration: Registration) -> None:
    """Register an attention. For the errors, see :func:`register`."""
    if not isinstance(name, str):
        raise TypeError(f"name = {name!r}: expected a str, such as 'ring_dilated'.")
    registered[name] = registration
    AttentionInterface.register(name, registration.forward)
    AttentionMaskInterface.register(name, registration.make_mask)


def _attend_alone(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A stand-in for attention, in which every row depends on its own query, key and value alone.

    q, k and v are [batch, rows, heads, head_dim]; the result is [batch, rows, heads, head_dim of v].
    """
    groups = query.shape[2] // key.shape[2]
    weights = torch.linspace(-1, 1, query.shape[-1], dtype=query.dtype, device=query.device)
    # Unlike a softmax or a sigmoid, asinh shows every change of a large query or key.
    of_query, of_key = (torch.asinh(rows @ weights) for rows in (query, key))
    factors = of_query + of_key.repeat_interleave(groups, 2)
    return (factors.unsqueeze(-1) * value.repeat_interleave(groups, 2)).contiguous()


def _check_mask(attention_mask: Any, is_causal: bool | None) -> RingMask:
    if not isinstance(attention_mask, RingMask):
        given = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else attention_mask
        raise ValueError(
            f"attention_mask is {given}: expected None, or [batch, local seq] with 0 for padding, passed through "
            "transformers' mask functions; masks of pairs of positions, and models that make their own masks, are not "
            "supported by a ring."
        )
    if attention_mask.refusal is not None:
        raise ValueError(attention_mask.refusal)
    if is_causal is not None and is_causal != attention_mask.is_causal:
        kind = "causal" if attention_mask.is_causal else "bidirectional"
        raise ValueError(
            f"is_causal = {is_causal}: the model's mask is {kind}, and the attentions of transformers differ in which "
            "of the two they follow; leave it out, or use another model if this one passes it itself."
        )
    return attention_mask


def check_layerdrop(models: Iterable[PreTrainedModel]) -> None:
    """Check that none of these models is in training and skips layers at random there.

    Raises:
        ValueError: one does. Each rank would skip others.
    """
    in_training = [model for model in models if model.training]
    for model, name in product(in_training, ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")):
        value = getattr(model.config, name, None)
        if value:
            raise ValueError(
                f"{name} = {value}: each rank of a ring would skip other layers; set it to 0 in the configuration and "
                "in the model's modules."
            )


_MIXING = frozenset(("linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding"))
"""The types of layers that mix positions without an attention, or beside it."""

_LAYER_TYPES = _MIXING | {
    *("full_attention", "attention", "sliding_attention", "chunked_attention", "moe", "mlp", "sparse", "dense")
}


def check_config(config: Any, num_passing: int = 0) -> None:
    """Check that a model of this configuration can run on a ring of several ranks.

    Args:
        num_passing: the number of layers that pass positions or states on to later ranks.

    Raises:
        ValueError: it is an encoder-decoder, mixes positions in other layers, or rotates by the length.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            "is_encoder_decoder = True: encoder-decoders are not supported by a ring; use its encoder or its decoder."
        )
    layer_types = getattr(config, "layer_types", None) or ()
    others = set(layer_types) - _LAYER_TYPES
    if others:
        raise ValueError(
            f"layer_types has {', '.join(sorted(others))}: a ring does not know how these layers mix positions. They "
            "would see only one shard; use a model without them."
        )
    if sum(name in _MIXING for name in layer_types) > num_passing:
        raise ValueError(
            f"layer_types has {', '.join(sorted(set(layer_types) & _MIXING))}: these layers mix positions without this "
            "attention, and would see only one shard. A ring knows those of most models, if transformers is 5.17 or "
            "later and the model was given to use_ring(), attach() or register(attention, model=model)."
        )
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        rope_type = str(parameters.get("rope_type", parameters.get("type", "")))
        if "dynamic" in rope_type or rope_type == "longrope":
            raise ValueError(
                f"rope_type = {rope_type!r}: its angles depend on the largest position, which differs between ranks; "
                "use 'default', 'linear', 'yarn' or 'llama3'."
            )


def describe(model: nn.Module) -> str:
    """What each attention layer of a model on a ring computes, a line for each kind of layer.

    Call it after ``use_ring`` or ``attach`` has probed the model, or after the model's first call.

    Raises:
        ValueError: no layer of the model has been called with an attention of a ring.
    """
    kinds: dict[str, list[str]] = {}
    for registration in registered.values():
        for name, layer in model.named_modules():
            if layer in registration.layers:
                kinds.setdefault(registration.layers[layer], []).append(name)
    if not kinds:
        raise ValueError(
            f"model = {type(model).__name__}: no layer of it has been called on a ring; call use_ring() or attach() "
            "with probe=True, or the model once."
        )
    return "\n".join(f"{', '.join(names)}: {what}" for what, names in kinds.items())


def first_position_of(config: Any) -> int:
    """The position id of the first token in models of this configuration."""
    counts_after_padding = getattr(config, "model_type", None) in _POSITIONS_AFTER_PADDING
    return int(config.pad_token_id) + 1 if counts_after_padding else 0


def _check_positions(
    position_ids: Tensor, is_real: Tensor | None, ring: Ring, local_len: int, seq_len: int | None, config: Any
) -> None:
    first = first_position_of(config)
    expected = ring.positions(local_len * ring.size if seq_len is None else seq_len).to(position_ids.device) + first
    is_right = torch.zeros((), dtype=torch.bool)
    if position_ids.shape[-1] == local_len:
        is_right = position_ids == expected if is_real is None else (position_ids == expected) | ~is_real
    if not bool(is_right.all()):
        raise ValueError(
            f"position_ids = {position_ids.flatten()[:4].tolist()}…: expected this rank's global positions, "
            f"{expected[:4].tolist()}…; call the model with shard_inputs(ring, input_ids=…"
            f"{f', first_position={first}' if first else ''})."
        )
