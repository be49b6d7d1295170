"""The tensors and options of one call of attention: one object from the module down to the kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionInputs:
    """What one call attends over on this rank, and how.

    Fields with a tensor come first; the others are plain values that a compiled graph holds as constants. A new
    per-call option takes a field here, an argument of ``RingDilatedAttention.forward``, and the code that acts on it.

    Attributes:
        query: [batch, local seq, heads, head_dim].
        key, value: [batch, local seq, key/value heads, head_dim].
        key_padding_mask: bool [batch, local seq], True for a key to be ignored.
        document_ids: int32 or int64 [batch, local seq].
        dropout_seed: int64 [1], on the CPU; None without dropout.
        is_causal: whether a query sees only keys at or before its own global position.
        seq_len: length of the global sequence; None means local length × ring size.
        return_lse: whether the caller wants the LSE too.
        dropout_p: probability that an attention weight is dropped in this call; 0 without dropout.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    key_padding_mask: Tensor | None = None
    document_ids: Tensor | None = None
    dropout_seed: Tensor | None = None
    is_causal: bool = False
    seq_len: int | None = None
    return_lse: bool = False
    dropout_p: float = 0.0

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The fields with a tensor, in order: what autograd and operators take."""
        return tuple(getattr(self, name) for name in TENSORS)

    @property
    def options(self) -> dict[str, Any]:
        """The other fields, as plain values."""
        return {name: getattr(self, name) for name in OPTIONS}

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None], options: Mapping[str, Any]) -> AttentionInputs:
        """The inputs with these :attr:`tensors` and :attr:`options`."""
        return cls(**dict(zip(TENSORS, tensors, strict=True)), **options)  # type: ignore[arg-type]

    @property
    def needs_gradients(self) -> bool:
        """Whether a backward may follow."""
        return torch.is_grad_enabled() and any(x.requires_grad for x in (self.query, self.key, self.value))


TENSORS = ("query", "key", "value", "key_padding_mask", "document_ids", "dropout_seed")
OPTIONS = tuple(field.name for field in fields(AttentionInputs) if field.name not in TENSORS)
