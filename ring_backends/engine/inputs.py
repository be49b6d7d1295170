"""The tensors and options of one call of attention: one object from the module down to the kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ring_backends.kernels.score_mod import ScoreMod


@dataclass(frozen=True)
class AttentionInputs:
    """The tensors and options of one call of attention on this rank.

    The fields with tensors come first. The other fields are plain values, which a compiled graph holds as constants. A
    new per-call option needs a field here, an argument of ``RingDilatedAttention.forward``, and the code that uses it.

    Attributes:
        query: [batch, local seq, heads, head_dim].
        key: [batch, local seq, key/value heads, head_dim].
        value: [batch, local seq, key/value heads, value_dim].
        key_padding_mask: bool [batch, local seq], True for a key to ignore.
        document_ids: int32 or int64 [batch, local seq], document number of each row; negative for no document.
        dropout_seed: int64 [1], on the CPU; None without dropout.
        sinks: float [heads], the score of each head's sink; None without sinks.
        is_causal: whether a query sees only keys at or before its own global position.
        seq_len: length of the global sequence; None means local length × ring size.
        return_lse: whether the caller wants the LSE too.
        dropout_p: probability that an attention weight is dropped in this call; 0 without dropout.
        score_mod: changes the score of each pair; None for no change. Compiled graphs have none.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    key_padding_mask: Tensor | None = None
    document_ids: Tensor | None = None
    dropout_seed: Tensor | None = None
    sinks: Tensor | None = None
    is_causal: bool = False
    seq_len: int | None = None
    return_lse: bool = False
    dropout_p: float = 0.0
    score_mod: ScoreMod | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The fields with tensors, in order: the tensor arguments of the autograd function and of operators."""
        marks = self.key_padding_mask, self.document_ids
        return self.query, self.key, self.value, *marks, self.dropout_seed, self.sinks

    @property
    def options(self) -> dict[str, Any]:
        """The other fields, as plain values."""
        return {name: getattr(self, name) for name in OPTIONS}

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None], options: Mapping[str, Any]) -> AttentionInputs:
        """Make the inputs from their :attr:`tensors` and :attr:`options`."""
        return cls(*tensors, **options)  # type: ignore[arg-type]

    @property
    def needs_gradients(self) -> bool:
        """Whether a backward may follow."""
        if not torch.is_grad_enabled():
            return False
        is_of_sinks = self.sinks is not None and self.sinks.requires_grad
        return self.query.requires_grad or self.key.requires_grad or self.value.requires_grad or is_of_sinks


TENSORS = ("query", "key", "value", "key_padding_mask", "document_ids", "dropout_seed", "sinks")
OPTIONS = tuple(field.name for field in fields(AttentionInputs) if field.name not in TENSORS)
