"""What a kernel is: the forward and backward of one tile, and its own word on what it cannot run.

A tile is one block-attention call. Its backward takes the out and LSE of a softmax over *more* keys than the
tile holds (P = exp(S - LSE)), which is what makes ring steps and branches add up to the exact gradient.
Masking is data here, never a special number: a row that sees no key has out = 0 and LSE = -inf, and no kernel
turns that into NaN.

Shapes: B batch, Hq query heads, Hk key/value heads, Sq query rows, Sk key rows, D head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ring_backends.kernels.dropout import Dropout
from ring_backends.kernels.merge import statistics_dtype


@dataclass(frozen=True)
class KernelInputs:
    """What one attention call asks of a kernel.

    device, dtype: of query, key and value. head_dim: D, in elements. has_key_mask: whether some tile comes
    with a key mask. needs_grad: whether the backward will be called. has_dropout: whether weights are dropped.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    has_key_mask: bool = False
    needs_grad: bool = True
    has_dropout: bool = False

    def __str__(self) -> str:
        mask = "with" if self.has_key_mask else "without"
        grad = "with" if self.needs_grad else "without"
        dropout = ", dropout" if self.has_dropout else ""
        return (
            f"device={self.device}, dtype={self.dtype}, head_dim={self.head_dim}, {mask} key mask, {grad} gradient"
            f"{dropout}"
        )


@dataclass(frozen=True)
class PairRule:
    """What decides about a query row and a key together: documents, and dropout.

    query_documents: int [B, Hq, Sq]; key_documents: int [B, Hk, Sk]; a query sees the keys of its own number. None
    for both means that all are of one. query_words: [B, Hq, Sq, 2]; key_words: [B, Hk, Sk]; as of `dropout`.
    """

    query_documents: Tensor | None = None
    key_documents: Tensor | None = None
    dropout: Dropout | None = None
    query_words: Tensor | None = None
    key_words: Tensor | None = None

    def part(self, batch: slice, rows: slice, keys: slice) -> PairRule:
        """The rule for some of the batch, some query rows and some keys alone."""
        rows_of = (None if x is None else x[batch, :, rows] for x in (self.query_documents, self.query_words))
        keys_of = (None if x is None else x[batch, :, keys] for x in (self.key_documents, self.key_words))
        (query_documents, query_words), (key_documents, key_words) = rows_of, keys_of
        return PairRule(query_documents, key_documents, self.dropout, query_words, key_words)


class Kernel(ABC):
    """One implementation of tile attention. Stateless: the registry holds one instance of each.

    `unverified` is None, or a sentence that says what the project's tests have not run.
    """

    name: ClassVar[str]
    device_types: ClassVar[tuple[str, ...] | None]
    """Device types the kernel runs on; None means any."""
    dtypes: ClassVar[tuple[torch.dtype, ...]]
    unverified: ClassVar[str | None] = None
    prefers_contiguous: ClassVar[bool] = False
    """Whether contiguous rows are worth a copy of strided ones."""
    has_dropout: ClassVar[bool] = False
    """Whether calls with dropout are its own. The math kernel's are, to which `pairwise` gives what has a rule."""

    def not_supported_reasons(self, inputs: KernelInputs) -> list[str]:
        """Why this kernel cannot run such a call, one sentence each; an empty list means that it can."""
        reasons = []
        if self.device_types is not None and inputs.device.type not in self.device_types:
            reasons.append(f"it runs on {' and '.join(self.device_types)} tensors only")
        if inputs.dtype not in self.dtypes:
            reasons.append(f"it takes {', '.join(str(dtype) for dtype in self.dtypes)} only")
        if inputs.has_dropout and not self.has_dropout:
            reasons.append("it has no dropout that is the same however the sequence is sharded")
        return reasons

    @abstractmethod
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool,
        scale: float,
        key_mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Attention of every query row over the keys of this tile.

        query: [B, Hq, Sq, D]; key, value: [B, Hk, Sk, D] with Hq % Hk == 0; query head h reads key/value head
        h // (Hq // Hk). All sizes are at least 1, strides are free. is_causal: row t sees keys 0 ... t; only
        with Sq == Sk. scale multiplies the scores. key_mask: bool [B, Hk, Sk], True = ignore this key.

        Returns (out, lse): out [B, Hq, Sq, D] in the dtype of query; lse [B, Hq, Sq] in the statistics dtype.
        A row whose visible keys are all masked has out = 0, lse = -inf. Records no autograd history of its
        own: call it with gradients off, as an autograd.Function does.
        """

    @abstractmethod
    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        is_causal: bool,
        scale: float,
        key_mask: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This tile's share of the gradients of the whole softmax.

        grad_out, out: [B, Hq, Sq, D], any float dtype; lse: [B, Hq, Sq]. out and lse belong to the *global*
        softmax, over this tile's keys and any others. The rest is as in `forward`. A row with lse = -inf
        gives and gets gradient 0.

        Returns (grad_query, grad_key, grad_value), shaped as query, key and value, each in the dtype of the
        inputs or in the statistics dtype: the caller adds tiles up in the statistics dtype.
        """


