"""Dilated attention and its gradients in fp64, also for sequences whose n × n matrix does not fit into memory.

This module follows the definition, and shares no code with the compared methods. It computes only the pairs of covered
positions, for a few query rows at a time. It computes the gradients by their formulas, without autograd.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

_QUERY_ROWS = 512


def exact_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor,
    segment_lengths: tuple[int | None, ...],
    dilation_rates: tuple[int, ...],
    window_lengths: tuple[int | None, ...] | None = None,
    *,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute dilated attention of a whole sequence (LongNet, arXiv 2307.02486), and its gradients.

    The head mode is "all", and the offset of head j is j % r.

    Args:
        query, grad_out: [seq, heads, head_dim], any floating dtype.
        key, value: [seq, key/value heads, head_dim].
        segment_lengths, dilation_rates, window_lengths: as in :class:`~ring_backends.DilatedPattern`.

    Returns:
        out, dq, dk and dv in fp64.
    """
    seq_len, num_heads, head_dim = query.shape
    scale = 1 / math.sqrt(head_dim)
    windows = window_lengths or (None,) * len(segment_lengths)
    out, grad_query, grad_key, grad_value = (
        torch.zeros_like(x, dtype=torch.float64) for x in (query, query, key, value)
    )
    for head in range(num_heads):
        kv_head = head // (num_heads // key.shape[1])
        q, do = query[:, head].double() * scale, grad_out[:, head].double()
        k, v = key[:, kv_head].double(), value[:, kv_head].double()
        o, dq, dk, dv = out[:, head], grad_query[:, head], grad_key[:, kv_head], grad_value[:, kv_head]
        pairs = [
            pair
            for w, r, window in zip(segment_lengths, dilation_rates, windows, strict=True)
            for pair in _covered_pairs(seq_len, w or seq_len, r, window or seq_len, head % r, is_causal)
        ]
        # The softmax is over the keys of all branches. The first loop computes its denominator.
        lse = q.new_full((seq_len,), -math.inf)
        for t, u, window in pairs:
            lse[t] = torch.logaddexp(lse[t], _scores(q, k, t, u, window, is_causal).logsumexp(-1))
        for t, u, window in pairs:
            o[t] += (_scores(q, k, t, u, window, is_causal) - lse[t, None]).exp_() @ v[u]
        delta = (o * do).sum(-1)
        for t, u, window in pairs:
            weights = (_scores(q, k, t, u, window, is_causal) - lse[t, None]).exp_()
            dv[u] += weights.T @ do[t]
            grad_scores = (do[t] @ v[u].T).sub_(delta[t, None]).mul_(weights)
            dq[t] += grad_scores @ k[u] * scale
            dk[u] += grad_scores.T @ q[t]
    return out, grad_query, grad_key, grad_value


def _covered_pairs(
    seq_len: int, w: int, r: int, window: int, offset: int, is_causal: bool
) -> Iterator[tuple[slice, slice, int]]:
    """Yield slices (queries, keys) of covered positions in the same segment, and the window.

    The keys end at the last query if ``is_causal``, and at the end of the last query's window otherwise.
    """
    reach = (window - 1) // r * r  # the largest distance of a visible key
    for segment in range(0, seq_len, w):
        first, end = segment + offset, min(segment + w, seq_len)
        for start in range(first, end, _QUERY_ROWS * r):
            stop = min(start + _QUERY_ROWS * r, end)
            last = stop if is_causal else min(stop + reach, end)
            yield slice(start, stop, r), slice(max(first, start - reach), last, r), window


def _scores(q: Tensor, k: Tensor, t: slice, u: slice, window: int, is_causal: bool) -> Tensor:
    queries, keys = (torch.arange(x.start, x.stop, x.step, device=q.device) for x in (t, u))
    distance = queries[:, None] - keys
    is_hidden = (distance < 0) if is_causal else (distance <= -window)
    return (q[t] @ k[u].T).masked_fill_(is_hidden | (distance >= window), -math.inf)
