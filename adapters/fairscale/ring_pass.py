"""The ring pass of FairScale: ``PipeMessage`` objects on a ``Transport``, as its pipeline sends activations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch.distributed as dist
from fairscale.nn.pipe.messages import Transport
from fairscale.nn.pipe.types import ACTIVATIONS_GRADS_QUEUE, PipeMessage
from torch import Tensor

from ring_backends.ring.ring import Ring
from ring_backends.ring.stream_hops import Buffers
from ring_backends.ring.transfer import Transfer, post_works


@dataclass(frozen=True)
class RingTransport(Transport):  # type: ignore[misc]
    """The messages of one hop, posted as one batch of ``isend`` and ``irecv``.

    Messages have no header of FairScale's: both ends know source, destination and size from the schedule.
    """

    group: dist.ProcessGroup
    _operations: list[dist.P2POp] = field(default_factory=list)

    def recv_message_tensors(self, message: PipeMessage) -> PipeMessage:
        """Receive into the tensors of the message. They are filled when the works of ``post`` are done."""
        for tensor in message.tensors:
            self._operations.append(dist.P2POp(dist.irecv, tensor, message.src, self.group, message.tag))
        return message

    def send_message(self, message: PipeMessage, sync: bool = False, skip_header: bool = False) -> None:
        """Send the tensors of a message. They must stay unchanged until the works of ``post`` are done."""
        assert skip_header
        assert not sync
        for tensor in message.tensors:
            self._operations.append(dist.P2POp(dist.isend, tensor, message.dest, self.group, message.tag))

    def post(self) -> list[dist.Work]:
        return dist.batch_isend_irecv(self._operations)


def post_hop(ring: Ring, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], tag: int) -> Transfer:
    """Post one hop: flat uint8 buffers to and from ring ranks."""
    group, here = ring.group, ring.ranks[ring.rank]
    assert group is not None
    device = next(iter([*outgoing.values(), *incoming.values()])).device

    def post(outgoing: Buffers, incoming: Buffers) -> list[dist.Work]:
        transport = RingTransport(None, device, group)
        for peer, buffer in incoming:
            transport.recv_message_tensors(_message(ring.ranks[peer], here, buffer, tag))
        for peer, buffer in outgoing:
            transport.send_message(_message(here, ring.ranks[peer], buffer, tag), skip_header=True)
        return transport.post()

    return post_works(group, post, outgoing, incoming, tag)


def _message(source: int, destination: int, buffer: Tensor, tag: int) -> PipeMessage:
    """A message between two global ranks."""
    message = PipeMessage(source, destination, ACTIVATIONS_GRADS_QUEUE, tensors=(buffer,))
    message.tag = tag  # by default a count of this process's messages, which other ranks do not know
    return message
