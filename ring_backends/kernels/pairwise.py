"""Tiles in which a query row and a key decide together: packed documents, and dropout.

With documents, a tile is cut into blocks: those of one document go to the kernel as they are, those whose rows and keys
have no document in common are left out, and the few that a boundary crosses go to the math kernel. So kernels need not
know of documents, and what nobody sees costs nothing. With dropout, all of it goes to the math kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch
from torch import Tensor

from ring_backends.kernels.base import Kernel, PairRule
from ring_backends.kernels.math import MathKernel
from ring_backends.softmax import merge_, statistics_dtype

_MATH = MathKernel()

BLOCK = 256
"""Rows and keys per block: as many as the math kernel takes at once."""


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
    for rows, keys, on_diagonal, is_mixed in _parts(rule, is_causal):
        tensors = query[:, :, rows], key[:, :, keys], value[:, :, keys]
        mask = None if key_mask is None else key_mask[:, :, keys]
        if is_mixed:
            some_rule = rule.part(rows, keys)
            part = _MATH.forward(*tensors, is_causal=on_diagonal, scale=scale, key_mask=mask, rule=some_rule)
        else:
            part = kernel.forward(*tensors, is_causal=on_diagonal, scale=scale, key_mask=mask)
        merge_(out[:, :, rows], lse[:, :, rows], *part)
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
    for rows, keys, on_diagonal, is_mixed in _parts(rule, is_causal):
        of_rows = [x[:, :, rows] for x in (grad_out, query, out, lse)]
        tensors = of_rows[0], of_rows[1], key[:, :, keys], value[:, :, keys], of_rows[2], of_rows[3]
        mask = None if key_mask is None else key_mask[:, :, keys]
        if is_mixed:
            some_rule = rule.part(rows, keys)
            part = _MATH.backward(*tensors, is_causal=on_diagonal, scale=scale, key_mask=mask, rule=some_rule)
        else:
            part = kernel.backward(*tensors, is_causal=on_diagonal, scale=scale, key_mask=mask)
        grad_query[:, :, rows] += part[0]
        grad_key[:, :, keys] += part[1]
        grad_value[:, :, keys] += part[2]
    return grad_query, grad_key, grad_value


def _parts(rule: PairRule, is_causal: bool) -> Iterator[tuple[slice, slice, bool, bool]]:
    """(rows, keys, whether the causal diagonal runs through them, whether several documents meet there)."""
    assert rule.query_documents is not None
    assert rule.key_documents is not None
    rows, keys = _bounds(rule.query_documents), _bounds(rule.key_documents)
    for index, (first, last, row_slice) in enumerate(rows):
        met = []
        for key_index, (first_key, last_key, key_slice) in enumerate(keys[: index + 1] if is_causal else keys):
            if last >= first_key and first <= last_key:
                is_mixed = not first == last == first_key == last_key
                met.append((is_causal and key_index == index, is_mixed, key_slice))
        for (on_diagonal, is_mixed), group in groupby(met, key=lambda block: block[:2]):
            for stretch in _joined([key_slice for _, _, key_slice in group]):
                yield row_slice, stretch, on_diagonal, is_mixed


def _joined(slices: list[slice]) -> list[slice]:
    """Slices in order, those that follow each other without a gap made one."""
    joined: list[slice] = []
    for part in slices:
        if joined and joined[-1].stop == part.start:
            joined[-1] = slice(joined[-1].start, part.stop)
        else:
            joined.append(part)
    return joined


def _bounds(documents: Tensor) -> list[tuple[int, int, slice]]:
    """Per block of [B, H, S]: the lowest and the highest document, and the block."""
    blocks = documents.split(BLOCK, dim=2)
    ends = torch.stack([torch.stack(block.aminmax()) for block in blocks]).tolist()
    starts = range(0, documents.shape[2], BLOCK)
    return [
        (first, last, slice(start, start + block.shape[2]))
        for (first, last), start, block in zip(ends, starts, blocks, strict=True)
    ]
