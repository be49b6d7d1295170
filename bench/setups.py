"""The attention calls that claims.py measures. ``shrink`` divides all lengths, for a quick run."""

from __future__ import annotations

import dataclasses
from typing import Any

from case import Branches, Case

DILATED: Branches = ((2048, 1), (8192, 4), (65536, 16))
DILATED_RING, PLAIN = "dilated, causal, zigzag", "plain, causal, zigzag"
ONE_DEVICE_BRANCHES: Branches = ((2048, 1), (8192, 4), (32768, 16))


def setup(shrink: int, seq_len: int, branches: Branches, **options: Any) -> Case:
    """Make a case, without a contestant unless ``options`` have one. All its lengths are divided by ``shrink``.

    Raises:
        ValueError: a segment length is not a multiple of ``shrink`` times its dilation rate.
    """
    for length, rate in branches:
        if length % shrink or length // shrink % rate:
            raise ValueError(
                f"shrink = {shrink}: a segment of {length} tokens must stay a multiple of its dilation rate {rate}; "
                f"use a divisor of {length // rate}."
            )
    branches = tuple((length // shrink, rate) for length, rate in branches)
    return Case(seq_len=seq_len // shrink, branches=branches, **{"contestant": "", **options})


def window_setup(shrink: int, seq_len: int, **options: Any) -> Case:
    """Make a case with a causal window of 1,024 tokens over the whole sequence."""
    options = {"contestant": "", "causal": True, "window": max(1, 1024 // shrink), **options}
    return Case(seq_len=seq_len // shrink, branches=((seq_len // shrink, 1),), **options)


def shortened(case: Case, by: int) -> Case:
    """Return the case with all lengths divided by ``by``. Segments stay multiples of their dilation rates."""
    branches = tuple((max(rate, length // by // rate * rate), rate) for length, rate in case.branches)
    window = None if case.window is None else max(1, case.window // by)
    return dataclasses.replace(case, seq_len=max(1, case.seq_len // by), branches=branches, window=window)


def as_segments(case: Case) -> Case:
    """Return the case with segments in place of windows of the same length. A query sees about half as many keys."""
    if case.window is None:
        return case
    return dataclasses.replace(case, branches=tuple((case.window, rate) for _, rate in case.branches), window=None)


def ring_setups(shrink: int, dtype: str, plain_tokens: int = 65536) -> dict[str, Case]:
    """Return the calls on rings by name: dilated attention at 65,536 tokens, and plain ring attention."""
    dilated = setup(shrink, 65536, DILATED, dtype=dtype)
    return {
        "dilated": dataclasses.replace(dilated, causal=False),
        DILATED_RING: dataclasses.replace(dilated, layout="zigzag"),
        "dilated, causal, contiguous": dilated,
        PLAIN: setup(shrink, plain_tokens, ((plain_tokens, 1),), dtype=dtype, layout="zigzag"),
    }
