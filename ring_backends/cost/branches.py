"""The default branches for a sequence of any length. This module imports no torch."""

from __future__ import annotations


def default_branches(seq_len: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return segment lengths and dilation rates whose cost grows almost linearly with ``seq_len``.

    There are three branches. Their segments have at most 256 tokens, at most 4,096 tokens, and the whole sequence. The
    first branch has the dilation rate 1. The rate r of each further branch is a power of two above the rate before it:
    the smallest one with w / r² ≤ 64, where w is the segment length. Such a branch computes at most 64 scores per
    position and head.

    >>> default_branches(131072)
    ((256, 4096, 131072), (1, 8, 64))
    """
    lengths = (min(256, -(-seq_len // 4)), min(4096, -(-seq_len // 2)), seq_len)
    rates = [1]
    for length in lengths[1:]:
        rate = 2 * rates[-1]
        while length > 64 * rate**2:
            rate *= 2
        rates.append(rate)
    return lengths, tuple(rates)
