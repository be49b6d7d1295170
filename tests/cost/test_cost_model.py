"""The cost model against values computed by hand, against the schedule, and against the plans of ranks."""

from __future__ import annotations

import json
import math
import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_cases import outside_of

from ring_backends import DilatedPattern, RingSchedule, SequenceLayout
from ring_backends.cost.estimate import Estimate
from ring_backends.cost.hardware import Hardware
from ring_backends.cost.model import RingCost, smallest_rings
from ring_backends.cost.probe import slowest, with_host_links
from ring_backends.cost.work import work_of
from ring_backends.ring.topology import topology_order
from ring_backends.schedule.bands import Band
from ring_backends.schedule.limits import limits_of
from ring_backends.schedule.planner import rank_plan
from ring_backends.schedule.rank_plan import Message
from ring_backends.schedule.rows import DilatedRows
from ring_backends.schedule.trees import MESSAGE_COST
from ring_backends.testing.fine_cuts import every_branch_on_trees
from ring_backends.testing.strategies import AttentionCase, attention_cases, in_parts

PLAIN = Hardware(
    latency_seconds=1e-3, bytes_per_second=1e9, forward_flops_per_second=1e9, backward_flops_per_second=5e8
)


def cost_of(layout: SequenceLayout, branches: Any, heads: Any, *sizes: Any, causal: bool = False) -> RingCost:
    """The cost of a pattern of LongNet. ``heads`` are (query heads, key/value heads), ``sizes`` those of RingCost."""
    return RingCost(RingSchedule(DilatedPattern.longnet(*branches), layout, *heads, is_causal=causal), *sizes)


def full(seq_len: int, ring_size: int, *, causal: bool = False, heads: Any = (2,)) -> RingCost:
    """Plain attention: one branch over the whole sequence, with head dim 4 and fp32. Its rows travel along chains."""
    return cost_of(SequenceLayout(seq_len, ring_size), ([seq_len], [1]), heads, 1, 4, 4, "cpu", 0, causal=causal)


def test_memory_of_one_device_by_hand() -> None:
    """16 tokens, 4 query heads, 2 key/value heads, head dim 4, fp32."""
    cost = full(16, 1, heads=(4, 2))
    assert cost.tensor_bytes.tolist() == [16 * 4 * 4 * (4 * 4 + 4 * 2)]  # q, out, dq, dO; k, v, dk, dv
    assert cost.lse_bytes.tolist() == [16 * 4 * 4]
    assert cost.communication_bytes == 0
    # There is one tile. It has q, out, dO, dq and k, v, dk, dv.
    assert cost.tile_bytes.tolist() == [16 * 4 * 4 * (4 * 4 + 4 * 2)]
    assert cost.memory_bytes.tolist() == [2 * 16 * 4 * 4 * 24 + 16 * 4 * 4]


def test_memory_of_a_ring_by_hand() -> None:
    """Two ranks hold half of these tensors each, and six buffers with 8 rows and 2 heads of K and V."""
    cost = full(16, 2, heads=(4, 2))
    half = 8 * 4 * 4 * 24
    assert cost.communication_bytes == 6 * 8 * 2 * 2 * 4 * 4
    assert cost.memory_bytes.tolist() == [2 * half + 8 * 4 * 4 + cost.communication_bytes] * 2


@pytest.mark.parametrize(
    ("buffer_bytes", "in_rows"),
    [
        (0, 6 * 8 * 2),  # along chains: three buffers each of K, V, dK and dV
        (2048, 64 * 2),  # K and V of all ranks, or in a backward twice half of these, and their dK and dV
        (None, 64 * 4),  # K, V, dK and dV of all ranks
    ],
)
def test_buffers_of_rows_that_take_few_hops_by_hand(buffer_bytes: int | None, in_rows: int) -> None:
    """8 ranks have 8 rows each, of one head with 4 numbers of 4 bytes."""
    cost = replace(full(64, 8, heads=(1,)), buffer_bytes=buffer_bytes)
    assert cost.communication_bytes == in_rows * 4 * 4


