"""Traffic: ranks send the scheduled bytes, post hops before tiles, hold two receive buffers, call no collective.

If dK and dV travel in bf16, they need half the bytes, and their error is within the bound that the attention states.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_backends.errors import RingMismatchError
from ring_backends.schedule.layout import LayoutKind
from ring_backends.schedule.planner import rank_plan
from ring_backends.testing.calls import Results, call_here, check_results, expected, run_cases, whole
from ring_backends.testing.capabilities import AdapterSuite, core
from ring_backends.testing.failing_calls import ending
from ring_backends.testing.fine_cuts import fine_cuts
from ring_backends.testing.marks import MORE_CASES, matrix_but
from ring_backends.testing.recording import Event, no_collectives, recorded
from ring_backends.testing.reference import reference_attention
from ring_backends.testing.rings import (
    FOUR,
    RingSpec,
    every_layout,
    rows_of_ranks,
)
from ring_backends.testing.strategies import AttentionCase
from ring_backends.testing.world import World, on_every_rank

_FULL = AttentionCase(48, (48,), (1,), num_heads=4, num_kv_heads=4, head_dim=8, dtype=torch.float64)
_MIXED = replace(
    _FULL, seq_len=61, segment_lengths=(7, 30, 61), dilation_rates=(1, 2, 3), num_kv_heads=2, masked="random"
)

HOPS_BY_HAND = {
    "full": (_FULL, (3, 3, 3, 3), (6, 6, 6, 6)),
    "dilated": (replace(_FULL, dilation_rates=(3,), num_heads=3, num_kv_heads=3), (3, 3, 3, 3), (6, 6, 6, 6)),
    # Rank i sends K and V of the shards 0 … i. The last rank sends none. In backward, rank i also sends i gradients.
    "causal": (replace(_FULL, is_causal=True), (1, 2, 3, 0), (1, 3, 5, 3)),
    # Each pair of ranks forms a ring of two.
    "segments of two shards": (replace(_FULL, segment_lengths=(24,)), (1, 1, 1, 1), (2, 2, 2, 2)),
}
"""Cases, and the number of hops that each rank sends in forward and in backward."""


def sizes_of(case: AttentionCase) -> dict[str, Any]:
    """The sizes of a case as arguments of the schedule."""
    dims = {"head_dim": case.head_dim, "value_dim": case.value_dim}
    return {"batch": case.batch, **dims, "itemsize": case.dtype.itemsize, "buffer_bytes": case.buffer_bytes}


def planned_hops(case: AttentionCase, rings: RingSpec, layout: LayoutKind, ring_rank: int, *, backward: bool) -> int:
    """The number of hops of a forward or backward in which a rank sends or receives."""
    schedule = case.schedule(rings.size, layout)
    plan = rank_plan(schedule, ring_rank, **sizes_of(case), backward=backward)
    return len(plan.hops)


@dataclass(frozen=True)
class Walked:
    """The results of one rank, and by direction: the planned tiles, the events, and the bytes that the ring counted."""

    results: Results
    tiles_of_steps: dict[str, list[int]]
    events: dict[str, list[Event]]
    sent_bytes: dict[str, int]


def walk(adapter: str, layout: LayoutKind, case: AttentionCase, cut: bool) -> Walked:
    """Record a call that the ranks have agreed on before. Collectives are forbidden during the call."""
    call = call_here(adapter, case, FOUR, layout)
    traffic, events, sent_bytes = call.attention.ring.traffic, {}, {}
    with fine_cuts(1024) if cut else contextlib.nullcontext():
        call.gradients(call())
        with no_collectives(), recorded(type(call.attention)) as recording:
            traffic.reset()
            out, lse = call(return_lse=True)
            events["forward"], sent_bytes["forward"] = list(recording.events), traffic.bytes
            recording.events.clear()
            traffic.reset()
            results = Results(out.detach(), lse, *call.gradients(out))
            events["backward"], sent_bytes["backward"] = recording.events, traffic.bytes
    return Walked(results, recording.tiles_of_steps, events, sent_bytes)


_ROUNDED = replace(
    _FULL, seq_len=64, segment_lengths=(64, 16), dilation_rates=(1, 2), batch=2, num_kv_heads=2, dtype=torch.bfloat16
)
_IN_GROUPS = replace(_ROUNDED, num_kv_heads=1, ulysses_size=2)
_ROUNDING = 2.0**-8
"""The largest relative error of rounding to bf16."""


def both_ways(adapter: str, case: AttentionCase) -> list[tuple[list[Tensor], int]]:
    """The same call with dK and dV in fp32 and in bf16 on the wire: out, gradients and the bytes of the backward."""
    found = []
    for dtype in (None, torch.bfloat16):
        call = call_here(adapter, case, grad_wire_dtype=dtype)
        out, traffic = call(), call.attention.ring.traffic
        traffic.reset()
        found.append(([out.detach(), *call.gradients(out)], traffic.bytes))
    return found


def shares_of_ranks(case: AttentionCase) -> list[tuple[Tensor, Tensor]]:
    """The absolute values of dK and dV from the queries of each rank, in fp64, by the dense reference."""
    query, key, value, grad_out, _ = case.tensors()
    query, key, value = (x.double().requires_grad_() for x in (query, key, value))
    out, _ = reference_attention(query, key, value, **case.options())
    shares = []
    for rows in rows_of_ranks(case.seq_len, 4, "contiguous"):
        of_rank = torch.zeros_like(out)
        of_rank[:, rows] = grad_out.double()[:, rows]
        grad_key, grad_value = torch.autograd.grad(out, [key, value], of_rank, retain_graph=True)
        shares.append((grad_key.abs(), grad_value.abs()))
    return shares


class TrafficTests(AdapterSuite):
    @pytest.mark.parametrize(
        "name", [pytest.param(name, marks=() if name == "full" else pytest.mark.core) for name in HOPS_BY_HAND]
    )
    def test_hops_counted_by_hand(self, world: World, name: str) -> None:
        """A hop carries the dilated rows of a shard of 12 rows, in K and V or in dK and dV, of 8 fp64 components."""
        case, *numbers = HOPS_BY_HAND[name]
        hop_bytes = 12 // case.dilation_rates[0] * case.num_kv_heads * 8 * 8 * 2
        answers = run_cases(world, self.adapter, FOUR, "contiguous", [case])[0][0]
        for answer, *hops in zip(answers, *numbers, strict=True):
            assert [answer.forward, answer.backward] == [(number * hop_bytes, number) for number in hops]

    @pytest.mark.parametrize("cut", matrix_but(False, of=(False, True)), ids=["whole", "cut"])
    @pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
    @pytest.mark.parametrize("case", [pytest.param(_FULL, marks=pytest.mark.core), _MIXED], ids=["full", "mixed"])
    @every_layout
    def test_hops(self, world: World, layout: LayoutKind, case: AttentionCase, is_causal: bool, cut: bool) -> None:
        """Check the results, bytes, buffers and event order of recorded calls. The calls use no collective."""
        case = replace(case, is_causal=is_causal)
        by_rank: list[Walked] = world.run(walk, self.adapter, layout, case, cut)
        got = whole([walked.results for walked in by_rank], case.seq_len, layout)
        check_results(got, expected(case), 1e-10, case)
        for rank, walked in enumerate(by_rank):
            for direction, events in walked.events.items():
                _check_bytes(events, walked.sent_bytes[direction], rank)
                _check_buffers(events, rank)
                _check_waits(events, rank)
                _check_order(events, walked.tiles_of_steps[direction], rank)
            assert any(event.what == "tile" for event in walked.events["forward"])
        if case.segment_lengths == _FULL.segment_lengths and not is_causal and layout == "contiguous":
            hops = {sum(event.what == "post" for event in walked.events["forward"]) for walked in by_rank}
            assert (hops == {3}) != cut, f"{hops} hops per rank"

    @core
    @pytest.mark.parametrize("case", [_ROUNDED, pytest.param(_IN_GROUPS, marks=MORE_CASES)], ids=["alone", "groups"])
    def test_gradients_in_bf16_on_the_wire(self, world: World, case: AttentionCase) -> None:
        by_rank = world.run(both_ways, self.adapter, case)
        schedule, sizes = case.schedule(4), sizes_of(case)
        for rank, ((exact, exact_bytes), (rounded, rounded_bytes)) in enumerate(by_rank):
            assert torch.equal(exact[0], rounded[0])
            assert torch.equal(exact[1], rounded[1])
            assert exact_bytes == schedule.wire_bytes(rank, **sizes, backward=True)
            assert rounded_bytes == schedule.wire_bytes(rank, **sizes, backward=True, grad_itemsize=2)
        for index, name in ((2, "dk"), (3, "dv")):
            exact_grad, rounded_grad = (
                torch.cat([answers[way][0][index] for answers in by_rank], 1).double() for way in (0, 1)
            )
            share = sum(shares[index - 2] for shares in shares_of_ranks(case))
            # At most four hops round, and both gradients are rounded once more in the end. The shares are rounded too.
            bound = 1.05 * (4 + 2) * _ROUNDING * share
            error = (exact_grad - rounded_grad).abs()
            assert bool((error <= bound).all()), f"{name}: {float((error - bound).max())}"
            # A hop between two groups carries the results of one tile, which the kernel has rounded already.
            assert bool((error > 0).any()) or case.ulysses_size > 1, f"{name} was not rounded on the wire"

    @core
    @on_every_rank
    def test_ranks_that_send_gradients_in_other_dtypes_are_reported(self) -> None:
        call = self.call(_ROUNDED, grad_wire_dtype=torch.bfloat16 if dist.get_rank() == 1 else None)
        ending(call).check(RingMismatchError, "grad_wire_dtype")


def _check_bytes(events: list[Event], counted: int, rank: int) -> None:
    """Check that the buffers hold the counted bytes and only padding: each slice is padded to 16 bytes."""
    handed = sum(sum(event.sent.values()) for event in events)
    slices = 64 * sum(len(event.sent) for event in events)
    assert counted <= handed <= counted + 16 * slices, f"rank {rank}: buffers of {handed} bytes, {counted} counted"
    tags = Counter((event.tag, peer) for event in events if event.what == "post" for peer in event.sent)
    assert all(count == 1 for count in tags.values()), f"rank {rank} sends several buffers per tag and peer: {tags}"
    assert not any(rank in (*event.sent, *event.received) for event in events), f"rank {rank} sends to itself"


def _check_buffers(events: list[Event], rank: int) -> None:
    """Check that a rank holds at most two receive buffers: one in use, one in flight."""
    alive = [event.buffers_alive for event in events]
    assert max(alive) <= 2, f"rank {rank} holds {max(alive)} received buffers of K and V; by event: {alive}"


def _check_waits(events: list[Event], rank: int) -> None:
    """Check that a rank waits once for every hop, after it posted the hop."""
    posts = [event.tag for event in events if event.what == "post"]
    waits = [event.tag for event in events if event.what == "wait"]
    assert sorted(posts) == sorted(waits), f"rank {rank} posted {posts} and waited for {waits}"
    seen = set()
    for event in events:
        assert event.what != "wait" or event.tag in seen, f"rank {rank} waited for a hop before it posted it"
        if event.what == "post":
            seen.add(event.tag)


def _check_order(events: list[Event], tiles_of_steps: list[int], rank: int) -> None:
    """Check that the hop for the next step is posted before the tiles of the current step are computed."""
    for event in events:
        if event.posts_keys:
            due = sum(tiles_of_steps[: event.step - 1])
            what = f"rank {rank} posts the hop of step {event.step} after {event.tiles_before} tiles"
            assert event.tiles_before == due, f"{what}; expected {due} tiles"
    assert sum(event.what == "tile" for event in events) == sum(tiles_of_steps)
