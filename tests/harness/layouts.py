"""Layouts: the rows of a rank, shard and unshard with their gradients, and modules that hold an attention."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ring_backends.schedule.layout import LayoutKind
from ring_backends.testing.calls import (
    Results,
    call_here,
    check_results,
    difference,
    expected,
    local_call,
    new_attention,
)
from ring_backends.testing.capabilities import AdapterSuite, core
from ring_backends.testing.failing_calls import Ended, ending
from ring_backends.testing.models import DenseAttention
from ring_backends.testing.rings import (
    FOUR,
    ONE,
    RingSpec,
    every_ring,
    every_ring_and_layout,
    new_ring,
    ring_here,
    ring_of,
    rows_of_ranks,
)
from ring_backends.testing.strategies import AttentionCase
from ring_backends.testing.world import World

LENGTHS = (1, 2, 3, 5, 8, 13, 16, 27)
_CASE = AttentionCase(
    seq_len=27, segment_lengths=(9, 27), dilation_rates=(1, 2), num_heads=2, num_kv_heads=2, dtype=torch.float64
)


@dataclass(frozen=True)
class Cut:
    """A sharded tensor: this rank's positions, its shard, the bytes of its storage, and the unsharded tensor."""

    positions: Tensor
    part: Tensor
    part_bytes: int
    again: Tensor


def place_here(adapter: str, rings: RingSpec) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """(size, rank) of this rank's ring, and (data_size, data_rank)."""
    ring = ring_here(adapter, rings)
    return None if ring is None else ((ring.size, ring.rank), (ring.data_size, ring.data_rank))


def _numbers(seq_len: int, dim: int, dtype: torch.dtype = torch.float64) -> Tensor:
    shape = [2, 3, 4]
    shape[dim] = seq_len
    return torch.arange(24 * seq_len)[: torch.Size(shape).numel()].view(shape).to(dtype, copy=True)


def cut_and_join(adapter: str, rings: RingSpec, layout: LayoutKind, dim: int, dtype: torch.dtype) -> list[Cut] | None:
    ring = ring_here(adapter, rings)
    if ring is None:
        return None
    ring = ring.with_layout(layout)
    cuts = []
    for seq_len in LENGTHS:
        part = ring.shard(_numbers(seq_len, dim, dtype), dim=dim)
        again = ring.unshard(part, dim=dim, seq_len=seq_len)
        cuts.append(Cut(ring.positions(seq_len), part, part.untyped_storage().nbytes(), again))
    return cuts


def adjoints(adapter: str, rings: RingSpec, layout: LayoutKind, dim: int) -> list[tuple[Tensor, Tensor]] | None:
    """The gradients of the inputs of shard and unshard. The gradients of their outputs differ between ranks."""
    ring = ring_here(adapter, rings)
    if ring is None:
        return None
    ring = ring.with_layout(layout)
    grads = []
    for seq_len in LENGTHS:
        numbers = _numbers(seq_len, dim)
        x = numbers.clone().requires_grad_()
        part = ring.shard(x, dim=dim)
        (grad_x,) = torch.autograd.grad((part * (ring.rank + 2)).sum(), x)
        local = part.detach().requires_grad_()
        joined = ring.unshard(local, dim=dim, seq_len=seq_len)
        (grad_local,) = torch.autograd.grad((joined * numbers * 10.0**ring.rank).sum(), local)
        grads.append((grad_x, grad_local))
    return grads


class Sandwich(nn.Module):
    """Parameters on the whole sequence, then on the shards, then on the whole sequence again."""

    def __init__(self, ring: Any, attention: nn.Module) -> None:
        super().__init__()
        self.ring, self.attention = ring, attention
        self.before, self.within, self.after = (nn.Linear(8, 8, dtype=torch.float64) for _ in range(3))
        generator = torch.Generator().manual_seed(3)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2

    def forward(self, x: Tensor) -> Tensor:
        seq_len = x.shape[1]
        x = self.before(x).tanh()
        x = x if self.ring is None else self.ring.shard(x)
        rows = self.within(x).unflatten(-1, (2, 4))
        x = x + self.attention(rows, rows * 2, rows + 1, is_causal=True, seq_len=seq_len).flatten(-2)
        x = x if self.ring is None else self.ring.unshard(x, seq_len=seq_len)
        result: Tensor = self.after(x.sin())
        return result


