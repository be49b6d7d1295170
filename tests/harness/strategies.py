"""Hypothesis strategies: branches and whole attention calls, every one of them valid.

A case is a small value: a failure report shows it whole, and it can be pasted into a test. Its tensors follow from its
seed. The strategies draw no invalid combinations, so that shrinking is fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ring_backends.testing.reference import reference_dropout

# Small, prime, powers of two and their neighbours: where index arithmetic goes wrong.
_TELLING_NUMBERS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 16, 17, 24, 31, 32, 33, 48, 61, 64, 96, 101, 127, 128)

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class AttentionCase:
    """One call of dilated attention on a whole sequence.

    ``masked`` says which keys are ignored: None, no mask at all; ``"random"``, each with probability a third;
    ``"rows"``, all keys of every other batch entry (the first among them), and a tail of the others;
    ``"all"``, every key. ``spoiled`` are (tensor, position, number): all heads and components of that row of
    ``"query"``, ``"key"``, ``"value"`` or ``"grad_out"`` are this number instead. ``documents`` says which are
    packed: None, no word of documents; ``"some"``, of random lengths, with rows of none between them, one after the
    other; ``"shuffled"``, the same in no order. ``replica`` is the ring's place among those beside it, of which
    dropout, at ``dropout_p``, depends.
    """

    seq_len: int
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    batch: int = 1
    num_heads: int = 1
    num_kv_heads: int = 1
    head_dim: int = 4
    is_causal: bool = False
    head_mode: str = "all"
    offset: str | None = None
    padding: str = "masked"
    scale: float | None = None
    masked: str | None = None
    documents: str | None = None
    dropout_p: float = 0.0
    replica: int = 0
    dtype: torch.dtype = torch.float32
    seed: int = 0
    spoiled: tuple[tuple[str, int, float], ...] = ()

    def __repr__(self) -> str:
        """The call that makes this case, without what has its default value."""
        shown = [f for f in fields(self) if f.name in _ALWAYS_SHOWN or getattr(self, f.name) != f.default]
        return f"AttentionCase({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in shown)})"

    def options(self) -> dict[str, Any]:
        """Keyword arguments for ``dilated_attention`` and ``reference_attention``, tensors excepted."""
        return {
            "segment_lengths": self.segment_lengths,
            "dilation_rates": self.dilation_rates,
            "is_causal": self.is_causal,
            "head_mode": self.head_mode,
            "offset": self.offset,
            "padding": self.padding,
            "scale": self.scale,
        }

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """query, key, value, gradient of the output, and key_padding_mask, the same at every call.

        query and the gradient are ``[batch, seq_len, num_heads, head_dim]``, key and value have num_kv_heads
        instead; all are standard normal in ``dtype`` and need no gradient. The mask is bool
        ``[batch, seq_len]``, or None. Cases that differ in dtype alone hold the same numbers, rounded.
        """
        generator = torch.Generator().manual_seed(self.seed)

        def normal(num_heads: int) -> Tensor:
            shape = (self.batch, self.seq_len, num_heads, self.head_dim)
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)

        query, key, value = normal(self.num_heads), normal(self.num_kv_heads), normal(self.num_kv_heads)
        grad_out = normal(self.num_heads)
        named = {"query": query, "key": key, "value": value, "grad_out": grad_out}
        for name, position, number in self.spoiled:
            named[name][:, position] = number
        return query, key, value, grad_out, self._key_padding_mask(generator)

    def document_ids(self) -> Tensor | None:
        """int64 ``[batch, seq_len]``, the same at every call, or None."""
        if self.documents is None:
            return None
        generator = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(-1, 4, (self.batch, self.seq_len), generator=generator)
        if self.documents == "shuffled":
            return ids
        if self.documents == "some":
            return ids.sort(dim=1).values.roll(self.seq_len // 5, 1)
        raise ValueError(f'documents = {self.documents!r}: it must be None, "some" or "shuffled".')

    def weight_factors(self) -> Tensor | None:
        """What dropout multiplies the attention weights by, ``[batch, num_heads, seq_len, seq_len]``, or None."""
        if not self.dropout_p:
            return None
        return reference_dropout(
            self.dropout_p, self.seed, self.replica, self.batch, self.num_heads, range(self.seq_len)
        )

    def _key_padding_mask(self, generator: torch.Generator) -> Tensor | None:
        shape = (self.batch, self.seq_len)
        if self.masked is None:
            return None
        if self.masked == "all":
            return torch.ones(shape, dtype=torch.bool)
        if self.masked == "random":
            return torch.rand(shape, generator=generator) < 1 / 3
        if self.masked == "rows":
            lengths = torch.randint(1, self.seq_len + 1, (self.batch,), generator=generator)
            lengths[::2] = 0
            return torch.arange(self.seq_len)[None, :] >= lengths[:, None]
        raise ValueError(f'masked = {self.masked!r}: it must be None, "random", "rows" or "all".')


_ALWAYS_SHOWN = ("seq_len", "segment_lengths", "dilation_rates")


@st.composite
def branches(draw: st.DrawFn, max_n: int = 200, *, max_branches: int = 4) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(segment_lengths, dilation_rates) of 1 to ``max_branches`` branches, for sequences of up to ``max_n``.

    Lengths go from 1 to beyond ``max_n``, rates from 1 to beyond their length; small numbers, primes,
    divisors, lengths about ``max_n`` and repeated branches are drawn more often than chance would.
    """
    pairs: list[tuple[int, int]] = []
    for _ in range(draw(st.integers(1, max_branches))):
        if pairs and draw(st.integers(0, 5)) == 5:
            pairs.append(draw(st.sampled_from(pairs)))
        else:
            w = draw(_segment_lengths(max_n))
            pairs.append((w, draw(_dilation_rates(w))))
    return tuple(w for w, _ in pairs), tuple(r for _, r in pairs)


