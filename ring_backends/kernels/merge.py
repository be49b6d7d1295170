"""Online softmax: merges the results over two sets of keys into the result over both.

A result is (out, lse): the softmax-weighted mean of the values, and the logsumexp of the scores. A set without keys has
out = 0 and lse = −inf. Merging it changes nothing, and merging two such sets gives no NaN. Ring steps and branches use
the same merge (LongNet, arXiv 2307.02486, equation 10; Milakov and Gimelshein, arXiv 1805.02867).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of LSE and of running sums: fp32, or fp64 for fp64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge_weight(lse: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the LSE over both sets of keys, and the weight of the other result in the merged output, in 0 … 1.

    Args:
        lse, other_lse: same shape and dtype; −inf where a set has no key.
    """
    merged = torch.logaddexp(lse, other_lse)
    weight = torch.exp(other_lse - merged).masked_fill(merged == -math.inf, 0.0)
    return merged, weight


def merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two results.

    Args:
        out, other_out: [..., head_dim].
        lse, other_lse: [...], in the statistics dtype.

    Returns:
        (out, lse) over both sets of keys; a key in both counts twice.
    """
    merged, weight = merge_weight(lse, other_lse)
    return torch.lerp(out, other_out.to(out.dtype), weight.unsqueeze(-1).to(out.dtype)), merged


def merge_(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """:func:`merge` in place: ``out`` and ``lse``, in the statistics dtype, become the result over both sets."""
    merged, weight = merge_weight(lse, other_lse)
    lse.copy_(merged)
    out.lerp_(other_out.to(out.dtype), weight.unsqueeze(-1))
