"""Transfers: the handles of ring passes, and hops by torch.distributed.

An adapter's ring pass returns a :class:`Transfer`. The other classes and functions serve adapters whose hops are
``dist.Work`` objects, and the exchanges of a ring outside of attention.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

Post = Callable[[Mapping[int, Tensor], Mapping[int, Tensor]], Sequence[dist.Work]]
"""(outgoing, incoming) -> the works that send and receive these buffers. Both map ring ranks to buffers."""


class Transfer(ABC):
    """A ring pass that has been posted: buffers that are being sent and received."""

    @abstractmethod
    def wait(self, timeout: timedelta) -> None:
        """Return when all buffers are sent and received. Called exactly once, since gloo hangs on a second wait.

        Raises:
            Exception: whatever the transport raises when a peer is gone or ``timeout`` has passed.
        """


@dataclass(frozen=True)
class WorkTransfer(Transfer):
    """The works of one hop, with one deadline.

    ``buffers`` are kept alive until the works are done. For CUDA buffers ``wait`` blocks the current stream, not the
    host.
    """

    works: Sequence[dist.Work]
    buffers: Sequence[Tensor]

    def wait(self, timeout: timedelta) -> None:
        end = time.monotonic() + timeout.total_seconds()
        on_stream = any(buffer.is_cuda for buffer in self.buffers)
        for work in self.works:
            if on_stream:
                work.wait()
            else:
                work.wait(timedelta(seconds=max(0.001, end - time.monotonic())))


@dataclass(frozen=True)
class _StagedTransfer(Transfer):
    transfer: Transfer
    incoming: Mapping[int, Tensor]
    host_incoming: Mapping[int, Tensor]

    def wait(self, timeout: timedelta) -> None:
        self.transfer.wait(timeout)
        for peer, buffer in self.incoming.items():
            buffer.copy_(self.host_incoming[peer], non_blocking=True)


def through_host(
    post: Callable[[Mapping[int, Tensor], Mapping[int, Tensor]], Transfer],
    outgoing: Mapping[int, Tensor],
    incoming: Mapping[int, Tensor],
) -> Transfer:
    """Post a hop of device buffers through pinned host memory, for a transport that moves only host memory."""

    def on_host(buffer: Tensor) -> Tensor:
        return torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=torch.cuda.is_available())

    host_outgoing = {peer: on_host(buffer).copy_(buffer) for peer, buffer in outgoing.items()}
    host_incoming = {peer: on_host(buffer) for peer, buffer in incoming.items()}
    return _StagedTransfer(post(host_outgoing, host_incoming), incoming, host_incoming)


def post_works(
    group: dist.ProcessGroup, post: Post, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]
) -> Transfer:
    """Post a hop with ``post``, through host memory if the group cannot send device buffers."""

    def post_transfer(outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> Transfer:
        return WorkTransfer(post(outgoing, incoming), [*outgoing.values(), *incoming.values()])

    device = next(iter([*outgoing.values(), *incoming.values()])).device
    if needs_host(group, device):
        return through_host(post_transfer, outgoing, incoming)
    return post_transfer(outgoing, incoming)


def post_batch(
    group: dist.ProcessGroup, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], tag: int
) -> list[dist.Work]:
    """Post receives and sends as one batch of torch.distributed. Peers are group ranks."""
    receives = [dist.P2POp(dist.irecv, x, group=group, tag=tag, group_peer=peer) for peer, x in incoming.items()]
    sends = [dist.P2POp(dist.isend, x, group=group, tag=tag, group_peer=peer) for peer, x in outgoing.items()]
    return dist.batch_isend_irecv([*receives, *sends])


def needs_host(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether tensors on ``device`` must pass through host memory, as CUDA tensors over gloo must."""
    return device.type == "cuda" and "gloo" in dist.get_backend_config(group).split("cuda:")[-1].split(",")[0]