def _segment_lengths(max_n: int) -> st.SearchStrategy[int]:
    telling = [w for w in _TELLING_NUMBERS if w < max_n]
    return st.one_of(
        st.sampled_from([*telling, max_n]),
        st.integers(1, max_n + 3),
        st.sampled_from([max_n, max_n + 1, 2 * max_n, max(1, max_n - 1), max(1, max_n // 2)]),
    )


def _dilation_rates(w: int) -> st.SearchStrategy[int]:
    divisors = [r for r in range(1, min(w, 16) + 1) if w % r == 0]
    return st.one_of(
        st.integers(1, 4),
        st.integers(2, 5),
        st.sampled_from(divisors),
        st.integers(1, min(w, 16) + 1),
        st.sampled_from([w, w + 1, 2 * w + 1]),
    )


@st.composite
def attention_cases(
    draw: st.DrawFn,
    *,
    max_n: int = 200,
    max_heads: int = 6,
    head_dims: Sequence[int] = (4, 1, 3, 8, 16),
    head_modes: Sequence[str] = ("all", "grouped"),
    offsets: Sequence[str | None] = (None, "mod", "block", "branch"),
    paddings: Sequence[str] = ("masked", "zeros"),
    causal: Sequence[bool] = (False, True),
    masks: Sequence[str | None] = (None, "random", "rows", "all"),
    documents: Sequence[str | None] = (None, "some", "shuffled"),
    dropout_ps: Sequence[float] = (0.0, 0.0, 0.3),
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> AttentionCase:
    """Valid :class:`AttentionCase` values; each option shrinks towards the first of its choices."""
    some, many = min(12, max_n), max(1, max_n // 4)
    seq_len = draw(st.one_of(st.integers(1, some), st.integers(1, max_n), st.integers(many, max_n)))
    segment_lengths, dilation_rates = draw(branches(seq_len, max_branches=min(4, max_heads)))
    padding = draw(st.sampled_from(paddings))
    if padding == "zeros":
        dilation_rates = tuple(map(_rate_for_zeros(seq_len), segment_lengths, dilation_rates))
    head_mode = draw(st.sampled_from(head_modes))
    fewest_heads = len(segment_lengths) if head_mode == "grouped" else 1
    num_heads = draw(st.integers(fewest_heads, max_heads))
    return AttentionCase(
        seq_len=seq_len,
        segment_lengths=segment_lengths,
        dilation_rates=dilation_rates,
        batch=draw(st.integers(1, 3)),
        num_heads=num_heads,
        num_kv_heads=draw(st.sampled_from([h for h in range(num_heads, 0, -1) if num_heads % h == 0])),
        head_dim=draw(st.sampled_from(head_dims)),
        is_causal=draw(st.sampled_from(causal)),
        head_mode=head_mode,
        offset=draw(st.sampled_from(offsets)),
        padding=padding,
        scale=draw(st.sampled_from([None, 1.0, 0.1])),
        masked=draw(st.sampled_from(masks)),
        documents=draw(st.sampled_from(documents)) if padding == "masked" else None,
        dropout_p=draw(st.sampled_from(dropout_ps)),
        dtype=draw(st.sampled_from(dtypes)),
        seed=draw(st.integers(0, 2**16)),
    )


def _rate_for_zeros(seq_len: int) -> Callable[[int, int], int]:
    """``padding="zeros"`` wants w % r == 0 where the segment is shorter than the sequence."""
    return lambda w, r: math.gcd(w, r) if w < seq_len else r
