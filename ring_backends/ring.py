"""A ring of ranks: who is in it, how a sequence lies over it, and what has been sent through it.

A :class:`Ring` belongs to one rank. Adapters make it (``initialize``); attention, ``shard`` and ``unshard`` use it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ring_backends.agreement import Agreement
from ring_backends.layout import LayoutKind, SequenceLayout


class Transfer(ABC):
    """A ring pass under way: some buffers leaving, some arriving."""

    @abstractmethod
    def wait(self, timeout: timedelta) -> None:
        """Return when everything has left and arrived. Called exactly once, since gloo hangs on a second wait.

        Raises:
            Exception: whatever the transport raises when a peer is gone or ``timeout`` has passed.
        """


@dataclass
class Traffic:
    """What this rank has sent by ring passes since the last reset, and how long it has waited for them.

    Attributes:
        messages, bytes: sent; payload, without padding or headers.
        wait_seconds: in which the host waited for hops. One on a GPU's stream holds up the stream, not the host.
    """

    messages: int = 0
    bytes: int = 0
    wait_seconds: float = 0.0

    def reset(self) -> None:
        self.messages = 0
        self.bytes = 0
        self.wait_seconds = 0.0


@dataclass(frozen=True)
class Ring:
    """One rank's view of a ring.

    Attributes:
        size, rank: ring size, and this rank's place in the ring.
        data_size, data_rank: how many rings there are beside each other, and which of them this one is.
        ranks: the global rank of every ring rank. The ring's process group has them in the same order.
        order: the global ranks of all rings, ring after ring; empty where nobody knows, as of a group's ring.
        layout_kind: ``"contiguous"`` or ``"zigzag"``.
        group: the ring's own process group; None in a ring of one, which sends nothing.
        agreement: checks that the ranks call alike; None in a ring of one.
        timeout: the most that one call of attention may wait for its peers.
        traffic: what this rank has sent; shared by all layouts of the ring.
        adapter: name of the adapter whose ``initialize`` made the ring, as the registry knows it.
    """

    size: int = 1
    rank: int = 0
    data_size: int = 1
    data_rank: int = 0
    ranks: tuple[int, ...] = (0,)
    order: tuple[int, ...] = ()
    layout_kind: LayoutKind = "contiguous"
    group: dist.ProcessGroup | None = None
    agreement: Agreement | None = None
    timeout: timedelta = timedelta(seconds=300)
    traffic: Traffic = dataclasses.field(default_factory=Traffic)
    adapter: str = "native"

    def __post_init__(self) -> None:
        SequenceLayout(1, self.size, self.layout_kind)

    @contextlib.contextmanager
    def refusals_told(self) -> Iterator[None]:
        """The other ranks hear of a TypeError or ValueError by which this one refuses a call, and need not wait."""
        try:
            yield
        except (TypeError, ValueError) as error:
            if self.agreement is not None:
                self.agreement.refuse(error)
            raise

    def with_layout(self, kind: LayoutKind) -> Ring:
        """The same ranks, group and traffic, with the sequence laid out as ``kind``."""
        return dataclasses.replace(self, layout_kind=kind)

    def layout(self, seq_len: int) -> SequenceLayout:
        """How a global sequence of ``seq_len`` tokens lies over the ring."""
        return SequenceLayout(seq_len, self.size, self.layout_kind)

    def positions(self, seq_len: int) -> Tensor:
        """Global positions of this rank's rows of a sequence of ``seq_len`` tokens: int64 [local seq], on the CPU."""
        return self.layout(seq_len).positions(self.rank)

    def shard(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """This rank's part of a tensor that every rank holds whole.

        Args:
            tensor: any shape; ``dim`` is the global sequence.

        Returns:
            A tensor of its own (in a ring of one, ``tensor`` itself), so that the whole may be freed. Its backward is
            the
            zero-padded slice: the objective is the sum of the ranks' local sums.
        """
        if self.size == 1:
            return tensor
        pieces = [tensor.narrow(dim, piece.start, len(piece)) for piece in self._pieces(tensor.shape[dim], self.rank)]
        return torch.cat(pieces, dim)

    def unshard(self, tensor: Tensor, dim: int = 1, seq_len: int | None = None) -> Tensor:
        """The whole tensor, from every rank's part.

        Args:
            tensor: this rank's part, as :meth:`shard` cuts it.
            seq_len: length of the global sequence; None means local length × ring size.

        Returns:
            The same tensor on every rank. Its backward sums the ranks' gradients and keeps this rank's part.

        Raises:
            ValueError: ``tensor`` does not have the length that this rank holds of ``seq_len`` tokens.
        """
        if seq_len is None:
            seq_len = tensor.shape[dim] * self.size
        is_empty = isinstance(seq_len, int) and seq_len == 0
        expected = 0 if is_empty else self.layout(seq_len).local_len(self.rank)
        if tensor.shape[dim] != expected:
            raise ValueError(
                f"tensor has {tensor.shape[dim]} rows along dim {dim}, but rank {self.rank} of a {self.layout_kind} "
                "ring of "
                f"{self.size} holds {expected} of {seq_len}; pass the seq_len that the tensor was sharded from."
            )
        if self.size == 1:
            return tensor
        unsharded: Tensor = _Unshard.apply(tensor, self, dim, seq_len)  # type: ignore[no-untyped-call]
        return unsharded

    def _pieces(self, seq_len: int, rank: int) -> Sequence[range]:
        return self.layout(seq_len).pieces(rank) if seq_len else (range(0),)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Equally shaped tensors of all ranks, stacked: [size, …]. For ``unshard``; no adapter gathers K or V."""
        gathered = tensor.new_empty((self.size, *tensor.shape))
        # Lists, since the forms that take one tensor changed their name between the torch releases in use.
        dist.all_gather(list(gathered), tensor.contiguous(), group=self.group)
        return gathered

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Sum the ranks' [size, …] tensors and return this rank's entry."""
        reduced = tensor.new_empty(tensor.shape[1:])
        dist.reduce_scatter(reduced, list(tensor.contiguous()), group=self.group)
        return reduced

    def __deepcopy__(self, memo: dict[int, Any]) -> Ring:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        kept = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("group", "agreement", "traffic")
        }
        return _unpickle_ring, (kept,)

    def check_connected(self) -> None:
        """Refuse a ring that came out of a pickle: process groups do not travel between processes.

        Raises:
            RuntimeError: this ring has several ranks and no connection to them.
        """
        if self.size > 1 and self.agreement is None:
            raise RuntimeError(
                f"this ring of {self.size} was unpickled in a process that is not connected to it; call the adapter's "
                "initialize() here and assign its ring to the attention's .ring."
            )


