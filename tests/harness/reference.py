"""The dense reference: dilated attention computed directly from its definition, in fp64.

It imports only torch and the standard library. A test against it therefore compares two independent implementations
of the definition. It favours short code over speed: memory and time are O(n^2) per head.

    covered      position t is covered by branch i for head j    iff (t mod w) mod r == offset(i, j)
    shown        branch i shows key u to query t                 iff both are covered, t // w == u // w,
                                                                 |t - u| < W if the branch has a window,
                                                                 and, if causal, u <= t
    offset "every": every position is covered, and t and u must have equal residues (t mod w) mod r
    attention    one softmax over the multiset union of the keys that a head's branches show the query
                 (LongNet, arXiv 2307.02486, does the same: it weights each branch by its softmax denominator)

A key that k branches show counts k times. This equals adding ln(k) to its score.

Letters: B batch, n sequence, H query heads, D head dim, V value dim, w segment length, r dilation rate, i branch,
j head, t query position, u key position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segment_lengths: Sequence[int | None],
    dilation_rates: Sequence[int],
    *,
    is_causal: bool = False,
    head_mode: str = "all",
    offset: str | None = None,
    padding: str = "masked",
    window_lengths: Sequence[int | None] | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Dilated attention of a whole sequence in fp64, differentiable by plain autograd.

    Args:
        query: ``[B, n, H, D]`` of any floating dtype. It is cast to fp64. Gradients have the dtype of the input, so
            exact gradients need fp64 tensors.
        key: ``[B, n, Hk, D]`` with H a multiple of Hk; query head j reads head ``j // (H // Hk)``.
        value: ``[B, n, Hk, V]``.
        segment_lengths, dilation_rates: w and r of each branch, in positions. w None is the whole sequence.
        is_causal: a query sees keys at its own and earlier positions only.
        head_mode: ``"all"`` or ``"grouped"``.
        offset: None, ``"mod"``, ``"block"``, ``"branch"`` or ``"every"``.
        padding: ``"masked"`` or ``"zeros"``.
        window_lengths: W of each branch, None for a branch without a window.
        options: further keyword arguments of :func:`dense_attention`.

    Returns:
        out ``[B, n, H, V]``, and LSE ``[B, H, n]``, detached, both in fp64 if ``dtype`` is None. A query that sees no
        key has out 0, LSE -inf and gradient 0.

    Raises:
        ValueError: an option is unknown, or the branches are not valid for this sequence and these heads.
    """
    seq_len, num_heads = query.shape[1], query.shape[2]
    branches = (seq_len, num_heads, segment_lengths, dilation_rates)
    rules: dict[str, Any] = {"is_causal": is_causal, "head_mode": head_mode, "offset": offset}
    counts = reference_counts(*branches, **rules, window_lengths=window_lengths)
    phantom_counts = None
    if padding == "zeros":
        phantom_counts = reference_phantom_counts(*branches, **rules)
    elif padding != "masked":
        raise ValueError(f'padding = {padding!r}: it must be "masked" or "zeros".')
    return dense_attention(query, key, value, counts, phantom_counts=phantom_counts, **options)


