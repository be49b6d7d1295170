"""Plans for rings of up to 64 ranks are symmetric and complete, without duplicates, and match the stated bytes."""

from __future__ import annotations

import itertools
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import output_of
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import outside_of
from torch import Tensor

from ring_backends import DilatedPattern, RingSchedule, SequenceLayout
from ring_backends.engine.wire_buffers import RowFormat
from ring_backends.kernels.rows import gather
from ring_backends.schedule.bands import Band
from ring_backends.schedule.links import messages_on_trees
from ring_backends.schedule.planner import rank_plan
from ring_backends.schedule.rank_plan import Delivery, Hop, Message, Parcel, RankPlan, Step
from ring_backends.schedule.rows import DilatedRows
from ring_backends.schedule.tiling import max_tile_bytes
from ring_backends.schedule.travel import Travel
from ring_backends.testing.fine_cuts import every_branch_on_trees, fine_cuts
from ring_backends.testing.marks import THOROUGH
from ring_backends.testing.reference import reference_counts
from ring_backends.testing.strategies import AttentionCase, attention_cases, in_parts

RING_SIZES = st.one_of(st.integers(1, 8), st.sampled_from([16, 31, 64]))
LAYOUTS = st.sampled_from(["contiguous", "zigzag"])
CASES = attention_cases(max_n=90, max_heads=4, paddings=["masked"], masks=[None], dtypes=[torch.float32])
SIZES = {"batch": 1, "head_dim": 4, "itemsize": 4, "buffer_bytes": 0}


def sizes_of(case: AttentionCase) -> dict[str, Any]:
    return {**SIZES, "buffer_bytes": case.buffer_bytes}


def plans_of(schedule: RingSchedule, case: AttentionCase) -> list[RankPlan]:
    """The backward plan of every rank. It contains the steps of the forward plan.

    Ranks differ in their threads, in the bands that their kernels take, and in whether tiles are cut.
    """
    tile_bytes = max_tile_bytes(torch.device("cpu"), 0, backward=True)
    cuts = {"tile_bytes": tile_bytes}, {"tile_bytes": tile_bytes, "takes_bands": True}, {}
    return [
        rank_plan(schedule, rank, **sizes_of(case), backward=True, threads=1 + rank % 3, **cuts[rank % 4 % 3])
        for rank in range(schedule.layout.ring_size)
    ]


def steps_of(plan: RankPlan) -> list[Step]:
    return [step for block in plan.blocks for step in block.steps]


def parcels_of(messages: tuple[Message, ...]) -> Iterator[tuple[int, Parcel]]:
    return ((message.peer, parcel) for message in messages for parcel in message.parcels)


def check_symmetry(plans: list[RankPlan]) -> None:
    """Check that i sends to j what j expects from i, in the same order, and that each hop names a peer once."""
    assert len({len(plan.steps) for plan in plans}) == 1
    times = {tuple((delivery.first_step, delivery.last_step) for delivery in plan.deliveries) for plan in plans}
    assert len(times) == 1
    for delivery, kind in itertools.product(range(len(times.pop())), ("keys", "grads")):
        hops = {plan.rank: getattr(plan.deliveries[delivery], kind) for plan in plans}
        assert len({*map(len, hops.values())}) == 1
        sent, received = keys_of_messages(hops, "sends"), keys_of_messages(hops, "receives")
        assert sent == {(index, peer, rank): keys for (index, rank, peer), keys in received.items()}


def keys_of_messages(hops: dict[int, tuple[Hop, ...]], kind: str) -> dict[tuple[int, int, int], list[Any]]:
    """The keys of the parcels of each message, by the number of its hop, its rank and its peer."""
    found: dict[tuple[int, int, int], list[Any]] = {}
    for rank, of_rank in hops.items():
        for index, hop in enumerate(of_rank):
            for message in getattr(hop, kind):
                assert message.peer != rank
                assert (index, rank, message.peer) not in found
                found[index, rank, message.peer] = [parcel.key for parcel in message.parcels]
    return found