def _sandwich_input() -> tuple[Tensor, list[Tensor]]:
    """The whole input, and the weights of each rank. The objective of a rank is the weighted sum of the output."""
    generator = torch.Generator().manual_seed(4)
    x, *weights = torch.randn(5, 2, _CASE.seq_len, 8, generator=generator, dtype=torch.float64)
    return x, weights


def gradients_of_sandwich(adapter: str, rings: RingSpec, layout: LayoutKind) -> list[Tensor] | None:
    ring = ring_here(adapter, rings)
    if ring is None:
        return None
    ring = ring.with_layout(layout)
    model = Sandwich(ring, new_attention(adapter, ring, _CASE))
    x, weights = _sandwich_input()
    return list(torch.autograd.grad((model(x) * weights[ring.rank]).sum(), list(model.parameters())))


def layout_properties(adapter: str) -> list[bool]:
    """Properties of a ring and of ``ring.with_layout()``, each of which has to be True."""
    ring = new_ring(adapter, FOUR, layout="zigzag")
    other = ring.with_layout("contiguous")
    call = local_call(adapter, other, _CASE)
    call()
    return [
        ring.layout_kind == "zigzag",
        other.layout_kind == "contiguous",
        other.traffic.bytes > 0,
        ring.traffic is other.traffic,
        ring.group is other.group,
        torch.equal(ring.positions(27), rows_of_ranks(27, 4, "zigzag")[ring.rank]),
        torch.equal(other.positions(27), rows_of_ranks(27, 4, "contiguous")[ring.rank]),
        (other.size, other.rank) == (ring.size, ring.rank),
    ]


def deep_copied(adapter: str) -> tuple[bool, Tensor, Tensor]:
    """Deep-copy a model. Returns whether the copy shares the ring, the original output, and the output of the copy."""
    call = call_here(adapter, _CASE)
    (twin,) = copy.deepcopy(nn.Sequential(call.attention))
    return twin.ring is call.attention.ring, call().detach(), replace(call, attention=twin)().detach()


def pickled(adapter: str) -> tuple[Ended, Tensor]:
    """Unpickle an attention module. Returns how a call without a ring ended, and the output with a ring."""
    call = call_here(adapter, _CASE)
    ring, twin = call.attention.ring, pickle.loads(pickle.dumps(call.attention))
    call = replace(call, attention=twin)
    ended = ending(call)
    twin.ring = ring
    return ended, call().detach()


def pickled_alone(adapter: str, rings: RingSpec) -> Results:
    """The results of an unpickled attention module on a ring of one."""
    call = local_call(adapter, ring_of(adapter, rings), _CASE, gradients=False)
    twin = pickle.loads(pickle.dumps(call.attention))
    return Results(*replace(call, attention=twin)(return_lse=True))


