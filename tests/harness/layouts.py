"""Layouts: the rows of a rank, shard and unshard with their gradients, and modules that hold an attention."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_backends.schedule.layout import LayoutKind
from ring_backends.testing.calls import local_call
from ring_backends.testing.capabilities import AdapterSuite, core, requires
from ring_backends.testing.rings import (
    ALL_RINGS,
    IN_GROUPS,
    TWO,
    RingSpec,
    every_ring,
    in_every_layout,
    ring_here,
    rows_of_ranks,
)
from ring_backends.testing.strategies import AttentionCase
from ring_backends.testing.world import on_every_rank

LENGTHS = (1, 2, 3, 5, 8, 13, 16, 27)
_CASE = AttentionCase(27, (9, 27), (1, 2), num_heads=2, num_kv_heads=2, dtype=torch.float64)


def _numbers(seq_len: int, dim: int, dtype: torch.dtype = torch.float64) -> Tensor:
    shape = [2, 3, 4]
    shape[dim] = seq_len
    return torch.arange(24 * seq_len)[: torch.Size(shape).numel()].view(shape).to(dtype, copy=True)


class LayoutTests(AdapterSuite):
    @every_ring
    @on_every_rank
    def test_ring_and_data_ranks(self, rings: RingSpec) -> None:
        ring, where = ring_here(self.adapter, rings), rings.place(dist.get_rank())
        if ring is None or where is None:
            assert (ring, where) == (None, None)
            return
        assert (ring.size, ring.rank, ring.ranks) == (rings.size, where[1], rings.rings[where[0]]), ring
        hosts = [rings.hosts[rank] for rank in ring.ranks] if rings.hosts else [socket.gethostname()] * ring.size
        assert [*ring.hosts] == (hosts if ring.size > 1 else []), ring
        if len(rings.rings) * rings.size == 4:  # the rings tile the world
            assert (ring.data_size, ring.data_rank) == (len(rings.rings), where[0]), ring

    @requires("several rings per world")
    @on_every_rank
    def test_options_reach_the_ring(self) -> None:
        ring = self.new_ring(TWO, 17.0, "zigzag")
        assert (ring.size, ring.layout_kind, ring.timeout) == (2, "zigzag", timedelta(seconds=17)), ring
        assert ring.buffer_bytes == 0, ring  # the default is None

    @core
    @pytest.mark.parametrize(
        ("dim", "dtype"), [(0, torch.float64), (1, torch.bfloat16), (2, torch.int64), (-2, torch.float32)]
    )
    @in_every_layout("rings", ALL_RINGS, quick_every=3)
    @on_every_rank
    def test_shards_are_pieces_of_tensor_split(
        self, rings: RingSpec, layout: LayoutKind, dim: int, dtype: torch.dtype
    ) -> None:
        if (ring := ring_here(self.adapter, rings)) is None:
            return
        ring = ring.with_layout(layout)
        for seq_len in LENGTHS:
            numbers, rows = _numbers(seq_len, dim, dtype), rows_of_ranks(seq_len, rings.size, layout)[ring.rank]
            part = ring.shard(numbers, dim=dim)
            again = ring.unshard(part, dim=dim, seq_len=seq_len)
            found = ring.positions(seq_len), part, again
            torch.testing.assert_close(found, (rows, numbers.index_select(dim, rows), numbers), rtol=0, atol=0)
            assert part.untyped_storage().nbytes() == part.nbytes, "the shard keeps the whole tensor alive"

    @core
    @pytest.mark.parametrize("dim", [1, -1])
    @in_every_layout("rings", ALL_RINGS, quick_every=3)
    @on_every_rank
    def test_shard_and_unshard_backward(self, rings: RingSpec, layout: LayoutKind, dim: int) -> None:
        """The gradient of shard is zero outside the slice. That of unshard sums the gradients of all ranks."""
        if (ring := ring_here(self.adapter, rings)) is None:
            return
        ring = ring.with_layout(layout)
        for seq_len in LENGTHS:
            numbers, rows = _numbers(seq_len, dim), rows_of_ranks(seq_len, rings.size, layout)[ring.rank]
            x = numbers.clone().requires_grad_()
            part = ring.shard(x, dim=dim)
            (grad_x,) = torch.autograd.grad((part * (ring.rank + 2)).sum(), x)
            local = part.detach().requires_grad_()
            joined = ring.unshard(local, dim=dim, seq_len=seq_len)
            (grad_local,) = torch.autograd.grad((joined * numbers * 10.0**ring.rank).sum(), local)
            slice_alone = torch.zeros_like(numbers).index_fill_(dim, rows, ring.rank + 2)
            sums = numbers.index_select(dim, rows) * sum(10.0**rank for rank in range(rings.size))
            torch.testing.assert_close((grad_x, grad_local), (slice_alone, sums), rtol=0, atol=1e-9)

    @core
    @on_every_rank
    def test_layouts_of_one_ring_share_its_group_and_traffic(self) -> None:
        ring = self.new_ring(IN_GROUPS, layout="zigzag")
        other = ring.with_layout("contiguous")
        local_call(self.adapter, other, _CASE)()
        assert other.traffic.bytes > 0
        assert ring.traffic is other.traffic
        assert ring.group is other.group
        assert (other.size, other.rank) == (ring.size, ring.rank), other
        for made, layout in ((ring, "zigzag"), (other, "contiguous")):
            assert made.layout_kind == layout, made
            assert (made.buffer_bytes, made.ulysses_size) == (0, 2), made
            torch.testing.assert_close(made.positions(27), rows_of_ranks(27, 4, layout)[ring.rank])