def test_half_precision_keeps_sums_of_two_blocks_in_fp32() -> None:
    cost = replace(full(16, 1), batch=3, itemsize=2)
    assert cost.tensor_bytes.tolist() == [3 * 16 * 4 * 2 * 16]
    assert cost.lse_bytes.tolist() == [3 * 16 * 2 * 4]
    # The tile has 2 bytes per number. dq, dk and dv of one block of heads are summed with 4 bytes per number.
    assert cost.tile_bytes.tolist() == [3 * 16 * 4 * 2 * 16 + 3 * 16 * 4 * 4 * (2 + 2 * 2)]


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize(("itemsize", "head_dim"), [(2, 128), (4, 64), (8, 32)])
def test_buffers_of_long_hops_take_the_share_of_the_planner(itemsize: int, head_dim: int, device_type: str) -> None:
    sizes = {"batch": 2, "head_dim": head_dim, "itemsize": itemsize, "device_type": device_type}
    cost = replace(full(2**22, 8, causal=True, heads=(16, 4)), **sizes)
    share = limits_of(device_type).communication_share
    assert 0.7 * share <= cost.communication_bytes / int(cost.tensor_bytes.max()) <= share


@in_parts(3)
@settings(max_examples=20, deadline=None)
@example(case=AttentionCase(seq_len=32, segment_lengths=(16,), dilation_rates=(1,)), ring_size=2, kind="zigzag")
@given(case=attention_cases(max_n=200), ring_size=st.integers(1, 12), kind=st.sampled_from(["contiguous", "zigzag"]))
def test_numbers_are_those_of_schedule_and_plans(part: int, case: AttentionCase, ring_size: int, kind: Any) -> None:
    """Bytes, FLOPs and tokens are those of the schedule, and tiles and hops those of the plans that ranks execute."""
    schedule, ranks = case.schedule(ring_size, kind), range(ring_size)
    cost = RingCost(schedule, case.batch, case.head_dim, case.dtype.itemsize, buffer_bytes=case.buffer_bytes)
    for backward in (False, True):
        stated = [schedule.wire_bytes(rank, **cost.sizes, backward=backward) for rank in ranks]
        assert cost.sent_bytes(backward=backward).tolist() == stated
    forward = [schedule.tile_flops(rank, batch=case.batch, head_dim=case.head_dim) for rank in ranks]
    assert cost.flops().tolist() == forward
    assert cost.flops(backward=True).tolist() == [flops * 5 / 2 for flops in forward]
    assert cost.tokens.tolist() == [schedule.layout.local_len(rank) for rank in ranks]
    schedule = schedule.of_members[-1]
    ranks = range(schedule.layout.ring_size)
    sizes = {"batch": 1, "head_dim": case.head_dim, "itemsize": 8, "buffer_bytes": case.buffer_bytes}
    travel = schedule.travel(**sizes)
    keys: Counter[int] = Counter()
    grads: Counter[int] = Counter()
    for rank in ranks:
        own_pairs = own_rows = own_tiles = 0
        plan = rank_plan(schedule, rank, **sizes)
        for _, step in plan.steps:
            for tile in step.all_tiles:
                rows, segments, heads = tile.queries.rows, tile.queries.segments, tile.queries.num_heads
                if isinstance(tile.keys, DilatedRows) and tile.queries.start == tile.keys.start:
                    own_pairs += segments * heads * int((~outside_of(tile.band or Band(), rows, tile.keys.rows)).sum())
                    own_rows += segments * heads * rows
                    own_tiles += 1
        for hop in plan.hops:
            keys[rank] += num_rows(hop.sends)
            grads[rank] += num_rows(hop.receives)
        work = work_of(schedule, travel, rank)
        assert (work.own_pairs, work.own_rows, work.own_tiles) == (own_pairs, own_rows, own_tiles)
    assert travel.key_rows_sent.tolist() == [keys[rank] for rank in ranks]
    assert schedule.rows_received.tolist() == [grads[rank] for rank in ranks]
    everywhere = sum(2 * case.head_dim * 8 * (2 * keys[rank] + grads[rank]) for rank in ranks)
    assert schedule.bytes_between_hosts(ranks, **sizes) == everywhere


