"""Transfers over torch.distributed, for adapters whose hops are made of its works."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ring_backends.ring import Transfer


@dataclass(frozen=True)
class WorkTransfer(Transfer):
    """Some works of one hop, waited for within one deadline.

    ``buffers`` are held until the works are over. Works on a GPU's stream are ordered by the stream, not waited for.
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
    """Post a hop of device buffers by way of pinned host memory, for a transport that moves host memory only."""

    def on_host(buffer: Tensor) -> Tensor:
        return torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=torch.cuda.is_available())

    host_outgoing = {peer: on_host(buffer).copy_(buffer) for peer, buffer in outgoing.items()}
    host_incoming = {peer: on_host(buffer) for peer, buffer in incoming.items()}
    return _StagedTransfer(post(host_outgoing, host_incoming), incoming, host_incoming)


def transfer_of_works(
    group: dist.ProcessGroup,
    post: Callable[[Mapping[int, Tensor], Mapping[int, Tensor]], Sequence[dist.Work]],
    outgoing: Mapping[int, Tensor],
    incoming: Mapping[int, Tensor],
) -> Transfer:
    """Post a hop that is made of the group's works, by way of host memory where the group needs that."""

    def post_transfer(outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> Transfer:
        return WorkTransfer(post(outgoing, incoming), [*outgoing.values(), *incoming.values()])

    device = next(iter([*outgoing.values(), *incoming.values()])).device
    if needs_host(group, device):
        return through_host(post_transfer, outgoing, incoming)
    return post_transfer(outgoing, incoming)


def needs_host(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group's hops of tensors on ``device`` have to go through host memory: gloo's do, of CUDA tensors."""
    return device.type == "cuda" and "gloo" in dist.get_backend_config(group).split("cuda:")[-1].split(",")[0]
