"""Which ranks are near each other, an order of them in which neighbours are, and what crosses between hosts.

A ring's hops go from neighbour to neighbour. In the order of the ranks, as a launcher happens to number them, they may
all go from host to host; with the ranks of a host beside each other only two of a ring's links leave each host.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ring_backends.schedule import RingSchedule

RingOrder = Literal["rank", "topology"]

HOST_VARIABLE = "RING_BACKENDS_HOST"
"""The environment variable that names a rank's host, where the machine's own name will not do."""


@dataclass(frozen=True)
class Place:
    """Where one rank runs.

    Attributes:
        host: name of its host: ``RING_BACKENDS_HOST``, or else the machine's own.
        device: what its GPU is called, alike in every process of the host; ``"cpu"`` where it has none.
        links: the GPUs that this one has an NVLink to, or, as far as nothing tells more, can read directly.
    """

    host: str
    device: str = "cpu"
    links: tuple[str, ...] = ()

    @classmethod
    def here(cls) -> Place:
        """Of this process, with the GPU that it has set as its current one."""
        host = os.environ.get(HOST_VARIABLE) or socket.gethostname()
        if not torch.cuda.is_available():
            return cls(host)
        index = torch.cuda.current_device()
        links = _linked_by_nvml(_gpu_name(index))
        return cls(host, _gpu_name(index), _readable_gpus(index) if links is None else links)


def _gpu_name(index: int) -> str:
    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


def _readable_gpus(index: int) -> tuple[str, ...]:
    """Of the GPUs that torch sees, those that one can read directly, be it by NVLink or by PCIe."""
    others = [other for other in range(torch.cuda.device_count()) if other != index]
    return tuple(_gpu_name(other) for other in others if torch.cuda.can_device_access_peer(index, other))


def _linked_by_nvml(name: str) -> tuple[str, ...] | None:
    """The GPUs with an NVLink to this one, of all on the host; None where NVML or its Python package is missing."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handles = {}
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            handles[_text(pynvml.nvmlDeviceGetUUID(handle))] = handle
        nvlink, works = pynvml.NVML_P2P_CAPS_INDEX_NVLINK, pynvml.NVML_P2P_STATUS_OK
        here = handles.pop(name)
        return tuple(
            other for other, handle in handles.items() if pynvml.nvmlDeviceGetP2PStatus(here, handle, nvlink) == works
        )
    finally:
        pynvml.nvmlShutdown()


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


def topology_order(places: Sequence[Place]) -> tuple[int, ...]:
    """The ranks host by host, in the order of each host's first rank, and on a host along its NVLinks.

    On a host each rank is followed by the lowest one that is left whose GPU is linked to its own, and where there is
    none, by the lowest one that is left.
    """
    hosts: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        hosts.setdefault(place.host, []).append(rank)
    order: list[int] = []
    for ranks in hosts.values():
        left = list(ranks)
        rank = left.pop(0)
        order.append(rank)
        while left:
            links = places[rank].links
            rank = next((other for other in left if places[other].device in links), left[0])
            left.remove(rank)
            order.append(rank)
    return tuple(order)


@dataclass(frozen=True, eq=False)
class Links:
    """What goes from which ring rank to which in one call: int64 [links] each; a pair may stand there several times.

    Attributes:
        source, destination: ring ranks.
        rows: head rows of K and V, or of dK and dV.
    """

    source: Tensor
    destination: Tensor
    rows: Tensor

    @classmethod
    def of_keys(cls, schedule: RingSchedule) -> Links:
        """Where K and V go, in a forward and again in a backward."""
        return cls._of(schedule, grads=False)

    @classmethod
    def of_grads(cls, schedule: RingSchedule) -> Links:
        """Where dK and dV go in a backward: along the same routes from their first stop on, and from the last home."""
        return cls._of(schedule, grads=True)

    @classmethod
    def _of(cls, schedule: RingSchedule, *, grads: bool) -> Links:
        """Hops to the next rank add up in two arrays of all neighbours; those around a sub-ring are listed."""
        size = schedule.layout.ring_size
        changes = {direction: torch.zeros(size + 1, dtype=torch.int64, device="cpu") for direction in (1, -1)}
        listed: list[tuple[Tensor, Tensor, Tensor]] = []
        for branch in schedule.branches:
            for direction, change in changes.items():
                chosen = (branch.crossing.direction == direction).nonzero().squeeze(1)
                rows = (branch.num_rows * branch.streams_at)[chosen]
                reach = branch.reach[chosen]
                source, lo, hi = (
                    column[chosen].unsqueeze(1).expand_as(reach)
                    for column in (branch.crossing.rank, branch.crossing.lo, branch.crossing.hi)
                )
                ring = hi - lo + 1
                first = lo + (source - lo + direction * int(grads)).remainder(ring)
                hops = (reach - int(grads)).clamp(min=0)
                # Counted in the direction of travel: hops before the end of the sub-ring, one around, hops after it.
                until_end = (hi - first) if direction > 0 else (first - lo)
                before = torch.minimum(hops, until_end)
                around = (hops > until_end).long()
                after = hops - before - around
                begin, end = (lo, hi) if direction > 0 else (hi, lo)
                for start, count in ((first, before), (begin, after)):
                    low = start if direction > 0 else start - count + 1
                    change.index_add_(0, low.flatten(), (rows * (count > 0)).flatten())
                    change.index_add_(0, (low + count).flatten(), -(rows * (count > 0)).flatten())
                listed.append((end, begin, rows * around))
                if grads:
                    last = lo + (source - lo + direction * reach).remainder(ring)
                    listed.append((last, source, rows * (reach > 0)))
        ranks = torch.arange(size, device="cpu")
        neighbours = [(ranks, ranks + direction, change.cumsum(0)[:-1]) for direction, change in changes.items()]
        columns = [torch.cat([part.flatten() for part in column]) for column in zip(*neighbours, *listed, strict=True)]
        used = columns[2] > 0
        return cls(*(column[used] for column in columns))

    def rows_between(self, hosts: Tensor) -> int:
        """Rows whose source and destination are on different hosts; ``hosts``: a number per ring rank, [ring size]."""
        crosses = hosts[self.source] != hosts[self.destination]
        return int((self.rows * crosses).sum())


def bytes_between_hosts(
    schedule: RingSchedule, hosts: Sequence[int], *, batch: int, head_dim: int, itemsize: int
) -> int:
    """Payload bytes that cross between hosts in one forward and one backward of a ring.

    Args:
        hosts: the host of each ring rank, as any number.
    """
    numbers = torch.tensor(hosts, dtype=torch.int64, device="cpu")
    keys = Links.of_keys(schedule).rows_between(numbers)
    grads = Links.of_grads(schedule).rows_between(numbers)
    return 2 * batch * head_dim * (2 * keys * itemsize + grads * max(itemsize, 4))
