"""Which keys a query sees: dilated attention (LongNet, arXiv 2307.02486, section 3) as index arithmetic.

Branch i covers position t for head j if and only if ``(t mod w) mod r == offset(i, j)``. Two covered positions of one
segment see each other, unless a window limits their distance. With ``offset="every"``, a branch covers every position,
and two positions of one segment see each other if ``(t mod w) mod r`` is the same for both. No other module of the
package decides which positions are covered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

if TYPE_CHECKING:
    from torch import Tensor

from ring_backends.schedule.checks import check_integer

HeadMode = Literal["all", "grouped"]
Offset = Literal["mod", "block", "branch", "every"]
Padding = Literal["masked", "zeros"]
Positions = TypeVar("Positions", int, "Tensor")


@dataclass(frozen=True)
class DilatedPattern:
    """The branches of dilated attention, and the heads and offsets of each.

    Args:
        segment_lengths: w of each branch, in tokens, at least 1; None for the whole sequence of each call. A w above
            the length of the sequence has the effect of None.
        dilation_rates: r of each branch, at least 1; one per segment length.
        head_mode: ``"all"``: every head runs every branch (LongNet). ``"grouped"``: the heads are cut into one
            contiguous group per branch. The sizes of groups differ by at most one, and larger groups come first.
        offset: rule for the offset of head j, of H heads, in branch i. ``"mod"``: j % r (the paper). ``"block"``: j //
            ceil(H / r) (torchscale). ``"branch"``: i % r. ``"every"``: the head has all offsets 0 … r − 1, and
            positions see each other only if they have the same one, as in Sparse Transformers (arXiv 1904.10509) and in
            Longformer's dilated windows (arXiv 2004.05150). None means ``"branch"`` with ``head_mode="grouped"``, and
            otherwise ``"mod"``.
        padding: ``"masked"``: no key lies beyond the sequence. ``"zeros"``, as in torchscale: the last segment is
            padded with zero keys and values, which its queries see unless attention is causal.
        window_lengths: W of each branch, in tokens, at least 1; None for a branch without a window. The query at
            position t sees a key at position u of such a branch only if ``|t − u| < W``. Transformers'
            ``sliding_window`` is W in a causal model, and W − 1 otherwise. None means no windows. Not allowed with
            ``padding="zeros"``.

    Raises:
        ValueError, TypeError: an argument is invalid.

    >>> pattern = DilatedPattern([2048, 16384], [1, 8])
    >>> [pattern.head_offsets(1, head, num_heads=4, seq_len=16384) for head in range(2)]
    [range(0, 1), range(1, 2)]
    """

    segment_lengths: tuple[int | None, ...]
    dilation_rates: tuple[int, ...]
    head_mode: HeadMode = "all"
    offset: Offset | None = None
    padding: Padding = "masked"
    window_lengths: tuple[int | None, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "segment_lengths", _positive_ints("segment_lengths", self.segment_lengths, (None,)))
        object.__setattr__(self, "dilation_rates", _positive_ints("dilation_rates", self.dilation_rates))
        if len(self.segment_lengths) != len(self.dilation_rates):
            raise ValueError(
                f"segment_lengths has {len(self.segment_lengths)} entries and dilation_rates has "
                f"{len(self.dilation_rates)}: a branch is one pair, so give both the same length."
            )
        if self.window_lengths is not None:
            windows = _positive_ints("window_lengths", self.window_lengths, (None,))
            if len(windows) != len(self.segment_lengths):
                raise ValueError(
                    f"window_lengths has {len(windows)} entries and segment_lengths has {len(self.segment_lengths)}: "
                    "give one entry per branch, None for a branch without a window."
                )
            object.__setattr__(self, "window_lengths", None if set(windows) == {None} else windows)
        _check_choice("head_mode", self.head_mode, get_args(HeadMode))
        _check_choice("offset", self.offset, (None, *get_args(Offset)))
        _check_choice("padding", self.padding, get_args(Padding))
        if self.window_lengths is not None and self.padding == "zeros":
            raise ValueError(
                f"window_lengths = {self.window_lengths} with padding='zeros': torchscale, whose padding this is, has "
                "no windows; use padding='masked'."
            )

    @classmethod
    def longnet(
        cls,
        segment_lengths: Sequence[int | None],
        dilation_rates: Sequence[int],
        window_lengths: Sequence[int | None] | None = None,
    ) -> DilatedPattern:
        """The paper's pattern: every head in every branch, offset j % r. The paper has no windows."""
        windows = None if window_lengths is None else tuple(window_lengths)
        return cls(tuple(segment_lengths), tuple(dilation_rates), window_lengths=windows)

    @classmethod
    def torchscale(cls, segment_lengths: Sequence[int | None], dilation_rates: Sequence[int]) -> DilatedPattern:
        """torchscale's pattern, with which published checkpoints were trained: offset by blocks, zero padding."""
        return cls(tuple(segment_lengths), tuple(dilation_rates), offset="block", padding="zeros")

    @classmethod
    def grouped(
        cls,
        segment_lengths: Sequence[int | None],
        dilation_rates: Sequence[int],
        window_lengths: Sequence[int | None] | None = None,
    ) -> DilatedPattern:
        """One group of heads per branch, offset i % r."""
        windows = None if window_lengths is None else tuple(window_lengths)
        branches = tuple(segment_lengths), tuple(dilation_rates)
        return cls(*branches, head_mode="grouped", offset="branch", window_lengths=windows)

    @property
    def num_branches(self) -> int:
        return len(self.segment_lengths)

    def heads(self, branch: int, num_heads: int) -> range:
        """The heads that run ``branch``.

        >>> DilatedPattern.grouped([16, 64], [1, 4]).heads(1, num_heads=5)
        range(3, 5)
        """
        if self.head_mode == "all":
            return range(num_heads)
        size, extra = divmod(num_heads, self.num_branches)
        start = branch * size + min(branch, extra)
        return range(start, start + size + (branch < extra))

    def head_offsets(self, branch: int, head: int, num_heads: int, seq_len: int) -> range:
        """The offsets of ``head`` in ``branch``: one of 0 … r − 1, or with ``offset="every"`` all that have a position.

        >>> DilatedPattern([64], [4], offset="every").head_offsets(0, 0, num_heads=4, seq_len=64)
        range(0, 4)
        """
        rate = self.dilation_rates[branch]
        rule = self.offset or ("branch" if self.head_mode == "grouped" else "mod")
        if rule == "every":
            return range(min(rate, self.segment_length(branch, seq_len)))
        if rule == "mod":
            offset = head % rate
        elif rule == "block":
            offset = head // -(-num_heads // rate)
        else:
            offset = branch % rate
        return range(offset, offset + 1)

    def segment_length(self, branch: int, seq_len: int) -> int:
        """The segment length w of ``branch``, but at most ``seq_len``."""
        length = self.segment_lengths[branch]
        return seq_len if length is None else min(length, seq_len)

    def band(self, branch: int, seq_len: int) -> int | None:
        """By how many covered rows a query and a key of ``branch`` may be apart; None if no window limits it.

        >>> DilatedPattern([None], [4], window_lengths=[16]).band(0, seq_len=1024)
        3
        """
        window = None if self.window_lengths is None else self.window_lengths[branch]
        if window is None or window >= self.segment_length(branch, seq_len):
            return None
        return (window - 1) // self.dilation_rates[branch]

    def reach(self, branch: int, seq_len: int) -> int:
        """By how many positions a query and a key of one segment of ``branch`` may be apart."""
        band = self.band(branch, seq_len)
        return self.segment_length(branch, seq_len) if band is None else band * self.dilation_rates[branch]

    def segment(self, branch: int, position: Positions, seq_len: int) -> Positions:
        """The number of the segment of ``branch`` that holds each position."""
        return position // self.segment_length(branch, seq_len)

    def covers(self, branch: int, offset: int, position: Tensor, seq_len: int) -> Tensor:
        """Whether ``branch`` covers each position for a head at ``offset``: bool, shaped as ``position``."""
        return position % self.segment_length(branch, seq_len) % self.dilation_rates[branch] == offset

    def phantom_keys(self, branch: int, offset: int, seq_len: int) -> int:
        """How many zero keys ``padding="zeros"`` adds to the last segment, for a head at ``offset``."""
        if self.padding == "masked":
            return 0
        w, r = self.segment_length(branch, seq_len), self.dilation_rates[branch]
        last_length = (seq_len - 1) % w + 1
        padded_length = -(-w // r) * r
        return num_covered(padded_length, offset, r) - num_covered(last_length, offset, r)

    def check(self, *, seq_len: int, num_heads: int) -> None:
        """Refuse a pattern that is undefined for ``seq_len`` tokens and ``num_heads`` heads.

        Raises:
            ValueError: there are fewer heads than branches, with ``head_mode="grouped"``; or torchscale would misplace
                outputs, with ``padding="zeros"``.
        """
        if self.head_mode == "grouped" and num_heads < self.num_branches:
            raise ValueError(
                f"head_mode='grouped' with {num_heads} heads and {self.num_branches} branches: every branch needs a "
                f"head of its own; use at least {self.num_branches} heads, fewer branches, or head_mode='all'."
            )
        if self.padding == "zeros":
            for w, r in zip(self.segment_lengths, self.dilation_rates, strict=True):
                if w is not None and w < seq_len and w % r:
                    raise ValueError(
                        f"padding='zeros' with segment length {w} and dilation rate {r} on {seq_len} tokens: {r} does "
                        f"not divide {w}. torchscale pads every segment to {-(-w // r) * r} rows and joins the outputs "
                        f"without removing the {-w % r} padded rows, so later segments end up at wrong positions. "
                        "Prov-GigaPath's formula for segment lengths gives such pairs: (185363, 8) by default, "
                        "(23170, 4) and (110217, 8) for slides of 250,000 pixels. Use a segment length that "
                        f"{r} divides, a sequence of at most {w} tokens, or padding='masked'."
                    )


def num_covered(length: Positions, offset: Positions, rate: int) -> Positions:
    """How many of the first ``length`` positions of a segment lie at ``offset`` modulo ``rate``. Tensors broadcast."""
    rows = -((offset - length) // rate)
    return rows * (rows > 0)


def _positive_ints(name: str, values: Iterable[Any], others: tuple[None, ...] = ()) -> tuple[Any, ...]:
    """The values, if each is a positive int or one of ``others``."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"{name} = {values!r}: expected a sequence of integers; give a list such as [2048, 8192].")
    values = tuple(values)
    if not values:
        raise ValueError(f"{name} is empty: attention needs at least one branch; give one entry per branch.")
    for index, value in enumerate(values):
        if value not in others:
            check_integer(f"{name}[{index}]", value, 1, advice="drop the branch or give a positive number")
            if value >= 2**62:
                raise ValueError(
                    f"{name}[{index}] = {value}: must be below 2**62, since positions are int64; give less."
                )
    return values


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} = {value!r}: unknown option; choose one of {', '.join(map(repr, choices))}.")
