"""Attention weights of chosen queries over the whole sequence, on one device or on a ring, and pictures of them.

No rank ever holds the attention matrix. Every rank computes the scores of the chosen queries with its own keys. The
ranks then combine the sums of their exponentiated scores.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ring_backends.attention import RingDilatedAttention
from ring_backends.engine.binding import Binding
from ring_backends.engine.call import AttentionCall, AttentionInputs
from ring_backends.kernels.dtype import without_autocast
from ring_backends.kernels.merge import statistics_dtype
from ring_backends.kernels.score_mod import PairScores, ScoreMod
from ring_backends.plotting import check_plot, new_figure
from ring_backends.ring.calls import Configuration
from ring_backends.schedule.pattern import DilatedPattern

__all__ = ["attention_weights", "draw_pattern", "draw_weights"]


@torch.no_grad()
def attention_weights(
    attention: RingDilatedAttention,
    query: Tensor,
    key: Tensor,
    positions: Sequence[int],
    *,
    is_causal: bool = False,
    seq_len: int | None = None,
    key_padding_mask: Tensor | None = None,
    document_ids: Tensor | None = None,
    sinks: Tensor | None = None,
    score_mod: ScoreMod | None = None,
) -> Tensor:
    """Return the attention weights that ``attention`` gives the queries at some positions, without gradients.

    Every rank of the ring makes the same call, each with its own rows of query and key.

    Args:
        attention: an attention of any adapter.
        query: [batch, local seq, heads, head_dim].
        key: [batch, local seq, key/value heads, head_dim].
        positions: global positions of the chosen queries, the same on every rank.
        is_causal, seq_len, key_padding_mask, document_ids, sinks, score_mod: as in a call of ``attention``; dropout
            does not apply.

    Returns:
        [batch, heads, len(positions), local seq], in the statistics dtype (fp32; fp64 for fp64): the weight of each of
        this rank's keys, summed over the branches in which the query sees the key. Over all ranks, the weights of a
        query sum to 1. With ``padding="zeros"`` or sinks, they sum to 1 minus the weight of the padding and of the
        sink. The weights of a query that sees no key are 0. ``ring.unshard(weights, dim=3, seq_len=…)`` returns the
        weights of all keys.

    Raises:
        ValueError, TypeError: an argument is invalid.
        RingMismatchError: the ranks' calls differ.
        RingPeerError: a rank died, stalled or left.

    >>> from ring_backends.adapters.native import RingDilatedAttention
    >>> zeros = torch.zeros(1, 4, 1, 8)  # all scores are 0, so that weights are counts
    >>> weights = attention_weights(RingDilatedAttention([4, 2], [1, 1]), zeros, zeros, [0])
    >>> (weights[0, 0, 0] * 6).round().tolist()  # query 0 sees keys 0 and 1 in both branches
    [2.0, 2.0, 1.0, 1.0]
    """
    binding, ring = attention.binding, attention.ring
    tensors = (query, key, key, key_padding_mask, document_ids)
    options: dict[str, Any] = {"sinks": sinks, "is_causal": is_causal, "seq_len": seq_len, "score_mod": score_mod}
    inputs, call = binding.check(AttentionInputs(*tensors, **options))
    layout = ring.layout(call.layout.seq_len)
    with ring.report_refusals():
        chosen = _check_positions(positions, layout.seq_len)
    begun, gather = _agree_on_gather(binding, call, inputs, chosen)
    dtype, here = statistics_dtype(inputs.query.dtype), layout.positions(ring.rank)
    with begun, without_autocast(query.device):
        rows = gather(_rows_here(inputs.query.to(dtype), here, chosen)).sum(0)
        grouped = rows.unflatten(2, (inputs.key.shape[2], -1))
        scores = torch.einsum("bmkgd,bnkd->bkgmn", grouped, inputs.key.to(dtype)).flatten(1, 2) * call.scale
        if score_mod is not None:
            pairs = PairScores.of_rows(score_mod, chosen.to(scores.device), here.to(scores.device), *scores.shape[:2])
            scores = pairs.modified(scores)
        counts = _counts(binding.pattern, query.shape[2], chosen, here, layout.seq_len, is_causal).to(scores)
        scores = (scores + counts.clamp(min=1).log()).masked_fill(counts == 0, -torch.inf)
        if key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask[:, None, None], -torch.inf)
        if document_ids is not None:
            of_queries = gather(_rows_here(document_ids[:, :, None, None], here, chosen)).sum(0)[:, None, :, 0, :]
            hidden = (of_queries != document_ids[:, None, None]) | (of_queries < 0)
            scores = scores.masked_fill(hidden, -torch.inf)
        sums = gather(scores.logsumexp(3))
        phantoms = _phantoms(binding.pattern, query.shape[2], chosen, layout.seq_len, is_causal).to(scores).log()
        lse = torch.cat([sums, phantoms.expand_as(sums[:1])]).logsumexp(0).unsqueeze(3)
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None, None])
        return torch.where(lse == -torch.inf, 0.0, (scores - lse).exp())


def _agree_on_gather(
    binding: Binding, call: AttentionCall, inputs: AttentionInputs, chosen: Tensor
) -> tuple[contextlib.AbstractContextManager[None], Callable[[Tensor], Tensor]]:
    """Agree on this call with the other ranks.

    Returns:
        A context manager that reports an error of this rank to the others, and a function that stacks all ranks'
        tensors [ring size, …].
    """
    ring, agreement = binding.ring, binding.ring.agreement
    if agreement is None:
        return contextlib.nullcontext(), lambda tensor: tensor.unsqueeze(0)
    agreed = call.configuration(inputs, binding.name, needs_gradients=False).fields
    configuration = Configuration({**agreed, "positions": chosen.tolist()})
    begun = agreement.begin(configuration, direction="attention_weights", check_again=True)
    indices = itertools.count()
    return agreement.report_errors(begun), lambda tensor: ring.all_gather(begun, tensor, next(indices))


def draw_pattern(
    path: Path, pattern: DilatedPattern, seq_len: int, num_heads: int, heads: Sequence[int] = (0,)
) -> None:
    """Draw which keys the queries of some heads see, one picture per branch. Requires matplotlib.

    Args:
        path: the file to write. Its suffix sets the format.
        seq_len: length of the sequence. The picture is readable up to a few hundred tokens.
        num_heads: number of heads.
        heads: the heads to draw, one per row.

    Raises:
        ValueError: matplotlib is missing or does not write this format, or the pattern does not fit.
    """
    check_plot(path, "path")
    pattern.check(seq_len=seq_len, num_heads=num_heads)
    everywhere = torch.arange(seq_len)
    figure = new_figure((2.6 * pattern.num_branches, 2.8 * len(heads)))
    axes = figure.subplots(len(heads), pattern.num_branches, squeeze=False)
    for row, head in zip(axes, heads, strict=True):
        for branch, place in enumerate(row):
            shown = torch.zeros(seq_len, seq_len, dtype=torch.bool)
            if head in pattern.heads(branch, num_heads):
                for offset in pattern.head_offsets(branch, head, num_heads, seq_len):
                    shown |= _shown(pattern, branch, offset, everywhere, everywhere, seq_len)
            place.imshow(shown.tolist(), cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
            w, r = pattern.segment_lengths[branch] or "all", pattern.dilation_rates[branch]
            window = pattern.window_lengths and pattern.window_lengths[branch]
            title = f"head {head}, w = {w}, r = {r}" + (f", W = {window}" if window else "")
            place.set_title(title, fontsize="small")
            place.set_xlabel("key")
            place.set_ylabel("query")
    figure.savefig(path)


def draw_weights(path: Path, weights: Tensor, positions: Sequence[int]) -> None:
    """Draw the attention weights of chosen queries of one sequence, head by head. Requires matplotlib.

    Args:
        path: the file to write. Its suffix sets the format.
        weights: [heads, len(positions), seq]: :func:`attention_weights` of one sequence, unsharded.
        positions: positions of the queries, for the labels.

    Raises:
        ValueError: matplotlib is missing or does not write this format, or the shapes do not fit.
    """
    check_plot(path, "path")
    if weights.dim() != 3 or weights.shape[1] != len(positions):
        raise ValueError(
            f"weights is {[*weights.shape]} with {len(positions)} positions: expected [heads, positions, seq], one "
            "sequence of the batch."
        )
    figure = new_figure((9, 1 + 0.9 * len(positions)))
    for place, position, rows in zip(
        figure.subplots(len(positions), 1, sharex=True, squeeze=False)[:, 0], positions, weights.unbind(1), strict=True
    ):
        place.imshow(rows.tolist(), aspect="auto", cmap="viridis", interpolation="nearest", vmin=0)
        place.axvline(position, color="tab:red", linewidth=0.8)
        place.set_ylabel(f"query {position}\nhead", fontsize="small")
    place.set_xlabel("key")
    figure.savefig(path)


def _check_positions(positions: Sequence[int], seq_len: int) -> Tensor:
    for position in positions:
        if not isinstance(position, int) or isinstance(position, bool):
            raise TypeError(f"positions has {position!r}: expected ints; convert it with int().")
        if not 0 <= position < seq_len:
            raise ValueError(f"positions has {position}: the sequence has positions 0 … {seq_len - 1}.")
    return torch.tensor([*positions], dtype=torch.int64)


def _rows_here(query: Tensor, here: Tensor, chosen: Tensor) -> Tensor:
    """The chosen queries [batch, chosen, heads, head_dim], with 0 for those that other ranks hold."""
    which, index = (chosen[:, None] == here).nonzero(as_tuple=True)
    rows = query.new_zeros(query.shape[0], len(chosen), *query.shape[2:])
    rows[:, which] = query[:, index]
    return rows


def _branches(pattern: DilatedPattern, num_heads: int, seq_len: int) -> Iterator[tuple[int, int, int]]:
    """Yield (branch, head, offset) for every branch, each head that runs it, and each of the head's offsets."""
    for branch in range(pattern.num_branches):
        for head in pattern.heads(branch, num_heads):
            for offset in pattern.head_offsets(branch, head, num_heads, seq_len):
                yield branch, head, offset