def _unpickle_ring(fields: dict[str, Any]) -> Ring:
    return Ring(**fields)


class _Unshard(torch.autograd.Function):
    """All-gather forward, reduce-scattered sum backward; uneven parts travel padded to the longest."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ring: Ring, dim: int, seq_len: int) -> Tensor:
        ctx.ring, ctx.dim, ctx.seq_len = ring, dim, seq_len
        local = tensor.movedim(dim, 0)
        longest = max(ring.layout(seq_len).local_len(rank) for rank in range(ring.size))
        padded = local.new_zeros((longest, *local.shape[1:]))
        padded[: len(local)] = local
        gathered = ring.all_gather(padded)
        whole = local.new_empty((seq_len, *local.shape[1:]))
        for rank, part in enumerate(gathered):
            first = 0
            for piece in ring.layout(seq_len).pieces(rank):
                whole[piece.start : piece.stop] = part[first : first + len(piece)]
                first += len(piece)
        return whole.movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ring, layout = ctx.ring, ctx.ring.layout(ctx.seq_len)
        whole = grad.movedim(ctx.dim, 0)
        longest = max(layout.local_len(rank) for rank in range(ring.size))
        padded = whole.new_zeros((ring.size, longest, *whole.shape[1:]))
        for rank in range(ring.size):
            first = 0
            for piece in layout.pieces(rank):
                padded[rank, first : first + len(piece)] = whole[piece.start : piece.stop]
                first += len(piece)
        local = ring.reduce_scatter(padded)[: layout.local_len(ring.rank)]
        return local.movedim(0, ctx.dim), None, None, None