def check_forwarding(schedule: RingSchedule, plans: list[RankPlan]) -> None:
    """Check that a rank sends own rows or parcels of the previous step, and returns gradients of received ones."""
    for plan in plans:
        arrived: set[Parcel] = set()
        pieces = schedule.layout.pieces(plan.rank)
        chained, *lots = plan.deliveries
        for step, hop, grads in zip(steps_of(plan), chained.keys, chained.grads, strict=True):
            for _, parcel in parcels_of(hop.sends):
                assert parcel in arrived or any(parcel.start in piece for piece in pieces)
            arrived = {parcel for _, parcel in parcels_of(hop.receives)}
            assert arrived == {parcel for _, parcel in parcels_of(grads.sends)}
            assert {parcel for tile in step.tiles[0] for parcel in tile.parcels} <= arrived
        for kept in lots:
            here = {*kept.own}
            assert all(any(parcel.start in piece for piece in pieces) for parcel in here)
            for hop in kept.keys:
                assert {parcel for _, parcel in parcels_of(hop.sends)} <= here
                here |= {parcel for _, parcel in parcels_of(hop.receives)}
            for index, step in enumerate(steps_of(plan)):
                tiles = step.tiles[kept.number]
                if tiles:
                    assert len(kept.keys) <= index + 1 or index >= len(plan.blocks[0].steps)
                    assert kept.first_step <= index <= kept.last_step
                assert {parcel for tile in tiles for parcel in tile.parcels} <= here
            returned = [parcel for hop in kept.grads for _, parcel in parcels_of(hop.sends)]
            assert Counter(returned) == Counter(kept.received)
            assert not any(kept.grads[: kept.last_step])
            assert not any(kept.keys[kept.first_step + 1 :])


def computed_counts(schedule: RingSchedule, plans: list[RankPlan]) -> Tensor:
    """int64 [heads, n, n]: how often all ranks together compute each (head, query position, key position)."""
    layout, heads = schedule.layout, len(schedule.heads)
    counts = torch.zeros(heads, layout.seq_len, layout.seq_len, dtype=torch.int64)
    positions = [layout.positions(rank) for rank in range(layout.ring_size)]

    def grid(rank: int, num_heads: int) -> Tensor:
        return positions[rank].view(1, -1, 1).expand(1, -1, num_heads)

    for plan in plans:
        for block in plan.blocks:
            query_grid = grid(plan.rank, block.heads.stop - block.heads.start)
            for step in block.steps:
                for tile in step.all_tiles:
                    queries = gather(query_grid, tile.queries)
                    if isinstance(tile.keys, DilatedRows):
                        keys = gather(grid(plan.rank, block.kv_heads.stop - block.kv_heads.start), tile.keys)
                    else:
                        parts = ((parcel_positions(schedule, part.parcel), part) for part in tile.keys.parts)
                        keys = torch.cat([rows[:, [*part.streams]][:, :, [*part.row_range]] for rows, part in parts], 2)
                    block_heads = torch.arange(heads)[block.heads].view(1, 1, -1)
                    head_ids = gather(block_heads.expand_as(query_grid), tile.queries)
                    keys = keys[:, list(tile.stream_of_head)]
                    t, u = torch.broadcast_tensors(queries.unsqueeze(-1), keys.unsqueeze(-2))
                    seen = ~outside_of(tile.band or Band(), *t.shape[-2:]).expand_as(t)
                    index = (head_ids.unsqueeze(-1).expand_as(t)[seen], t[seen], u[seen])
                    counts.index_put_(index, torch.ones_like(index[0]), accumulate=True)
    return counts


def parcel_positions(schedule: RingSchedule, parcel: Parcel) -> Tensor:
    """The global positions of a parcel's rows, [1, streams, rows], from the layout of its source rank."""
    positions = schedule.layout.positions(owner_of(schedule.layout, parcel.start))
    return gather(positions.view(1, -1, 1).expand(1, -1, len(schedule.kv_heads)), parcel.source)


