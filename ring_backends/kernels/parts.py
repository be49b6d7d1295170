"""Runs a kernel on parts of a tile, one after the other, if one launch cannot hold the whole tile."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

MAX_ENTRIES = 65_535
"""The largest second dim of a CUDA grid, where FlashAttention and cuDNN have the batch."""


def in_parts(
    call: Callable[..., tuple[Tensor, ...]], tensors: Sequence[Tensor], *, entries: int, kv_heads: int | None = None
) -> tuple[Tensor, ...]:
    """Return the results of ``call(*tensors)``, called with parts of the batch and of the heads if they are too many.

    Args:
        tensors: [B, H, ...], where H is a multiple of the smallest number of heads, that of the key.
        call: a function of such tensors whose results are [B, H, ...] too.
        entries: the number of batch entries that one call may have.
        kv_heads: the number of key/value heads that one call may have; None for all.
    """
    batch, num_heads = tensors[0].shape[0], min(x.shape[1] for x in tensors)
    kv_heads = num_heads if kv_heads is None else kv_heads
    if batch <= entries and num_heads <= kv_heads:
        return call(*tensors)
    wholes: list[Tensor] = []
    for entry in range(0, batch, entries):
        for head in range(0, num_heads, kv_heads):

            def part(x: Tensor, entry: int = entry, head: int = head) -> Tensor:
                group = x.shape[1] // num_heads
                return x[entry : entry + entries, head * group : (head + kv_heads) * group]

            results = call(*map(part, tensors))
            if not wholes:
                wholes = [_whole(x, batch, num_heads, min(kv_heads, num_heads)) for x in results]
            for whole, result in zip(wholes, results, strict=True):
                part(whole).copy_(result)
    return tuple(wholes)


def _whole(part: Tensor, batch: int, num_heads: int, heads_of_part: int) -> Tensor:
    """A tensor for the results of all parts. Results with four dims have the memory layout [B, S, H, D]."""
    heads = part.shape[1] // heads_of_part * num_heads
    if part.dim() == 3:
        return part.new_empty(batch, heads, part.shape[2])
    return part.new_empty(batch, part.shape[2], heads, part.shape[3]).transpose(1, 2)