def num_rows(messages: Iterable[Message]) -> int:
    return sum(parcel.rows * parcel.num_streams for message in messages for parcel in message.parcels)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    case=attention_cases(max_n=120, ulysses_sizes=[1]),
    hosts=st.lists(st.integers(0, 3), min_size=2, max_size=20),
    kind=st.sampled_from(["contiguous", "zigzag"]),
    message_cost=st.sampled_from([0.0, 0.3, 5.0]),
)
def test_bytes_of_branches_on_trees_between_hosts(
    case: AttentionCase, hosts: list[int], kind: Any, message_cost: float
) -> None:
    """Rows on trees cross between hosts once for each message between two of them. So do dK and dV."""
    ring_size = len(hosts)
    with every_branch_on_trees(message_cost):
        schedule = case.schedule(ring_size, kind)
        crossing = 0
        for rank in range(ring_size):
            plan = rank_plan(schedule, rank, batch=1, head_dim=1, itemsize=8)
            messages = (message for hop in plan.hops for message in hop.sends)
            crossing += num_rows(message for message in messages if hosts[message.peer] != hosts[rank])
        assert schedule.bytes_between_hosts(hosts, batch=1, head_dim=1, itemsize=8) == 3 * 2 * 8 * crossing


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("tokens", "ranks", "bytes_per_second"), [(10**9, 1024, 50e9), (2**20, 32, 400e9)])
def test_sparse_branches_leave_a_gpu_busy(tokens, ranks, bytes_per_second, layout, backward):
    """A hop takes 20 µs. The host takes 100 µs for each tile."""
    branches = [(2048, 1), (16384, 8), (131072, 64), (1048576, 512), (10**9, 65536)]
    lengths_and_rates = zip(*(branch for branch in branches if branch[0] <= tokens), strict=True)
    cost = cost_of(SequenceLayout(tokens, ranks, layout), lengths_and_rates, (16,), 1, 128, 2, "cuda", causal=True)
    flops_per_second = 400e12
    gpu = Hardware(20e-6, bytes_per_second, flops_per_second, flops_per_second, tile_seconds=100e-6)
    computing = float(cost.flops(backward=backward).max()) / flops_per_second
    assert computing / cost.call_seconds(gpu, backward=backward) > 0.9


def test_seconds_of_one_device_by_hand() -> None:
    """2 heads with 100² pairs and head dim 4. Forward has 2 products at 1 GFLOP/s, backward 5 at half of that."""
    cost = full(100, 1)
    assert cost.call_seconds(PLAIN) == pytest.approx(2 * 100**2 * 4 * 4 / 1e9)
    assert cost.call_seconds(PLAIN, backward=True) == pytest.approx(2 * 100**2 * 4 * 10 / 5e8)
    assert cost.call_seconds(replace(PLAIN, speed_alone=2.0)) == pytest.approx(100**2 * 4 * 4 / 1e9)


def test_seconds_of_causal_tiles_rows_and_copies_by_hand() -> None:
    cost = full(100, 1, causal=True)
    causal = replace(PLAIN, causal_forward_flops_per_second=2e9, causal_row_keys=50.0, row_keys=1000.0)
    pairs = 2 * (100 * 101 / 2 + 100 * 50)
    assert cost.call_seconds(causal) == pytest.approx(pairs * 4 * 4 / 2e9)
    # A query row (copy of q, merge of out) moves 5 times 4 numbers, a key row (copies of k and v) 4 times 4.
    copies = 100 * 2 * (5 + 4) * 4 * 4 / 1e6
    assert cost.call_seconds(replace(causal, copy_bytes_per_second=1e6)) == pytest.approx(pairs * 16 / 2e9 + copies)