@lru_cache(maxsize=1024)
def owner_of(layout: SequenceLayout, position: int) -> int:
    """The rank that holds a position."""
    return next(r for r in range(layout.ring_size) if any(position in piece for piece in layout.pieces(r)))


def check_completeness(schedule: RingSchedule, case: AttentionCase) -> None:
    options = {name: value for name, value in case.options().items() if name not in ("padding", "scale")}
    expected = reference_counts(case.seq_len, case.num_heads, **options)
    counts = [computed_counts(of_member, plans_of(of_member, case)) for of_member in schedule.of_members]
    assert torch.equal(torch.cat(counts), expected)
    assert int(schedule.pairs.sum()) == int(expected.sum())


def check_plans(schedule: RingSchedule, case: AttentionCase) -> None:
    """Check the plans of all ranks, or with groups those of the ranks with the same heads."""
    for of_member in schedule.of_members:
        plans = plans_of(of_member, case)
        check_symmetry(plans)
        check_forwarding(of_member, plans)
        check_bytes(of_member, plans, case)
    check_completeness(schedule, case)


def check_bytes(schedule: RingSchedule, plans: list[RankPlan], case: AttentionCase) -> None:
    """Check that the computed totals equal the sums over the steps of all ranks."""
    for plan in plans:
        keys = schedule.travel(**sizes_of(case), backward=True).key_rows_sent
        for kind, rows in (("keys", keys), ("grads", schedule.rows_received)):
            hops = [hop for delivery in plan.deliveries for hop in getattr(delivery, kind)]
            parcels = [parcel for hop in hops for _, parcel in parcels_of(hop.sends)]
            assert sum(parcel.rows * parcel.num_streams for parcel in parcels) == int(rows[plan.rank])


@THOROUGH
@in_parts(2)
@settings(max_examples=10, deadline=None)
@given(case=CASES, ring_size=st.integers(1, 8), layout=LAYOUTS)
def test_fine_cuts_change_only_the_number_of_hops(part: int, case: AttentionCase, ring_size: int, layout: str) -> None:
    with fine_cuts():
        check_plans(case.schedule(ring_size, layout), case)


@in_parts(4)
@settings(max_examples=5, deadline=None)
@given(
    case=CASES,
    ring_size=RING_SIZES,
    layout=LAYOUTS,
    message_cost=st.sampled_from([0.0, 0.3, 5.0]),
    share=st.sampled_from([1e9, 1.0, 0.3]),
)
def test_branches_on_trees(part, case, ring_size, layout, message_cost, share):
    """The rows of all branches travel along trees, in one hop or in several, and in one lot or in several."""
    with every_branch_on_trees(message_cost, share=share):
        schedule = case.schedule(ring_size, layout)
        for of_member in schedule.of_members:
            travel = of_member.travel(**sizes_of(case), backward=True)
            assert travel.num_steps == 0 or share < 1e9
            check_lots(travel)
            check_messages(of_member, travel, plans_of(of_member, case))
        check_plans(schedule, case)
        with fine_cuts():
            check_plans(schedule, case)


def check_lots(travel: Travel) -> None:
    """Check that the lots have all rows of their branches, and that no hop of a lot comes before it is due."""
    shares = Counter((part.branch, part.shares) for lot in travel.lots for part in lot.parts)
    assert all(count == of for (_, of), count in shares.items())
    assert len({branch for branch, _ in shares}) == len(shares)
    for before, after in itertools.pairwise(travel.lots):
        assert after.step - after.num_hops >= before.step


def check_messages(schedule: RingSchedule, travel: Travel, plans: list[RankPlan]) -> None:
    """Check that ranks send at least the messages on trees that are counted, if no branch travels in shares."""
    for number, lot in enumerate(travel.lots, 1):
        if all(part.shares == 1 for part in lot.parts):
            branches = [schedule.branches[part.branch] for part in lot.parts]
            counted = messages_on_trees(zip(branches, (part.tree for part in lot.parts), strict=True))
            sent = torch.tensor([num_messages(plan.deliveries[number : number + 1]) for plan in plans])
            assert bool((counted <= sent).all())


