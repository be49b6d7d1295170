"""Pooling of a sequence that is distributed over a ring: the mean, maximum, first or last of its rows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, cast, get_args

import torch
from torch import Tensor

from ring_backends.torch_internals import with_backward

if TYPE_CHECKING:
    from ring_backends.ring.ring import Ring

How = Literal["mean", "max", "first", "last"]


def pool(ring: Ring, rows: Tensor, mask: Tensor | None, how: How, seq_len: int | None) -> Tensor:
    """See :meth:`ring_backends.Ring.pool`."""
    with ring.report_refusals():
        seq_len = rows.shape[1] * ring.size if seq_len is None else seq_len
        _check(ring, rows, mask, how, seq_len)
    counts = torch.ones(rows.shape[:2], dtype=torch.bool, device=rows.device) if mask is None else mask != 0
    number = sum_of_ranks(ring, counts.sum(1), f"pool of {seq_len} rows of shape {[*rows.shape[2:]]} by {how!r}")
    inner = (1,) * (rows.dim() - 2)
    if how in ("first", "last"):
        pooled = _outermost(ring, rows, counts, seq_len, is_last=how == "last")
    else:
        rows_that_count = counts.view(*counts.shape, *inner)
        wide = torch.promote_types(rows.dtype, torch.float32)
        if how == "mean":
            sums = torch.where(rows_that_count, rows, 0.0).sum(1, dtype=wide)
            pooled = (sum_of_ranks(ring, sums) / number.clamp(min=1).view(-1, *inner)).to(rows.dtype)
        else:
            own = torch.where(rows_that_count, rows, -math.inf)
            largest = own.amax(1) if own.shape[1] else rows.sum(1) - math.inf
            pooled = _largest_of_ranks(ring, largest, (own == largest.unsqueeze(1)).sum(1))
    return torch.where(number.view(-1, *inner) > 0, pooled, 0.0)


def _largest_of_ranks(ring: Ring, largest: Tensor, ties: Tensor) -> Tensor:
    """The largest value of the ranks. The gradient goes to all rows with this value alike, as that of ``amax`` does.

    Args:
        largest: this rank's largest values, whose gradient goes to its rows alike.
        ties: how many rows have them.
    """
    of_ranks = _of_ranks(ring, largest)
    pooled = of_ranks.detach().amax(1)
    if not of_ranks.requires_grad:
        return pooled
    shares = torch.where(of_ranks == pooled.unsqueeze(1), _of_ranks(ring, ties), 0)
    shares = shares.to(torch.promote_types(of_ranks.dtype, torch.float32))
    shares = (shares / shares.sum(1, keepdim=True).clamp(min=1)).to(of_ranks.dtype)
    return with_backward(of_ranks, lambda _: pooled, lambda grad: grad.unsqueeze(1) * shares)


def sum_of_ranks(ring: Ring, of_rank: Tensor, name: str = "unshard") -> Tensor:
    """The sum of a tensor of every rank, of any shape, the same on every rank. Every rank makes the same call.

    Its backward sums the ranks' gradients. If every rank computes the same loss from it, that multiplies the gradient
    by the ring size, and the mean over the ranks is the gradient of one device.

    Args:
        name: what the sum is for. The ranks compare it.
    """
    return ring.with_layout("contiguous")._unshard(name, of_rank.unsqueeze(0), 0, ring.size).sum(0)


def _outermost(ring: Ring, rows: Tensor, counts: Tensor, seq_len: int, *, is_last: bool) -> Tensor:
    """The row with the lowest or the highest position of those that count; any row if none counts."""
    positions = ring.positions(seq_len).to(rows.device) if seq_len else rows.new_zeros(0, dtype=torch.int64)
    order = -positions if is_last else positions
    entries, never = torch.arange(len(rows), device=rows.device), seq_len + 1
    if rows.shape[1]:
        place, index = torch.where(counts, order, never).min(1)
        own = rows[entries, index]
    else:
        place, own = torch.full_like(entries, never), rows.sum(1)
    nearest = _of_ranks(ring, place).argmin(1)
    return _of_ranks(ring, own)[entries, nearest]


def _of_ranks(ring: Ring, of_rank: Tensor) -> Tensor:
    """A tensor [batch, …] of every rank, [batch, ring size, …]. The gradient of each rank's part returns to it."""
    return cast(Tensor, ring.with_layout("contiguous").unshard(of_rank.unsqueeze(1), seq_len=ring.size))


def _check(ring: Ring, rows: Tensor, mask: Tensor | None, how: How, seq_len: int) -> None:
    if how not in get_args(How):
        raise ValueError(f"how = {how!r}: expected one of {', '.join(map(repr, get_args(How)))}.")
    ring.check_rows("rows", rows, seq_len)
    if mask is not None and mask.shape != rows.shape[:2]:
        raise ValueError(
            f"mask is {[*mask.shape]}: expected {[*rows.shape[:2]]}, one element per row; pass this rank's part, "
            "ring.shard(mask)."
        )
