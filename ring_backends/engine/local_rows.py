"""This rank's rows of query, key and value in one call, with their masks, documents and dropout."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ring_backends.engine.inputs import AttentionInputs
from ring_backends.kernels.dropout import Dropout
from ring_backends.schedule.rank_plan import HeadBlock
from ring_backends.torch_internals import has_values


@dataclass(frozen=True)
class LocalRows:
    """Query, key and value of this rank, and marks of their rows. The marks are the same for every head.

    Attributes:
        key_marks: [batch, local seq, key/value heads]. Without documents, it is bool, and True for a key to ignore.
            With documents, it holds the document number of each key, or −1 for a key to ignore.
        query_documents: [batch, local seq, heads], the document number of each query, or −2 for none.
        dropout_seed: seed of this call's dropout.
        query_words, key_words: the 32-bit words of each query and key that ``dropout`` hashes.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    key_marks: Tensor | None = None
    query_documents: Tensor | None = None
    dropout: Dropout | None = None
    dropout_seed: int = 0
    query_words: Tensor | None = None
    key_words: Tensor | None = None

    @classmethod
    def of(cls, inputs: AttentionInputs, dropout: Dropout | None) -> LocalRows:
        query, key, marks, documents = inputs.query, inputs.key, inputs.key_padding_mask, None
        if inputs.document_ids is not None:
            ids = inputs.document_ids
            ignored = ids < 0 if marks is None else marks | (ids < 0)
            marks = ids.masked_fill(ignored, -1)
            documents = ids.masked_fill(ids < 0, -2).unsqueeze(2).expand(-1, -1, query.shape[2])
        if marks is not None:
            marks = marks.unsqueeze(2).expand(-1, -1, key.shape[2])
        if dropout is None:
            return cls(query, key, inputs.value, marks, documents)
        if not has_values(query):
            query_words, key_words = (
                query.new_empty(shape, dtype=torch.int32) for shape in ((*query.shape[:3], 2), key.shape[:3])
            )
            return cls(query, key, inputs.value, marks, documents, dropout, 0, query_words, key_words)
        assert inputs.dropout_seed is not None
        seed = int(inputs.dropout_seed)
        query_words = dropout.query_words(seed, query.shape[0], query.shape[2], query.device)
        key_words = dropout.key_words(seed, dropout.positions).to(key.device)[:, None].expand(*key.shape[:3])
        return cls(query, key, inputs.value, marks, documents, dropout, seed, query_words, key_words)

    def block(self, block: HeadBlock) -> LocalRows:
        """The rows of the heads of one block."""
        heads, kv_heads = block.heads, block.kv_heads
        return replace(
            self,
            query=self.query[:, :, heads],
            key=self.key[:, :, kv_heads],
            value=self.value[:, :, kv_heads],
            key_marks=_heads(self.key_marks, kv_heads),
            query_documents=_heads(self.query_documents, heads),
            query_words=_heads(self.query_words, heads),
            key_words=_heads(self.key_words, kv_heads),
        )


def _heads(tensor: Tensor | None, heads: slice) -> Tensor | None:
    return None if tensor is None else tensor[:, :, heads]
