"""Ring dilated attention for Hugging Face transformers, selected by ``attn_implementation``::

    from ring_backends.integrations.transformers import register, shard_inputs

    register(attention)  # of any adapter
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="ring_dilated")
    logits = model(**shard_inputs(attention.ring, input_ids=input_ids)).logits  # this rank's rows

Every rank has the whole model and its rows of the sequence. Layers that work row by row (projections, norms, rotary
embedding by ``position_ids``) stay unchanged. The attention uses the ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ring_backends.attention import RingDilatedAttention
from ring_backends.data import document_ids
from ring_backends.errors import AdapterUnavailableError
from ring_backends.ring.ring import Ring

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function
except ImportError as error:
    raise AdapterUnavailableError(
        f"transformers cannot be imported ({error}); install it with pip install 'ring-backends[hf]'."
    ) from error

__all__ = ["IGNORED", "register", "shard_inputs"]

IGNORED = -100
"""The label that losses of transformers ignore."""

_REFUSED = {
    "sliding_window": "a window is not a dilated pattern; use segment lengths instead",
    "softcap": "soft-capping is not supported; set it to None in the model",
    "s_aux": "attention sinks are not supported; use a model without them",
    "position_bias": "biases of scores are not supported; use a model with rotary or learned positions",
    "head_mask": "masking heads is not supported; prune them instead",
}
"""Attention options that are not supported. Each maps to what the user can do."""

FOR_FLASH_ATTENTION = frozenset(("cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"))
"""What DataCollatorWithFlattening adds to ``cu_seq_lens_q``."""

_POSITIONS_AFTER_PADDING = frozenset(
    (
        *("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "roberta-prelayernorm", "data2vec-text", "xmod"),
        *("ibert", "longformer", "luke", "mpnet", "esm"),
    )
)
"""Model types whose first position is ``pad_token_id + 1``."""


_OTHER_MASK = (
    "the model requests a mask that is neither causal nor bidirectional: sliding windows, chunks and custom masks are "
    "not supported. If position_ids are not consecutive, as in packed sequences or with a zigzag layout, call the "
    "model with shard_inputs(ring, …), which passes an attention_mask."
)


@dataclass(frozen=True)
class _RingMask:
    """The mask that a model passes to its layers. It is not a tensor, so no other attention can use it by mistake."""

    padding: Tensor | None
    is_causal: bool
    refusal: str | None = None


def register(attention: RingDilatedAttention, name: str = "ring_dilated") -> None:
    """Register ``attention`` under ``attn_implementation=name``, for all layers and their masks.

    The model's masks decide whether the attention is causal. Grouped key/value heads, padding masks, packed sequences
    and the model's attention dropout are supported. The forward raises an error that names the option for sliding
    windows, soft-capping, returned attention weights, cross-attention, key/value caches and four-dimensional masks. On
    a ring of several ranks, it also raises an error for layers that mix positions in other ways (convolutions, states),
    for encoder-decoders, and for rotary embeddings that depend on the length (dynamic, longrope).

    Args:
        attention: a RingDilatedAttention of any adapter. Every layer of a model gets a copy.
        name: value of ``attn_implementation``. An existing name is replaced.

    Raises:
        TypeError: ``attention`` is not a RingDilatedAttention, or ``name`` is not a string.
        ValueError: ``attention`` has dropout. The model's configuration decides about it.
    """
    if not isinstance(attention, RingDilatedAttention):
        raise TypeError(
            f"attention = {type(attention).__name__}: expected a RingDilatedAttention of an adapter; make one with "
            "backend.RingDilatedAttention(segment_lengths, dilation_rates, ring=ring)."
        )
    if not isinstance(name, str):
        raise TypeError(f"name = {name!r}: expected a str, such as 'ring_dilated'.")
    if attention.dropout_p:
        raise ValueError(
            f"dropout_p = {attention.dropout_p}: the model's configuration decides about dropout; make the attention "
            "with dropout_p=0, and set the model's attention_dropout (BERT: attention_probs_dropout_prob)."
        )
    ring = attention.ring
    by_layer: dict[int, RingDilatedAttention] = {}

    def attention_of(layer: nn.Module) -> RingDilatedAttention:
        """Return the layer's own copy. If ranks call layers in different orders, they then raise an error."""
        index: Any = getattr(layer, "layer_idx", None)
        if index is not None and index not in by_layer and not torch.compiler.is_compiling():
            by_layer[index] = attention.copy_for(f"layer {index}")
        return by_layer.get(index, attention)

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        seq_len: int | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """q, k and v are [batch, heads, local seq, head_dim]; out is [batch, local seq, heads, head_dim]."""
        with ring.report_refusals():
            mask = _check_mask(attention_mask, is_causal)
            _check_options(options)
            _check_scaling(scaling, attention.scale, query.shape[-1])
            _check_layer(module, query.shape[2], key.shape[2])
            config = getattr(module, "config", None)
            if ring.size > 1:
                _check_model(config, seq_len)
            if position_ids is not None and document_ids is None:
                _check_positions(position_ids, ring, query.shape[2], seq_len, config)
        own = attention_of(module)
        if own.dropout_p != dropout:  # the model passes 0 after its eval()
            own.dropout_p = dropout
            own.train()
        out = own(
            *(tensor.transpose(1, 2) for tensor in (query, key, value)),
            is_causal=mask.is_causal,
            seq_len=seq_len,
            # Passed even if this rank has no padding, since either all ranks or no rank must pass a mask.
            key_padding_mask=None if mask.padding is None else ~mask.padding,
            document_ids=document_ids,
        )
        return out, None

    def make_mask(
        batch_size: int,
        *,
        kv_length: int,
        q_length: int | None = None,
        cache_position: Tensor | None = None,
        kv_offset: int = 0,
        mask_function: Any = causal_mask_function,
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> _RingMask:
        # Some releases of transformers pass the positions of the queries, others their number.
        num_queries = q_length if cache_position is None else len(cache_position)
        with ring.report_refusals():
            if num_queries != kv_length or kv_offset:
                raise ValueError(
                    f"a mask of {num_queries} queries and {kv_length} keys: key/value caches and cross-attention are "
                    "not supported by a ring; call the model on whole sequences, with use_cache=False."
                )
        padding = None if attention_mask is None else attention_mask.bool()
        # A model may make masks that no layer uses, so the layer refuses it.
        is_known = mask_function in (causal_mask_function, bidirectional_mask_function)
        return _RingMask(padding, mask_function is causal_mask_function, None if is_known else _OTHER_MASK)

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, make_mask)