def num_messages(deliveries: Iterable[Delivery]) -> int:
    """The number of messages with K and V that a rank sends."""
    return sum(len(hop.sends) for delivery in deliveries for hop in delivery.keys)


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ring_size", [4, 32])
def test_number_of_messages(ring_size: int, layout: str, is_causal: bool) -> None:
    """Branches with segments of different lengths send to different ranks in the same hop, in zigzag both ways."""
    pattern = DilatedPattern((256, 1024, None), (4, 8, 16))
    schedule = RingSchedule(pattern, SequenceLayout(64 * ring_size, ring_size, layout), 2, is_causal=is_causal)
    for backward in (False, True):
        sizes = {**SIZES, "buffer_bytes": 2**20, "backward": backward}
        sent = [num_messages(rank_plan(schedule, rank, **sizes).deliveries[1:]) for rank in range(ring_size)]
        assert schedule.travel(**sizes).num_tree_messages == max(sent) > 0


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_own_rows_are_sent_in_one_hop_without_a_copy(layout: str, is_causal: bool) -> None:
    """The parcels of each message are adjacent in the buffer, also if rows travel upwards and downwards."""
    pattern = DilatedPattern((48, 96, None), (1, 2, 4))
    schedule = RingSchedule(pattern, SequenceLayout(192, 8, layout), 2, is_causal=is_causal)
    for rank in range(8):
        with every_branch_on_trees(0.0):
            (lot,) = rank_plan(schedule, rank, **SIZES).deliveries[1:]
        assert sum(map(bool, lot.keys)) == 1
        for hop in lot.keys:
            for message in hop.sends:
                first = lot.own.index(message.parcels[0])
                assert message.parcels == lot.own[first : first + len(message.parcels)]


@in_parts(3)
@settings(max_examples=20, deadline=None)
@given(case=CASES, ring_size=RING_SIZES, layout=LAYOUTS)
def test_only_needed_rows_travel_and_every_visible_pair_is_computed_once(part, case, ring_size, layout):
    """The last rank of each route uses the parcels that it receives. No parcel visits a rank twice."""
    schedule = case.schedule(ring_size, layout)
    check_plans(schedule, case)
    for of_member in schedule.of_members:
        check_visits(of_member, plans_of(of_member, case))


def check_visits(schedule: RingSchedule, plans: list[RankPlan]) -> None:
    visits: Counter[tuple[object, int]] = Counter()
    for plan in plans:
        block_of_step = [index for index, block in enumerate(plan.blocks) for _ in block.steps]
        chained = plan.deliveries[0]
        for block_index, step, hop, grads in zip(
            block_of_step, steps_of(plan), chained.keys, chained.grads, strict=True
        ):
            used = {parcel for tile in step.tiles[0] for parcel in tile.parcels}
            for _, parcel in parcels_of(hop.receives):
                visits[(block_index, *parcel.key), plan.rank] += 1
            for message in grads.sends:
                home = [p for p in message.parcels if message.peer == owner_of(schedule.layout, p.start)]
                assert all(parcel in used for parcel in home)
    assert all(count == 1 for count in visits.values())


def test_only_groups_hop() -> None:
    """Eight ranks in groups of four see all keys after one hop. The backward has one more, with dK and dV."""
    pattern, layout = DilatedPattern((None,), (1,)), SequenceLayout(1024, 8, "zigzag")
    schedule = RingSchedule(pattern, layout, 4, is_causal=True, ulysses_size=4)
    for of_member in schedule.of_members:
        for backward in (False, True):
            plans = [rank_plan(of_member, group, **SIZES, backward=backward) for group in range(2)]
            assert {len(plan.hops) for plan in plans} == {1 + backward}