@pytest.mark.parametrize("overlap", [0.0, 0.25, 1.0])
def test_seconds_of_a_ring_by_hand(overlap: float) -> None:
    """Two ranks have 50 rows each. The hop overlaps the tile of the local keys. No hop overlaps the second tile."""
    cost = full(100, 2)
    own = other = 2 * 50 * 50 * 4 * 4 / 1e9
    hop = 1e-3 + 50 * 2 * 2 * 4 * 4 / 1e9
    hidden = overlap * min(hop, own)
    assert cost.call_seconds(replace(PLAIN, overlap=overlap)) == pytest.approx(own + other + hop - hidden)
    fast = replace(PLAIN, overlap=overlap, latency_seconds=0.0)
    assert cost.call_seconds(fast) == pytest.approx(own + other + (hop - 1e-3) * (1 - overlap))
    # In backward, gradients of equal size return to their rank. Nothing overlaps the last hop, here the only one.
    own, other = (tile * 2.5 * 2 for tile in (own, other))
    hidden = overlap * min(hop, own)
    backward = cost.call_seconds(replace(PLAIN, overlap=overlap), backward=True)
    assert backward == pytest.approx(own + other + 2 * hop - hidden)


def test_a_branch_within_each_shard_adds_no_waiting() -> None:
    cost = cost_of(SequenceLayout(100, 4), ([25], [1]), (2,), 1, 4, 4)
    assert cost.communication_bytes == 0
    assert cost.call_seconds(PLAIN) == pytest.approx(2 * 25**2 * 16 / 1e9)


def test_a_rank_takes_at_least_the_time_in_which_its_host_launches_tiles_and_posts_hops() -> None:
    chained = full(64, 4)  # each rank has one tile of its own keys, and three of other ranks' keys
    in_one_hop = replace(chained, buffer_bytes=None)  # one of all other ranks' keys
    hosts = replace(PLAIN, tile_seconds=1.0, latency_seconds=0.0, overlap=0.0)
    for cost, num_chained, num_others, hops in ((chained, 3, 0, 3), (in_one_hop, 0, 1, 1 + 2 * MESSAGE_COST)):
        for rank in range(4):
            work = work_of(cost.schedule, cost.schedule.travel(**cost.sizes), rank)
            assert (work.own_tiles, work.chained_tiles, work.other_tiles) == (1, num_chained, num_others)
            assert work.other_rows == 16 * 2 * (num_chained + num_others)
        tiles = 1 + num_chained + num_others
        moved = cost.call_seconds(replace(hosts, tile_seconds=0.0)) - 64 * 16 * 2 * 16 / 1e9
        assert cost.call_seconds(hosts) == pytest.approx(tiles + moved, abs=1e-6)
        assert cost.call_seconds(replace(hosts, post_seconds=0.5)) == pytest.approx(tiles + 0.5 * hops)


def test_seconds_of_a_sparse_branch_by_hand() -> None:
    """A rank sends its rows to three others in one hop. In backward, dK and dV come home in one hop more."""
    hardware = replace(PLAIN, bytes_per_second=1e30, forward_flops_per_second=1e30, backward_flops_per_second=1e30)
    with every_branch_on_trees():
        cost = cost_of(SequenceLayout(64, 4), ([64], [8]), (1,), 1, 4, 4)
        for backward in (False, True):
            seconds = (1 + backward) * (1 + 2 * MESSAGE_COST) * hardware.latency_seconds
            assert cost.call_seconds(hardware, backward=backward) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("backward", "num_branches", "share", "num_lots", "hiding"),
    [
        (False, 1, 1.0, 1, 0),
        (False, 1, 0.6, 2, 0),  # two lots of half of the rows, of which the second is sent after the tiles of the first
        (False, 3, 2.5, 3, 2),  # each lot is sent during the tiles of the one before it
        (True, 1, 1.0, 2, 0),
        (True, 3, 5.0, 3, 2),
    ],
)
def test_seconds_of_lots_by_hand(backward: bool, num_branches: int, share: float, num_lots: int, hiding: int) -> None:
    """4 ranks have 16 rows each. A lot takes one hop, to three others. Hops overlap with tiles before the last lot.

    In a backward, the dK and dV of the last lot come home after all tiles.
    """
    hardware = replace(PLAIN, latency_seconds=1e-5)
    with every_branch_on_trees(share=share):
        cost = cost_of(SequenceLayout(64, 4), ([64] * num_branches, [1] * num_branches), (1,), 1, 4, 4, "cpu", 0)
        travel = cost.schedule.travel(**cost.sizes, backward=backward)
        assert len(travel.lots) == num_lots
        seconds = cost.call_seconds(hardware, backward=backward)
        tiles = work_of(cost.schedule, travel, 0).other_tiles
    assert tiles == num_lots
    pair_seconds = 40 / 5e8 if backward else 16 / 1e9
    own, other = (16 * keys * pair_seconds for keys in (16, 48))
    rows, latency = num_branches * 48 * 2 * 4 * 4 / 1e9, (1 + 2 * MESSAGE_COST) * 1e-5
    hops, last_hop = rows + num_lots * latency, 0.0
    if backward:
        hops, last_hop = 2 * hops, rows / num_lots + latency
    hidden = min(hops - last_hop, num_branches * own + hiding * other * num_branches / num_lots)
    assert seconds == pytest.approx(num_branches * (own + other) + hops - hidden)