def shard_inputs(
    ring: Ring,
    *,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    labels: Tensor | None = None,
    next_token_labels: bool = True,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    first_position: int = 0,
    **others: Any,
) -> dict[str, Any]:
    """Make this rank's arguments of the model. Every rank passes the tensors of the whole sequence.

    Args:
        ring: the ring of the registered attention.
        input_ids: int64 [batch, seq].
        attention_mask: [batch, seq], 0 where a token is padding.
        labels: int64 [batch, seq], as for the model on one device; :data:`IGNORED` where there is no label.
        next_token_labels: whether the label of a token is the next token, as in causal models. The labels are then
            shifted before sharding, since the last label of a shard is on the next rank. False for masked language
            models.
        position_ids: int64 [batch, seq], where each packed document starts again at ``first_position``; None for one
            document per batch entry. DataCollatorWithFlattening makes them.
        cu_seq_lens_q: int [documents + 1], 0 and the end of each packed document. The same collator makes them with
            ``return_flash_attn_kwargs=True``. Its other arguments for flash-attn may be given, and are left out.
        first_position: position id of the first token; ``pad_token_id + 1`` for RoBERTa and similar models.
        others: other tensors [batch, seq, …], such as token_type_ids.

    Returns:
        Keyword arguments: the local rows of these tensors, ``position_ids``, ``seq_len``, and ``document_ids`` for
        packed sequences. A loss that the model itself computes is the mean over this rank's labels. For the gradient of
        the mean over all labels pass a sum to ``state.loss``.

    Raises:
        ValueError: the length of a tensor differs from that of ``input_ids``; ``position_ids`` are not those of packed
            documents; or ``seq_len`` or ``document_ids`` is given.
    """
    for name in {"seq_len", "document_ids"} & set(others):
        raise ValueError(f"{name} is given: shard_inputs() computes it; leave it out, and give position_ids.")
    seq_len = input_ids.shape[1]
    positions, documents = _positions_and_documents(input_ids, position_ids, cu_seq_lens_q, first_position)
    is_packed = bool((documents != 0).any())
    if attention_mask is None and (is_packed or (ring.layout_kind == "zigzag" and ring.size > 1)):
        # Without a mask, transformers treats every jump in the positions as the start of a new document.
        attention_mask = torch.ones_like(input_ids)
    whole: dict[str, Tensor | None] = {"input_ids": input_ids, "attention_mask": attention_mask}
    whole |= {"position_ids": positions, "document_ids": documents if is_packed else None}
    whole |= {name: tensor for name, tensor in others.items() if name not in FOR_FLASH_ATTENTION}
    if labels is not None:
        whole["labels"] = labels
        if next_token_labels:
            whole["labels"] = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], 1)
            whole["shift_labels"] = whole["labels"]
    for name, tensor in whole.items():
        if tensor is not None and (tensor.dim() < 2 or tensor.shape[1] != seq_len):
            raise ValueError(
                f"{name} is {[*tensor.shape]}: expected [batch, {seq_len}, …], with the positions of input_ids."
            )
    local = {name: ring.shard(tensor) for name, tensor in whole.items() if tensor is not None}
    return {**local, "seq_len": seq_len}


