"""``ring_size="auto"``: which rings are compared, and over which links, for the hosts that the ranks report.

The harness of adapters tests the choice on running ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any
from unittest import mock

import pytest
from test_cost_model import PLAIN

from ring_backends.cost import arrangement
from ring_backends.cost.hardware import Hardware
from ring_backends.cost.model import RingChoice, RingCost
from ring_backends.ring.topology import topology_order

CALL = {"seq_len": 4096, "segment_lengths": [4096], "dilation_rates": [1], "num_heads": 8, "head_dim": 16}
WITHIN = replace(PLAIN, latency_seconds=1e-6, bytes_per_second=1e11)
"""What ranks measure whose neighbours are on their own host. Others measure ``PLAIN``."""


def compared(hosts: str, ulysses_size: Any, ring_order: Any) -> tuple[RingCost, Hardware, list[int]]:
    """The arguments with which the smallest ring is searched, if each rank reports its host."""
    order = topology_order(hosts) if ring_order == "topology" else tuple(range(len(hosts)))
    measured: dict[int, Hardware] = {}
    for place, rank in enumerate(order):
        neighbours = {hosts[order[(place + step) % len(order)]] for step in (-1, 0, 1)}
        measured[rank] = WITHIN if len(neighbours) == 1 else PLAIN

    def decide(report: dict[str, Any], choose: Callable[[list[dict[str, Any]]], Any], timeout: object) -> Any:
        reports = [{**report, "host": host} for host in hosts]
        if "hardware" in report:
            reports = [{**of_rank, "hardware": asdict(measured[rank])} for rank, of_rank in enumerate(reports)]
        return choose(reports)

    choice = RingChoice(fits=8, fits_and_pays=8)
    with (
        mock.patch.object(arrangement, "decide_on_rank0", decide),
        mock.patch.object(arrangement, "RankProbe", **{"return_value.measure.return_value": PLAIN}),
        mock.patch.object(arrangement, "smallest_rings", return_value=choice) as smallest_rings,
    ):
        found = arrangement.arrange("auto", "contiguous", len(hosts), ring_order, None, ulysses_size, CALL)
    assert found == (8, order)
    (cost, _, hardware), sizes = smallest_rings.call_args.args, smallest_rings.call_args.kwargs["sizes"]
    return cost, hardware, sizes


@pytest.mark.parametrize(
    ("hosts", "ulysses_size", "ring_order", "group_size", "sizes", "within"),
    [
        ("aaaabbbb", 1, "rank", 1, [1, 2, 4, 8], True),
        ("aaaabbbb", 2, "rank", 2, [2, 4, 8], True),
        ("aaaabbbb", 8, "rank", 8, [8], False),
        ("aaabbbbb", 4, "rank", 4, [4, 8], False),
        ("aaaabbbb", "auto", "rank", 4, [1, 2, 4, 8], True),
        ("abababab", "auto", "rank", 1, [1, 2, 4, 8], False),
        ("abababab", "auto", "topology", 4, [1, 2, 4, 8], True),
    ],
)
def test_groups_within_hosts_have_links_of_their_own(
    hosts: str, ulysses_size: Any, ring_order: Any, group_size: int, sizes: list[int], within: bool
) -> None:
    """Where a group lies on several hosts, its exchanges use the same links as hops."""
    cost, hardware, compared_sizes = compared(hosts, ulysses_size, ring_order)
    assert (cost.ulysses_size, compared_sizes) == (group_size, sizes)
    assert cost.on_ring(8).schedule.ulysses_size == group_size
    links = (WITHIN.latency_seconds, WITHIN.bytes_per_second) if within else (None, None)
    assert (hardware.host_latency_seconds, hardware.host_bytes_per_second) == links
    assert (hardware.latency_seconds, hardware.bytes_per_second) == (PLAIN.latency_seconds, PLAIN.bytes_per_second)


def test_groups_that_do_not_divide_the_world_are_refused() -> None:
    with pytest.raises(ValueError, match="ulysses_size = 3: must divide the 8 ranks of the ring"):
        compared("aaaabbbb", 3, "rank")
