"""Tensors of all ranks of a ring, with their gradients: the rows of a sequence, sums, and pooled rows."""

from __future__ import annotations

import math
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ring_backends.ring.calls import Call, Configuration, backward_of
from ring_backends.ring.members import Members
from ring_backends.schedule.layout import SequenceLayout
from ring_backends.torch_internals import with_backward

How = Literal["mean", "max", "first", "last"]


def unshard(members: Members, name: str, layout: SequenceLayout, tensor: Tensor, dim: int = 1) -> Tensor:
    """See :meth:`ring_backends.Ring.unshard`. The ranks compare ``name``, which says what the operation is for."""
    if members.size == 1:
        return tensor
    others = [size for axis, size in enumerate(tensor.shape) if axis != dim % tensor.dim()]
    needs_gradient = torch.is_grad_enabled() and tensor.requires_grad
    members.check_connected()
    assert members.agreement is not None
    fields = {
        "order of calls": name,
        "seq_len": layout.seq_len,
        "layout": layout.kind,
        "dim": dim % tensor.dim(),
        "sizes of the other dims": others,
        "dtype": str(tensor.dtype),
        "device": tensor.device.type,
        "gradients": "needed" if needs_gradient else "not needed",
    }
    call = members.agreement.begin(Configuration(fields))
    return cast(Tensor, _Unshard.apply(tensor, members, layout, dim, call))  # type: ignore[no-untyped-call]


class _Unshard(torch.autograd.Function):
    """All-gather of the ranks' rows. The backward is a reduce-scatter of their gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, members: Members, layout: SequenceLayout, dim: int, call: Call) -> Tensor:
        ctx.members, ctx.layout, ctx.dim, ctx.call = members, layout, dim, call
        assert members.agreement is not None
        with members.agreement.report_errors(call):
            local = tensor.movedim(dim, 0).resolve_conj().resolve_neg().contiguous()
            lengths = [layout.local_len(rank) for rank in range(members.size)]
            whole = local.new_empty((layout.seq_len, *local.shape[1:]))
            for rank, part in members.parts_of_ranks(call, local, lengths, 0):
                first = 0
                for piece in layout.pieces(rank):
                    whole[piece.start : piece.stop] = part[first : first + len(piece)]
                    first += len(piece)
            return whole.movedim(0, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        agreement, whole = ctx.members.agreement, grad.movedim(ctx.dim, 0)
        call = agreement.begin(ctx.call.configuration, direction=backward_of(ctx.call.number))

        def part_of(rank: int) -> Tensor:
            # The result of torch.cat has the strides of its arguments if these are channels last.
            return torch.cat([whole[piece.start : piece.stop] for piece in ctx.layout.pieces(rank)]).contiguous()

        with agreement.report_errors(call):
            total = ctx.members.reduce_scatter(call, part_of, 0)
            return total.to(grad.dtype).movedim(0, ctx.dim), None, None, None, None


def sum_of_ranks(members: Members, of_rank: Tensor, name: str = "unshard") -> Tensor:
    """The sum of a tensor of every rank, of any shape, the same on every rank. Every rank makes the same call.

    Its backward sums the ranks' gradients. If every rank computes the same loss from it, that multiplies the gradient
    by the ring size, and the mean over the ranks is the gradient of one device.

    Args:
        name: what the sum is for. The ranks compare it.
    """
    return _of_ranks(members, of_rank, 0, name).sum(0)


def _of_ranks(members: Members, of_rank: Tensor, dim: int = 1, name: str = "unshard") -> Tensor:
    """A tensor of every rank, stacked along ``dim``. The gradient of each rank's part returns to it."""
    return unshard(members, name, SequenceLayout(members.size, members.size), of_rank.unsqueeze(dim), dim)


def pool(members: Members, layout: SequenceLayout | None, rows: Tensor, mask: Tensor | None, how: How) -> Tensor:
    """See :meth:`ring_backends.Ring.pool`.

    Args:
        layout: None if the sequence has no rows.
    """
    counts = torch.ones(rows.shape[:2], dtype=torch.bool, device=rows.device) if mask is None else mask != 0
    seq_len = 0 if layout is None else layout.seq_len
    number = sum_of_ranks(members, counts.sum(1), f"pool of {seq_len} rows of shape {[*rows.shape[2:]]} by {how!r}")
    inner = (1,) * (rows.dim() - 2)
    if how in ("first", "last"):
        pooled = _outermost(members, layout, rows, counts, is_last=how == "last")
    else:
        rows_that_count = counts.view(*counts.shape, *inner)
        wide = torch.promote_types(rows.dtype, torch.float32)
        if how == "mean":
            sums = torch.where(rows_that_count, rows, 0.0).sum(1, dtype=wide)
            pooled = (sum_of_ranks(members, sums) / number.clamp(min=1).view(-1, *inner)).to(rows.dtype)
        else:
            own = torch.where(rows_that_count, rows, -math.inf)
            largest = own.amax(1) if own.shape[1] else rows.sum(1) - math.inf
            pooled = _largest_of_ranks(members, largest, (own == largest.unsqueeze(1)).sum(1))
    return torch.where(number.view(-1, *inner) > 0, pooled, 0.0)


def _largest_of_ranks(members: Members, largest: Tensor, ties: Tensor) -> Tensor:
    """The largest value of the ranks. The gradient goes to all rows with this value alike, as that of ``amax`` does.

    Args:
        largest: this rank's largest values, whose gradient goes to its rows alike.
        ties: how many rows have them.
    """
    of_ranks = _of_ranks(members, largest)
    pooled = of_ranks.detach().amax(1)
    if not of_ranks.requires_grad:
        return pooled
    shares = torch.where(of_ranks == pooled.unsqueeze(1), _of_ranks(members, ties), 0)
    shares = shares.to(torch.promote_types(of_ranks.dtype, torch.float32))
    shares = (shares / shares.sum(1, keepdim=True).clamp(min=1)).to(of_ranks.dtype)
    return with_backward(of_ranks, lambda _: pooled, lambda grad: grad.unsqueeze(1) * shares)


def _outermost(
    members: Members, layout: SequenceLayout | None, rows: Tensor, counts: Tensor, *, is_last: bool
) -> Tensor:
    """The row with the lowest or the highest position of those that count; any row if none counts."""
    entries = torch.arange(len(rows), device=rows.device)
    if layout is not None and rows.shape[1]:
        positions = layout.positions(members.rank).to(rows.device)
        place, index = torch.where(counts, -positions if is_last else positions, layout.seq_len).min(1)
        own = rows[entries, index]
    else:
        place, own = torch.full_like(entries, torch.iinfo(entries.dtype).max), rows.sum(1)
    nearest = _of_ranks(members, place).argmin(1)
    return _of_ranks(members, own)[entries, nearest]


def check_pooling(rows: Tensor, mask: Tensor | None, how: How) -> None:
    """Check the arguments of :meth:`ring_backends.Ring.pool`.

    Raises:
        ValueError: ``how`` is unknown, or ``mask`` is not that of ``rows``.
    """
    if how not in get_args(How):
        raise ValueError(f"how = {how!r}: expected one of {', '.join(map(repr, get_args(How)))}.")
    if mask is not None and mask.shape != rows.shape[:2]:
        raise ValueError(
            f"mask is {[*mask.shape]}: expected {[*rows.shape[:2]]}, one element per row; pass this rank's part, "
            "ring.shard(mask)."
        )
