"""The arguments of a model on one rank, cut from those of the whole sequence."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ring_backends.data import document_ids
from ring_backends.ring.ring import Ring

IGNORED = -100
"""The label that losses of transformers ignore."""

MARKS = frozenset(("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"))
"""Arguments that only mark packed documents. DataCollatorWithFlattening makes them."""

PADDED_BEFORE = "is_padded_before_tokens"
"""Argument that is there if a token follows padding. Models that do not count padding then need ``position_ids``."""


def shard_inputs(
    ring: Ring,
    *,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    labels: Tensor | None = None,
    next_token_labels: bool = True,
    position_ids: Tensor | None = None,
    first_position: int = 0,
    **others: Any,
) -> dict[str, Any]:
    """Make this rank's arguments of the model. Every rank passes the tensors of the whole sequence.

    Args:
        ring: the ring of the registered attention.
        input_ids: int64 [batch, seq].
        attention_mask: [batch, seq], 0 where a token is padding. Numbers above 1 are those of packed documents.
        labels: int64 [batch, seq], as for the model on one device; ``IGNORED``, −100, where there is no label.
        next_token_labels: whether the label of a token is the next token, as in causal models. The labels are then
            shifted before sharding, since the last label of a shard is on the next rank. False for masked language
            models.
        position_ids: int64 [batch, seq], which start again at ``first_position`` in each packed document, as those of
            DataCollatorWithFlattening do. The ids of padding do not matter. None means one document per batch entry.
        first_position: position id of the first token; ``pad_token_id + 1`` for RoBERTa and similar models.
        others: other tensors [batch, seq, …], such as token_type_ids; or other arguments that mark packed documents:
            ``cu_seq_lens_q`` and ``cu_seq_lens_k``, int [documents + 1], 0 and the end of each document; ``seq_idx``,
            int [batch, seq], the number of each token's document; ``max_length_q`` and ``max_length_k`` beside them.

    Returns:
        Keyword arguments: the local rows of these tensors, ``position_ids``, ``document_ids`` for packed sequences,
        ``row_numbers`` (the number of each row in its document), ``leading_padding`` if a sequence begins with padding,
        ``has_padding`` (whether any token of the batch is padding), ``seq_len``, and what the layers need to check that
        the rows are those of their ring. With ``next_token_labels``, ``labels`` and ``shift_labels`` both hold the
        label of the next token in each row: do not shift them again. A loss that the model itself computes is the mean
        over this rank's labels. For the gradient of the mean over all labels pass a sum to ``state.loss``.

    Raises:
        ValueError: ``input_ids`` is sharded already; the length of another tensor differs; ``position_ids`` are not
            those of packed documents; two arguments mark different documents; there are fewer tokens than ranks; or
            ``seq_len``, ``document_ids`` or ``row_numbers`` is given.
    """
    for name in {"seq_len", "document_ids", "row_numbers"} & set(others):
        raise ValueError(f"{name} is given: shard_inputs() computes it; leave it out, and give position_ids.")
    ring.check_whole("input_ids", input_ids)
    seq_len = input_ids.shape[1]
    given = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids, **others}
    positions, documents, row_numbers = _positions_and_documents(given, first_position)
    is_packed, is_real = bool((documents != 0).any()), _is_real(given)
    if not all(ring.layout(seq_len).local_len(rank) for rank in range(ring.size)):
        raise ValueError(
            f"input_ids has {seq_len} tokens for {ring.size} ranks: pad it, so that every rank has a token."
        )
    if first_position and position_ids is None:
        check_padding_tokens(input_ids, is_real, first_position - 1)
    is_padded_before = position_ids is None and not is_packed and bool((is_real.long().diff(dim=1) > 0).any())
    if attention_mask is not None and _numbers_documents(attention_mask):
        attention_mask = (attention_mask != 0).to(attention_mask.dtype)
    if attention_mask is None and (is_packed or (ring.layout_kind == "zigzag" and ring.size > 1)):
        # Without a mask, transformers treats every jump in the positions as the start of a new document.
        attention_mask = torch.ones_like(input_ids)
    whole: dict[str, Tensor | None] = {"input_ids": input_ids, "attention_mask": attention_mask}
    whole |= {"position_ids": positions, "document_ids": documents if is_packed else None}
    whole["row_numbers"] = row_numbers
    whole |= {name: tensor for name, tensor in others.items() if name not in MARKS}
    if labels is not None:
        whole["labels"] = labels
        if next_token_labels:
            whole["labels"] = whole["shift_labels"] = next_labels(labels)
    for name, tensor in whole.items():
        if tensor is not None and (tensor.dim() < 2 or tensor.shape[1] != seq_len):
            raise ValueError(
                f"{name} is {[*tensor.shape]}: expected [batch, {seq_len}, …], with the positions of input_ids."
            )
    local: dict[str, Any] = {name: ring.shard(tensor) for name, tensor in whole.items() if tensor is not None}
    if is_padded_before:
        local[PADDED_BEFORE] = True
    if not bool(is_real[:, 0].all()):
        local["leading_padding"] = leading_padding_of(is_real)  # of the whole sequence
    return {**local, "has_padding": not bool(is_real.all()), "seq_len": seq_len, "ring_layout": ring.layout_kind}


def leading_padding_of(is_real: Tensor) -> Tensor:
    """The number of rows before the first token of each sequence: int64 [batch]."""
    return (is_real.cumsum(1) == 0).sum(1)


def check_padding_tokens(input_ids: Tensor, is_real: Tensor, padding: int) -> None:
    """Check that a model which finds padding by its token finds what the mask says.

    Raises:
        ValueError: there is such a token where there is no padding.
    """
    if bool(((input_ids == padding) & is_real).any()):
        raise ValueError(
            f"input_ids has the padding token {padding} where there is no padding, and the model does not count its "
            "position: give an attention_mask with 0 there, or use another pad_token_id."
        )


def next_labels(labels: Tensor) -> Tensor:
    """The label of the next token at every token, [batch, seq]; ``IGNORED`` at the last."""
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def documents_of(batch: Mapping[str, Any]) -> Tensor:
    """The number of each token's packed document, [batch, seq], from the arguments of a model."""
    return _positions_and_documents(batch, 0)[1]


