"""Hugging Face transformers: models whose attention is a ring's, by ``attn_implementation``::

    from ring_backends.integrations.transformers import register, shard_inputs

    register(attention)  # of any adapter, on its ring
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="ring_dilated")
    logits = model(**shard_inputs(attention.ring, input_ids=input_ids)).logits  # this rank's rows

Every rank has the whole model and its rows of the sequence. Whatever works row by row (projections, norms, rotary
embedding by ``position_ids``) needs no more; the attention goes around the ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ring_backends.attention import RingDilatedAttention
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
"""The label that transformers leaves out of a loss."""

_REFUSED = {
    "sliding_window": "a window is not a dilated pattern; use segment lengths instead",
    "softcap": "scores are not capped here; set the model's soft-capping to None",
    "s_aux": "attention sinks are not supported; use a model without them",
    "position_bias": "scores have no bias here; use a model with rotary or learned positions",
    "head_mask": "heads are not masked here; prune them instead",
}
"""What a model may ask of its attention that this one does not do, and what to do about it."""

_POSITIONS_AFTER_PADDING = frozenset(
    (
        *("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "roberta-prelayernorm", "data2vec-text", "xmod"),
        *("ibert", "longformer", "luke", "mpnet", "esm"),
    )
)
"""Types of models whose first position is the one after that of padding."""


@dataclass(frozen=True)
class _RingMask:
    """What a model hands on to its layers as a mask. No tensor, so that no other attention takes it for one."""

    padding: Tensor | None
    is_causal: bool


def register(attention: RingDilatedAttention, name: str = "ring_dilated") -> None:
    """Make ``attn_implementation=name`` work: attention and masks of all layers by ``attention``.

    Decoders are causal and encoders are not, as the masks say that they ask for; grouped key/value heads and padding
    masks are taken. What is not is refused by name in the forward pass: sliding windows, soft-capping, dropout,
    attention weights as a result, cross-attention, key/value caches, packed sequences and masks of four dimensions;
    and on a ring of several ranks models whose layers mix positions otherwise (convolutions, states), encoder-decoders,
    and rotary embeddings that depend on the length (dynamic, longrope).

    Args:
        attention: a RingDilatedAttention of any adapter, of which every layer of a model gets a copy.
        name: by which models ask for it; a name that exists already now means this one.

    Raises:
        TypeError: ``attention`` is not a RingDilatedAttention, or ``name`` no string.
        ValueError: ``attention`` drops weights: it would not hear of the model's ``eval()``.
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
            f"dropout_p = {attention.dropout_p}: the attention is no part of the model, and would drop weights after "
            "model.eval() too; make it with dropout_p=0."
        )
    ring = attention.ring
    by_layer: dict[int, RingDilatedAttention] = {}

    def attention_of(layer: nn.Module) -> RingDilatedAttention:
        """Each layer's own, so that ranks that call layers in another order are told."""
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
        **options: Any,
    ) -> tuple[Tensor, None]:
        """As transformers calls it: [batch, heads, local seq, head_dim]; out is [batch, local seq, heads, head_dim]."""
        with ring.report_refusals():
            mask = _check_mask(attention_mask, is_causal)
            _check_options(options, dropout)
            _check_scaling(scaling, attention.scale, query.shape[-1])
            _check_layer(module, query.shape[2], key.shape[2])
            config = getattr(module, "config", None)
            if ring.size > 1:
                _check_model(config, seq_len)
            if position_ids is not None:
                _check_positions(position_ids, ring, query.shape[2], seq_len, config)
        out = attention_of(module)(
            *(tensor.transpose(1, 2) for tensor in (query, key, value)),
            is_causal=mask.is_causal,
            seq_len=seq_len,
            # A mask without padding stays one: the ranks have to agree on whether there is one.
            key_padding_mask=None if mask.padding is None else ~mask.padding,
        )
        return out, None

    def make_mask(
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int = 0,
        kv_offset: int = 0,
        mask_function: Any = causal_mask_function,
        attention_mask: Tensor | None = None,
        **_: Any,
    ) -> _RingMask:
        with ring.report_refusals():
            if q_length != kv_length or kv_offset:
                raise ValueError(
                    f"a mask of {q_length} queries and {kv_length} keys: key/value caches and cross-attention are not "
                    "supported by a ring; call the model on whole sequences, with use_cache=False."
                )
            if mask_function not in (causal_mask_function, bidirectional_mask_function):
                raise ValueError(
                    "the model asks for a mask that is neither causal nor that of an encoder: sliding windows, chunks, "
                    "custom masks and packed sequences are not supported. For position_ids that jump, as a zigzag "
                    "shard's do, pass an attention_mask, as shard_inputs() does."
                )
        padding = None if attention_mask is None else attention_mask.bool()
        return _RingMask(padding, mask_function is causal_mask_function)

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, make_mask)