@pytest.mark.parametrize("rate", [1, 4])
@pytest.mark.parametrize(
    ("layout", "sent", "received"),
    [("contiguous", [*[1] * 7, 0], [0, *[1] * 7]), ("zigzag", [1, *[2] * 6, 1], [1, *[2] * 6, 1])],
)
def test_a_causal_window_sends_the_end_of_a_chunk_to_the_next(rate, layout, sent, received):
    """Of each chunk, the rows of the last W − 1 positions travel one hop, and nothing else."""
    window, kv_heads = 32, 2
    pattern = DilatedPattern((None,), (rate,), offset="every", window_lengths=(window,))
    schedule = RingSchedule(pattern, SequenceLayout(1024, 8, layout), 4, kv_heads, is_causal=True)
    travel = schedule.travel(**SIZES)
    assert travel.num_steps + travel.num_tree_hops == 1
    rows = (window - 1) // rate * rate * kv_heads
    assert schedule.rows_received.tolist() == [rows * chunks for chunks in received]
    assert [schedule.wire_bytes(rank, **SIZES) for rank in range(8)] == [rows * 2 * 4 * 4 * chunks for chunks in sent]


def test_a_window_sends_no_row_to_a_group_that_does_not_see_it() -> None:
    """The groups have 6, 3, 3 and 3 positions. The second and the third group see different rows of the first one."""
    pattern, layout = DilatedPattern((None,), (1,), window_lengths=(6,)), SequenceLayout(15, 12)
    schedule = RingSchedule(pattern, layout, 3, is_causal=True, ulysses_size=3)
    assert schedule.rows_received.tolist() == [*[0] * 3, *[5] * 9]


def test_bytes_of_a_plain_ring() -> None:
    """With one full-length branch, each of p ranks sends p − 1 shards of K and V, and of dK and dV in fp32."""
    schedule = RingSchedule(DilatedPattern((64,), (1,)), SequenceLayout(64, 4), num_heads=2, num_kv_heads=1)
    shard = 16 * 8
    assert schedule.wire_bytes(0, batch=3, head_dim=8, itemsize=2) == 3 * 3 * 2 * shard * 2
    assert schedule.wire_bytes(0, batch=3, head_dim=8, itemsize=2, backward=True) == 3 * 3 * 2 * shard * (2 + 4)
    assert schedule.wire_bytes(0, batch=3, head_dim=8, itemsize=2, masked=True) == 3 * 3 * (2 * shard * 2 + 16)
    assert schedule.tile_flops(0, batch=3, head_dim=8) == 3 * 2 * 16 * 64 * 4 * 8
    sizes = {"batch": 3, "head_dim": 8, "value_dim": 24}
    assert schedule.wire_bytes(0, **sizes, itemsize=2) == 2 * 3 * 3 * 2 * shard * 2
    assert schedule.wire_bytes(0, **sizes, itemsize=2, backward=True) == 2 * 3 * 3 * 2 * shard * (2 + 4)
    assert schedule.tile_flops(0, **sizes) == 3 * 2 * 16 * 64 * (2 * 8 + 2 * 24)


def test_causal_chunks_stop_where_no_later_rank_needs_them() -> None:
    causal = RingSchedule(DilatedPattern((64,), (1,)), SequenceLayout(64, 4), num_heads=1, is_causal=True)
    assert causal.travel(**SIZES).key_rows_sent.tolist() == [16, 32, 48, 0]
    zigzag = RingSchedule(DilatedPattern((64,), (1,)), SequenceLayout(64, 4, "zigzag"), num_heads=1, is_causal=True)
    # Chunks of the first half visit all ranks. Chunks of the second half go only to ranks with later chunks.
    assert zigzag.travel(**SIZES).key_rows_sent.tolist() == [24 + 0, 24 + 24, 24 + 16, 24 + 8]
    assert len(set(zigzag.pairs.tolist())) == 1, "zigzag balances causal work"


