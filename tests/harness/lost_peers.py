"""Lost peers: if a rank skips a call or dies, every other rank raises in time."""

from __future__ import annotations

import os
import re
import signal
import time

import torch
import torch.distributed as dist

from ring_backends.errors import RingPeerError
from ring_backends.testing.calls import difference, expected, local_call
from ring_backends.testing.capabilities import AdapterSuite, core, requires
from ring_backends.testing.failing_calls import (
    A_MOMENT,
    AT_ONCE,
    ODD_RANK,
    SHORT,
    SMALL_CASE,
    Ended,
    attend_on_a_new_ring,
    ending,
)
from ring_backends.testing.rings import FOUR, TWO, get_ready, new_ring
from ring_backends.testing.world import Outcome, World


def stay_away(adapter: str, seconds: float) -> tuple[Ended, Ended] | None:
    """Rank 2 of 4 skips the second of two equal calls. Then the other ranks call again."""
    ring = new_ring(adapter, FOUR, seconds)
    call = local_call(adapter, ring, SMALL_CASE)
    call()
    if ring.rank == 2:
        return None
    return ending(call), ending(call)


def stay_away_at_any_time(adapter: str, seconds: float) -> Ended | None:
    """In the first ring a rank skips the first call. In the second ring a rank skips the backward."""
    ring, place = new_ring(adapter, TWO, seconds), TWO.place(dist.get_rank())
    assert place is not None
    call = local_call(adapter, ring, SMALL_CASE)
    if place[0] == 0:
        return None if ring.rank == 1 else ending(call)
    out = call()
    return None if ring.rank == 1 else ending(lambda: out.backward(call.grad_out))


def die(adapter: str) -> None:
    """Rank 3 of 4 is killed while the other ranks make a call."""
    ring = new_ring(adapter, FOUR)
    call = local_call(adapter, ring, SMALL_CASE)
    call()
    if ring.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    call()


def backward_alone(adapter: str, seconds: float) -> Ended | None:
    """Only one rank runs the backward of an unshard."""
    ring = new_ring(adapter, FOUR, seconds)
    whole = ring.unshard(torch.ones(1, 2, requires_grad=True))
    return ending(whole.sum().backward) if ring.rank == ODD_RANK else None


class LostPeerTests(AdapterSuite):
    @core
    def test_a_backward_of_unshard_on_one_rank_is_reported_in_time(self, world: World) -> None:
        ended = world.run(backward_alone, self.adapter, SHORT)[ODD_RANK]
        ended.check(RingPeerError, "unshard (backward of call", within=SHORT + A_MOMENT)

    def test_a_rank_that_stays_away_is_reported_in_time(self, world: World) -> None:
        endings = world.run(stay_away, self.adapter, SHORT)
        for rank in (0, 1, 3):
            first, again = endings[rank]
            first.check(RingPeerError, within=SHORT + A_MOMENT)
            assert re.search(rf"rank {rank} waited in step \d+ of forward", first.message), first
            assert re.search(r"from rank \[\d", first.message), first
            assert re.search(r"to rank \[\d", first.message), first
            again.check(RingPeerError, "initialize()", within=1)
        outs = world.run(attend_on_a_new_ring, self.adapter, FOUR)
        assert difference(torch.cat(outs, 1), expected(SMALL_CASE, gradients=False).out) <= 1e-10

    @core
    @requires("several rings per world")
    def test_a_rank_may_stay_away_at_any_time(self, world: World) -> None:
        first_call, _, backward, _ = world.run(stay_away_at_any_time, self.adapter, SHORT)
        for ended in (first_call, backward):
            ended.check(RingPeerError, within=SHORT + A_MOMENT)
        assert "[1]" in first_call.message, first_call
        assert re.search(r"step \d+ of backward .* from rank \[1\] and to rank \[1\]", backward.message), backward

    @requires("a lost rank")
    def test_a_rank_that_dies_is_reported_at_once(self, world: World) -> None:
        world.run(get_ready, self.adapter)
        start = time.monotonic()
        *survivors, dead = world.run_collect(die, self.adapter)
        assert time.monotonic() - start < 5 + AT_ONCE
        assert dead.status == "died"
        for outcome in survivors:
            assert outcome.raised(RingPeerError), _all(survivors)
        outs = world.run(attend_on_a_new_ring, self.adapter, FOUR)
        assert difference(torch.cat(outs, 1), expected(SMALL_CASE, gradients=False).out) <= 1e-10


def _all(outcomes: list[Outcome]) -> str:
    return "\n".join(map(str, outcomes))
