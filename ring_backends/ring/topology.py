"""Which ranks are near each other, and an order of them in which neighbours are.

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