def reference_counts(
    seq_len: int,
    num_heads: int,
    segment_lengths: Sequence[int | None],
    dilation_rates: Sequence[int],
    *,
    is_causal: bool = False,
    head_mode: str = "all",
    offset: str | None = None,
    window_lengths: Sequence[int | None] | None = None,
) -> Tensor:
    """int64 ``[H, n, n]`` with axes head, query t, key u: the number of branches that show key u to query t."""
    counts = torch.zeros(num_heads, seq_len, seq_len, dtype=torch.int64)
    t = torch.arange(seq_len)[:, None]
    u = torch.arange(seq_len)[None, :]
    for i, j, w, r, o in _branches_of_heads(num_heads, segment_lengths, dilation_rates, head_mode, offset):
        w = w or seq_len
        shown = (t % w) % r == (u % w) % r
        if o is not None:
            shown = shown & ((t % w) % r == o)
        shown = shown & (t // w == u // w)
        window = None if window_lengths is None else window_lengths[i]
        if window is not None:
            shown = shown & ((t - u).abs() < window)
        if is_causal:
            shown = shown & (u <= t)
        counts[j] += shown
    return counts


def reference_phantom_counts(
    seq_len: int,
    num_heads: int,
    segment_lengths: Sequence[int | None],
    dilation_rates: Sequence[int],
    *,
    is_causal: bool = False,
    head_mode: str = "all",
    offset: str | None = None,
) -> Tensor:
    """int64 ``[H, n]``: the number of phantom keys that ``padding="zeros"`` shows to each query.

    torchscale pads the last segment to w positions, and w to a multiple of r, with zero keys and values. A phantom
    key is a covered position of this padding. Its score and value are 0. Every covered query of the segment sees it.
    A causal query does not, because the padding lies after all queries.
    """
    phantom_counts = torch.zeros(num_heads, seq_len, dtype=torch.int64)
    t = torch.arange(seq_len)
    for i, j, w, r, o in _branches_of_heads(num_heads, segment_lengths, dilation_rates, head_mode, offset):
        w = min(w or seq_len, seq_len)
        if seq_len > w and w % r != 0:
            raise ValueError(
                f'padding = "zeros" with segment_lengths[{i}] = {w} and dilation_rates[{i}] = {r}: a segment '
                f"shorter than the sequence ({seq_len}) must be a multiple of the dilation rate, because "
                'torchscale misplaces outputs otherwise; change the length, or use padding="masked".'
            )
        if is_causal:
            continue
        s = ((seq_len - 1) // w) * w
        # Count from s, not modulo w. If w is clamped to n, the padding to a multiple of r lies beyond s + w.
        phantoms = torch.arange(seq_len, s + math.ceil(w / r) * r)
        seen = ((t % w) % r)[:, None] == (phantoms - s) % r
        if o is not None:
            seen = seen & ((t % w) % r == o)[:, None]
        phantom_counts[j] += seen.sum(1) * (t >= s)
    return phantom_counts


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    counts: Tensor,
    *,
    phantom_counts: Tensor | None = None,
    scale: float | None = None,
    key_padding_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    weight_factors: Tensor | None = None,
    sinks: Tensor | None = None,
    modified_scores: Callable[[Tensor], Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention over a multiset of keys, by one dense score matrix.

    With ``dtype=query.dtype`` this is dense PyTorch attention: both products and the weights have that dtype, softmax
    statistics at least fp32. Its error against fp64 bounds the error of kernels with that dtype.

    Args:
        query, key, value: as in :func:`reference_attention`.
        counts: int ``[H, n, n]``, the number of times that query t sees key u.
        phantom_counts: int ``[H, n]``, the number of phantom keys that query t sees. Their score and value are 0.
            key_padding_mask does not remove them.
        scale: factor on the scores; None means ``1 / sqrt(D)``.
        key_padding_mask: bool ``[B, n]``, True = ignore this key.
        document_ids: int ``[B, n]``. A query sees only keys with its own id. With a negative id it sees no key.
        weight_factors: ``[B, H, n, n]``, factors of the attention weights after the softmax, for dropout.
        sinks: ``[H]``, the score of one more key of each head. Every query sees it, and its value is 0.
        modified_scores: a function of the scaled scores ``[B, H, n, n]``. A result of -inf hides the pair.
        dtype: dtype of the computation. None means fp64.

    Returns:
        out ``[B, n, H, V]`` in ``dtype``, and LSE ``[B, H, n]``, detached, in fp32 (fp64 for fp64).
    """
    dtype = dtype or torch.float64
    statistics_dtype = torch.promote_types(dtype, torch.float32)
    batch, seq_len, num_heads, head_dim = query.shape
    if scale is None:
        scale = 1 / math.sqrt(head_dim)
    if phantom_counts is None:
        phantom_counts = torch.zeros(num_heads, seq_len, dtype=torch.int64)

    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    queries_per_key_head = num_heads // key.shape[2]
    key = key.repeat_interleave(queries_per_key_head, dim=2)
    value = value.repeat_interleave(queries_per_key_head, dim=2)

    # Phantom keys are equal, so one column with their count represents them.
    key, value = (torch.cat([x, torch.zeros_like(x[:, :1])], dim=1) for x in (key, value))
    counts = torch.cat([counts.to(query.device), phantom_counts[:, :, None].to(query.device)], dim=2)
    counts = counts.expand(batch, num_heads, seq_len, seq_len + 1)
    if key_padding_mask is not None:
        ignored = torch.cat([key_padding_mask, key_padding_mask.new_zeros(batch, 1)], dim=1)
        counts = counts.masked_fill(ignored[:, None, None, :], 0)
    if document_ids is not None:
        together = (document_ids[:, :, None] == document_ids[:, None, :]) & (document_ids[:, :, None] >= 0)
        together = torch.cat([together, together.new_ones(batch, seq_len, 1)], dim=2)
        counts = counts.masked_fill(~together[:, None], 0)

    scores = torch.einsum("bthd,buhd->bhtu", query, key) * scale
    scores = scores.to(statistics_dtype)
    if modified_scores is not None:
        modified = modified_scores(scores[..., :seq_len]).to(statistics_dtype)
        hidden = torch.cat([modified == -torch.inf, modified.new_zeros(batch, num_heads, seq_len, 1).bool()], dim=3)
        scores = torch.cat([modified, scores[..., seq_len:]], dim=3).masked_fill(hidden, 0)
        counts = counts.masked_fill(hidden, 0)
    scores = scores + counts.to(statistics_dtype).log()
    if sinks is not None:
        sink_scores = sinks.to(statistics_dtype)[:, None, None].expand(batch, num_heads, seq_len, 1)
        scores = torch.cat([scores, sink_scores], dim=3)
        value = torch.cat([value, torch.zeros_like(value[:, :1])], dim=1)
        counts = torch.cat([counts, counts.new_ones(batch, num_heads, seq_len, 1)], dim=3)
    # A row with only -inf has no softmax. It is replaced before the softmax, so that no NaN enters the gradient.
    sees_a_key = (counts > 0).any(dim=-1, keepdim=True)
    scores = scores.masked_fill(~sees_a_key, 0)
    weights = torch.softmax(scores, dim=-1).masked_fill(~sees_a_key, 0)
    lse = torch.logsumexp(scores, dim=-1).masked_fill(~sees_a_key[..., 0], float("-inf"))
    if weight_factors is not None:
        others = weights.shape[3] - seq_len  # phantom keys and sinks are not dropped
        weights = weights * torch.cat(
            [weight_factors, weight_factors.new_ones(batch, num_heads, seq_len, others)], dim=3
        )
    out = torch.einsum("bhtu,buhd->bthd", weights.to(dtype), value)
    return out, lse.detach()


def reference_dropout(
    p: float, seed: int, replica: int, batch: int, num_heads: int, positions: Sequence[int]
) -> Tensor:
    """fp64 ``[B, H, n, n]`` with axes batch, head, query, key: the factor of each weight, 0 or 1 / (1 − p).

    A weight is kept if a hash of the seed, the data-parallel replica, batch row, head, query and key is below 1 − p.
    SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) hashes a query to two 32-bit words and a key to one; two rounds of
    xor-shift and multiplication then mix the words of a pair.
    """
    of_replica = _splitmix(seed + replica * _GOLDEN)
    of_queries = [
        [[_splitmix(_splitmix(_splitmix(of_replica + b) + j) + t) for t in positions] for j in range(num_heads)]
        for b in range(batch)
    ]
    of_keys = [_splitmix(_splitmix(~seed) + u) % 2**32 for u in positions]
    low, high = (
        torch.tensor([[[word >> shift & 0xFFFFFFFF for word in words] for words in rows] for rows in of_queries])
        for shift in (0, 32)
    )
    # int64 holds unsigned 32-bit words. A product wraps modulo 2^64, so its lower 32 bits are correct.
    pair = low[..., None] ^ torch.tensor(of_keys)
    pair = (pair ^ (pair >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    pair = (pair ^ (pair >> 15)) + high[..., None] & 0xFFFFFFFF
    pair = pair * 0x846CA68B & 0xFFFFFFFF
    kept = pair >> 1 < min(round((1 - p) * 2**31), 2**31 - 1)
    return kept.double() / (1 - p)


_GOLDEN = 0x9E3779B97F4A7C15


def _splitmix(word: int) -> int:
    """One step of SplitMix64, modulo 2^64."""
    word = (word + _GOLDEN) % 2**64
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return word ^ (word >> 31)


def _branches_of_heads(
    num_heads: int,
    segment_lengths: Sequence[int | None],
    dilation_rates: Sequence[int],
    head_mode: str,
    offset: str | None,
) -> list[tuple[int, int, int | None, int, int | None]]:
    """(i, j, w, r, offset(i, j)) for every branch i and every head j that runs it. Offset None stands for all."""
    num_branches = len(segment_lengths)
    if num_branches == 0 or len(dilation_rates) != num_branches:
        raise ValueError(
            f"segment_lengths = {list(segment_lengths)} and dilation_rates = {list(dilation_rates)}: give "
            "one length and one rate for each branch, and at least one branch."
        )
    if any(w is not None and w < 1 for w in segment_lengths) or min(dilation_rates) < 1:
        raise ValueError(
            f"segment_lengths = {list(segment_lengths)}, dilation_rates = {list(dilation_rates)}: all "
            "values must be at least 1."
        )
    if offset is None:
        offset = "branch" if head_mode == "grouped" else "mod"
    return [
        (i, j, segment_lengths[i], r, _offset(i, j, r, num_heads, offset))
        for i, r in enumerate(dilation_rates)
        for j in _heads_of_branch(i, num_branches, num_heads, head_mode)
    ]


def _heads_of_branch(i: int, num_branches: int, num_heads: int, head_mode: str) -> range:
    """The heads that run branch i: all of them, or its contiguous group, the larger groups first."""
    if head_mode == "all":
        return range(num_heads)
    if head_mode == "grouped":
        if num_heads < num_branches:
            raise ValueError(
                f'head_mode = "grouped" with {num_heads} heads and {num_branches} branches: every branch '
                'needs a head; give more heads, fewer branches, or head_mode="all".'
            )
        smaller, one_more = divmod(num_heads, num_branches)
        sizes = [smaller + 1] * one_more + [smaller] * (num_branches - one_more)
        return range(sum(sizes[:i]), sum(sizes[: i + 1]))
    raise ValueError(f'head_mode = {head_mode!r}: it must be "all" or "grouped".')


def _offset(i: int, j: int, r: int, num_heads: int, offset: str) -> int | None:
    """Head j's offset in branch i; None if it has all."""
    if offset == "mod":  # the paper
        return j % r
    if offset == "block":  # torchscale
        return j // math.ceil(num_heads / r)
    if offset == "branch":  # fkodom's dilated-attention-pytorch
        return i % r
    if offset == "every":  # Sparse Transformers, Longformer
        return None
    raise ValueError(f'offset = {offset!r}: it must be None, "mod", "block", "branch" or "every".')
