"""The arguments of a model on one rank, cut from those of the whole sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ring_backends.data import document_ids
from ring_backends.ring.ring import Ring

IGNORED = -100
"""The label that losses of transformers ignore."""

FOR_FLASH_ATTENTION = frozenset(("cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"))
"""What DataCollatorWithFlattening adds to ``cu_seq_lens_q``."""


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
        labels: int64 [batch, seq], as for the model on one device; ``IGNORED``, −100, where there is no label.
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
            whole["labels"] = whole["shift_labels"] = next_labels(labels)
    for name, tensor in whole.items():
        if tensor is not None and (tensor.dim() < 2 or tensor.shape[1] != seq_len):
            raise ValueError(
                f"{name} is {[*tensor.shape]}: expected [batch, {seq_len}, …], with the positions of input_ids."
            )
    local = {name: ring.shard(tensor) for name, tensor in whole.items() if tensor is not None}
    return {**local, "seq_len": seq_len}


def next_labels(labels: Tensor) -> Tensor:
    """The label of the next token at every token, [batch, seq]; ``IGNORED`` at the last."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


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