def shard_inputs(
    ring: Ring,
    *,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    labels: Tensor | None = None,
    next_token_labels: bool = True,
    first_position: int = 0,
    **others: Tensor | None,
) -> dict[str, Any]:
    """This rank's arguments of a model, from those of the whole sequence, which every rank passes alike.

    Args:
        ring: that of the registered attention.
        input_ids: int64 [batch, seq].
        attention_mask: [batch, seq], 0 where a token is padding.
        labels: int64 [batch, seq], as the model takes them on one device; :data:`IGNORED` where there is none.
        next_token_labels: whether the model is a causal one, whose label of a token is the next one's: they are shifted
            before they are cut, since a shard's last label is on the next rank. False for masked language models.
        first_position: what the model calls the first position; RoBERTa and its kin ``pad_token_id + 1``.
        others: more tensors [batch, seq, …], such as token_type_ids.

    Returns:
        The keyword arguments: the local rows of all of these, ``position_ids`` (the rows' global positions) and
        ``seq_len``. A loss that the model computes itself is the mean over this rank's labels; for the gradient of the
        mean over all of them use ``state.loss`` on a sum.

    Raises:
        ValueError: a tensor is not as long as ``input_ids``, or says what the ring has to say.
    """
    for name in {"position_ids", "seq_len"} & set(others):
        raise ValueError(
            f"{name} is given: it follows from the ring; packed sequences are not supported. Leave it out."
        )
    seq_len = input_ids.shape[1]
    if attention_mask is None and ring.layout_kind == "zigzag" and ring.size > 1:
        # Without one, transformers takes the jump in a zigzag shard's positions for the start of another document.
        attention_mask = torch.ones_like(input_ids)
    whole: dict[str, Tensor | None] = {"input_ids": input_ids, "attention_mask": attention_mask, **others}
    if labels is not None:
        whole["labels"] = labels
        if next_token_labels:
            whole["labels"] = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], 1)
            whole["shift_labels"] = whole["labels"]
    for name, tensor in whole.items():
        if tensor is not None and tensor.shape[1] != seq_len:
            raise ValueError(f"{name} has {tensor.shape[1]} positions and input_ids {seq_len}: give the same to both.")
    local = {name: ring.shard(tensor) for name, tensor in whole.items() if tensor is not None}
    positions = ring.positions(seq_len).to(input_ids.device) + first_position
    return {**local, "position_ids": positions.unsqueeze(0).expand(len(input_ids), -1), "seq_len": seq_len}


def _check_mask(attention_mask: Any, is_causal: bool | None) -> _RingMask:
    if not isinstance(attention_mask, _RingMask):
        given = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else attention_mask
        raise ValueError(
            f"attention_mask is {given}: expected what transformers' mask functions make of [batch, local seq] with 0 "
            "for padding, or of None; masks of pairs of positions, and models that make masks by themselves, are not "
            "supported by a ring."
        )
    if is_causal is not None and is_causal != attention_mask.is_causal:
        raise ValueError(f"is_causal = {is_causal}: the model's mask is for the contrary; leave it out.")
    return attention_mask


def _check_layer(module: nn.Module, num_queries: int, num_keys: int) -> None:
    if num_keys != num_queries:
        raise ValueError(
            f"key has {num_keys} rows and query {num_queries}: key/value caches and cross-attention are not "
            "supported by a ring; call the model on whole sequences, with use_cache=False."
        )
    if getattr(module, "is_cross_attention", False) or "CrossAttention" in type(module).__name__:
        raise ValueError(f"{type(module).__name__}: cross-attention is not dilated; use a model without it.")


def _check_model(config: Any, seq_len: int | None) -> None:
    """Refuse, on several ranks, what would be another model on each of them."""
    if seq_len is None:
        raise ValueError(
            "seq_len is not given: the model's arguments are not those of a shard; call it with "
            "shard_inputs(ring, input_ids=…)."
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            "is_encoder_decoder = True: encoder-decoders are not supported by a ring; use one of its halves."
        )
    layer_types = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "attention"}
    if layer_types:
        raise ValueError(
            f"layer_types has {', '.join(sorted(layer_types))}: layers that mix positions in another way than by this "
            "attention would see one shard alone; use a model of full_attention."
        )
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        rope_type = str(parameters.get("rope_type", parameters.get("type", "")))
        if "dynamic" in rope_type or rope_type == "longrope":
            raise ValueError(
                f"rope_type = {rope_type!r}: its angles depend on the largest position, which is another one on each "
                "rank; use 'default', 'linear', 'yarn' or 'llama3'."
            )


def _check_options(options: dict[str, Any], dropout: float) -> None:
    if dropout:
        raise ValueError(
            f"dropout = {dropout}: attention dropout is not supported; set the model's attention_dropout (BERT: "
            "attention_probs_dropout_prob) to 0."
        )
    if options.get("output_attentions"):
        raise ValueError("output_attentions = True: a ring never holds the attention weights; leave it out.")
    for name, instead in _REFUSED.items():
        if options.get(name) is not None:
            raise ValueError(f"{name} is given: {instead}.")


def _check_scaling(scaling: float | None, scale: float | None, head_dim: int) -> None:
    own = head_dim**-0.5 if scale is None else scale
    if scaling is not None and abs(scaling - own) > 1e-9 * abs(own):
        raise ValueError(f"scaling = {scaling}: the attention has scale = {own}; make it with scale={scaling}.")


def _check_positions(position_ids: Tensor, ring: Ring, local_len: int, seq_len: int | None, config: Any) -> None:
    first = 0
    if getattr(config, "model_type", None) in _POSITIONS_AFTER_PADDING:
        first = int(config.pad_token_id) + 1
    expected = ring.positions(local_len * ring.size if seq_len is None else seq_len).to(position_ids.device) + first
    if position_ids.shape[-1] != local_len or not bool((position_ids == expected).all()):
        raise ValueError(
            f"position_ids = {position_ids.flatten()[:4].tolist()}…: expected this rank's global positions, "
            f"{expected[:4].tolist()}…; call the model with shard_inputs(ring, input_ids=…"
            f"{f', first_position={first}' if first else ''})."
        )
