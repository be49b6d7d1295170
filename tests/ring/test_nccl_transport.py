"""Hops over the strict stand-in for NCCL: the suites with the native adapter, and planted faults. No GPU runs here."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from nccl_suites import BlockingHopTests, HopTests, Worlds, blocking_worlds, pair, simulated_worlds, world

from ring_backends.engine import wire
from ring_backends.engine.wire_buffers import WireBuffer
from ring_backends.errors import RingMismatchError
from ring_backends.ring import stream_hops, transfer
from ring_backends.ring.calls import Configuration
from ring_backends.testing.calls import call_here
from ring_backends.testing.correctness import EDGE_CASES
from ring_backends.testing.rings import FOUR, TWO, ring_here
from ring_backends.testing.world import World

__all__ = ["blocking_worlds", "pair", "simulated_worlds", "world"]

ADAPTER = "ring_backends.adapters.native"


class TestNative(HopTests):
    adapter = ADAPTER
    quick = ("test_gradients_accumulate", "test_every_byte_of_a_message_arrives[2]")


class TestNativeThatBlocks(BlockingHopTests):
    adapter = ADAPTER


@pytest.fixture(scope="module")
def gloo_world(worlds: Worlds) -> World:
    """The session's world of four ranks."""
    return worlds(4)


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


def give_back_buffers_before_they_are_sent() -> None:
    """Later buffers get the memory of a buffer before the ``wait`` of its hop."""
    advance = wire.ArrivingKeys.advance

    def give_back_and_advance(keys: wire.ArrivingKeys, step: int) -> WireBuffer | None:
        if keys._posted is not None:
            keys._posted.hops.memory.give_back(*keys._sent)
            keys._sent = []
        return advance(keys, step)

    with mock.patch.object(wire.ArrivingKeys, "advance", give_back_and_advance):
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
        (give_back_buffers_before_they_are_sent, AssertionError),
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