class LayoutTests(AdapterSuite):
    @every_ring
    def test_ring_and_data_ranks(self, world: World, rings: RingSpec) -> None:
        for rank, place in enumerate(world.run(place_here, self.adapter, rings)):
            where = rings.place(rank)
            if where is None:
                assert place is None
                continue
            assert place[0] == (rings.size, where[1])
            if len(rings.rings) * rings.size == 4:  # the rings tile the world
                assert place[1] == (len(rings.rings), where[0])

    @core
    @pytest.mark.parametrize(
        ("dim", "dtype"), [(0, torch.float64), (1, torch.bfloat16), (2, torch.int64), (-2, torch.float32)]
    )
    @every_ring_and_layout
    def test_shards_are_pieces_of_tensor_split(
        self, world: World, rings: RingSpec, layout: LayoutKind, dim: int, dtype: torch.dtype
    ) -> None:
        for answers in rings.by_ring(world.run(cut_and_join, self.adapter, rings, layout, dim, dtype)):
            for ring_rank, cuts in enumerate(answers):
                for seq_len, cut in zip(LENGTHS, cuts, strict=True):
                    rows = rows_of_ranks(seq_len, rings.size, layout)[ring_rank]
                    numbers = _numbers(seq_len, dim, dtype)
                    assert torch.equal(cut.positions, rows)
                    assert torch.equal(cut.part, numbers.index_select(dim, rows))
                    assert torch.equal(cut.again, numbers)
                    assert cut.again.dtype == dtype
                    assert cut.part_bytes == cut.part.nbytes, "the shard keeps the storage of the whole tensor alive"

    @core
    @pytest.mark.parametrize("dim", [1, -1])
    @every_ring_and_layout
    def test_shard_and_unshard_backward(self, world: World, rings: RingSpec, layout: LayoutKind, dim: int) -> None:
        for answers in rings.by_ring(world.run(adjoints, self.adapter, rings, layout, dim)):
            for ring_rank, grads in enumerate(answers):
                for seq_len, (grad_x, grad_local) in zip(LENGTHS, grads, strict=True):
                    rows = rows_of_ranks(seq_len, rings.size, layout)[ring_rank]
                    numbers = _numbers(seq_len, dim)
                    # The gradient of shard is zero outside the slice. That of unshard sums the gradients of all ranks.
                    slice_alone = torch.zeros_like(numbers).index_fill_(dim, rows, ring_rank + 2)
                    assert torch.equal(grad_x, slice_alone)
                    factors = sum(10.0**rank for rank in range(rings.size))
                    assert difference(grad_local, numbers.index_select(dim, rows) * factors) <= 1e-9

    @core
    @every_ring_and_layout
    def test_parameters_before_and_after_the_shards(self, world: World, rings: RingSpec, layout: LayoutKind) -> None:
        by_rank = world.run(gradients_of_sandwich, self.adapter, rings, layout)
        x, weights = _sandwich_input()
        model = Sandwich(None, DenseAttention(_CASE))
        objective = (model(x) * torch.stack(weights[: rings.size]).sum(0)).sum()
        wanted = torch.autograd.grad(objective, list(model.parameters()))
        for of_ranks in rings.by_ring(by_rank):
            sums = [torch.stack(grads).sum(0) for grads in zip(*of_ranks, strict=True)]
            for (name, _), got, want in zip(model.named_parameters(), sums, wanted, strict=True):
                assert difference(got, want) <= 1e-10 * float(want.abs().max()), name

    @core
    def test_layouts_of_one_ring_share_its_group_and_traffic(self, world: World) -> None:
        assert world.run(layout_properties, self.adapter) == [[True] * 8] * 4

    @core
    def test_a_copied_model_keeps_the_ring(self, world: World) -> None:
        for has_the_ring, out, same in world.run(deep_copied, self.adapter):
            assert has_the_ring
            assert torch.equal(out, same)

    @core
    def test_an_unpickled_ring_says_what_to_do(self, world: World) -> None:
        wanted = expected(_CASE, gradients=False).out
        endings, outs = zip(*world.run(pickled, self.adapter), strict=True)
        for ended in endings:
            ended.check(RuntimeError, "initialize()")
        assert difference(torch.cat(outs, 1), wanted) <= 1e-10

    @core
    @pytest.mark.parametrize("rings", [ONE], ids=str)
    def test_an_unpickled_ring_of_one_works(self, world: World, rings: RingSpec) -> None:
        wanted = expected(_CASE, gradients=False)
        for got in world.run(pickled_alone, self.adapter, rings):
            check_results(got, wanted, 1e-10)
