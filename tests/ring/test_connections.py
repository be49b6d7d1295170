"""NCCL connects the ranks of a ring before the first hop of a configuration, and only those that exchange messages.

The ranks are threads, whose hops go through queues. A test takes them for hops over NCCL and records the messages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ring_backends.engine.call import AttentionCall, forget_calls
from ring_backends.errors import RingPeerError
from ring_backends.ring import collectives, transfer
from ring_backends.ring.calls import Configuration
from ring_backends.ring.members import CONNECT
from ring_backends.ring.transfer import Transfer
from ring_backends.schedule.trees import MESSAGE_COST
from ring_backends.testing.fine_cuts import every_branch_on_trees
from ring_backends.testing.marks import MORE_CASES
from ring_backends.testing.thread_ring import ThreadRing, ThreadRingDilatedAttention, run_in_threads

CPU = torch.device("cpu")
HEADS, WIDTH = 2, 4

Pairs = frozenset[tuple[int, int]]
Part = Callable[["RecordedRing"], Any]


@dataclass(frozen=True)
class RecordedRing(ThreadRing):
    """A ring that records its messages.

    Attributes:
        posts: of each hop, whether it only connects ranks, and the (source, destination) pairs of its messages.
    """

    posts: list[tuple[bool, Pairs]] = field(default_factory=list)

    def post(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], tag: int) -> Transfer:
        pairs = {*((self.rank, peer) for peer in outgoing), *((peer, self.rank) for peer in incoming)}
        self.posts.append((tag & CONNECT == CONNECT, frozenset(pairs)))
        if self.posts[-1][0]:
            assert all(x.numel() == 1 for x in (*outgoing.values(), *incoming.values()))
        return super().post(outgoing, incoming, tag)

    def connections(self) -> list[Pairs]:
        """The pairs of each hop that only connects ranks."""
        return [pairs for connects, pairs in self.posts if connects]

    def messages(self) -> Pairs:
        """The pairs of all other messages."""
        return frozenset().union(*(pairs for connects, pairs in self.posts if not connects))


@pytest.fixture
def over_nccl() -> Iterator[None]:
    """Let the messages pass for messages that only a CUDA stream waits for."""
    with (
        mock.patch.object(transfer, "stream_device", return_value=CPU),
        mock.patch.object(torch.cuda, "current_stream", return_value=None),
    ):
        yield


def run(size: int, part: Part, *, connected: bool = True, **options: Any) -> list[RecordedRing]:
    """Call ``part`` on each rank of a ring, in which no ranks are connected. Return the rings by rank."""

    def run_rank(ring: ThreadRing) -> RecordedRing:
        fields = {item.name: getattr(ring, item.name) for item in dataclasses.fields(ring)}
        recorded = RecordedRing(**fields | {"connected": set() if connected else None})
        part(recorded)
        return recorded

    return run_in_threads(size, run_rank, **options)


def attention(ring: RecordedRing, *, is_causal: bool = False, backward: bool = True, gradients: bool = True) -> None:
    """Call attention with a dense branch across the ring, and a sparse one whose rows travel along a tree.

    Args:
        backward: whether the call needs gradients.
        gradients: whether they are computed.
    """
    seq_len = 24 * ring.size
    attend = ThreadRingDilatedAttention([seq_len // 2, seq_len], [1, 8], ring=ring)
    generator = torch.Generator().manual_seed(0)
    rows = ring.shard(torch.randn(1, seq_len, HEADS, WIDTH, generator=generator)).requires_grad_(backward)
    out = attend(rows, rows, rows, is_causal=is_causal, seq_len=seq_len)
    if backward and gradients:
        out.sum().backward()


def check_ends(rings: list[RecordedRing]) -> None:
    """Both ends of each connection make it, in the same order as their other connections."""
    for first in rings:
        for second in rings[: first.rank]:
            pairs = {(first.rank, second.rank), (second.rank, first.rank)}
            orders = [[made & pairs for made in ring.connections() if made & pairs] for ring in (first, second)]
            assert orders[0] == orders[1]


@pytest.mark.usefixtures("over_nccl")
@pytest.mark.parametrize(
    ("size", "message_cost", "layout"),
    [
        (2, 0, "contiguous"),
        (3, 0, "zigzag"),
        (8, MESSAGE_COST, "contiguous"),
        (15, 0, "zigzag"),
        (16, MESSAGE_COST, "contiguous"),
        pytest.param(16, 1e9, "zigzag", marks=MORE_CASES),
    ],
)
def test_attention_connects_its_ranks_before_the_first_hop(size: int, message_cost: float, layout: Any) -> None:
    def calls(ring: RecordedRing) -> None:
        attention(ring)
        assert [connects for connects, _ in ring.posts] == [True] + [False] * (len(ring.posts) - 1)
        (made,) = ring.connections()
        assert made == ring.messages() == ring.connected
        attention(ring)  # the same ranks again
        attention(ring.with_layout("contiguous"), is_causal=True, backward=False)
        assert ring.messages() == ring.connected  # all layouts share them

    with every_branch_on_trees(message_cost):
        rings = run(size, calls, layout=layout)
    check_ends(rings)
    numbers = {len(ring.connected or ()) for ring in rings}
    if message_cost == 0:  # a hop of a tree has a message for every other rank
        assert numbers == {2 * (size - 1)}
    elif size == 16:
        assert max(numbers) < 2 * (size - 1)


@pytest.mark.usefixtures("over_nccl")
@pytest.mark.parametrize("size", [2, 5, 8])
def test_a_step_of_decoding_connects_its_ranks_at_once(size: int) -> None:
    def step(ring: RecordedRing) -> None:
        attend = ThreadRingDilatedAttention([64], [1], ring=ring)
        rows, cache = torch.ones(1, 1, HEADS, WIDTH), attend.new_cache()
        attend.decode(rows, rows, rows, cache)
        assert [connects for connects, _ in ring.posts] == [True] + [False] * (len(ring.posts) - 1)
        assert ring.connections() == [ring.messages()]

    check_ends(run(size, step))


@pytest.mark.usefixtures("over_nccl")
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("seq_len", [3, 26])
def test_unshard_and_pool_connect_neighbours_only(seq_len: int, layout: Any) -> None:
    """Some ranks have no rows of the shorter sequence."""
    size = 5

    def calls(ring: RecordedRing) -> None:
        rows = ring.shard(torch.randn(2, seq_len, WIDTH)).requires_grad_()
        ring.unshard(rows, seq_len=seq_len).sum().backward()
        for how in ("mean", "max", "first"):
            ring.pool(rows, how=how, seq_len=seq_len).sum().backward()
        collectives.all_reduce(ring, "a sum", torch.ones(3))

    rings = run(size, calls, layout=layout)
    check_ends(rings)
    for ring in rings:
        neighbours = {((ring.rank - 1) % size, ring.rank), (ring.rank, (ring.rank + 1) % size)}
        assert ring.connected == ring.messages() == neighbours
        assert sum(map(len, ring.connections())) == len(neighbours)  # each once


@pytest.mark.usefixtures("over_nccl")
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("call", ["halo", "entering_state"])
def test_halos_and_states_connect_their_ranks_before_the_first_message(call: str, layout: Any) -> None:
    """The forward connects those of the backward, too. Without gradients, there is none."""

    def calls(ring: RecordedRing) -> None:
        for backward in (False, True):
            before = len(ring.posts)
            rows = torch.ones(2, 2, WIDTH, requires_grad=backward)
            out = ring.halo(rows, 3) if call == "halo" else ring.entering_state(rows, rows)
            if backward:
                out.sum().backward()
            posts = [connects for connects, _ in ring.posts[before:]]
            assert not any(posts[1:]), posts
            assert ring.messages() == ring.connected

    check_ends(run(5, calls, layout=layout))


@pytest.mark.usefixtures("over_nccl")
@pytest.mark.parametrize(("size", "peers"), [(2, 1), (5, 3), (8, 3), (16, 4)])
def test_small_all_gathers_take_few_rounds(size: int, peers: int) -> None:
    def gather(ring: RecordedRing) -> None:
        assert ring.agreement is not None
        mine = torch.arange(3) + 10 * ring.rank
        for index in range(2):
            call = ring.agreement.begin(Configuration({"order of calls": "a test"}))
            gathered = ring.all_gather(call, mine, index)
            assert torch.equal(gathered, torch.arange(3) + 10 * torch.arange(size)[:, None])
        tensor = torch.full((2,), float(ring.rank))
        collectives.broadcast(ring, "a test", [tensor])
        assert tensor.tolist() == [0.0, 0.0]

    rings = run(size, gather)
    check_ends(rings)
    for ring in rings:
        gathers = [pairs for connects, pairs in ring.posts if not connects][: 2 * peers]
        assert len({source for pairs in gathers for source, _ in pairs} - {ring.rank}) == peers
        assert ring.messages() == ring.connected


@pytest.mark.parametrize("connected", [False, True])
def test_without_nccl_no_ranks_are_connected(connected: bool) -> None:
    """In a group of gloo alone, or for tensors on the CPU in a group of gloo and NCCL. No plan is made early."""

    def calls(ring: RecordedRing) -> None:
        attention(ring, gradients=False)
        ring.unshard(torch.ones(1, 2)).sum()

    forget_calls()
    with mock.patch.object(AttentionCall, "_plan", autospec=True, side_effect=AttentionCall._plan) as plan:
        rings = run(2, calls, connected=connected)
    assert [ring.connections() for ring in rings] == [[], []]
    assert [ring.connected for ring in rings] == [set() if connected else None] * 2
    assert plan.call_args_list
    assert not any(call.kwargs["backward"] for call in plan.call_args_list)


@pytest.mark.usefixtures("over_nccl")
def test_a_lost_peer_while_ranks_are_connected() -> None:
    """The ranks have agreed on the call. Then one of them does not connect, and the other one names the wait."""
    errors: dict[int, str] = {}

    def call(ring: RecordedRing) -> None:
        with pytest.raises(RingPeerError) as raised:
            attention(ring if ring.rank == 0 else dataclasses.replace(ring, connected=None))
        errors[ring.rank] = str(raised.value)

    run(2, call, timeout=timedelta(seconds=2))
    assert "for the connections from ranks [1] and to ranks [1]" in errors[0]


def test_shards_are_summed_in_fp32_whatever_their_order() -> None:
    """The sum of a part begins on the rank after its owner. In bf16 it would lose the ones."""
    size = 4

    def reduce(ring: RecordedRing) -> None:
        assert ring.agreement is not None
        call = ring.agreement.begin(Configuration({"order of calls": "a test"}))
        parts = [torch.full((2,), 256.0 if ring.rank == 0 else 1.0, dtype=torch.bfloat16) for _ in range(size)]
        total = ring.reduce_scatter(call, parts.__getitem__, 0)
        assert total.dtype == torch.float32
        assert total.tolist() == [259.0, 259.0]

    run(size, reduce)
