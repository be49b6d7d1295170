"""Branches for a sequence of any length, at a cost that grows almost linearly with it. This module imports no torch."""

from __future__ import annotations


def default_branches(seq_len: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Segment lengths and dilation rates whose cost grows almost linearly; the last segment is the whole sequence.

    There are three branches: segments of at most 256 tokens, of at most 4,096 tokens, and the whole sequence. The rate
    of a dilated branch is the smallest power of two above the rate before it with w / r² ≤ 64. Such a branch computes
    at most 64 scores per position and head. For 131,072 tokens the branches (w, r) are (256, 1), (4096, 8) and
    (131072, 64).

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