def _counts(
    pattern: DilatedPattern, num_heads: int, queries: Tensor, keys: Tensor, seq_len: int, is_causal: bool
) -> Tensor:
    """In how many branches each query sees each key: int64 [heads, queries, keys]."""
    counts = torch.zeros(num_heads, len(queries), len(keys), dtype=torch.int64)
    for branch, head, offset in _branches(pattern, num_heads, seq_len):
        counts[head] += _shown(pattern, branch, offset, queries, keys, seq_len)
    return counts * (keys <= queries[:, None]) if is_causal else counts


def _shown(pattern: DilatedPattern, branch: int, offset: int, queries: Tensor, keys: Tensor, seq_len: int) -> Tensor:
    """Whether each query sees each key in a branch at an offset, causal or not: bool [queries, keys]."""
    is_covered, is_key_covered = (pattern.covers(branch, offset, x, seq_len) for x in (queries, keys))
    same_segment = pattern.segment(branch, queries, seq_len)[:, None] == pattern.segment(branch, keys, seq_len)
    is_near = (queries[:, None] - keys).abs() <= pattern.reach(branch, seq_len)
    return is_covered[:, None] & is_key_covered & same_segment & is_near


def _phantoms(pattern: DilatedPattern, num_heads: int, queries: Tensor, seq_len: int, is_causal: bool) -> Tensor:
    """How many zero keys of the padding each query sees: int64 [heads, queries]."""
    counts = torch.zeros(num_heads, len(queries), dtype=torch.int64)
    for branch, head, offset in () if is_causal else _branches(pattern, num_heads, seq_len):
        in_last = pattern.segment(branch, queries, seq_len) == pattern.segment(branch, seq_len - 1, seq_len)
        covered = in_last & pattern.covers(branch, offset, queries, seq_len)
        counts[head] += pattern.phantom_keys(branch, offset, seq_len) * covered
    return counts