def documents_of(input_ids: Tensor, position_ids: Tensor | None, cu_seq_lens: Tensor | None) -> Tensor:
    """The number of each token's packed document, [batch, seq]."""
    return _positions_and_documents(input_ids, position_ids, cu_seq_lens, 0)[1]


def _positions_and_documents(
    input_ids: Tensor, position_ids: Tensor | None, cu_seq_lens: Tensor | None, first_position: int
) -> tuple[Tensor, Tensor]:
    """The position ids of the whole sequence, and the number of each token's document: [batch, seq] both."""
    batch, seq_len = input_ids.shape[:2]
    if position_ids is not None and position_ids.shape not in ((batch, seq_len), (1, seq_len)):
        raise ValueError(f"position_ids is {[*position_ids.shape]}: expected {[batch, seq_len]}, as input_ids.")
    positions = torch.arange(seq_len, device=input_ids.device).expand(batch, -1)
    documents = torch.zeros_like(positions)
    if cu_seq_lens is not None:
        if batch != 1:
            raise ValueError(f"cu_seq_lens_q is given for a batch of {batch}; pack all documents into one batch entry.")
        documents = document_ids(cu_seq_lens, seq_len).to(positions)
        positions = positions - cu_seq_lens.to(positions)[documents]  # in padding, −1 is the end of the last document
    elif position_ids is not None:
        documents = (position_ids == first_position).expand(batch, -1).cumsum(1) - 1
        starts = torch.where(documents.diff(dim=1, prepend=documents[:, :1] - 1) > 0, positions, 0)
        positions = positions - starts.cummax(1).values
    positions = positions + first_position
    if position_ids is not None and not torch.equal(positions, position_ids.expand(batch, -1)):
        raise ValueError(
            f"position_ids = {position_ids.flatten()[:4].tolist()}…: expected numbers that begin with {first_position} "
            "and go on by 1 in each packed document, those of cu_seq_lens_q if that is given; leave them out for one "
            "document per batch entry."
        )
    return positions, documents


