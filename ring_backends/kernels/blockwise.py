"""Attention of one tile in plain torch, block by block, for every device, float dtype and rule of pairs.

It computes an online softmax over blocks of keys, so that memory is O(S × block) beyond inputs and outputs. Products,
sums and statistics are in fp32 (fp64 for fp64 inputs), also under autocast.

A NaN or inf in a key never reaches a row that does not see the key. Scores are masked by ``masked_fill``, and masked
keys and values are set to 0. If the rows of one block see different keys (on a causal diagonal, between documents), a
matrix product would turn 0 × NaN into NaN. There :func:`_product` adds NaN and inf separately, if there are any.
In the backward, a NaN in a query or gradient row likewise never reaches a key that the row does not see. A score_mod is
evaluated for hidden pairs too, and its results and gradients there are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ring_backends.kernels.dtype import without_autocast
from ring_backends.kernels.merge import statistics_dtype
from ring_backends.kernels.score_mod import PairScores
from ring_backends.kernels.tile import PairRule, TileInputs
from ring_backends.schedule.bands import CAUSAL, Band, as_slice, trimmed
from ring_backends.torch_internals import has_values

BLOCK_PAIRS = 2**19
"""How many scores are computed at a time. More would not stay in a cache of the CPU; fewer cost more calls."""


class _BlockPair(NamedTuple):
    """One block of rows against one block of keys, and their band; None if no limit of the band crosses the block."""

    rows: slice
    keys: slice
    band: Band | None


def forward(tile: TileInputs) -> tuple[Tensor, Tensor]:
    """As :meth:`~ring_backends.kernels.base.Kernel.forward`, also with ``tile.rule``."""
    query, value = tile.query, tile.value
    is_finite = _is_finite(value)
    out = query.new_empty(*query.shape[:3], value.shape[3])
    lse = query.new_empty(query.shape[:-1], dtype=statistics_dtype(query.dtype))
    with without_autocast(query.device):
        for rows, pairs in _row_blocks(tile):
            out[:, :, rows], lse[:, :, rows] = _forward_rows(tile, rows, pairs, is_finite=is_finite)
    return out, lse


def backward(tile: TileInputs, grad_out: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As :meth:`~ring_backends.kernels.base.Kernel.backward`, also with ``tile.rule``.

    Gradients are in the statistics dtype.
    """
    query, key, value = tile.tensors
    is_finite = all(map(_is_finite, (grad_out, query, key, value, out)))  # out is NaN if another tile has one
    stats = statistics_dtype(query.dtype)
    grad_query = torch.empty_like(query, dtype=stats)
    grad_key = torch.zeros_like(key, dtype=stats)
    grad_value = torch.zeros_like(value, dtype=stats)
    with without_autocast(query.device):
        for rows, pairs in _row_blocks(tile):
            grad_query[:, :, rows] = _backward_rows(
                tile, grad_out, out, lse, rows, pairs, grad_key, grad_value, is_finite=is_finite
            )
    if tile.key_mask is not None:
        grad_key.masked_fill_(tile.key_mask.unsqueeze(-1), 0.0)
        grad_value.masked_fill_(tile.key_mask.unsqueeze(-1), 0.0)
    return grad_query, grad_key, grad_value


