"""Rings ordered by host, and rings whose size is chosen for an attention call.

The tests check size and order, and also the results of attention on these rings.
"""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ring_backends.cost import arrangement, probe
from ring_backends.errors import RingMismatchError
from ring_backends.ring.topology import HOST_VARIABLE
from ring_backends.schedule.layout import LayoutKind
from ring_backends.testing.calls import Results, check_exact, check_results, expected, local_call, whole
from ring_backends.testing.capabilities import AdapterSuite, core, requires
from ring_backends.testing.failing_calls import Ended, ending
from ring_backends.testing.marks import MORE_CASES
from ring_backends.testing.rings import BY_HOSTS, TWO_BY_HOSTS, RingSpec, backend, every_layout, ring_of
from ring_backends.testing.strategies import AttentionCase
from ring_backends.testing.world import World

_CASE = AttentionCase(401, (16, 401), (1, 8), num_heads=4, num_kv_heads=2, is_causal=True, dtype=torch.float64)
_ROW = 4 * (4 + 2) * _CASE.head_dim * 8
"""Bytes of one position in query, key, value, out and their gradients, in fp64."""

_HOSTS = ("a", "b", "c", "a")


def _initialize(adapter: str, **options: Any) -> Any:
    """Call ``initialize`` with a short probe: small tiles, measured for a millisecond."""
    with mock.patch.object(probe, "TILE_ROWS", 256), mock.patch.object(arrangement, "PROBE_SECONDS", 0.001):
        return backend(adapter).initialize(timeout=timedelta(seconds=60), **options)


def _needs(case: AttentionCase) -> dict[str, Any]:
    """What ``ring_size="auto"`` has to know of a call."""
    names = "seq_len segment_lengths dilation_rates num_heads num_kv_heads head_dim dtype is_causal"
    return {name: getattr(case, name) for name in names.split()}


def attend_on_smallest_ring(
    adapter: str, case: AttentionCase, memory_bytes: int | None, order: str
) -> tuple[int, tuple[int, ...], Results]:
    """Call attention on a ring of automatic size. Returns its size, its ranks, and this rank's results."""
    with mock.patch.dict(os.environ, {HOST_VARIABLE: _HOSTS[dist.get_rank()]}):
        options = {"ring_size": "auto", "ring_order": order, "memory_bytes": memory_bytes}
        ring = _initialize(adapter, **options, **_needs(case))
    return ring.size, ring.ranks, local_call(adapter, ring, case).results()


def choose(adapter: str, **options: Any) -> tuple[int, int, int]:
    """The ring that ``ring_size="auto"`` chooses: (ring size, data size, ring rank)."""
    ring = _initialize(adapter, ring_size="auto", **options)
    return ring.size, ring.data_size, ring.rank


def choose_differently(adapter: str) -> list[Ended]:
    """One rank passes another ``seq_len`` than the other ranks, and then another layout.

    It also spells the same pattern in another way, which is no difference.
    """
    odd = dist.get_rank() == 2
    needs = _needs(replace(_CASE, seq_len=60) if odd else _CASE)
    needs |= {"window_lengths": [None, None]} if odd else {}
    return [
        ending(partial(_initialize, adapter, ring_size="auto", **needs)),
        ending(partial(_initialize, adapter, layout="zigzag" if odd else "contiguous", ring_order="topology")),
    ]


def choose_with_too_little_memory(adapter: str) -> Ended:
    return ending(partial(_initialize, adapter, ring_size="auto", memory_bytes=1000, **_needs(_CASE)))


def places(adapter: str, rings: RingSpec) -> tuple[tuple[int, ...], int, int, int]:
    ring = ring_of(adapter, rings)
    return ring.ranks, ring.rank, ring.data_size, ring.data_rank


class ArrangementTests(AdapterSuite):
    @core
    @requires("rings by topology")
    @pytest.mark.parametrize("rings", [BY_HOSTS, TWO_BY_HOSTS], ids=str)
    def test_ranks_of_a_host_are_neighbours(self, world: World, rings: RingSpec) -> None:
        for rank, (ranks, ring_rank, data_size, data_rank) in enumerate(world.run(places, self.adapter, rings)):
            place = rings.place(rank)
            assert place is not None
            assert (ranks, data_size) == (rings.rings[place[0]], len(rings.rings))
            assert (data_rank, ring_rank) == place

    @core
    @requires("rings by topology")
    @pytest.mark.parametrize("rings", [BY_HOSTS, TWO_BY_HOSTS], ids=str)
    @every_layout
    def test_attention_in_the_order_of_hosts(self, world: World, rings: RingSpec, layout: LayoutKind) -> None:
        cases = [_CASE, replace(_CASE, is_causal=False, masked="random", batch=2), replace(_CASE, seq_len=3)]
        answers = check_exact(world, self.adapter, rings, layout, cases)
        for ring_answers in answers[0]:
            assert sum(answer.forward_bytes for answer in ring_answers) > 0

    @core
    @requires("automatic ring size", "rings by topology")
    @pytest.mark.parametrize(
        ("ranks", "order"), [*(pytest.param(ranks, "rank", marks=MORE_CASES) for ranks in (2, 4)), (4, "topology")]
    )
    def test_the_smallest_ring_that_fits(self, world: World, ranks: int, order: str) -> None:
        """The memory is 1.5 times the tensor bytes of a ring half as large. That is too little for its tiles."""
        memory_bytes = 3 * _ROW * _CASE.seq_len // ranks
        found = world.run(attend_on_smallest_ring, self.adapter, _CASE, memory_bytes, order)
        cut = {"rank": (0, 1, 2, 3), "topology": (0, 3, 1, 2)}[order]
        for first in range(0, 4, ranks):
            members = cut[first : first + ranks]
            assert [found[rank][:2] for rank in members] == [(ranks, members)] * ranks
            got = whole([found[rank][2] for rank in members], _CASE.seq_len, "contiguous")
            check_results(got, expected(_CASE), 1e-10)

    @core
    @requires("automatic ring size", "several rings per world")
    def test_a_ring_that_does_not_pay_is_not_chosen(self, world: World) -> None:
        short = replace(_CASE, seq_len=8)
        assert world.run(choose, self.adapter, **_needs(short)) == [(1, 4, 0)] * 4

    @core
    @requires("automatic ring size", "several rings per world")
    def test_a_ring_that_pays_is_chosen(self, world: World) -> None:
        long = replace(_CASE, seq_len=2**20, segment_lengths=(2**20,), dilation_rates=(1,), is_causal=False)
        found = world.run(choose, self.adapter, **_needs(long), memory_bytes=10**12)
        assert found == [(2, 2, 0), (2, 2, 1), (2, 2, 0), (2, 2, 1)]

    @requires("automatic ring size")
    def test_ranks_that_ask_for_different_rings_are_reported(self, world: World) -> None:
        for in_size, in_layout in world.run(choose_differently, self.adapter):
            in_size.check(RingMismatchError, "seq_len (rank 0: 401, rank 1: 401, rank 2: 60, rank 3: 401)")
            assert "window_lengths" not in in_size.message
            in_layout.check(RingMismatchError, "rank 2: zigzag")

    @core
    @requires("automatic ring size")
    def test_no_ring_fits(self, world: World) -> None:
        for ended in world.run(choose_with_too_little_memory, self.adapter):
            ended.check(ValueError, "1,000", "memory_bytes")
