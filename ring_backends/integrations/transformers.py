"""Hugging Face transformers: models whose attention is a ring's, by ``attn_implementation``.

>>> from ring_backends.integrations.transformers import register, shard_inputs
>>> register(attention)  # of any adapter, on its ring
>>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="ring_dilated")
>>> logits = model(**shard_inputs(attention.ring, input_ids=input_ids)).logits  # this rank's rows

Every rank has the whole model and its rows of the sequence. Whatever works row by row (projections, norms, rotary
embedding by ``position_ids``) needs no more; the attention goes around the ring.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ring_backends.attention import RingDilatedAttention
from ring_backends.errors import AdapterUnavailableError
from ring_backends.ring import Ring

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


def register(attention: RingDilatedAttention, name: str = "ring_dilated") -> None:
    """Make ``attn_implementation=name`` work: attention and masks of all layers by ``attention``.

    Decoders are causal and encoders are not, as their layers say; grouped key/value heads and padding masks are taken.
    What is not is refused by name in the forward pass: sliding windows, soft-capping, dropout, attention weights as a
    result, cross-attention, key/value caches, packed sequences and masks of four dimensions.

    Args:
        attention: a RingDilatedAttention of any adapter. One serves all layers, for it has no parameters.
        name: by which models ask for it; a name that exists already now means this one.

    Raises:
        TypeError: ``attention`` is not a RingDilatedAttention, or ``name`` no string.
    """
    if not isinstance(attention, RingDilatedAttention):
        raise TypeError(
            f"attention = {type(attention).__name__}: expected a RingDilatedAttention of an adapter; make one with "
            "backend.RingDilatedAttention(segment_lengths, dilation_rates, ring=ring)."
        )
    if not isinstance(name, str):
        raise TypeError(f"name = {name!r}: expected a str, such as 'ring_dilated'.")

    def forward(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        seq_len: int | None = None,
        position_ids: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """As transformers calls it: [batch, heads, local seq, head_dim]; out is [batch, local seq, heads, head_dim]."""
        _check_options(options, dropout)
        _check_scaling(scaling, attention.scale, query.shape[-1])
        if key.shape[2] != query.shape[2]:
            raise ValueError(
                f"key has {key.shape[2]} rows and query {query.shape[2]}: key/value caches and cross-attention are not "
                "supported by a ring; call the model on whole sequences, with use_cache=False."
            )
        if position_ids is not None:
            _check_positions(position_ids, attention.ring, query.shape[2], seq_len)
        if is_causal is None:
            config = getattr(module, "config", None)
            is_causal = getattr(module, "is_causal", True) and getattr(config, "is_causal", True) is not False
        out = attention(
            *(tensor.transpose(1, 2) for tensor in (query, key, value)),
            is_causal=bool(is_causal),
            seq_len=seq_len,
            key_padding_mask=_padding(attention_mask),
        )
        return out, None

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, _mask)


def shard_inputs(
    ring: Ring,
    *,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    labels: Tensor | None = None,
    next_token_labels: bool = True,
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
        others: more tensors [batch, seq, …], such as token_type_ids.

    Returns:
        The keyword arguments: the local rows of all of these, ``position_ids`` (the rows' global positions) and
        ``seq_len``. A loss that the model computes itself is the mean over this rank's labels; for the gradient of the
        mean over all of them use ``state.loss`` on a sum.

    Raises:
        ValueError: a tensor is not as long as ``input_ids``.
    """
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
    positions = ring.positions(seq_len).to(input_ids.device)
    return {**local, "position_ids": positions.unsqueeze(0).expand(len(input_ids), -1), "seq_len": seq_len}


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> Tensor | None:
    """What of a mask is not causality: bool [batch, local seq], True for a key that is seen; None for all of them."""
    if q_length != kv_length or kv_offset:
        raise ValueError(
            f"a mask of {q_length} queries and {kv_length} keys: key/value caches and cross-attention are not "
            "supported by a ring; call the model on whole sequences, with use_cache=False."
        )
    if mask_function not in (causal_mask_function, bidirectional_mask_function):
        raise ValueError(
            "the model asks for a mask that is neither causal nor that of an encoder: sliding windows, chunks, custom "
            "masks and packed sequences are not supported. For position_ids that jump, as a zigzag shard's do, pass an "
            "attention_mask, as shard_inputs() does."
        )
    return attention_mask


def _padding(attention_mask: Any) -> Tensor | None:
    """The key padding mask. A mask without padding stays one: the ranks have to agree on whether there is one."""
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
        shape = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ValueError(
            f"attention_mask is {shape}: expected [batch, local seq] with 0 for padding; masks of pairs of positions "
            "are not supported by a ring."
        )
    return ~attention_mask.bool()


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


def _check_positions(position_ids: Tensor, ring: Ring, local_len: int, seq_len: int | None) -> None:
    expected = ring.positions(local_len * ring.size if seq_len is None else seq_len).to(position_ids.device)
    if position_ids.shape[-1] != local_len or not bool((position_ids == expected).all()):
        raise ValueError(
            f"position_ids = {position_ids.flatten()[:4].tolist()}…: expected this rank's global positions, "
            f"{expected[:4].tolist()}…; call the model with shard_inputs(ring, input_ids=…)."
        )
