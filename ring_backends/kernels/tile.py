"""The rows of one tile, as its kernel gets them, and what several kernels do with such rows.

A tile is some query rows against some key rows. The backward takes the out and LSE of the softmax over *all* keys, not
only those of the tile (P = exp(S − LSE)). So the gradients of all tiles add up to the exact gradient. A row that sees
no key has out = 0 and LSE = −inf. No kernel returns NaN for such a row.

Shapes: B batch, Hq query heads, Hk key/value heads, Sq query rows, Sk key rows, D head dim of query and key, V value
dim, which is that of value and out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ring_backends.kernels.dropout import Dropout
from ring_backends.kernels.merge import statistics_dtype
from ring_backends.kernels.score_mod import PairScores
from ring_backends.schedule.bands import Band


@dataclass(frozen=True)
class PairRule:
    """Documents, dropout and score_mod, which depend on a query row and a key together.

    Attributes:
        query_documents: int [B, Hq, Sq]; a query sees the keys of its own document. None means one document.
        key_documents: int [B, Hk, Sk]; None if ``query_documents`` is None.
        dropout: the dropout of the call; None without dropout.
        query_words: int32 [B, Hq, Sq, 2], the two 32-bit words of each query that ``dropout`` hashes.
        key_words: int32 [B, Hk, Sk], the 32-bit word of each key that ``dropout`` hashes.
        scores: the score_mod of the call and its arguments; None without.
    """

    query_documents: Tensor | None = None
    key_documents: Tensor | None = None
    dropout: Dropout | None = None
    query_words: Tensor | None = None
    key_words: Tensor | None = None
    scores: PairScores | None = None

    @property
    def needs_math(self) -> bool:
        """Whether the math kernel computes the whole tile."""
        return self.dropout is not None or self.scores is not None

    def part(self, batch: slice, rows: slice, keys: slice) -> PairRule:
        """The rule for a part of the batch, of the query rows and of the keys. It has no score_mod."""
        assert self.scores is None
        rows_of = (None if x is None else x[batch, :, rows] for x in (self.query_documents, self.query_words))
        keys_of = (None if x is None else x[batch, :, keys] for x in (self.key_documents, self.key_words))
        (query_documents, query_words), (key_documents, key_words) = rows_of, keys_of
        return PairRule(query_documents, key_documents, self.dropout, query_words, key_words)

    def reversed(self) -> PairRule:
        """The rule for the query rows and keys in reverse order."""
        tensors = (self.query_documents, self.key_documents, self.query_words, self.key_words)
        query_documents, key_documents, query_words, key_words = (None if x is None else x.flip(2) for x in tensors)
        scores = None if self.scores is None else self.scores.reversed()
        return PairRule(query_documents, key_documents, self.dropout, query_words, key_words, scores)


@dataclass(frozen=True)
class TileInputs:
    """The rows of one tile, and what its kernel needs to know.

    Attributes:
        query: [B, Hq, Sq, D]; all sizes are at least 1, strides are free.
        key, value: [B, Hk, Sk, D] and [B, Hk, Sk, V] with Hq % Hk == 0; query head h reads key/value head
            h // (Hq // Hk).
        scale: factor on the scores. It is positive: see :func:`~ring_backends.kernels.steps.split_scale`.
        is_causal: whether row t sees only keys 0 … t. Requires Sq == Sk.
        key_mask: bool [B, Hk, Sk], True = ignore this key; None for none.
        band: a band that is neither causal nor full, else None. Only for kernels with ``takes_bands``, or for a tile
            that :meth:`reversed` makes causal.
        rule: documents, dropout and score_mod; None without. Only for :mod:`ring_backends.kernels.per_tile`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    is_causal: bool = False
    key_mask: Tensor | None = None
    band: Band | None = None
    rule: PairRule | None = None

    def __post_init__(self) -> None:  # the arguments of users were checked before
        query, key, value = shapes = self.query.shape, self.key.shape, self.value.shape
        batch, num_heads, seq_q, head_dim = query
        _, num_kv_heads, seq_k, value_dim = value
        # The ATen CPU operator dereferences a null pointer if there is no key.
        assert 0 not in query, shapes
        assert 0 not in value, shapes
        assert key == (batch, num_kv_heads, seq_k, head_dim), shapes
        assert value == (batch, num_kv_heads, seq_k, value_dim), shapes
        assert num_heads % num_kv_heads == 0, shapes
        assert not self.is_causal or seq_q == seq_k, f"a causal tile is square, got {seq_q} x {seq_k}"
        if self.key_mask is not None:
            assert self.key_mask.dtype == torch.bool, self.key_mask.dtype
            assert self.key_mask.shape == (batch, num_kv_heads, seq_k), (self.key_mask.shape, key)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    def reversed(self) -> TileInputs:
        """The rows of an anticausal tile in reverse order, in which it is causal."""
        mask = None if self.key_mask is None else self.key_mask.flip(2)
        rule = None if self.rule is None else self.rule.reversed()
        query, key, value = (x.flip(2) for x in self.tensors)
        return TileInputs(query, key, value, self.scale, True, mask, rule=rule)


def blank_rows(out: Tensor, lse: Tensor, tile: TileInputs) -> tuple[Tensor, Tensor]:
    """Set out = 0 and LSE = −inf in the rows that see no key because of the mask.

    The operators return different LSEs for such rows (0, NaN, −inf). So the rows are found from the mask.
    """
    if tile.key_mask is None:
        return out, lse
    if tile.is_causal:
        blind = (~tile.key_mask).cumsum(-1, dtype=torch.int32) == 0
    else:
        blind = tile.key_mask.all(-1, keepdim=True).expand(-1, -1, out.shape[2])
    blind = expand_heads(blind, out.shape[1])
    return out.masked_fill(blind.unsqueeze(-1), 0.0), lse.masked_fill(blind, -torch.inf)


def lse_for_backward(lse: Tensor) -> Tensor:
    """Replace −inf by +inf in the LSE. P = exp(S − LSE) is then 0, and not NaN, in rows that see no key.

    The CUDA operators themselves use +inf for rows beyond the end of the sequence.
    """
    return lse.nan_to_num(torch.nan, torch.inf, torch.inf)


def expand_heads(x: Tensor, num_heads: int) -> Tensor:
    """Repeat key or value [B, Hk, …] to [B, Hq, …], for operators that do not support grouped heads."""
    repeats = num_heads // x.shape[1]
    return x if repeats == 1 else x.repeat_interleave(repeats, dim=1)


def sum_heads(grad: Tensor, num_kv_heads: int) -> Tensor:
    """Sum a gradient [B, Hq, Sk, D] after :func:`expand_heads` to [B, Hk, Sk, D], in the statistics dtype."""
    repeats = grad.shape[1] // num_kv_heads
    if repeats == 1:
        return grad
    grouped: Tensor = grad.unflatten(1, (num_kv_heads, repeats))
    return grouped.sum(2, dtype=statistics_dtype(grad.dtype))
