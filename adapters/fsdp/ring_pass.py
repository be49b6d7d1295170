"""The ring pass of FSDP: point-to-point operations on a CUDA stream of their own.

FSDP runs its all-gathers and reduce-scatters on CUDA streams of its own, beside the compute stream. The hops do the
same. A peer is a coordinate on the mesh's ring axis. The ring's process group has its ranks in the order of that axis,
so a coordinate is also a group rank.

In a compiled block, a call with all its hops is one operator (:mod:`ring_backends.engine.operators`), which calls the
functions of this file, too.

No GPU has run the stream branch. It is tested with a simulated one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache

import torch
from torch import Tensor

from ring_backends.ring import transfer
from ring_backends.ring.ring import Ring
from ring_backends.ring.stream_hops import StreamHop
from ring_backends.ring.transfer import Transfer


def post_hop(ring: Ring, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], tag: int) -> Transfer:
    """Post one hop: flat uint8 buffers to and from coordinates of the mesh's ring axis."""
    buffers = [*outgoing.values(), *incoming.values()]
    device = transfer.stream_device(buffers)
    if device is None:
        return ring.post(outgoing, incoming, tag)
    stream = _hop_stream(device)
    # The compute stream fills the outgoing buffers, and may still use the memory of the incoming buffers.
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        posted = ring.post(outgoing, incoming, tag)
    return StreamTransfer(posted, stream, buffers)


@cache
def _hop_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all hops of this process on one device. Its high priority lets hops start before waiting tiles."""
    return torch.cuda.Stream(device, priority=-1)


@dataclass(frozen=True)
class StreamTransfer(Transfer):
    """A transfer whose operations were posted on a stream of their own.

    It holds the buffers until the compute stream waits for the hops. From then on the ring may use their memory again,
    in the order of the compute stream. Only a failed wait calls ``record_stream``, since nothing orders the two streams
    then. (Over NCCL torch calls it for every buffer, which delays the reuse of memory that is freed.)
    """

    transfer: Transfer
    stream: torch.cuda.Stream
    buffers: Sequence[Tensor]

    def wait(self, timeout: timedelta) -> StreamHop | None:
        try:
            with torch.cuda.stream(self.stream):
                hop = self.transfer.wait(timeout)
        except BaseException:
            for buffer in self.buffers:
                buffer.record_stream(self.stream)
            raise
        torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
        return hop

    def abandon(self) -> None:
        self.transfer.abandon()