def check_tile(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, key_mask: Tensor | None) -> None:
    """Assert the shapes that `Kernel.forward` promises (our own callers' duty, hence no ValueError)."""
    batch, num_heads, seq_q, head_dim = query.shape
    num_kv_heads, seq_k = key.shape[1], key.shape[2]
    # The ATen CPU operator reads through a null pointer where there is no key.
    assert query.numel() > 0, f"empty query {tuple(query.shape)}"
    assert key.numel() > 0, f"empty key {tuple(key.shape)}"
    assert key.shape == (batch, num_kv_heads, seq_k, head_dim), (query.shape, key.shape)
    assert value.shape == key.shape, (key.shape, value.shape)
    assert num_heads % num_kv_heads == 0, (num_heads, num_kv_heads)
    assert not is_causal or seq_q == seq_k, f"a causal tile is square, got {seq_q} x {seq_k}"
    if key_mask is not None:
        assert key_mask.dtype == torch.bool, key_mask.dtype
        assert key_mask.shape == (batch, num_kv_heads, seq_k), (key_mask.shape, key.shape)


def blind_rows(key_mask: Tensor, num_heads: int, seq_q: int, is_causal: bool) -> Tensor:
    """Which query rows see no key at all because of `key_mask` [B, Hk, Sk]: bool [B, Hq, Sq].

    Operators report such rows each in their own way (LSE 0, NaN, -inf), so it is derived from the mask
    instead.
    """
    if is_causal:
        blind = (~key_mask).cumsum(-1, dtype=torch.int32) == 0
    else:
        blind = key_mask.all(-1, keepdim=True).expand(-1, -1, seq_q)
    return blind.repeat_interleave(num_heads // key_mask.shape[1], dim=1)


def blank_rows(out: Tensor, lse: Tensor, key_mask: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Give the rows that see no key their agreed values: out = 0, LSE = -inf."""
    blind = blind_rows(key_mask, out.shape[1], out.shape[2], is_causal)
    return out.masked_fill(blind.unsqueeze(-1), 0.0), lse.masked_fill(blind, -torch.inf)


def lse_for_backward(lse: Tensor) -> Tensor:
    """LSE with +inf for -inf, so that P = exp(S - LSE) is 0, not NaN, in rows that see nothing.

    +inf is also what the CUDA operators themselves use for rows beyond the end of the sequence.
    """
    return lse.masked_fill(lse == -torch.inf, torch.inf)


def expand_heads(x: Tensor, num_heads: int) -> Tensor:
    """Key or value [B, Hk, ...] as [B, Hq, ...], for operators without grouped heads; x if Hk == Hq."""
    repeats = num_heads // x.shape[1]
    return x if repeats == 1 else x.repeat_interleave(repeats, dim=1)


def sum_heads(grad: Tensor, num_kv_heads: int) -> Tensor:
    """Gradient [B, Hq, Sk, D] of expanded heads summed to [B, Hk, Sk, D], in the statistics dtype."""
    repeats = grad.shape[1] // num_kv_heads
    if repeats == 1:
        return grad
    grouped: Tensor = grad.unflatten(1, (num_kv_heads, repeats))
    return grouped.sum(2, dtype=statistics_dtype(grad.dtype))