def test_tiles_of_a_window_have_as_many_rows_in_each_lot() -> None:
    """Each rank has 16 rows. Of the rows of a neighbour, the first or last 9 are seen."""
    pattern, found = DilatedPattern((64,), (1,), window_lengths=(10,)), []
    for share in (1e9, 0.3):
        with every_branch_on_trees(share=share):
            schedule = RingSchedule(pattern, SequenceLayout(64, 4), 1)
            travel = schedule.travel(batch=1, head_dim=4, itemsize=4, buffer_bytes=0)
            found.append((travel.num_lots(0), work_of(schedule, travel, 1).other_rows))
    (few, rows), (many, rows_in_all) = found
    assert (few, many) == (1, 2)
    assert rows_in_all == 2 * rows


def test_the_slowest_rank_decides_the_time_of_a_call() -> None:
    cost = full(128, 4, causal=True)
    seconds = cost.seconds(PLAIN)
    assert cost.busiest == [2, 3]  # rank 2 sends most, rank 3 computes most
    assert cost.call_seconds(PLAIN) == float(seconds[1]) > float(seconds[0])


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(case=attention_cases(max_n=300, ulysses_sizes=[1]), ring_size=st.integers(1, 8), backward=st.booleans())
def test_worse_constants_never_make_a_call_faster(case: AttentionCase, ring_size: int, backward: bool) -> None:
    sizes = case.batch, case.head_dim, case.dtype.itemsize
    cost = RingCost(case.schedule(ring_size), *sizes, buffer_bytes=case.buffer_bytes)
    before = cost.seconds(PLAIN, backward=backward)
    assert bool((before >= 0).all())
    for worse in (
        {"latency_seconds": 5e-3},
        {"bytes_per_second": 1e6},
        {"forward_flops_per_second": 1e8, "backward_flops_per_second": 1e8},
        {"overlap": 0.5},
        {"row_keys": 10.0, "causal_row_keys": 10.0},
        {"tile_seconds": 1e-3},
        {"post_seconds": 1e-3},
        {"copy_bytes_per_second": 1e7},
    ):
        assert bool((cost.seconds(replace(PLAIN, **worse), backward=backward) >= before - 1e-12).all()), worse


def memory_of(cost: RingCost, ring_size: int) -> int:
    """Memory of the rank that needs most."""
    return int(cost.on_ring(ring_size).memory_bytes.max())


def test_memory_falls_and_bytes_per_rank_do_not_grow_with_the_ring() -> None:
    cost = replace(full(2**16, 1, causal=True), head_dim=64)
    memory = [memory_of(cost, size) for size in (1, 2, 4, 8, 16, 32)]
    assert all(less < more for more, less in pairwise(memory))
    longer = [full(tokens, 4).call_seconds(PLAIN) for tokens in (64, 128, 256, 512)]
    assert all(shorter < longer for shorter, longer in pairwise(longer))


