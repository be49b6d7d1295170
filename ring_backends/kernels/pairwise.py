"""Tiles in which a query row and a key decide together: packed documents, and dropout.

With documents, a tile is cut where documents end: what lies within one document goes to the kernel as it is, what has
no document in common is left out, and the little that heads of different offsets cut differently goes to the math
kernel. So kernels need not know of documents, and what nobody sees costs nothing. With dropout, all of it goes to the
math kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise

import torch
from torch import Tensor

from ring_backends.kernels.base import Kernel, PairRule
from ring_backends.kernels.math import MathKernel
from ring_backends.kernels.merge import merge_, statistics_dtype

_MATH = MathKernel()

BLOCK = 256
"""Rows and keys per block where documents change too often to be cut out: as many as the math kernel takes at once."""

MIN_MEAN_RUN = 32
"""Rows that a document has on average where it is cut out."""


def forward(
    kernel: Kernel,
    rule: PairRule,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    is_causal: bool,
    scale: float,
    key_mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As Kernel.forward, for the pairs that the rule lets see each other; out is in the statistics dtype."""
    if rule.dropout is not None:
        return _MATH.forward(query, key, value, is_causal=is_causal, scale=scale, key_mask=key_mask, rule=rule)
    stats = statistics_dtype(query.dtype)
    out = torch.zeros_like(query, dtype=stats, memory_format=torch.contiguous_format)
    lse = query.new_full(query.shape[:-1], -torch.inf, dtype=stats)
    for batch, rows, keys, on_diagonal, is_mixed in _parts(rule, is_causal):
        tensors = query[batch, :, rows], key[batch, :, keys], value[batch, :, keys]
        mask = None if key_mask is None else key_mask[batch, :, keys]
        if is_mixed:
            some_rule = rule.part(batch, rows, keys)
            part = _MATH.forward(*tensors, is_causal=on_diagonal, scale=scale, key_mask=mask, rule=some_rule)
        else:
            part = kernel.forward(*tensors, is_causal=on_diagonal, scale=scale, key_mask=mask)
        merge_(out[batch, :, rows], lse[batch, :, rows], *part)
    return out, lse


def backward(
    kernel: Kernel,
    rule: PairRule,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    is_causal: bool,
    scale: float,
    key_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As Kernel.backward, for the pairs that the rule lets see each other; in the statistics dtype."""
    if rule.dropout is not None:
        tensors = grad_out, query, key, value, out, lse
        return _MATH.backward(*tensors, is_causal=is_causal, scale=scale, key_mask=key_mask, rule=rule)
    stats = statistics_dtype(query.dtype)
    grad_query, grad_key, grad_value = (
        torch.zeros_like(x, dtype=stats, memory_format=torch.contiguous_format) for x in (query, key, value)
    )
    for batch, rows, keys, on_diagonal, is_mixed in _parts(rule, is_causal):
        of_rows = [x[batch, :, rows] for x in (grad_out, query, out, lse)]
        tensors = of_rows[0], of_rows[1], key[batch, :, keys], value[batch, :, keys], of_rows[2], of_rows[3]
        mask = None if key_mask is None else key_mask[batch, :, keys]
        if is_mixed:
            some_rule = rule.part(batch, rows, keys)
            part = _MATH.backward(*tensors, is_causal=on_diagonal, scale=scale, key_mask=mask, rule=some_rule)
        else:
            part = kernel.backward(*tensors, is_causal=on_diagonal, scale=scale, key_mask=mask)
        grad_query[batch, :, rows] += part[0]
        grad_key[batch, :, keys] += part[1]
        grad_value[batch, :, keys] += part[2]
    return grad_query, grad_key, grad_value


def _parts(rule: PairRule, is_causal: bool) -> Iterator[tuple[slice, slice, slice, bool, bool]]:
    """(batch, rows, keys, whether the causal diagonal runs through them, whether several documents meet there)."""
    assert rule.query_documents is not None
    assert rule.key_documents is not None
    everything = slice(None)
    for batch, is_of_one in _alike(rule.query_documents, rule.key_documents):
        if is_of_one:
            yield batch, everything, everything, is_causal, False
            continue
        queries, keys = rule.query_documents[batch], rule.key_documents[batch]
        both = (queries, keys)
        first, last, row_blocks = _bounds(queries, *(both if is_causal else (queries,)))
        first_key, last_key, key_blocks = _bounds(keys, *(both if is_causal else (keys,)))
        meet = (last[:, None] >= first_key) & (first[:, None] <= last_key)
        if is_causal:
            meet = meet.tril()
        mixed = (first != last)[:, None] | (first_key != last_key) | (first[:, None] != first_key)
        where = meet.nonzero()
        met = zip(where.tolist(), mixed[where[:, 0], where[:, 1]].tolist(), strict=True)
        blocks = ((row, is_causal and row == key, is_mixed, key_blocks[key]) for (row, key), is_mixed in met)
        for (row, on_diagonal, is_mixed), group in groupby(blocks, key=lambda block: block[:3]):
            for stretch in _joined([block for *_, block in group]):
                yield batch, row_blocks[row], stretch, on_diagonal, is_mixed


def _alike(queries: Tensor, keys: Tensor) -> list[tuple[slice, bool]]:
    """Parts of the batch with whether all in them is of one document each, the same for queries and keys.

    The whole batch where all of it has the same documents; else runs of such, and the others one by one.
    """
    if all(bool((x[1:] == x[:-1]).all()) for x in (queries, keys)):
        return [(slice(None), False)]
    both = torch.cat([queries.flatten(1), keys.flatten(1)], 1)
    parts: list[tuple[slice, bool]] = []
    for index, is_of_one in enumerate((both == both[:, :1]).all(1).tolist()):
        if is_of_one and parts and parts[-1][1]:
            parts[-1] = slice(parts[-1][0].start, index + 1), True
        else:
            parts.append((slice(index, index + 1), is_of_one))
    return parts


def _bounds(documents: Tensor, *all_documents: Tensor) -> tuple[Tensor, Tensor, list[slice]]:
    """Blocks of [B, H, S], cut where some head's document changes in any of ``all_documents``, equally long.

    Cut evenly where they change often. Lowest and highest document per block: on the CPU.
    """
    length = documents.shape[2]
    changes = torch.stack([(x[:, :, 1:] != x[:, :, :-1]).flatten(0, 1).any(0) for x in all_documents]).any(0)
    cuts: list[int] = (changes.nonzero().squeeze(1) + 1).tolist()
    if len(cuts) * MIN_MEAN_RUN > length:
        cuts = [*range(BLOCK, length, BLOCK)]
        ends = [torch.stack(block.aminmax()) for block in documents.split(BLOCK, dim=2)]
        first, last = torch.stack(ends).cpu().unbind(1)
    else:  # which leaves each head one document per block
        starts = torch.tensor([0, *cuts], device=documents.device)
        first, last = (bound.cpu() for bound in documents.index_select(2, starts).flatten(0, 1).aminmax(dim=0))
    return first, last, [slice(start, stop) for start, stop in pairwise([0, *cuts, length])]


def _joined(slices: list[slice]) -> list[slice]:
    """Slices in order, those that follow each other without a gap made one."""
    joined: list[slice] = []
    for part in slices:
        if joined and joined[-1].stop == part.start:
            joined[-1] = slice(joined[-1].start, part.stop)
        else:
            joined.append(part)
    return joined
