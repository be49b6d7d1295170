"""A ring of ranks: the distribution of a sequence over them, and the traffic of this rank.

Each rank has a :class:`Ring` object of its own. An adapter's ``initialize`` makes it; attention, ``shard`` and
``unshard`` use it.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ring_backends.ring.members import Members, Traffic
from ring_backends.ring.passing_on import check_maps, entering_state, halo
from ring_backends.ring.pooling import How, check_pooling, pool, unshard
from ring_backends.ring.wire_memory import WireMemory
from ring_backends.schedule.checks import check_integer
from ring_backends.schedule.layout import LayoutKind, SequenceLayout


@dataclass(frozen=True)
class Ring(Members):
    """One rank's view of a ring.

    Attributes:
        size, rank: ring size and ring rank.
        data_size, data_rank: number of rings in the world, and the index of this one.
        ranks: the global rank of every ring rank. The ring's process group has the same order.
        order: the global ranks of all rings, ring after ring; empty if unknown, as after ``initialize(group=…)``.
        hosts: the name of each ring rank's host; empty for one rank.
        layout_kind: ``"contiguous"`` or ``"zigzag"``.
        group: the ring's own process group; None in a ring of one.
        agreement: checks that all ranks make the same calls; None in a ring of one.
        timeout: the longest time from the beginning of a call to the end of its last wait for a peer.
        traffic: what this rank has sent. All layouts of the ring share it.
        adapter: name in the registry of the adapter whose ``initialize`` made the ring.
        buffer_bytes: communication buffers may take this many bytes, even if that is more than their share of the
            tensors; None for the default of the device. The same on every rank.
        ulysses_size: how many neighbouring ranks exchange rows for heads within a call, as in ``initialize``.
        fits_heads: whether a call takes the largest divisor of ``ulysses_size`` that divides its heads.
        parts: for each living tensor that :meth:`shard` has returned, the dimension and this rank's number of rows. All
            layouts of the ring share it.
        connected: the (source, destination) pairs with this rank that NCCL has connected; None if hops do not go over
            NCCL. All layouts of the ring share it.
        wire_memory: the memory of the buffers that hops send and receive. All layouts of the ring share it.
    """

    layout_kind: LayoutKind = "contiguous"
    timeout: timedelta = timedelta(seconds=300)
    traffic: Traffic = dataclasses.field(default_factory=Traffic)
    adapter: str = "native"
    buffer_bytes: int | None = None
    ulysses_size: int = 1
    fits_heads: bool = False
    parts: WeakTensorKeyDictionary = dataclasses.field(
        default_factory=WeakTensorKeyDictionary, repr=False, compare=False
    )
    wire_memory: WireMemory = dataclasses.field(default_factory=WireMemory, repr=False, compare=False)

    _connections: ClassVar[tuple[str, ...]] = ("group", "agreement", "traffic", "parts", "connected", "wire_memory")
    """The fields that a pickle leaves out."""

    def __post_init__(self) -> None:
        SequenceLayout(1, self.size, self.layout_kind)

    def group_size(self, num_heads: int) -> int:
        """How many neighbouring ranks exchange rows for heads in a call with this number of query heads."""
        return math.gcd(self.ulysses_size, num_heads) if self.fits_heads else self.ulysses_size

    def with_layout(self, kind: LayoutKind) -> Ring:
        """The same ranks, group and traffic with another layout."""
        return dataclasses.replace(self, layout_kind=kind)

    def layout(self, seq_len: int) -> SequenceLayout:
        """The layout of a global sequence of ``seq_len`` tokens over the ring."""
        return SequenceLayout(seq_len, self.size, self.layout_kind)

    def positions(self, seq_len: int) -> Tensor:
        """Global positions of this rank's rows of a sequence of ``seq_len`` tokens: int64 [local seq], on the CPU."""
        return self.layout(seq_len).positions(self.rank)

    def shard(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """This rank's part of a tensor that every rank holds whole.

        Args:
            tensor: any shape.
            dim: the dimension of the global sequence.

        Returns:
            A copy, so that the whole tensor can be freed; in a ring of one, ``tensor`` itself. The backward pads the
            gradient with zeros, so the gradient of the whole tensor is the sum of the ranks' gradients.

        Raises:
            ValueError: this method has returned ``tensor``, so it is this rank's part already. A view or a copy of a
                part is not noticed.
        """
        if self.size == 1:
            return tensor
        seq_len = tensor.shape[dim]
        if seq_len == 0:
            return tensor.clone()
        self.check_whole("tensor", tensor, dim)
        pieces = self.layout(seq_len).pieces(self.rank)
        part = torch.cat([tensor.narrow(dim, piece.start, len(piece)) for piece in pieces], dim)
        if not torch.compiler.is_compiling():
            self.parts[part] = dim % part.dim(), part.shape[dim]
        return part

    def check_whole(self, name: str, tensor: Tensor, dim: int = 1) -> None:
        """Check that :meth:`shard` has not returned the argument ``name``, sharded along this dimension.

        Raises:
            ValueError: it has.
        """
        if torch.compiler.is_compiling():
            return
        if self.parts.get(tensor) == (dim % tensor.dim(), tensor.shape[dim]):
            raise ValueError(
                f"{name} is {[*tensor.shape]}: ring.shard returned it, so it is sharded along dim "
                f"{dim % tensor.dim()} already; pass the whole tensor, or to attention this part with the seq_len of "
                "the whole sequence."
            )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def unshard(self, tensor: Tensor, dim: int = 1, seq_len: int | None = None) -> Tensor:
        """The whole tensor, from every rank's part. Every rank of the ring makes the same call.

        Args:
            tensor: this rank's part, as :meth:`shard` returns it.
            seq_len: length of the global sequence; None is local length × ring size.

        Returns:
            The same tensor on every rank. Its backward sums the ranks' gradients and returns this rank's part.

        Raises:
            ValueError: the length of ``tensor`` is not that of this rank's part of ``seq_len`` tokens.
            RingMismatchError: the ranks' calls differ.
            RingPeerError: a rank died, stalled or left.
        """
        with self.report_refusals():
            seq_len = self.check_rows("tensor", tensor, seq_len, dim)
        return unshard(self, "unshard", self.layout(seq_len), tensor, dim) if seq_len else tensor

    def pool(
        self, rows: Tensor, mask: Tensor | None = None, how: How = "mean", *, seq_len: int | None = None
    ) -> Tensor:
        """The mean, maximum, first or last row of the whole sequence. Every rank of the ring makes the same call.

        Args:
            rows: [batch, local seq, …], this rank's rows.
            mask: [batch, local seq], this rank's part of a mask: True, or not 0, where a row counts. None counts all.
            how: ``"mean"``, ``"max"``, ``"first"`` or ``"last"``. First and last are those of the lowest and highest
                global position.
            seq_len: length of the global sequence; None is local length × ring size.

        Returns:
            [batch, …], in the dtype of ``rows``, the same on every rank; 0 for a batch entry without a row that counts.
            Means are summed in fp32 at least. Its backward sums the ranks' gradients. If every rank computes the same
            loss from it, pass the whole sum and count to ``state.loss``, undivided. A loop of your own that sums the
            gradients over the ranks must divide the loss by ``ring.size``.

        Raises:
            ValueError: ``how`` is none of these, or the length of ``rows`` or ``mask`` is not that of this rank's part.
            RingMismatchError: the ranks' calls differ.
            RingPeerError: a rank died, stalled or left.
        """
        with self.report_refusals():
            check_pooling(rows, mask, how)
            seq_len = self.check_rows("rows", rows, seq_len)
        return pool(self, self.layout(seq_len) if seq_len else None, rows, mask, how)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def halo(self, rows: Tensor, width: int, dim: int = 1, seq_len: int | None = None) -> Tensor:
        """The ``width`` positions before this rank's rows, as a causal convolution over ``width + 1`` positions needs.

        Every rank of the ring makes the same call, and uses the result alike: its backward is a call of the ring, too.

        Args:
            rows: this rank's part of any tensor, as :meth:`shard` returns it. It may be shorter than ``width``.
            width: number of positions, at least 0.
            dim: the dimension of the sequence.
            seq_len: length of the global sequence; None is local length × ring size.

        Returns:
            The shape and dtype of ``rows``, but ``width`` long along ``dim``, with zeros for positions before 0. In the
            zigzag layout it is 2 · ``width`` long: the halo of this rank's first piece, then that of its second piece.
            The backward returns the gradients to the ranks that hold the rows, and adds them in fp32 at least.

        Raises:
            ValueError, TypeError: ``width`` is not such a number, ``rows`` has no ``dim``, or its length is not that of
                this rank's part of ``seq_len`` tokens.
            RingMismatchError: the ranks' calls differ.
            RingPeerError: a rank died, stalled or left.
        """
        with self.report_refusals():
            seq_len = self.check_rows("rows", rows, seq_len, dim)
            if check_integer("width", width, 0) >= 2**62:
                raise ValueError(f"width = {width}: must be below 2**62, since positions are int64; give less.")
        if not seq_len:
            shape = list(rows.shape)
            shape[dim] = width * (2 if self.layout_kind == "zigzag" else 1)
            return rows.new_zeros(shape)
        return halo(self, self.traffic, self.layout(seq_len), rows, width, dim)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def entering_state(self, decay: Tensor, state: Tensor, *, matrix: bool = False) -> Tensor:
        """The state of a recurrent layer before this rank's rows.

        The rows of each rank map the state S that they find to ``decay · S + state``. The ranks exchange these maps in
        ⌈log2(ring size)⌉ rounds of messages, whose sizes do not depend on the length of the sequence. Ranks without
        rows pass a ``decay`` of 1, or the identity, and a ``state`` of 0. Every rank of the ring makes the same call,
        and uses the result alike: its backward is a call of the ring, too.

        Args:
            decay: broadcasts over ``state``. With ``matrix``, [..., K, K], a matrix on the left of each state.
            state: what the rows leave behind if they begin with a state of 0: any shape, or [..., K, V] with
                ``matrix``.
            matrix: whether ``decay`` is a matrix.

        Returns:
            The state that enters this rank's rows, 0 before position 0, in the shape and dtype of ``state``. It is
            computed in fp32 at least, also under autocast. Differentiable in both arguments. In the zigzag layout, all
            three tensors have one more dimension of size 2 before the others, for this rank's first and second piece of
            the sequence, and there are ⌈log2(2 · ring size)⌉ rounds.

        Raises:
            TypeError: an argument is not a floating-point or complex tensor, or ``decay`` is complex and ``state`` is
                not.
            ValueError: the shapes or devices do not fit.
            RingMismatchError: the ranks' calls differ.
            RingPeerError: a rank died, stalled or left.
        """
        with self.report_refusals():
            check_maps(self.layout_kind, decay, state, is_matrix=matrix)
        return entering_state(self, self.traffic, self.layout_kind, decay, state, is_matrix=matrix)

    def check_rows(self, name: str, tensor: Tensor, seq_len: int | None, dim: int = 1) -> int:
        """Check that the argument ``name`` is this rank's part of a tensor of ``seq_len`` tokens.

        Returns:
            The length of the global sequence: ``seq_len``, or local length × ring size if that is None.

        Raises:
            ValueError, TypeError: it is not such a part, or has no such dimension.
        """
        if not -tensor.dim() <= check_integer("dim", dim) < tensor.dim():
            raise ValueError(f"dim = {dim}: {name} is {[*tensor.shape]}; give the dim of the sequence.")
        seq_len = tensor.shape[dim] * self.size if seq_len is None else seq_len
        is_empty = isinstance(seq_len, int) and seq_len == 0
        expected = 0 if is_empty else self.layout(seq_len).local_len(self.rank)
        if tensor.shape[dim] != expected:
            raise ValueError(
                f"{name} has {tensor.shape[dim]} rows along dim {dim}, but rank {self.rank} of a {self.layout_kind} "
                f"ring of {self.size} holds {expected} of {seq_len}; pass the rank's part, ring.shard({name}), and "
                "the seq_len of the whole sequence."
            )
        return seq_len

    def __deepcopy__(self, memo: dict[int, Any]) -> Ring:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        kept = [field.name for field in dataclasses.fields(self) if field.name not in self._connections]
        return partial(type(self), **{name: getattr(self, name) for name in kept}), ()