def test_communication_buffers_are_a_twentieth_of_the_tensors() -> None:
    """Plain ring attention sends the most bytes. Hops are split until six buffers fit."""
    schedule = RingSchedule(DilatedPattern((65536,), (1,)), SequenceLayout(65536, 4), num_heads=8)
    sizes = {"batch": 1, "head_dim": 64, "itemsize": 4}
    tensors, row_format = 8 * 65536 // 4 * 8 * 64 * 4, RowFormat(1, 64, 64, torch.float32)
    for rank in range(4):
        plan = rank_plan(schedule, rank, **sizes, backward=True, buffer_bytes=0)
        hop, grad_hop = (
            max(row_format.buffer_bytes(p for _, p in parcels_of(messages)) for messages in of_hops)
            for of_hops in (
                [hop.receives for hop in plan.deliveries[0].keys],
                [hop.sends for hop in plan.deliveries[0].grads],
            )
        )
        assert 3 * (hop + grad_hop) <= 0.05 * tensors


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
def test_every_thread_gets_a_head_or_a_segment_of_a_tile(batch: int, backward: bool) -> None:
    """The kernel on the CPU divides heads and segments among threads, but not always the rows of one head."""
    case = AttentionCase(16384, (8192, 16384), (1, 2), num_heads=4, num_kv_heads=4, is_causal=True)
    schedule = case.schedule(1)
    sizes = {**SIZES, "batch": batch, "backward": backward, "tile_bytes": batch * 8192 * 4 * 4}

    def shapes(threads: int) -> set[tuple[int, int, int]]:
        (block,) = rank_plan(schedule, 0, **sizes, threads=threads).blocks
        queries = [tile.queries for step in block.steps for tile in step.all_tiles]
        return {(rows.segments, rows.num_heads, rows.rows) for rows in queries}

    assert shapes(1) == {(1, 1, 8192)}
    assert {segments * heads for segments, heads, _ in shapes(4)} == {4 // batch}
    assert {rows for *_, rows in shapes(4)} == {2048 * batch}
    assert {rows for *_, rows in shapes(64)} == {2048}


def test_backward_tiles_have_few_heads() -> None:
    schedule = AttentionCase(16384, (1024,), (1,), num_heads=4, num_kv_heads=4, is_causal=True).schedule(1)
    for backward, expected in ((False, (1, 4)), (True, (4, 1))):
        plan = rank_plan(schedule, 0, **SIZES, backward=backward, tile_bytes=4096 * 4 * 4)
        queries = [tile.queries for step in steps_of(plan) for tile in step.all_tiles]
        assert {(rows.segments, rows.num_heads) for rows in queries} == {expected}


@THOROUGH
def test_a_billion_tokens_on_a_thousand_ranks(tmp_path: Path) -> None:
    """Building and summing takes less than 10 seconds and 1 GiB, without the import of torch."""
    script = textwrap.dedent(
        """
        import resource, time
        from itertools import product
        from ring_backends import DilatedPattern, RingSchedule, SequenceLayout
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
        pattern = DilatedPattern((2048, 32768, 524288, 33554432, 10**9), (1, 8, 64, 1024, 16384))
        for layout, is_causal in product(("contiguous", "zigzag"), (False, True)):
            schedule = RingSchedule(pattern, SequenceLayout(10**9, 1024, layout), 32, 8, is_causal=is_causal)
            for rank, backward in product(range(1024), (False, True)):
                assert schedule.wire_bytes(rank, batch=1, head_dim=128, itemsize=2, backward=backward) >= 0
                assert schedule.tile_flops(rank, batch=1, head_dim=128) > 0
            print(layout, is_causal, round(time.perf_counter() - start, 2), "s")
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        seconds = (time.perf_counter() - start) / 4
        assert seconds < 10 and used < 2**20, (seconds, used)
        """
    )
    output_of(["-c", script], tmp_path, timeout=200)


@pytest.mark.parametrize(
    ("heads", "error", "words"),
    [
        ((6, 4), ValueError, "num_heads = 6 and num_kv_heads = 4"),
        ((0,), ValueError, "num_heads = 0"),
        ((2.0,), TypeError, "num_heads = 2.0"),
    ],
)
def test_bad_heads_are_refused(heads: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        RingSchedule(DilatedPattern((8,), (1,)), SequenceLayout(8, 2), *heads)
