"""Hops over the strict stand-in for NCCL (:mod:`ring_backends.testing.nccl_stand_in`): all suites, and planted faults.

No GPU runs here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from unittest import mock

import pytest
import torch

from ring_backends.engine import hops
from ring_backends.engine.hops import Hop
from ring_backends.errors import RingMismatchError
from ring_backends.ring import stream_hops, transfer
from ring_backends.ring.calls import Configuration
from ring_backends.ring.transfer import WorkTransfer
from ring_backends.testing import nccl_stand_in
from ring_backends.testing.activation_checkpointing import ActivationCheckpointTests
from ring_backends.testing.calls import call_here
from ring_backends.testing.contiguity import ContiguityTests
from ring_backends.testing.correctness import EDGE_CASES, CorrectnessTests, EdgeCaseTests
from ring_backends.testing.faults import FaultTests, LostPeerTests
from ring_backends.testing.layouts import LayoutTests
from ring_backends.testing.messages import MessageTests
from ring_backends.testing.mismatches import MismatchTests
from ring_backends.testing.rings import FOUR, TWO, ring_here
from ring_backends.testing.traffic import TrafficTests
from ring_backends.testing.world import World

ADAPTER = "ring_backends.adapters.native"


@pytest.fixture(scope="module")
def gloo_world(worlds: Callable[[int], World]) -> World:
    """The session's world of four ranks."""
    return worlds(4)


@pytest.fixture(scope="module")
def simulated_worlds(adapters: list[str]) -> Iterator[Callable[[int], World]]:
    """Worlds of ranks with a simulated GPU each."""
    with contextlib.ExitStack() as stack:
        yield lru_cache(lambda size: stack.enter_context(World(size, preload=adapters, prepare=nccl_stand_in.install)))


@pytest.fixture(scope="module")
def world(simulated_worlds: Callable[[int], World]) -> World:
    return simulated_worlds(4)


@pytest.fixture(scope="module")
def pair(simulated_worlds: Callable[[int], World]) -> World:
    return simulated_worlds(2)


class HopTests(
    FaultTests,
    MismatchTests,
    LostPeerTests,
    MessageTests,
    TrafficTests,
    LayoutTests,
    ContiguityTests,
    ActivationCheckpointTests,
    EdgeCaseTests,
    CorrectnessTests,
):
    """The suites whose calls exchange messages.

    Left out is what the simulated GPU cannot do. torch.compile does not trace while a dispatch mode is active, and the
    kernels for the CPU look for NaN on the host.
    """

    test_a_compiled_region_keeps_attention = None


class TestNative(HopTests):
    adapter = ADAPTER


def post_hops_in_another_order_on_each_rank() -> None:
    """Two hops of equal sizes. Their tags differ."""
    ring = ring_here(ADAPTER, TWO)
    call, peer = ring.agreement.begin(Configuration({"order of calls": "two hops"})), 1 - ring.rank
    received, posted = {}, {}
    for index in (0, 1) if ring.rank == 0 else (1, 0):
        received[index] = torch.zeros(4, dtype=torch.uint8)
        outgoing = torch.full((4,), 7 + index, dtype=torch.uint8)
        posted[index] = ring.post({peer: outgoing}, {peer: received[index]}, call.tag(index))
    for index in (0, 1):
        ring.agreement.follow(call, f"rank {ring.rank} waited for hop {index}", posted[index].wait(call.time_left()))
    ring.synchronize()
    assert [received[index].tolist() for index in (0, 1)] == [[7] * 4, [8] * 4], received


def free_buffers_before_they_are_sent() -> None:
    """Only the works hold the buffers of a hop."""
    keeps_none = mock.patch.object(transfer, "WorkTransfer", lambda works, _, *rest: WorkTransfer(works, [], *rest))
    with keeps_none, mock.patch.object(hops, "Hop", lambda posted, _, *rest: Hop(posted, {}, *rest)):
        call_here(ADAPTER, EDGE_CASES["grouped queries"], FOUR, "zigzag").check()


def read_headers_before_their_messages_arrive() -> None:
    """The stream that copies headers to the host waits for no work."""
    with mock.patch.object(transfer, "follow", lambda works, *rest: stream_hops.follow([], *rest)):
        call_here(ADAPTER, EDGE_CASES["grouped queries"], FOUR, "zigzag").check()
        ring_here(ADAPTER, FOUR).synchronize()


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (post_hops_in_another_order_on_each_rank, RingMismatchError),
        (free_buffers_before_they_are_sent, AssertionError),
        (read_headers_before_their_messages_arrive, RingMismatchError),
    ],
    ids=lambda value: value.__name__,
)
def test_the_stand_in_finds_what_gloo_lets_pass(
    fault: Callable[[], None], error: type[Exception], world: World, gloo_world: World
) -> None:
    gloo_world.run(fault)
    outcomes = world.run_collect(fault, grace=2)
    world.close()  # its rings are closed
    assert any(outcome.raised(error) for outcome in outcomes), outcomes