def test_the_smallest_ring_that_fits_is_the_smallest() -> None:
    cost = replace(full(3000, 1), head_dim=64)
    for size in (1, 2, 3, 7, 12, 100):
        memory = memory_of(cost, size)
        found = smallest_rings(cost, memory, PLAIN)
        assert found.fits == min(n for n in range(1, size + 1) if memory_of(cost, n) <= memory)
    assert smallest_rings(cost, 1, PLAIN).fits is None


def test_a_ring_pays_when_it_is_faster_than_one_device() -> None:
    """Two ranks halve the work of 2 · n² · 16 FLOP and add two latencies of 1 ms and three hops' bytes."""
    for seq_len, pays in ((50, False), (2000, True)):
        estimate = Estimate(full(seq_len, 2), PLAIN, memory_bytes=10**12)
        assert (estimate.speedup > 1) is pays
        assert estimate.smallest_rings.fits == 1
        assert estimate.smallest_rings.fits_and_pays == (2 if pays else None)
    ring, alone = (
        cost.call_seconds(PLAIN) + cost.call_seconds(PLAIN, backward=True) for cost in (full(2000, 2), full(2000, 1))
    )
    assert estimate.speedup == pytest.approx(alone / ring)


def test_the_choice_is_limited_to_given_sizes() -> None:
    cost = replace(full(3000, 1), head_dim=64)
    memory = memory_of(cost, 5)
    assert smallest_rings(cost, memory, None, sizes=[1, 2, 4, 8]).fits == 8
    assert smallest_rings(cost, memory, PLAIN, sizes=[1, 2, 4]).fits is None
    slow = replace(PLAIN, latency_seconds=1e6)
    assert asdict(smallest_rings(cost, memory, slow, sizes=[1, 2, 4, 8])) == {"fits": 8, "fits_and_pays": None}


def test_a_billion_tokens_on_4096_ranks() -> None:
    started = time.process_time()
    tokens = 10**9
    branches = [2048, 16384, 2**20, tokens], [1, 8, 64, 4096]
    cost = cost_of(SequenceLayout(tokens, 4096, "zigzag"), branches, (32, 8), 1, 128, 2, causal=True)
    assert int(cost.tokens.sum()) == tokens
    assert int(cost.tensor_bytes.sum()) == tokens * 4 * 40 * 128 * 2
    assert cost.call_seconds(PLAIN, backward=True) > 0
    found = smallest_rings(cost, 80 * 10**9, PLAIN)
    assert memory_of(cost, found.fits) <= 80 * 10**9 < memory_of(cost, found.fits - 1)
    hosts = [rank // 8 for rank in range(4096)]
    assert cost.schedule.bytes_between_hosts(hosts, batch=1, head_dim=128, itemsize=2, device_type="cuda") > 0
    assert time.process_time() - started < 60


SIZES = {"batch": 0, "head_dim": -1, "itemsize": 2.0}
CONSTANTS = {"latency_seconds": -1.0, "bytes_per_second": 0.0, "forward_flops_per_second": math.inf, "overlap": 1.5}


@pytest.mark.parametrize(("name", "value"), [*SIZES.items(), *CONSTANTS.items(), ("memory_bytes", "much")])
def test_bad_sizes_and_constants_are_refused(name: str, value: object) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(f"{name} = {value!r}")):
        replace(full(4, 1) if name in SIZES else PLAIN, **{name: value})


def test_constants_survive_a_json_round_trip() -> None:
    assert Hardware.of(json.loads(json.dumps(asdict(PLAIN)))) == PLAIN
    values = {name: value for name, value in asdict(PLAIN).items() if name != "bytes_per_second"}
    with pytest.raises(ValueError, match=r"colour is unknown, bytes_per_second is missing"):
        Hardware.of({**values, "colour": 1})