def _positions_and_documents(batch: Mapping[str, Any], first_position: int) -> tuple[Tensor, Tensor, Tensor]:
    """The position ids of the whole sequence, the number of each token's document, and its number there: [batch, seq].

    The position ids of padding are those that were given. The numbers of rows begin with 0 wherever a document does.
    """
    input_ids, position_ids = batch["input_ids"], batch.get("position_ids")
    shape = input_ids.shape[:2]
    if position_ids is not None and position_ids.shape not in (shape, (1, shape[1])):
        raise ValueError(f"position_ids is {[*position_ids.shape]}: expected {[*shape]}, as input_ids.")
    is_real = _is_real(batch)
    marked = _marked_documents(batch, is_real)
    name, documents = next(iter(marked.items()), ("", torch.zeros_like(is_real, dtype=torch.int64)))
    if not marked and position_ids is not None:
        starts = (position_ids == first_position).expand(shape).cumsum(1)
        documents = starts - 1  # −1 before the first start, where only padding may be
        documents = documents + ((documents < 0) & is_real).any(1, keepdim=True)
    places = torch.arange(shape[1], device=input_ids.device).expand(shape)
    is_start = documents.diff(dim=1, prepend=documents[:, :1]) != 0
    row_numbers = places - torch.where(is_start, places, 0).cummax(1).values
    positions = row_numbers + first_position
    if position_ids is not None and bool(((positions != position_ids) & is_real).any()):
        raise ValueError(
            f"position_ids = {position_ids.flatten()[:4].tolist()}…: expected numbers that begin with {first_position} "
            f"and go on by 1 in each packed document{f', those of {name}' if name else ''}; leave them out for one "
            "document per batch entry."
        )
    return positions if position_ids is None else position_ids.expand(shape), documents, row_numbers


def _is_real(batch: Mapping[str, Any]) -> Tensor:
    """Where a token is not padding: bool [batch, seq]."""
    input_ids, mask = batch["input_ids"], batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == input_ids.shape[:2]:
        return mask != 0
    return torch.ones(input_ids.shape[:2], dtype=torch.bool, device=input_ids.device)


def _marked_documents(batch: Mapping[str, Any], is_real: Tensor) -> dict[str, Tensor]:
    """The numbers of the documents, [batch, seq], by the argument that marks them; −1 where there is no document."""
    batch_size, seq_len = is_real.shape
    numbers: dict[str, Tensor] = {}
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if batch.get(name) is not None:
            if batch_size != 1:
                raise ValueError(
                    f"{name} is given for a batch of {batch_size}; pack all documents into one batch entry."
                )
            numbers[name] = document_ids(batch[name], seq_len)
    for name in ("max_length_q", "max_length_k"):
        if batch.get(name) is not None and not numbers:
            raise ValueError(f"{name} is given without cu_seq_lens_q, which marks the documents; give both or neither.")
    if batch.get("seq_idx") is not None:
        numbers["seq_idx"] = batch["seq_idx"]
    if batch.get("attention_mask") is not None and _numbers_documents(batch["attention_mask"]):
        numbers["attention_mask"] = batch["attention_mask"]
    documents: dict[str, Tensor] = {}
    for name, given in numbers.items():
        if given.shape not in (is_real.shape, (1, seq_len)):
            raise ValueError(f"{name} is {[*given.shape]}: expected {[*is_real.shape]}, as input_ids.")
        is_none = given < 1 if name == "attention_mask" else given < 0
        for row, is_outside in zip(given, is_none, strict=True):
            runs = torch.unique_consecutive(torch.where(is_outside, -1, row))
            runs = runs[runs >= 0]
            if len(runs) != len(runs.unique()):
                raise ValueError(
                    f"{name} has a document in two parts: give the tokens of each document one after another."
                )
        changes = given.diff(dim=1, prepend=given[:, :1]) != 0
        documents[name] = changes.cumsum(1).masked_fill(is_none, -1).expand(is_real.shape).to(is_real.device)
    for (name, one), (other_name, other) in pairwise(documents.items()):
        differ = (one.diff(dim=1) != 0) != (other.diff(dim=1) != 0)
        if bool((differ & is_real[:, 1:] & is_real[:, :-1]).any()):
            raise ValueError(f"{name} and {other_name} mark different documents: leave one of them out.")
    return documents


def marks_documents(batch: Mapping[str, Any]) -> bool:
    """Whether an argument other than ``position_ids`` marks packed documents."""
    mask = batch.get("attention_mask")
    return bool(MARKS & batch.keys()) or (isinstance(mask, Tensor) and _numbers_documents(mask))


def _numbers_documents(attention_mask: Tensor) -> bool:
    """Whether a mask has the number of each token's document, from 1 on, instead of 1 for every token.

    Raises:
        ValueError: it does, in a dtype that rounds such numbers.
    """
    is_numbered = attention_mask.dtype != torch.bool and attention_mask.dim() == 2 and bool((attention_mask > 1).any())
    if is_numbered and attention_mask.is_floating_point() and attention_mask.dtype.itemsize < 4:
        raise ValueError(
            f"attention_mask has numbers of documents in {attention_mask.dtype}, which rounds large ones to the same "
            "number; give it as integers. Some wrappers cast every floating-point input of a model."
        )
    return is_numbered