def _check_mask(attention_mask: Any, is_causal: bool | None) -> _RingMask:
    if not isinstance(attention_mask, _RingMask):
        given = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else attention_mask
        raise ValueError(
            f"attention_mask is {given}: expected None, or [batch, local seq] with 0 for padding, passed through "
            "transformers' mask functions; masks of pairs of positions, and models that make their own masks, are not "
            "supported by a ring."
        )
    if attention_mask.refusal is not None:
        raise ValueError(attention_mask.refusal)
    if is_causal is not None and is_causal != attention_mask.is_causal:
        raise ValueError(f"is_causal = {is_causal}: contradicts the model's mask; leave it out.")
    return attention_mask


def _check_layer(module: nn.Module, num_queries: int, num_keys: int) -> None:
    if num_keys != num_queries:
        raise ValueError(
            f"key has {num_keys} rows and query {num_queries}: key/value caches and cross-attention are not "
            "supported by a ring; call the model on whole sequences, with use_cache=False."
        )
    if getattr(module, "is_cross_attention", False) or "CrossAttention" in type(module).__name__:
        raise ValueError(f"{type(module).__name__}: cross-attention is not supported; use a model without it.")


def _check_model(config: Any, seq_len: int | None) -> None:
    """Refuse models whose result on several ranks would differ from that on one rank."""
    if seq_len is None:
        raise ValueError(
            "seq_len is not given: the arguments of the model are not those of a shard; call the model with "
            "shard_inputs(ring, input_ids=…)."
        )
    check_config(config)


def check_config(config: Any) -> None:
    """Check that a model of this configuration can run on a ring of several ranks.

    Raises:
        ValueError: it has windows, is an encoder-decoder, mixes positions in other layers, or rotates by the length.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            "is_encoder_decoder = True: encoder-decoders are not supported by a ring; use its encoder or its decoder."
        )
    layer_types = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    has_windows = "sliding_attention" in layer_types if layer_types else getattr(config, "use_sliding_window", True)
    if window is not None and has_windows:
        raise ValueError(f"sliding_window = {window}: {_REFUSED['sliding_window']}.")
    others = layer_types - {"full_attention", "attention"}
    if others:
        raise ValueError(
            f"layer_types has {', '.join(sorted(others))}: layers that mix positions without this attention "
            "would see only one shard; use a model of full_attention."
        )
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        rope_type = str(parameters.get("rope_type", parameters.get("type", "")))
        if "dynamic" in rope_type or rope_type == "longrope":
            raise ValueError(
                f"rope_type = {rope_type!r}: its angles depend on the largest position, which differs between ranks; "
                "use 'default', 'linear', 'yarn' or 'llama3'."
            )


def first_position_of(config: Any) -> int:
    """The position id of the first token in models of this configuration."""
    counts_after_padding = getattr(config, "model_type", None) in _POSITIONS_AFTER_PADDING
    return int(config.pad_token_id) + 1 if counts_after_padding else 0


def _check_options(options: dict[str, Any]) -> None:
    if options.get("output_attentions"):
        raise ValueError("output_attentions = True: a ring has no matrix of attention weights; leave it out.")
    for name, instead in _REFUSED.items():
        if options.get(name) is not None:
            raise ValueError(f"{name} is given: {instead}.")


def _check_scaling(scaling: float | None, scale: float | None, head_dim: int) -> None:
    own = head_dim**-0.5 if scale is None else scale
    if scaling is not None and abs(scaling - own) > 1e-9 * abs(own):
        raise ValueError(f"scaling = {scaling}: the attention has scale = {own}; make it with scale={scaling}.")


def _check_positions(position_ids: Tensor, ring: Ring, local_len: int, seq_len: int | None, config: Any) -> None:
    first = first_position_of(config)
    expected = ring.positions(local_len * ring.size if seq_len is None else seq_len).to(position_ids.device) + first
    if position_ids.shape[-1] != local_len or not bool((position_ids == expected).all()):
        raise ValueError(
            f"position_ids = {position_ids.flatten()[:4].tolist()}…: expected this rank's global positions, "
            f"{expected[:4].tolist()}…; call the model with shard_inputs(ring, input_ids=…"
            f"{f', first_position={first}' if first else ''})."
        )