def test_links_within_a_host_are_those_of_ranks_between_two_others() -> None:
    quick, slow = (replace(PLAIN, latency_seconds=x, bytes_per_second=1 / x) for x in (1.0, 2.0))
    assert with_host_links([slow, quick, slow] * 2, [*"aaabbb"]) == replace(
        slow, host_latency_seconds=1.0, host_bytes_per_second=1.0
    )
    for hosts in ("aaaaaa", "ababab"):
        assert with_host_links([slow, quick, slow] * 2, [*hosts]) == slow


def test_an_exchange_of_rows_for_heads_by_hand() -> None:
    """A rank has 16 tokens. It sends them for one head, in bf16 of width 8, and gets back out and LSE."""
    schedule = RingSchedule(DilatedPattern((None,), (1,)), SequenceLayout(64, 4), 2, ulysses_size=2)
    cost, hardware = RingCost(schedule, 1, 8, 2), replace(PLAIN, host_latency_seconds=0.5, host_bytes_per_second=4.0)
    sent = {False: 16 * (3 * 16) + 16 * (16 + 4), True: 16 * (5 * 16 + 4) + 16 * (3 * 16)}
    hops = replace(cost, schedule=schedule.of_members[0])
    for backward, posts in ((False, 3), (True, 4)):
        exchanged = schedule.exchanged_bytes(batch=1, head_dim=8, itemsize=2, backward=backward)
        assert exchanged.tolist() == [sent[backward]] * 4
        seconds = cost.seconds(hardware, backward=backward) - hops.seconds(hardware, backward=backward)
        assert seconds.tolist() == pytest.approx([sent[backward] / 4 + posts * 0.5] * len(seconds))
    assert cost.exchange_bytes.tolist() == [2 * (8 * 2 * 16 * 16)] * 4  # twice eight tensors of two heads
    assert replace(cost, ulysses_size=8).on_ring(6).schedule.ulysses_size == 2


def test_a_ring_has_the_constants_of_its_slowest_ranks() -> None:
    other = replace(PLAIN, latency_seconds=2e-3, bytes_per_second=2e9, overlap=0.5, memory_bytes=7, row_keys=3.0)
    expected = replace(PLAIN, latency_seconds=2e-3, overlap=0.5, row_keys=3.0)
    assert slowest([replace(PLAIN, memory_bytes=9), other]) == replace(expected, memory_bytes=7)
    assert slowest([PLAIN, other]).memory_bytes is None


def test_topology_order_groups_ranks_by_host() -> None:
    assert topology_order("abab") == (0, 2, 1, 3)
    assert topology_order("bbaa") == (0, 1, 2, 3)
    assert topology_order("abcab") == (0, 3, 1, 4, 2)


def test_bytes_between_hosts_by_hand() -> None:
    """4 ranks, each with 4 rows, 2 heads, head dim 4, fp32. K and V take 3 hops, dK and dV take 3."""
    cost = full(16, 4)
    chunk = 2 * 4 * 2 * 4 * 4
    sizes = {"batch": 1, "head_dim": 4, "itemsize": 4, "buffer_bytes": 0}
    everywhere = cost.schedule.bytes_between_hosts([0, 1, 0, 1], **sizes)
    assert everywhere == sum(cost.sent_bytes().tolist()) + sum(cost.sent_bytes(backward=True).tolist())
    assert everywhere == 2 * 4 * 3 * chunk + 4 * 3 * chunk
    # Two hosts of two ranks: on its 3 hops, a chunk of K and V crosses between hosts once or twice. So do dK and dV.
    halves = cost.schedule.bytes_between_hosts([0, 0, 1, 1], **sizes)
    assert halves == 2 * (1 + 2 + 1 + 2) * chunk + (1 + 1 + 1 + 1 + 2) * chunk
    assert cost.schedule.bytes_between_hosts([5, 5, 5, 5], **sizes) == 0
    # In one hop, a rank sends its chunk to two ranks of the other host. K and V go twice, dK and dV once.
    assert cost.schedule.bytes_between_hosts([0, 0, 1, 1], batch=1, head_dim=4, itemsize=4) == 3 * 4 * 2 * chunk
