"""Hypothesis strategies for valid branches and valid attention calls.

A case is a small dataclass. A failure report shows its whole repr, which can be pasted into a test. Its tensors follow
from its seed. The strategies draw no invalid combinations, so that shrinking is fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from ring_backends.ring.ring import Ring
from ring_backends.schedule.layout import LayoutKind, SequenceLayout
from ring_backends.schedule.pattern import DilatedPattern
from ring_backends.schedule.ring_schedule import RingSchedule
from ring_backends.testing.marks import matrix_but
from ring_backends.testing.reference import reference_dropout
from ring_backends.testing.score_functions import NAMES, modified_scores, score_function

# Small numbers, primes, powers of two and their neighbours tend to reveal errors in index arithmetic.
_CRITICAL_NUMBERS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 16, 17, 24, 31, 32, 33, 48, 61, 64, 96, 101, 127, 128)

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class AttentionCase:
    """One call of dilated attention on a whole sequence.

    Attributes:
        value_dim: width of a value; None if it is ``head_dim``.
        masked: the keys that are ignored. None: there is no mask. ``"random"``: each key with probability 1/3.
            ``"rows"``: all keys of every other batch entry, from the first, and a tail of the others. ``"all"``:
            every key.
        spoiled: (tensor, position, number). This number replaces all heads and components of that row of ``"query"``,
            ``"key"``, ``"value"`` or ``"grad_out"``.
        sinks: whether every head has a sink.
        score_mod: name of a function of :mod:`ring_backends.testing.score_functions`.
        documents: the packed documents. None: there are no document ids. ``"some"``: consecutive documents of random
            lengths, and a run of rows without a document. ``"shuffled"``: each row has a random id, or none.
            ``"resumed"``: two documents take turns, for 40 rows each.
        replica: the index of the ring in the world. The dropout mask depends on it.
        buffer_bytes: that of the ring. With 0, most rows of such small calls travel along chains.
        ulysses_size: how many neighbouring ranks exchange rows for heads. The harness takes the largest divisor of this
            number that divides the ring size and ``num_heads``.
    """

    seq_len: int
    segment_lengths: tuple[int | None, ...]
    dilation_rates: tuple[int, ...]
    batch: int = 1
    num_heads: int = 1
    num_kv_heads: int = 1
    head_dim: int = 4
    value_dim: int | None = None
    is_causal: bool = False
    head_mode: str = "all"
    offset: str | None = None
    padding: str = "masked"
    window_lengths: tuple[int | None, ...] | None = None
    scale: float | None = None
    masked: str | None = None
    documents: str | None = None
    sinks: bool = False
    score_mod: str | None = None
    dropout_p: float = 0.0
    replica: int = 0
    dtype: torch.dtype = torch.float32
    seed: int = 0
    spoiled: tuple[tuple[str, int, float], ...] = ()
    buffer_bytes: int | None = 0
    ulysses_size: int = 1

    def __repr__(self) -> str:
        """The constructor call, without default values."""
        shown = [f for f in fields(self) if f.name in _ALWAYS_SHOWN or getattr(self, f.name) != f.default]
        return f"AttentionCase({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in shown)})"

    @property
    def dims(self) -> tuple[int, int]:
        """The widths of a key and of a value."""
        return self.head_dim, self.head_dim if self.value_dim is None else self.value_dim

    def pattern_options(self) -> dict[str, Any]:
        """Keyword arguments for ``DilatedPattern``."""
        return {
            "segment_lengths": self.segment_lengths,
            "dilation_rates": self.dilation_rates,
            "head_mode": self.head_mode,
            "offset": self.offset,
            "padding": self.padding,
            "window_lengths": self.window_lengths,
        }

    def schedule(self, ring_size: int, layout: LayoutKind = "contiguous") -> RingSchedule:
        """The schedule of this call on a ring."""
        layout_of_call = SequenceLayout(self.seq_len, ring_size, layout)
        pattern = DilatedPattern(**self.pattern_options())
        group_size = math.gcd(self.ulysses_size, ring_size, self.num_heads)
        heads = self.num_heads, self.num_kv_heads
        return RingSchedule(pattern, layout_of_call, *heads, self.is_causal, group_size)

    def on_ring(self, ring: Ring) -> Ring:
        """The ring with the options of the case."""
        ring = replace(ring, buffer_bytes=self.buffer_bytes)
        if self.ulysses_size == 1:
            return ring
        return replace(ring, ulysses_size=math.gcd(self.ulysses_size, ring.size), fits_heads=True)

    def options(self) -> dict[str, Any]:
        """Keyword arguments for ``dilated_attention`` and ``reference_attention``, without tensors."""
        return {**self.pattern_options(), "is_causal": self.is_causal, "scale": self.scale}

    def reference_options(self) -> dict[str, Any]:
        """Keyword arguments for ``reference_attention``, tensors included."""
        return {
            **self.options(),
            "key_padding_mask": self.tensors()[4],
            "document_ids": self.document_ids(),
            "weight_factors": self.weight_factors(),
            "sinks": self.sink_scores(),
            "modified_scores": self.modified_scores(),
        }

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """query, key, value, gradient of the output, and key_padding_mask. Every call returns equal tensors.

        query and the gradient are ``[batch, seq_len, num_heads, …]``. key and value have num_kv_heads heads. The last
        dim is ``head_dim`` of query and key, and ``value_dim`` of value and the gradient.
        All are standard normal in ``dtype`` and do not require gradients. The mask is bool ``[batch, seq_len]``, or
        None. Cases that differ only in dtype hold the same numbers, rounded.
        """
        generator = torch.Generator().manual_seed(self.seed)

        def normal(num_heads: int, dim: int) -> Tensor:
            shape = (self.batch, self.seq_len, num_heads, dim)
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype)

        head_dim, value_dim = self.dims
        query, key = (normal(heads, head_dim) for heads in (self.num_heads, self.num_kv_heads))
        value, grad_out = (normal(heads, value_dim) for heads in (self.num_kv_heads, self.num_heads))
        named = {"query": query, "key": key, "value": value, "grad_out": grad_out}
        for name, position, number in self.spoiled:
            named[name][:, position] = number
        return query, key, value, grad_out, self._key_padding_mask(generator)

    def document_ids(self) -> Tensor | None:
        """int64 ``[batch, seq_len]``, or None. Every call returns equal tensors."""
        if self.documents is None:
            return None
        generator = torch.Generator().manual_seed(self.seed + 1)
        ids = torch.randint(-1, 4, (self.batch, self.seq_len), generator=generator)
        if self.documents == "shuffled":
            return ids
        if self.documents == "some":
            return ids.sort(dim=1).values.roll(self.seq_len // 5, 1)
        if self.documents == "resumed":
            return (torch.arange(self.seq_len) // 40 % 2).expand(self.batch, -1)
        raise ValueError(f'documents = {self.documents!r}: it must be None, "some", "shuffled" or "resumed".')

    def sink_scores(self) -> Tensor | None:
        """The scores of the sinks, fp64 ``[num_heads]``, or None. Every call returns equal tensors."""
        if not self.sinks:
            return None
        generator = torch.Generator().manual_seed(self.seed + 2)
        return torch.randn(self.num_heads, generator=generator, dtype=torch.float64)

    def score_function(self, device: str = "cpu") -> Any:
        """The score_mod for tensors on a device, or None."""
        if self.score_mod is None:
            return None
        return score_function(self.score_mod, self.batch, self.seq_len, self.num_heads, self.seed, device)

    def modified_scores(self) -> Callable[[Tensor], Tensor] | None:
        """The score_mod as a function of all scores, for the reference, or None."""
        return None if self.score_mod is None else partial(modified_scores, self.score_mod, seed=self.seed)

    def weight_factors(self) -> Tensor | None:
        """The dropout factors of the attention weights, ``[batch, num_heads, seq_len, seq_len]``, or None."""
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
def branches(
    draw: st.DrawFn, max_n: int = 200, *, max_branches: int = 4
) -> tuple[tuple[int | None, ...], tuple[int, ...]]:
    """(segment_lengths, dilation_rates) of 1 to ``max_branches`` branches, for sequences of up to ``max_n``.

    Lengths range from 1 to more than ``max_n``, and may be None. Rates range from 1 to more than their length. Small
    numbers, primes, divisors, lengths near ``max_n`` and repeated branches are drawn with increased probability.
    """
    pairs: list[tuple[int | None, int]] = []
    for _ in range(draw(st.integers(1, max_branches))):
        if pairs and draw(st.integers(0, 5)) == 5:
            pairs.append(draw(st.sampled_from(pairs)))
        else:
            w = draw(_segment_lengths(max_n))
            pairs.append((w if draw(st.integers(0, 5)) < 5 else None, draw(_dilation_rates(w))))
    return tuple(w for w, _ in pairs), tuple(r for _, r in pairs)


def window_lengths(max_n: int) -> st.SearchStrategy[int | None]:
    """W of one branch: None, or a number between 1 and more than ``max_n``, mostly small or near ``max_n``."""
    return st.one_of(st.none(), st.integers(1, min(12, max_n)), _segment_lengths(max_n))


def _segment_lengths(max_n: int) -> st.SearchStrategy[int]:
    telling = [w for w in _CRITICAL_NUMBERS if w < max_n]
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
    value_dims: Sequence[int | None] = (None, None, 1, 5, 24),
    head_modes: Sequence[str] = ("all", "grouped"),
    offsets: Sequence[str | None] = (None, "mod", "block", "branch", "every"),
    paddings: Sequence[str] = ("masked", "zeros"),
    windows: Sequence[bool] = (False, True, True),
    causal: Sequence[bool] = (False, True),
    masks: Sequence[str | None] = (None, "random", "rows", "all"),
    documents: Sequence[str | None] = (None, "some", "shuffled"),
    sinks: Sequence[bool] = (False, False, True),
    score_mods: Sequence[str | None] = (None, None, None, *NAMES),
    dropout_ps: Sequence[float] = (0.0, 0.0, 0.3),
    dtypes: Sequence[torch.dtype] = DTYPES,
    ulysses_sizes: Sequence[int] = (1, 12),
) -> AttentionCase:
    """Valid :class:`AttentionCase` values. Each option shrinks towards its first choice."""
    some, many = min(12, max_n), max(1, max_n // 4)
    seq_len = draw(st.one_of(st.integers(1, some), st.integers(1, max_n), st.integers(many, max_n)))
    segment_lengths, dilation_rates = draw(branches(seq_len, max_branches=min(4, max_heads)))
    padding = draw(st.sampled_from(paddings))
    windows_of_branches = None
    if padding == "zeros":
        dilation_rates = tuple(map(_rate_for_zeros(seq_len), segment_lengths, dilation_rates))
    elif draw(st.sampled_from(windows)):
        windows_of_branches = tuple(draw(window_lengths(seq_len)) for _ in segment_lengths)
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
        value_dim=draw(st.sampled_from(value_dims)),
        is_causal=draw(st.sampled_from(causal)),
        head_mode=head_mode,
        offset=draw(st.sampled_from(offsets)),
        padding=padding,
        window_lengths=windows_of_branches,
        scale=draw(st.sampled_from([None, 1.0, 0.1, -0.3])),
        masked=draw(st.sampled_from(masks)),
        documents=draw(st.sampled_from(documents)) if padding == "masked" else None,
        sinks=draw(st.sampled_from(sinks)),
        score_mod=draw(st.sampled_from(score_mods)),
        dropout_p=draw(st.sampled_from(dropout_ps)),
        dtype=draw(st.sampled_from(dtypes)),
        seed=draw(st.integers(0, 2**16)),
        buffer_bytes=draw(st.sampled_from([0, None, 400, 4000])),
        ulysses_size=draw(st.sampled_from(ulysses_sizes)),
    )


def _rate_for_zeros(seq_len: int) -> Callable[[int | None, int], int]:
    """A rate r that ``padding="zeros"`` accepts: w % r == 0 if the segment is shorter than the sequence."""
    return lambda w, r: r if w is None or w >= seq_len else math.gcd(w, r)


def in_parts(number: int) -> pytest.MarkDecorator:
    """Run a test with random cases ``number`` times, all but the first in the matrix. The test gets ``part``."""
    return pytest.mark.parametrize("part", matrix_but(0, of=range(number)))
