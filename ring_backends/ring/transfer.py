"""Transfers: the handles of ring passes, and hops by torch.distributed.

An adapter's ring pass returns a :class:`Transfer`. The other classes and functions serve adapters whose hops are
``dist.Work`` objects, and the exchanges of a ring outside of attention.
"""

from __future__ import annotations

import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from ring_backends.ring.stream_hops import Buffers, Headers, StreamHop, follow, keep_until_over, waits_block_host

Post = Callable[[Buffers, Buffers], Sequence[dist.Work]]
"""(outgoing, incoming) -> the works that receive and send these buffers, posted as one batch in their order."""


class Transfer(ABC):
    """A ring pass that has been posted: buffers that are being sent and received."""

    @abstractmethod
    def wait(self, timeout: timedelta) -> StreamHop | None:
        """Return when all buffers are sent and received. Called exactly once, since gloo hangs on a second wait.

        Returns:
            None; or, if only a CUDA stream waits for the buffers, a hop whose end the ring checks later. An adapter
            returns what ``WorkTransfer.wait`` returns.

        Raises:
            Exception: whatever the transport raises when a peer is gone or ``timeout`` has passed.
        """

    def abandon(self) -> None:  # noqa: B027 - most transports need nothing
        """Called in place of ``wait`` after an error: keeps the buffers' memory unused while a device may use it."""


@dataclass(frozen=True)
class WorkTransfer(Transfer):
    """The works of one hop, with one deadline.

    For CUDA buffers over NCCL, ``wait`` blocks the current stream, not the host. Memory is safe for these reasons:

    - The works run on NCCL's own stream. Before they start, that stream waits for the stream on which they are posted.
      So outgoing buffers are filled, and earlier uses of the memory of incoming buffers have ended.
    - ``buffers`` are referenced until ``wait`` has ordered the current stream after the works. From then on their
      memory may be used again in the order of that stream (:mod:`ring_backends.ring.wire_memory`).
    - If an error comes before a stream waits for the works, ``abandon`` keeps the memory unused until they are over.

    Attributes:
        headers: the headers that the works send and receive too; None if they have none.
    """

    works: Sequence[dist.Work]
    buffers: Sequence[Tensor]
    headers: Headers | None = None

    def wait(self, timeout: timedelta) -> StreamHop | None:
        end = time.monotonic() + timeout.total_seconds()
        device = stream_device(self.buffers)
        try:
            for work in self.works:
                if device is not None and not waits_block_host():
                    work.wait()
                else:
                    work.wait(timedelta(seconds=max(0.001, end - time.monotonic())))
            return None if device is None else follow(self.works, self.headers, device)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        device = stream_device(self.buffers)
        if device is not None:
            keep_until_over(self.works, self.buffers, device)


def stream_device(buffers: Sequence[Tensor]) -> torch.device | None:
    """The GPU on whose streams the works of these buffers run; None for host memory."""
    for buffer in buffers:
        if buffer.is_cuda:
            return buffer.device
    return None


@dataclass(frozen=True)
class _StagedTransfer(Transfer):
    transfer: Transfer
    incoming: Mapping[int, Tensor]
    host_incoming: Mapping[int, Tensor]

    def wait(self, timeout: timedelta) -> None:
        self.transfer.wait(timeout)
        for peer, buffer in self.incoming.items():
            # CUDA's allocator keeps pinned memory until the copy is over. Other devices may not.
            buffer.copy_(self.host_incoming[peer], non_blocking=buffer.is_cuda)


def through_host(
    post: Callable[[Mapping[int, Tensor], Mapping[int, Tensor]], Transfer],
    outgoing: Mapping[int, Tensor],
    incoming: Mapping[int, Tensor],
) -> Transfer:
    """Post a hop of device buffers through host memory, for a transport that moves only host memory.

    The host waits until the outgoing buffers are copied. With CUDA, host memory is pinned.
    """

    def on_host(buffer: Tensor) -> Tensor:
        return torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu", pin_memory=torch.cuda.is_available())

    host_outgoing = {peer: on_host(buffer).copy_(buffer) for peer, buffer in outgoing.items()}
    host_incoming = {peer: on_host(buffer) for peer, buffer in incoming.items()}
    return _StagedTransfer(post(host_outgoing, host_incoming), incoming, host_incoming)


def post_works(
    group: dist.ProcessGroup,
    post: Post,
    outgoing: Mapping[int, Tensor],
    incoming: Mapping[int, Tensor],
    tag: int | None = None,
) -> Transfer:
    """Post a hop with ``post``, through host memory if the group cannot send device buffers.

    Args:
        tag: the hop's tag. If the group sends device buffers itself, as NCCL does, every message follows a header with
            this tag. None sends no headers.
    """

    buffers = [*outgoing.values(), *incoming.values()]
    device = buffers[0].device
    if needs_host(group, device):
        name = device.type.upper()
        warnings.warn(f"hops of {name} tensors {_why_through_host(name)}", stacklevel=2)  # Python shows it once
        return through_host(lambda out, into: _posted(post, [*out.items()], [*into.items()]), outgoing, incoming)
    sends, receives = [*outgoing.items()], [*incoming.items()]
    if tag is not None and stream_device(buffers) is not None:
        headers = Headers.of(tag, incoming, device)
        return _posted(post, *headers.before(sends, receives), headers)
    return _posted(post, sends, receives)


def _posted(post: Post, outgoing: Buffers, incoming: Buffers, headers: Headers | None = None) -> Transfer:
    return WorkTransfer(post(outgoing, incoming), [buffer for _, buffer in (*outgoing, *incoming)], headers)


def post_batch(group: dist.ProcessGroup, outgoing: Buffers, incoming: Buffers, tag: int) -> list[dist.Work]:
    """Post receives and sends with torch.distributed, as one batch if they are on a GPU. Peers are group ranks.

    For host memory, a batch also begins its operations one by one, and takes twice as long.
    """
    if stream_device([buffer for _, buffer in (*outgoing, *incoming)]) is None:
        works = [dist.irecv(x, group=group, tag=tag, group_src=peer) for peer, x in incoming]
        works += [dist.isend(x, group=group, tag=tag, group_dst=peer) for peer, x in outgoing]
        return cast(list[dist.Work], works)
    receives = [dist.P2POp(dist.irecv, x, group=group, tag=tag, group_peer=peer) for peer, x in incoming]
    sends = [dist.P2POp(dist.isend, x, group=group, tag=tag, group_peer=peer) for peer, x in outgoing]
    return dist.batch_isend_irecv([*receives, *sends])


def needs_host(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether tensors on ``device`` must pass through host memory: CUDA tensors over gloo, and those of accelerators.

    Other accelerators than CUDA may have a backend of their own. It is not used, since no deadline of a hop over it is
    known to work.
    """
    if device.type == "cuda":
        return "gloo" in dist.get_backend_config(group).split("cuda:")[-1].split(",")[0]
    return device.type not in ("cpu", "meta")


def _why_through_host(name: str) -> str:
    if name == "CUDA":
        return (
            "go over gloo, through host memory, since torch.distributed was initialized without NCCL for them. If each "
            "rank has a GPU, let every process see the GPUs of all ranks of its host, or call "
            'torch.distributed.init_process_group("cpu:gloo,cuda:nccl") before initialize().'
        )
    return (
        "go over gloo, through host memory, and the host waits for every copy. This package was tested on CPUs "
        f"and CUDA, but not on {name}: compare a few results with those of a CPU."
    )
