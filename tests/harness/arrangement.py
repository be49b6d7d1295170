"""Rings ordered by host, and rings whose size is chosen for an attention call.

The tests check size and order, and also the results of attention on these rings.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ring_backends.cost import arrangement, probe
from ring_backends.cost.probe import slowest
from ring_backends.errors import RingMismatchError
from ring_backends.ring.topology import HOST_VARIABLE, UlyssesSize
from ring_backends.testing.calls import local_call
from ring_backends.testing.capabilities import AdapterSuite, core, requires
from ring_backends.testing.failing_calls import ending
from ring_backends.testing.marks import MORE_CASES, THOROUGH
from ring_backends.testing.rings import BY_HOSTS, TWO_BY_HOSTS, RingSpec, backend
from ring_backends.testing.strategies import AttentionCase
from ring_backends.testing.world import on_every_rank

_CASE = AttentionCase(401, (16, 401), (1, 8), num_heads=4, num_kv_heads=2, is_causal=True, dtype=torch.float64)
_ROW = 4 * (4 + 2) * _CASE.head_dim * 8
"""Bytes of one position in query, key, value, out and their gradients, in fp64."""

_HOSTS = ("a", "b", "c", "a")


_FULL = AttentionCase(16, (16,), (1,), dtype=torch.float64)

GROUPS_OF_HOSTS: dict[str, tuple[str, int, str, list[int]]] = {
    "one host": ("aaaa", 4, "rank", [4]),
    "neighbours": ("aabb", 4, "rank", [2]),
    "round-robin": ("abab", 4, "rank", [1]),
    "by topology": ("abab", 4, "topology", [2]),
    "three of a host": ("aaab", 4, "rank", [1]),
    "two rings": ("aabc", 2, "rank", [2, 1]),
}
"""The host of each rank, the ring size, the order, and the group size of each ring."""


def _initialize(adapter: str, **options: Any) -> Any:
    """Call ``initialize`` with a short probe: small tiles, measured for a millisecond."""
    with mock.patch.object(probe, "TILE_ROWS", 256), mock.patch.object(arrangement, "PROBE_SECONDS", 0.001):
        return backend(adapter).initialize(timeout=timedelta(seconds=60), **options)


def _needs(case: AttentionCase) -> dict[str, Any]:
    """What ``ring_size="auto"`` has to know of a call."""
    names = "seq_len segment_lengths dilation_rates num_heads num_kv_heads head_dim dtype is_causal"
    return {name: getattr(case, name) for name in names.split()}


class ArrangementTests(AdapterSuite):
    @core
    @requires("rings by topology")
    @pytest.mark.parametrize("rings", [BY_HOSTS, TWO_BY_HOSTS], ids=str)
    @on_every_rank
    def test_ranks_of_a_host_are_neighbours(self, rings: RingSpec) -> None:
        ring, place = self.ring(rings), rings.place(dist.get_rank())
        assert place is not None
        assert (ring.data_rank, ring.rank) == place, ring
        assert (ring.ranks, ring.data_size) == (rings.rings[place[0]], len(rings.rings)), ring

    @core
    @requires("several rings per world", "rings by topology")
    @pytest.mark.parametrize(
        ("hosts", "ring_size", "order", "group_sizes"), GROUPS_OF_HOSTS.values(), ids=GROUPS_OF_HOSTS.keys()
    )
    @on_every_rank
    def test_groups_are_within_hosts(self, hosts: str, ring_size: int, order: Any, group_sizes: list[int]) -> None:
        """A call takes the largest divisor of the size that divides its heads."""
        with mock.patch.dict(os.environ, {HOST_VARIABLE: hosts[dist.get_rank()]}):
            ring = backend(self.adapter).initialize(ring_size, ring_order=order, ulysses_size="auto", timeout=60)
        size = group_sizes[ring.data_rank]
        assert (ring.ulysses_size, ring.hosts) == (size, tuple(hosts[rank] for rank in ring.ranks)), ring
        for heads in (1, 3, 4, 6):
            ring.traffic.reset()
            case = replace(_FULL, num_heads=heads, num_kv_heads=heads)
            local_call(self.adapter, ring, case).check()
            group_size = math.gcd(size, heads)
            hops, exchanges = 3 * (ring.size // group_size - 1), 7 * (group_size - 1)
            assert ring.traffic.messages == hops + exchanges, (ring, heads, ring.traffic)

    @THOROUGH
    @core
    @requires("automatic ring size", "rings by topology")
    @pytest.mark.parametrize(
        ("ranks", "order"), [*(pytest.param(ranks, "rank", marks=MORE_CASES) for ranks in (2, 4)), (4, "topology")]
    )
    @on_every_rank
    def test_the_smallest_ring_that_fits(self, ranks: int, order: str) -> None:
        """The memory is 1.5 times the tensor bytes of a ring half as large. That is too little for its tiles.

        Hops take a second, so that no ring pays, whatever a busy machine measures.
        """
        options = {"ring_order": order, "memory_bytes": 3 * _ROW * _CASE.seq_len // ranks}
        with (
            mock.patch.dict(os.environ, {HOST_VARIABLE: _HOSTS[dist.get_rank()]}),
            mock.patch.object(probe, "slowest", lambda found: replace(slowest(found), latency_seconds=1.0)),
        ):
            ring = _initialize(self.adapter, ring_size="auto", **options, **_needs(_CASE))
        cut = {"rank": (0, 1, 2, 3), "topology": (0, 3, 1, 2)}[order]
        first = cut.index(dist.get_rank()) // ranks * ranks
        assert (ring.size, ring.ranks) == (ranks, cut[first : first + ranks]), ring
        local_call(self.adapter, ring, _CASE).check()

    @THOROUGH
    @core
    @requires("automatic ring size", "several rings per world")
    @on_every_rank
    def test_a_ring_that_does_not_pay_is_not_chosen(self) -> None:
        ring = _initialize(self.adapter, ring_size="auto", **_needs(replace(_CASE, seq_len=8)))
        assert (ring.size, ring.data_size, ring.rank) == (1, 4, 0), ring

    @THOROUGH
    @core
    @requires("automatic ring size", "several rings per world")
    @pytest.mark.parametrize(
        ("ulysses_size", "group_size"), [(1, 1), (2, 2), ("auto", 2)], ids=["alone", "groups", "auto"]
    )
    @on_every_rank
    def test_a_ring_that_pays_is_chosen(self, ulysses_size: UlyssesSize, group_size: int) -> None:
        long = replace(_CASE, seq_len=2**20, segment_lengths=(2**20,), dilation_rates=(1,), is_causal=False)
        options: dict[str, Any] = {"ring_size": "auto", "memory_bytes": 10**12, "ulysses_size": ulysses_size}
        ring = _initialize(self.adapter, **options, **_needs(long))
        assert (ring.size, ring.rank, ring.ulysses_size) == (2, dist.get_rank() % 2, group_size), ring

    @requires("automatic ring size")
    @on_every_rank
    def test_ranks_that_ask_for_different_rings_are_reported(self) -> None:
        """One rank passes another ``seq_len`` than the other ranks, and then another layout.

        It also spells the same pattern in another way, which is no difference.
        """
        odd = dist.get_rank() == 2
        needs = _needs(_CASE) | ({"seq_len": 60, "window_lengths": [None, None]} if odd else {})
        in_size = ending(_initialize, self.adapter, ring_size="auto", **needs)
        in_size.check(RingMismatchError, "seq_len (rank 0: 401, rank 1: 401, rank 2: 60, rank 3: 401)")
        assert "window_lengths" not in in_size.message, in_size
        layout = "zigzag" if odd else "contiguous"
        in_layout = ending(_initialize, self.adapter, layout=layout, ring_order="topology")
        in_layout.check(RingMismatchError, "rank 2: zigzag")

    @THOROUGH
    @core
    @requires("automatic ring size")
    @on_every_rank
    def test_no_ring_fits(self) -> None:
        ended = ending(_initialize, self.adapter, ring_size="auto", memory_bytes=1000, **_needs(_CASE))
        ended.check(ValueError, "1,000", "memory_bytes")
