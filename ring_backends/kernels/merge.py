"""Online softmax: merges the results over two sets of keys into the result over both.

A result is (out, lse): the softmax-weighted mean of the values, and the logsumexp of the scores. A set without keys has
out = 0 and lse = −inf. Merging it changes nothing, and merging two such sets gives no NaN. Ring steps and branches use
the same merge (LongNet, arXiv 2307.02486, equation 10; Milakov and Gimelshein, arXiv 1805.02867).
"""

from __future__ import annotations

import torch
from torch import Tensor


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of LSE and of running sums: fp32, or fp64 for fp64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge_(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Merge another result into ``out`` and ``lse``, in place. A key in both sets of keys counts twice.

    Args:
        out, other_out: [..., head_dim]. They are merged in the statistics dtype.
        lse, other_lse: [...], in the statistics dtype; −inf where a set has no key.
    """
    weight = weight_of(other_lse, torch.logaddexp(lse, other_lse, out=lse)).unsqueeze(-1)
    if other_out.dtype != weight.dtype:
        other_out = other_out.to(weight.dtype)
    if out.dtype == weight.dtype:
        out.lerp_(other_out, weight)
    else:
        out.copy_(out.to(weight.dtype).lerp_(other_out, weight))


def merge_zero_value_(out: Tensor, lse: Tensor, score: Tensor | float) -> None:
    """Add a key with this score and value 0 to the softmax of every row, in place.

    Args:
        out: […, D].
        lse: […], in the statistics dtype.
        score: broadcasts to ``lse``.
    """
    # new_full writes a number on the device. as_tensor would copy it from the host.
    merged = torch.logaddexp(lse, score.to(lse.dtype) if isinstance(score, Tensor) else lse.new_full((), score))
    out.mul_(weight_of(lse, merged).unsqueeze(-1))
    lse.copy_(merged)


def weight_of(score: Tensor, lse: Tensor) -> Tensor:
    """The softmax weight exp(score − LSE) of keys with this score. It is 0 for −inf, also if the LSE is −inf."""
    # exp(−inf − lowest) is 0, but exp(−inf + inf) would be NaN.
    return (score - lse.clamp_min(torch.finfo(lse.dtype).min)).exp_()
