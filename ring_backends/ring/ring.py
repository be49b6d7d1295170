"""A ring of ranks: its members, the distribution of a sequence over them, and the traffic of this rank.

Each rank has a :class:`Ring` object of its own. An adapter's ``initialize`` makes it; attention, ``shard`` and
``unshard`` use it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

from ring_backends.errors import RingMismatchError, RingPeerError
from ring_backends.ring import transfer
from ring_backends.ring.agreement import Agreement
from ring_backends.ring.calls import Call, Configuration, backward_of
from ring_backends.ring.pooling import How, pool
from ring_backends.ring.transfer import Transfer, post_batch, post_works
from ring_backends.schedule.layout import LayoutKind, SequenceLayout

CONNECT = 0xFFFF
"""The index in the tag of messages that only connect ranks."""


@dataclass(eq=False)
class Traffic:
    """What this rank has sent by ring passes since the last reset, and how long it has waited for them.

    Attributes:
        messages, bytes: number of messages sent, and their payload without padding or headers.
        wait_seconds: seconds that the host has waited for hops. A hop on a CUDA stream blocks the stream, not the host.
    """

    messages: int = 0
    bytes: int = 0
    wait_seconds: float = 0.0

    def reset(self) -> None:
        self.messages = self.bytes = 0
        self.wait_seconds = 0.0


@dataclass(frozen=True)
class Ring:
    """One rank's view of a ring.

    Attributes:
        size, rank: ring size and ring rank.
        data_size, data_rank: number of rings in the world, and the index of this one.
        ranks: the global rank of every ring rank. The ring's process group has the same order.
        order: the global ranks of all rings, ring after ring; empty if unknown, as after ``initialize(group=…)``.
        layout_kind: ``"contiguous"`` or ``"zigzag"``.
        group: the ring's own process group; None in a ring of one.
        agreement: checks that all ranks make the same calls; None in a ring of one.
        timeout: the longest time from the beginning of a call to the end of its last wait for a peer.
        traffic: what this rank has sent. All layouts of the ring share it.
        adapter: name in the registry of the adapter whose ``initialize`` made the ring.
        parts: for each living tensor that :meth:`shard` has returned, the dimension and this rank's number of rows. All
            layouts of the ring share it.
        connected: the (source, destination) pairs with this rank that NCCL has connected; None if hops do not go over
            NCCL. All layouts of the ring share it.
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
    parts: WeakTensorKeyDictionary = dataclasses.field(
        default_factory=WeakTensorKeyDictionary, repr=False, compare=False
    )
    connected: set[tuple[int, int]] | None = dataclasses.field(default=None, repr=False, compare=False)

    _connections: ClassVar[tuple[str, ...]] = ("group", "agreement", "traffic", "parts", "connected")
    """The fields that a pickle leaves out."""

    def __post_init__(self) -> None:
        SequenceLayout(1, self.size, self.layout_kind)

    @property
    def peers(self) -> list[int]:
        """The other ring ranks."""
        return [rank for rank in range(self.size) if rank != self.rank]

    def report_refusals(self) -> contextlib.AbstractContextManager[None]:
        """Wraps the checks before a call. An error in them is published, so that the other ranks stop waiting."""
        return contextlib.nullcontext() if self.agreement is None else _report_refusals(self.agreement)

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
        return self._unshard("unshard", tensor, dim, seq_len)

    def _unshard(self, name: str, tensor: Tensor, dim: int = 1, seq_len: int | None = None) -> Tensor:
        """As :meth:`unshard`, for an operation with a name, which the ranks compare."""
        with self.report_refusals():
            if seq_len is None:
                seq_len = tensor.shape[dim] * self.size
            self.check_rows("tensor", tensor, seq_len, dim)
        if self.size == 1 or seq_len == 0:
            return tensor
        others = [size for axis, size in enumerate(tensor.shape) if axis != dim % tensor.dim()]
        needs_gradient = torch.is_grad_enabled() and tensor.requires_grad
        self.check_connected()
        assert self.agreement is not None
        fields = {
            "order of calls": name,
            "seq_len": seq_len,
            "layout": self.layout_kind,
            "dim": dim % tensor.dim(),
            "sizes of the other dims": others,
            "dtype": str(tensor.dtype),
            "device": tensor.device.type,
            "gradients": "needed" if needs_gradient else "not needed",
        }
        call = self.agreement.begin(Configuration(fields))
        return cast(Tensor, _Unshard.apply(tensor, self, dim, seq_len, call))  # type: ignore[no-untyped-call]

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
        return pool(self, rows, mask, how, seq_len)

    def check_rows(self, name: str, tensor: Tensor, seq_len: int, dim: int = 1) -> None:
        """Check that the argument ``name`` is this rank's part of a tensor of ``seq_len`` tokens.

        Raises:
            ValueError: it is not.
        """
        is_empty = isinstance(seq_len, int) and seq_len == 0
        expected = 0 if is_empty else self.layout(seq_len).local_len(self.rank)
        if tensor.shape[dim] != expected:
            raise ValueError(
                f"{name} has {tensor.shape[dim]} rows along dim {dim}, but rank {self.rank} of a {self.layout_kind} "
                f"ring of {self.size} holds {expected} of {seq_len}; pass the rank's part, ring.shard({name}), and "
                "the seq_len of the whole sequence."
            )

    def exchange(self, call: Call, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], index: int) -> None:
        """Send tensors to ring ranks and receive tensors from them, in a call outside of attention.

        Args:
            call: what ``agreement.begin`` returned.
            outgoing, incoming: contiguous tensors by ring rank, with the same number of bytes at both ends.
            index: number of the exchange within the call.

        Raises:
            RingMismatchError, RingPeerError: a peer made another call, or did not come in time.
        """
        outgoing, incoming = _as_buffers(outgoing), _as_buffers(incoming)
        buffers = [*outgoing.values(), *incoming.values()]
        if buffers:
            pairs = [*((self.rank, peer) for peer in outgoing), *((peer, self.rank) for peer in incoming)]
            self.connect(call, pairs, buffers[0])
            self._hop(call, outgoing, incoming, index, "tensors")

    def connect(self, call: Call, pairs: Iterable[tuple[int, int]], tensor: Tensor) -> None:
        """Connect the ranks that are to exchange tensors like ``tensor`` over NCCL, unless they are connected.

        NCCL connects two ranks at their first message. Both hosts wait for each other then, within the post. Only an
        abort ends this wait, and NCCL's abort frees the communicator while the waiting thread may still use it. So the
        first call of a configuration makes its connections before its first hop, right after the ranks have compared
        the configuration through the store: all of them are alive then, and have posted all earlier hops. If a rank
        dies or stops in this short time, the abort at the deadline may still end the process.

        Args:
            call: what ``agreement.begin`` returned. The pairs depend on nothing but its configuration, so that all
                ranks connect in the same calls.
            pairs: (source, destination), one of which is this rank. They are not read if hops do not go over NCCL.

        Raises:
            RingMismatchError, RingPeerError: a peer made another call, or did not come in time.
        """
        if self.connected is None or transfer.stream_device([tensor]) is None:
            return
        assert self.agreement is not None
        with self.agreement.report_errors(call):
            new = sorted(set(pairs) - self.connected)
            if new:
                byte = torch.zeros(1, dtype=torch.uint8, device=tensor.device)
                outgoing = {peer: byte for source, peer in new if source == self.rank}
                incoming = {peer: torch.empty_like(byte) for peer, destination in new if destination == self.rank}
                self._hop(call, outgoing, incoming, CONNECT, "the connections")
                self.connected.update(new)

    def _hop(
        self, call: Call, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], index: int, what: str
    ) -> None:
        """Post a hop outside of attention, and wait for it."""
        assert self.agreement is not None
        what = (
            f"rank {self.rank} waited in {call.position['order of calls']} ({call.direction}) for {what} from ranks "
            f"{[*incoming]} and to ranks {[*outgoing]}"
        )
        try:
            with self.agreement.waiting(call):
                with self.agreement.posting():
                    posted = self.post(outgoing, incoming, call.tag(index))
                hop = posted.wait(call.time_left())
        except Exception as error:
            self.agreement.fail(call, what, error)
        self.agreement.follow(call, what, hop)

    def parts_of_ranks(
        self, call: Call, own: Tensor, lengths: Sequence[int], index: int
    ) -> Iterator[tuple[int, Tensor]]:
        """Every rank and its part, this rank's first.

        The parts go around the ring: each step sends to the next rank what the previous one has sent before. So a rank
        sends no more bytes than if it sent its part to all others, holds two parts at a time, and NCCL connects only
        neighbours. A connection takes up to 384 MiB of each GPU.

        Args:
            own: this rank's part, contiguous.
            lengths: the length of each rank's part along dim 0.
            index: number of this collective within the call.
        """
        yield self.rank, own
        part = own
        for step in range(1, self.size):
            source = (self.rank - step) % self.size
            arrived = own.new_empty((lengths[source], *own.shape[1:]))
            self._exchange_with_neighbours(call, part, arrived, index * self.size + step)
            yield source, arrived
            part = arrived

    def reduce_scatter(self, call: Call, part_of: Callable[[int], Tensor], index: int) -> Tensor:
        """Sum this rank's part over all ranks, in fp32 or fp64.

        The sum of a part begins on the rank after its owner, and goes around the ring to the owner, so its order is
        fixed, and NCCL connects only neighbours. Half-precision parts take twice the bytes of the parts themselves,
        since the sums travel in fp32.

        Args:
            part_of: ring rank -> what this rank adds to that rank's part, contiguous, with the same shape on every
                rank.
            index: number of this collective within the call.
        """
        total = part_of((self.rank - 1) % self.size)
        total = total.to(torch.promote_types(total.dtype, torch.float32))
        for step in range(1, self.size):
            part = part_of((self.rank - 1 - step) % self.size)
            arrived = torch.empty_like(part, dtype=total.dtype)
            self._exchange_with_neighbours(call, total, arrived, index * self.size + step)
            total = arrived.add_(part)
        return total

    @property
    def _distances(self) -> list[int]:
        """How far the messages of each round of :meth:`all_gather` go."""
        return [2**index for index in range((self.size - 1).bit_length())]

    def connect_all_gather(self, call: Call, tensor: Tensor) -> None:
        """Connect the ranks of :meth:`all_gather`. A call that first computes something does this at its beginning."""
        sends = [(self.rank, (self.rank - distance) % self.size) for distance in self._distances]
        receives = [((self.rank + distance) % self.size, self.rank) for distance in self._distances]
        self.connect(call, [*sends, *receives], tensor)

    def _exchange_with_neighbours(self, call: Call, outgoing: Tensor, incoming: Tensor, index: int) -> None:
        """Send a tensor to the next rank, and receive one from the previous rank."""
        before, after = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        self.exchange(call, {after: outgoing}, {before: incoming}, index)

    def all_gather(self, call: Call, tensor: Tensor, index: int) -> Tensor:
        """All-gather small tensors of one shape into one of [size, …], in log2(size) rounds (Bruck et al., 1997).

        In round k a rank sends the 2^k tensors that it has to the rank 2^k before it. Around the ring, size − 1 steps
        would delay every decoded token. Attention never all-gathers K or V.

        Args:
            index: number of this collective within the call.
        """
        self.connect_all_gather(call, tensor)
        blocks = tensor.new_empty((self.size, *tensor.shape))
        blocks[0] = tensor
        for distance in self._distances:
            count = min(distance, self.size - distance)
            outgoing = {(self.rank - distance) % self.size: blocks[:count]}
            incoming = {(self.rank + distance) % self.size: blocks[distance : distance + count]}
            self.exchange(call, outgoing, incoming, index * self.size + distance)
        return blocks.roll(self.rank, 0)

    def post(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], tag: int) -> Transfer:
        """Send and receive flat uint8 buffers with torch.distributed. There is at least one buffer."""
        assert self.group is not None
        group = self.group
        return post_works(group, lambda out, into: post_batch(group, out, into, tag), outgoing, incoming, tag)

    def check(self) -> None:
        """Raise if the ring is closed, or a hop is known to have failed. It does not wait.

        Raises:
            RingMismatchError, RingPeerError: a hop failed, or the ring is closed.
        """
        if self.agreement is not None:
            self.agreement.check()

    def synchronize(self) -> None:
        """Wait until the GPU has finished all hops that this rank has waited for, and raise if one has failed.

        Over NCCL a call returns before its hops are over, so an error of a hop is raised only by a later call of the
        ring. After this method, the results of all calls so far are known to be right. Over gloo it returns
        immediately.

        It does not look for errors of CUDA itself, such as a failed assertion in a kernel. After such an error no hop
        ends, so this method raises at the hop's deadline.

        Raises:
            RingMismatchError, RingPeerError: a hop failed, or the ring is closed.
        """
        if self.agreement is not None:
            self.agreement.synchronize()

    def __deepcopy__(self, memo: dict[int, Any]) -> Ring:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        kept = [field.name for field in dataclasses.fields(self) if field.name not in self._connections]
        return partial(type(self), **{name: getattr(self, name) for name in kept}), ()

    def check_connected(self) -> None:
        """Refuse a ring that was unpickled: a pickle has no process groups.

        Raises:
            RuntimeError: this ring has several ranks and no connection to them.
        """
        if self.size > 1 and self.agreement is None:
            raise RuntimeError(
                f"this ring of {self.size} ranks was unpickled in a process that is not connected to it; call the "
                "adapter's initialize() in this process, and assign its result to the attention module's .ring."
            )