def _row_blocks(tile: TileInputs) -> Iterator[tuple[slice, list[_BlockPair]]]:
    """For each block of rows that sees a key, the blocks of keys that it sees."""
    (batch, num_heads, seq_q, _), seq_k = tile.query.shape, tile.key.shape[2]
    band = CAUSAL if tile.is_causal else tile.band
    size = block_size(batch * num_heads)
    for first_row in range(0, seq_q, size):
        queries = range(first_row, min(first_row + size, seq_q))
        seen = trimmed(queries, range(seq_k), band)
        keys = range(0) if seen is None else seen.keys
        pairs = []
        for first_key in range(keys.start // size * size, keys.stop, size):
            block = range(max(first_key, keys.start), min(first_key + size, keys.stop))
            of_block = band and band.shifted(queries.start, block.start).limits(len(queries), len(block))
            pairs.append(_BlockPair(as_slice(queries), as_slice(block), of_block))
        yield as_slice(queries), pairs


def block_size(num_heads: int) -> int:
    """How many rows and keys to compute at a time in ``num_heads`` heads, of all sequences of the batch.

    A block has about ``BLOCK_PAIRS`` pairs.
    """
    size = math.isqrt(BLOCK_PAIRS // num_heads)
    return min(max(size // 64 * 64, 64), 1024)


def _forward_rows(tile: TileInputs, rows: slice, pairs: list[_BlockPair], *, is_finite: bool) -> tuple[Tensor, Tensor]:
    """out [B, Hq, b, V] and lse [B, Hq, b] of one block of b rows, in the statistics dtype."""
    (query, key, value), key_mask, rule = tile.tensors, tile.key_mask, tile.rule
    num_kv_heads = key.shape[1]
    q = _fold(query[:, :, rows], num_kv_heads, statistics_dtype(query.dtype)) * tile.scale
    repeats = query.shape[1] // num_kv_heads
    maximum = q.new_full((*q.shape[:-1], 1), -torch.inf)
    total = torch.zeros_like(maximum)
    weighted = q.new_zeros(*q.shape[:-1], value.shape[3])
    for pair in pairs:
        k, v = _key_block(key, key_mask, pair), _key_block(value, key_mask, pair)
        product = scores = q @ k.transpose(-1, -2)
        of_pair = _pair_scores(pair, rule)
        if of_pair is not None:
            scores = _fold(of_pair.modified(_unfold(product, repeats)), num_kv_heads, product.dtype)
        hidden = _hidden(pair, repeats, key_mask, rule, q)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        unseen = None if is_finite else _unseen(pair, rule, hidden, scores)
        new_maximum = torch.maximum(maximum, scores.amax(-1, keepdim=True))
        # For a row that has seen no key yet, exp(−inf − 0) is 0, but exp(−inf + inf) would be NaN.
        shift = new_maximum.masked_fill(new_maximum == -torch.inf, 0.0)
        weights = torch.sub(scores, shift, out=product).exp_()
        rescale = torch.exp(maximum - shift)
        total = total * rescale + weights.sum(-1, keepdim=True)
        dropout = _dropout(pair, num_kv_heads, rule, weights.dtype)
        if dropout is not None:
            weights *= dropout
        weighted = weighted * rescale + _product(weights, v, unseen)
        maximum = new_maximum
        del product, scores, weights, hidden, unseen  # before the next block is computed
    blind = maximum == -torch.inf
    out = (weighted / total).masked_fill(blind, 0.0)
    lse = (maximum + total.log()).masked_fill(blind, -torch.inf)
    return _unfold(out, repeats), _unfold(lse, repeats).squeeze(-1)


def _backward_rows(
    tile: TileInputs,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    rows: slice,
    pairs: list[_BlockPair],
    grad_key: Tensor,
    grad_value: Tensor,
    *,
    is_finite: bool,
) -> Tensor:
    """grad_query [B, Hq, b, D] of one block of b rows; adds the rows' share to grad_key and grad_value.

    ``do`` is the gradient of the output, ``p`` the softmax weights of the pair, ``ds`` the gradient of its scores. The
    score_mod and its gradient are computed between the products: few blocks of scores are held at a time.
    """
    (query, key, value), key_mask, rule = tile.tensors, tile.key_mask, tile.rule
    num_kv_heads, repeats = key.shape[1], query.shape[1] // key.shape[1]
    stats = grad_key.dtype
    row_lse = _fold(lse[:, :, rows].unsqueeze(-1), num_kv_heads, stats)
    blind = row_lse == -torch.inf
    row_lse = row_lse.masked_fill(blind, torch.inf)  # so that exp(score − LSE) is 0
    has_blind = not (blind.device.type == "cpu" and has_values(blind)) or bool(blind.any())
    q = _fold(query[:, :, rows], num_kv_heads, stats).masked_fill(blind, 0.0)
    do = _fold(grad_out[:, :, rows], num_kv_heads, stats).masked_fill(blind, 0.0)
    o = _fold(out[:, :, rows], num_kv_heads, stats)
    delta = (do * o).sum(-1, keepdim=True).masked_fill(blind, 0.0)
    grad_q = torch.zeros_like(q)
    q *= tile.scale
    for pair in pairs:
        k, v = _key_block(key, key_mask, pair), _key_block(value, key_mask, pair)
        product = scores = q @ k.transpose(-1, -2)
        of_pair, gradient = _pair_scores(pair, rule), None
        if of_pair is not None:
            scores, gradient = of_pair.modified_with_gradient(_unfold(product, repeats))
            scores = _fold(scores, num_kv_heads, stats)
            product = torch.empty_like(product)  # the graph of the gradient may hold the former one
        hidden = _hidden(pair, repeats, key_mask, rule, q)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        unseen = None if is_finite else _unseen(pair, rule, hidden, scores)
        zero = hidden if unseen is None else unseen
        if has_blind:
            zero = blind if zero is None else zero | blind
        p = torch.sub(scores, row_lse, out=product).exp_()
        ds = do @ v.transpose(-1, -2)
        dropout = _dropout(pair, num_kv_heads, rule, p.dtype)
        if dropout is not None:
            ds *= dropout
        ds.sub_(delta).mul_(p)
        if zero is not None:
            p.masked_fill_(zero, 0.0)
            ds.masked_fill_(zero, 0.0)
        if gradient is not None:
            ds = _fold(gradient(_unfold(ds, repeats)), num_kv_heads, stats)
            if not _is_finite(ds):  # the slope of a score_mod may be infinite where it hides
                ds = ds.masked_fill((scores == -torch.inf) | blind, 0.0)
        if dropout is not None:
            p *= dropout
        # Rows of q and do that see no key are 0 already, and so are masked keys. Only the pairs that the band, the
        # documents or a score_mod hide are left.
        unseen_by = None if unseen is None else unseen.transpose(-1, -2)
        keys = pair.keys
        grad_q += _product(ds, k, unseen)
        grad_key[:, :, keys] += _product(ds.transpose(-1, -2), q, unseen_by)
        grad_value[:, :, keys] += _product(p.transpose(-1, -2), do, unseen_by)
        del product, scores, p, ds, hidden, unseen, unseen_by, zero, gradient  # before the next block is computed
    return _unfold(grad_q.mul_(tile.scale).masked_fill(blind, 0.0), repeats)


def _fold(x: Tensor, num_kv_heads: int, dtype: torch.dtype) -> Tensor:
    """[B, Hq, b, D] as [B, Hk, repeats × b, D]: the heads that share keys become rows of one head."""
    grouped: Tensor = x.unflatten(1, (num_kv_heads, -1))
    return grouped.flatten(2, 3).to(dtype)


def _unfold(x: Tensor, repeats: int) -> Tensor:
    """The inverse of :func:`_fold`."""
    grouped: Tensor = x.unflatten(2, (repeats, -1))
    return grouped.flatten(1, 2)


def _key_block(x: Tensor, key_mask: Tensor | None, pair: _BlockPair) -> Tensor:
    """A block of keys or values in the statistics dtype, with masked ones set to 0."""
    block = x[:, :, pair.keys].to(statistics_dtype(x.dtype))
    return block if key_mask is None else block.masked_fill(key_mask[:, :, pair.keys].unsqueeze(-1), 0.0)


def _hidden(
    pair: _BlockPair, repeats: int, key_mask: Tensor | None, rule: PairRule | None, like: Tensor
) -> Tensor | None:
    """Which keys each row does not see: bool, broadcasts to [B, Hk, repeats × rows, keys]; None if they see all."""
    hidden = None if key_mask is None else key_mask[:, :, None, pair.keys]
    if pair.band is not None:
        size = pair.rows.stop - pair.rows.start, pair.keys.stop - pair.keys.start
        below, above = pair.band.below, pair.band.above
        outside = like.new_zeros(size, dtype=torch.bool)
        if above is not None:
            outside |= like.new_ones(size, dtype=torch.bool).triu(above + 1)
        if below is not None:
            outside |= like.new_ones(size, dtype=torch.bool).tril(-below - 1)
        outside = outside.repeat(repeats, 1)
        hidden = outside if hidden is None else hidden | outside
    if rule is not None and rule.query_documents is not None and rule.key_documents is not None:
        keys = rule.key_documents[:, :, None, pair.keys]
        rows = _fold(rule.query_documents[:, :, pair.rows, None], keys.shape[1], keys.dtype)
        hidden = rows != keys if hidden is None else hidden | (rows != keys)
    return hidden


def _dropout(pair: _BlockPair, num_kv_heads: int, rule: PairRule | None, dtype: torch.dtype) -> Tensor | None:
    """The factors on the weights of the pair, [B, Hk, repeats × rows, keys]; None without dropout."""
    if rule is None or rule.dropout is None:
        return None
    assert rule.query_words is not None
    assert rule.key_words is not None
    rows = _fold(rule.query_words[:, :, pair.rows], num_kv_heads, torch.int32)
    return rule.dropout.weights(rows, rule.key_words[:, :, pair.keys], dtype)


def _pair_scores(pair: _BlockPair, rule: PairRule | None) -> PairScores | None:
    """The score_mod of the pair's rows and keys; None without."""
    return None if rule is None or rule.scores is None else rule.scores.part(pair.rows, pair.keys)


def _unseen(pair: _BlockPair, rule: PairRule | None, hidden: Tensor | None, scores: Tensor) -> Tensor | None:
    """Which keys each row does not see, if different rows may see different keys; else None."""
    if rule is not None and rule.scores is not None:
        return scores == -torch.inf
    is_pairwise = pair.band is not None or (rule is not None and rule.query_documents is not None)
    return hidden if is_pairwise else None


def _is_finite(x: Tensor) -> bool:
    """Whether all elements are known to be finite. On a GPU, the host would have to wait for the answer.

    The sum may overflow. This costs time, but no result depends on it.
    """
    is_known = x.device.type == "cpu" and has_values(x)
    return is_known and bool(x.sum(dtype=statistics_dtype(x.dtype)).isfinite())


def _product(weights: Tensor, x: Tensor, hidden: Tensor | None) -> Tensor:
    """Compute weights @ x. A NaN or inf in ``x`` reaches only the rows from which it is not hidden.

    Args:
        weights: [B, Hk, m, k], 0 where hidden.
        x: [B, Hk, k, D].
        hidden: bool, broadcasts to ``weights``; None if nothing is hidden, or ``x`` is known to be finite.
    """
    if hidden is None:
        return weights @ x
    finite = x.isfinite()
    seen = (~hidden).to(x.dtype).expand(weights.shape)
    product = weights @ x.masked_fill(~finite, 0.0)
    found = torch.cat([x.isnan(), x == torch.inf, x == -torch.inf], -1).to(x.dtype)
    numbers = torch.nan, torch.inf, -torch.inf
    for number, has_seen in zip(numbers, ((seen @ found) > 0).chunk(3, -1), strict=True):
        product = product + torch.zeros_like(product).masked_fill(has_seen, number)
    return product
