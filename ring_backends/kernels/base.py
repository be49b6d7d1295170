"""The interface of a kernel: the forward and backward of one tile, and the reasons why it cannot run.

A tile is one kernel call: some query rows against some key rows. The backward takes the out and LSE of the softmax over
*all* keys, not only those of the tile (P = exp(S − LSE)). So the gradients of all tiles add up to the exact gradient. A
row that sees no key has out = 0 and LSE = −inf. No kernel returns NaN for such a row.

Shapes: B batch, Hq query heads, Hk key/value heads, Sq query rows, Sk key rows, D head dim of query and key, V value
dim, which is that of value and out.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from ring_backends.kernels.dropout import Dropout
from ring_backends.kernels.merge import statistics_dtype
from ring_backends.kernels.operators import operator_reasons
from ring_backends.kernels.score_mod import PairScores, ScoreMod
from ring_backends.schedule.bands import Band

RAN_ON_ONE_GPU = (
    "of all GPUs, the tests have run it on an H100 with torch 2.11; to test it on another, run pytest --gpu"
)


@dataclass(frozen=True)
class KernelInputs:
    """The properties of a call of attention by which a kernel decides whether it can run it.

    Attributes:
        device, dtype: of query, key and value.
        head_dim: D, in elements.
        has_key_mask: whether tiles may have a key mask.
        needs_grad: whether the backward may be called.
        has_dropout: whether the call has dropout.
        has_documents: whether the call has document ids.
        score_mod: the score_mod of the call; None without.
        rows: rows per head in a segment, w / r, of the branch with the most work; None if unknown. It only decides
            which kernel is fastest, and not which can run.
        is_dilated: whether the kernel is for branches with a dilation rate above 1. Like ``rows``, it only decides
            which kernel is fastest.
        has_window: whether the branch with the most work has a window, whose tiles kernels without bands get in pieces.
            It only decides which kernel is fastest.
        is_step: whether the call is a step of decoding, whose tiles have another number of keys each time. It only
            decides which kernel is fastest.
        value_dim: V, in elements; None if it is D.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    has_key_mask: bool = False
    needs_grad: bool = True
    has_dropout: bool = False
    has_documents: bool = False
    score_mod: ScoreMod | None = None
    rows: int | None = None
    is_dilated: bool = False
    has_window: bool = False
    is_step: bool = False
    value_dim: int | None = None

    @property
    def has_score_mod(self) -> bool:
        return self.score_mod is not None

    @property
    def dims(self) -> tuple[int, int]:
        """D and V."""
        return self.head_dim, self.head_dim if self.value_dim is None else self.value_dim

    @property
    def widest(self) -> str:
        """The name of the larger of D and V, for messages."""
        return "value_dim" if self.dims[1] > self.dims[0] else "head_dim"

    def __str__(self) -> str:
        mask = "with" if self.has_key_mask else "without"
        grad = "with" if self.needs_grad else "without"
        documents = ", documents" if self.has_documents else ""
        dropout = ", dropout" if self.has_dropout else ""
        score_mod = ", score_mod" if self.has_score_mod else ""
        value_dim = "" if self.value_dim in (None, self.head_dim) else f"value_dim={self.value_dim}, "
        return (
            f"device={self.device}, dtype={self.dtype}, head_dim={self.head_dim}, {value_dim}{mask} key mask, "
            f"{grad} gradient{documents}{dropout}{score_mod}"
        )


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
        scale: factor on the scores. It is positive: see :func:`split_scale`.
        is_causal: whether row t sees only keys 0 … t. Requires Sq == Sk.
        key_mask: bool [B, Hk, Sk], True = ignore this key; None for none.
        band: a band that is neither causal nor full, else None. Only for kernels with ``takes_bands``, or for a tile
            that :meth:`reversed` makes causal.
        rule: documents, dropout and score_mod; None without. Only for :mod:`ring_backends.kernels.pairwise`.
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


