"""The ranks of a ring, and their messages outside of attention."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ring_backends.errors import RingMismatchError, RingPeerError
from ring_backends.ring import transfer
from ring_backends.ring.agreement import Agreement
from ring_backends.ring.calls import Call
from ring_backends.ring.transfer import Transfer, post_batch, post_works

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
class Members:
    """The ranks of a ring, as one of them sees them. :class:`~ring_backends.Ring` describes the attributes."""

    size: int = 1
    rank: int = 0
    data_size: int = 1
    data_rank: int = 0
    ranks: tuple[int, ...] = (0,)
    order: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    group: dist.ProcessGroup | None = field(default=None, kw_only=True)
    agreement: Agreement | None = field(default=None, kw_only=True)
    connected: set[tuple[int, int]] | None = field(default=None, repr=False, compare=False, kw_only=True)

    @property
    def peers(self) -> list[int]:
        """The other ring ranks."""
        return [rank for rank in range(self.size) if rank != self.rank]

    def report_refusals(self) -> contextlib.AbstractContextManager[None]:
        """Wraps the checks before a call. An error in them is published, so that the other ranks stop waiting."""
        return contextlib.nullcontext() if self.agreement is None else _report_refusals(self.agreement)

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
        return post_works(group, partial(post_batch, group, tag=tag), outgoing, incoming, tag)


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
    assert tensor.is_contiguous()
    # as_strided, since a contiguous tensor of one element may have any strides.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _as_buffers(tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Flat buffers of the tensors that are not empty. Neither end posts an empty tensor."""
    return {peer: flat_bytes(tensor) for peer, tensor in tensors.items() if tensor.numel()}