@contextlib.contextmanager
def _report_refusals(agreement: Agreement) -> Iterator[None]:
    try:
        yield
    except (RingMismatchError, RingPeerError):
        raise
    except Exception as error:
        agreement.refuse(error)
        raise


def flat_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, as uint8 [bytes]."""
    # as_strided, since a contiguous tensor of one element may have any strides.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _as_buffers(tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Flat buffers of the tensors that are not empty. Neither end posts an empty tensor."""
    return {peer: flat_bytes(tensor) for peer, tensor in tensors.items() if tensor.numel()}


class _Unshard(torch.autograd.Function):
    """All-gather of the ranks' rows. The backward is a reduce-scatter of their gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ring: Ring, dim: int, seq_len: int, call: Call) -> Tensor:
        ctx.ring, ctx.dim, ctx.seq_len, ctx.call_number = ring, dim, seq_len, call.number
        ctx.fields = call.configuration.fields
        assert ring.agreement is not None
        with ring.agreement.report_errors(call):
            layout, local = ring.layout(seq_len), tensor.movedim(dim, 0).resolve_conj().resolve_neg().contiguous()
            lengths = [layout.local_len(rank) for rank in range(ring.size)]
            whole = local.new_empty((seq_len, *local.shape[1:]))
            for rank, part in ring.parts_of_ranks(call, local, lengths, 0):
                first = 0
                for piece in layout.pieces(rank):
                    whole[piece.start : piece.stop] = part[first : first + len(piece)]
                    first += len(piece)
            return whole.movedim(0, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ring, layout, whole = ctx.ring, ctx.ring.layout(ctx.seq_len), grad.movedim(ctx.dim, 0)
        call = ring.agreement.begin(Configuration(ctx.fields), direction=backward_of(ctx.call_number))

        def part_of(rank: int) -> Tensor:
            return torch.cat([whole[piece.start : piece.stop] for piece in layout.pieces(rank)])

        with ring.agreement.report_errors(call):
            total = ring.reduce_scatter(call, part_of, 0)
            return total.to(grad.dtype).movedim(0, ctx.dim), None, None, None, None
