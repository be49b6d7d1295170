"""The calls of the claims. ``shrink`` divides every length, for a quick run."""

from __future__ import annotations

import dataclasses
from typing import Any

from case import Branches, Case

DILATED: Branches = ((2048, 1), (8192, 4), (65536, 16))
DILATED_RING, PLAIN = "dilated, causal, zigzag", "plain, causal, zigzag"
ONE_DEVICE_BRANCHES: Branches = ((2048, 1), (8192, 4), (32768, 16))


def setup(shrink: int, seq_len: int, branches: Branches, **options: Any) -> Case:
    """A case without a contestant, all of whose lengths are divided by ``shrink``.

    Raises:
        ValueError: a segment would be left without a row for each rate, or is no multiple of ``shrink``.
    """
    for length, rate in branches:
        if length % shrink or length // shrink % rate:
            raise ValueError(
                f"shrink = {shrink}: a segment of {length} has to stay a multiple of its dilation rate {rate}; use a "
                f"divisor of {length // rate}."
            )
    branches = tuple((length // shrink, rate) for length, rate in branches)
    return Case("", seq_len // shrink, branches=branches, **options)


def shortened(case: Case, by: int) -> Case:
    """The case with all lengths divided by ``by``; segments stay multiples of their rates."""
    branches = tuple((max(rate, length // by // rate * rate), rate) for length, rate in case.branches)
    return dataclasses.replace(case, seq_len=max(1, case.seq_len // by), branches=branches)


def ring_setups(shrink: int, dtype: str, plain_tokens: int = 65536) -> dict[str, Case]:
    """The calls on rings: dilated attention at 65,536 tokens, and plain ring attention."""
    dilated = setup(shrink, 65536, DILATED, dtype=dtype)
    return {
        "dilated": dataclasses.replace(dilated, causal=False),
        DILATED_RING: dataclasses.replace(dilated, layout="zigzag"),
        "dilated, causal, contiguous": dilated,
        PLAIN: setup(shrink, plain_tokens, ((plain_tokens, 1),), dtype=dtype, layout="zigzag"),
    }
