"""The order of ranks in which the ranks of one host are neighbours.

A ring's hops go from neighbour to neighbour. If the launcher numbers ranks round-robin over the hosts, every hop
crosses the network. With the ranks of each host next to each other, only two links of a ring leave each host.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Literal

RingOrder = Literal["rank", "topology"]

UlyssesSize = int | Literal["auto"]

HOST_VARIABLE = "RING_BACKENDS_HOST"
"""The environment variable that overrides the name of this rank's host."""


def host_name() -> str:
    """The name of this rank's host: ``RING_BACKENDS_HOST``, or else the name of the machine."""
    return os.environ.get(HOST_VARIABLE) or socket.gethostname()


def topology_order(hosts: Sequence[str]) -> tuple[int, ...]:
    """The ranks host by host, in the order of each host's first rank.

    Args:
        hosts: the name of each rank's host.

    >>> topology_order(["a", "b", "a", "b"])
    (0, 2, 1, 3)
    """
    first = {host: rank for rank, host in reversed([*enumerate(hosts)])}
    return tuple(sorted(range(len(hosts)), key=lambda rank: first[hosts[rank]]))


def ranks_of_one_host(hosts: Sequence[str]) -> int:
    """The largest divisor of the number of ranks such that neighbouring ranks in groups of this size share a host.

    Args:
        hosts: the name of each ring rank's host.

    >>> ranks_of_one_host(["a", "a", "b", "b", "b", "b"]), ranks_of_one_host(["a", "b", "a", "b"])
    (2, 1)
    """
    size = max(1, len(hosts))

    def share_hosts(group_size: int) -> bool:
        firsts = range(0, size, group_size)
        return size % group_size == 0 and all(len({*hosts[first : first + group_size]}) <= 1 for first in firsts)

    return max(filter(share_hosts, range(1, size + 1)))
