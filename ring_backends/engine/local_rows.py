"""This rank's rows of query, key and value in one call, with their masks, documents and dropout."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from ring_backends.engine.call import AttentionCall
from ring_backends.engine.inputs import AttentionInputs
from ring_backends.kernels.base import split_scale
from ring_backends.kernels.dropout import Dropout
from ring_backends.schedule.rank_plan import HeadBlock
from ring_backends.torch_internals import has_values, mode_of


@dataclass(frozen=True)
class LocalRows:
    """Query, key and value of this rank, and marks of their rows. The marks are the same for every head.

    Attributes:
        query: multiplied by the sign of the call's scale.
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
    def of(cls, call: AttentionCall, inputs: AttentionInputs) -> LocalRows:
        query, key, value, marks, documents = inputs.query, inputs.key, inputs.value, inputs.key_padding_mask, None
        sign, _ = split_scale(call.scale)
        if sign != 1:
            query = query * sign
        if marks is not None and call.kernel.reads_ignored_keys:
            key, value = (x.masked_fill(marks[:, :, None, None], 0.0) for x in (key, value))
        if inputs.document_ids is not None:
            ids = inputs.document_ids
            ignored = ids < 0 if marks is None else marks | (ids < 0)
            marks = ids.masked_fill(ignored, -1)
            documents = ids.masked_fill(ids < 0, -2).unsqueeze(2).expand(-1, -1, query.shape[2])
        if marks is not None:
            marks = marks.unsqueeze(2).expand(-1, -1, key.shape[2])
        dropout = call.dropout
        if dropout is None:
            return cls(query, key, value, marks, documents)
        assert inputs.dropout_seed is not None
        seed = int(inputs.dropout_seed) if has_values(inputs.dropout_seed) else 0  # it is on the CPU
        with mode_of(query):
            positions = call.layout.positions(call.rank, query.device)
            query_words = dropout.query_words(seed, positions, query.shape[0], query.shape[2])
            key_words = dropout.key_words(seed, positions)[:, None].expand(*key.shape[:3])
        return cls(query, key, value, marks, documents, dropout, seed, query_words, key_words)

    def block(self, block: HeadBlock) -> LocalRows:
        """The rows of the heads of one block."""
        if block.has_all_heads:
            return self
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