class Kernel(ABC):
    """One implementation of tile attention. It has no state: the registry holds one instance of each.

    Attributes:
        name: value of the argument ``kernel`` that selects it.
        device_types: the device types it runs on; None means any.
        dtypes: the dtypes it supports.
        operators: the private operators of torch that it calls, as in :mod:`ring_backends.kernels.operators`.
        unverified: a sentence about what the project's tests have not run; None if they run everything.
        prefers_contiguous: whether it is faster to copy strided rows into contiguous memory first, except those of out
            in a backward, which it reads once.
        gathers_rows_outermost: whether copies of strided rows get the memory layout [B, S, H, D], if it does not prefer
            contiguous ones. The rows of out and grad_out then always have it.
        reads_strided_rows: whether it is as fast on strided rows as on copies. Tiles are then cut to avoid copies.
        has_dropout: whether it can run calls with dropout.
        has_score_mod: whether it can run calls with a score_mod, at least with some.
        takes_value_dim: whether V may differ from D. For other kernels, the narrower rows are padded with zeros
            (:mod:`ring_backends.kernels.widths`).
        takes_bands: whether it runs tiles with any band. Other kernels run full and causal tiles.
        reads_ignored_keys: whether a NaN in a key that ``key_mask`` ignores would reach results. The engine then sets
            ignored keys and values to 0.
    """

    name: ClassVar[str]
    device_types: ClassVar[tuple[str, ...] | None]
    dtypes: ClassVar[tuple[torch.dtype, ...]]
    operators: ClassVar[tuple[str, ...]] = ()
    unverified: ClassVar[str | None] = None
    prefers_contiguous: ClassVar[bool] = False
    gathers_rows_outermost: ClassVar[bool] = False
    reads_strided_rows: ClassVar[bool] = False
    has_dropout: ClassVar[bool] = False
    has_score_mod: ClassVar[bool] = False
    takes_value_dim: ClassVar[bool] = False
    takes_bands: ClassVar[bool] = False
    reads_ignored_keys: ClassVar[bool] = False

    def not_supported_reasons(self, inputs: KernelInputs) -> list[str]:
        """Return the reasons why this kernel cannot run such a call, one sentence each; empty if it can.

        Tensors on device "meta" stand for tensors on any device, so there the device is never a reason.
        """
        reasons = operator_reasons(self.operators)
        if self.device_types is not None and inputs.device.type not in (*self.device_types, "meta"):
            reasons.append(f"it runs on {' and '.join(self.device_types)} tensors only")
        if inputs.dtype not in self.dtypes:
            reasons.append(f"it supports {', '.join(str(dtype) for dtype in self.dtypes)} only")
        if inputs.has_dropout and not self.has_dropout:
            reasons.append("its dropout would depend on how the sequence is sharded")
        if inputs.has_score_mod and not self.has_score_mod:
            reasons.append("it cannot call a score_mod")
        return reasons

    def auto_order(self, inputs: KernelInputs) -> int | None:
        """Where ``"auto"`` tries this kernel for such a call: lower numbers first; None if it never chooses it."""
        return 1

    @abstractmethod
    def forward(self, tile: TileInputs) -> tuple[Tensor, Tensor]:
        """Attend from every query row to the keys of this tile. Called without gradient tracking.

        Returns:
            (out, lse): out [B, Hq, Sq, V] in the dtype of query; lse [B, Hq, Sq] in the statistics dtype. A row whose
            visible keys are all masked has out = 0 and lse = −inf.
        """

    @abstractmethod
    def backward(self, tile: TileInputs, grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute this tile's contribution to the gradients of the global softmax.

        Args:
            grad_out, out: [B, Hq, Sq, V], any float dtype.
            lse: [B, Hq, Sq]. ``out`` and ``lse`` belong to the *global* softmax, over this tile's keys and all others.

        Returns:
            (grad_query, grad_key, grad_value), shaped as query, key and value, in the dtype of the inputs or in the
            statistics dtype. A row with lse = −inf has gradient 0 and contributes 0 to every key.
        """


@lru_cache
def split_scale(scale: float) -> tuple[float, float]:
    """Split a factor on the scores into a sign for the queries (1, −1 or 0) and a positive factor for kernels.

    Many kernels set the score of a hidden pair to −inf before they scale it, so any other factor would give NaN. A
    factor that is 0 in fp32 counts as 0.
    """
    if abs(scale) < torch.finfo(torch.float32).tiny:
        return 0.0, 1.0
    return math.copysign(1.0, scale), abs(scale)


def blind_rows(key_mask: Tensor, num_heads: int, seq_q: int, is_causal: bool) -> Tensor:
    """Which query rows see no key because of ``key_mask`` [B, Hk, Sk]: bool [B, Hq, Sq].

    The operators return different LSEs for such rows (0, NaN, −inf). So the rows are found from the mask.
    """
    if is_causal:
        blind = (~key_mask).cumsum(-1, dtype=torch.int32) == 0
    else:
        blind = key_mask.all(-1, keepdim=True).expand(-1, -1, seq_q)
    return blind.repeat_interleave(num_heads // key_mask.shape[1], dim=1)


def blank_rows(out: Tensor, lse: Tensor, key_mask: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Set out = 0 and LSE = −inf in the rows that see no key."""
    blind = blind_rows(key_mask, out.shape[1], out.shape[2], is_causal)
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
