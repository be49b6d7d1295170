"""Rings over NCCL, with the stand-in of ``nccl_cases``: hops on streams, lost peers and refusals.

No GPU runs here.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import nccl_cases as cases
import pytest
import torch
import torch.distributed as dist
from nccl_cases import SimulatedRing, attended, attention, begin, hop_from, local_inputs, meet, process, run
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ring_backends.engine import run as engine_run
from ring_backends.engine.wire import Hops, PostedHop, running
from ring_backends.engine.wire_buffers import RowFormat
from ring_backends.errors import RingMismatchError, RingPeerError
from ring_backends.ring.agreement import Agreement
from ring_backends.ring.calls import Call, Configuration
from ring_backends.ring.store import REFUSED, publish_configuration
from ring_backends.ring.stream_hops import Headers
from ring_backends.ring.transfer import WorkTransfer
from ring_backends.ring.wire_memory import CallMemory
from ring_backends.schedule.rank_plan import Hop
from ring_backends.testing import nccl_stand_in
from ring_backends.testing.failing_calls import Ended, ending
from ring_backends.testing.marks import MORE_CASES, THOROUGH, matrix_but
from ring_backends.testing.nccl_stand_in import DEVICE
from ring_backends.training.events import Events

__all__ = ["process"]


def test_the_host_waits_for_nothing() -> None:
    """Nothing arrives, and yet both the transfer and the ring return. The hop is over when both messages are there."""

    def call(ring: SimulatedRing) -> Any:
        tag = 7
        hop = hop_from(ring, 0, tag)
        ring.agreement.follow(begin(ring), "rank 0 waited", hop)
        seen = []
        for message in (Headers.of(tag, [], DEVICE).numbers.view(torch.uint8), torch.ones(4, dtype=torch.uint8)):
            time.sleep(0.1)
            seen.append(hop.is_over())
            ring.communicator.heard(0, b"message" + bytes(message.tolist()))
        ring.synchronize()
        return seen, hop.is_over(), hop.difference()

    assert run(1, call, seconds=60) == [([False, False], True, None)]


def kept(ring: SimulatedRing) -> dict[Any, tuple[Tensor, int]]:
    """The memory that the ring keeps for each stream, and the bytes that the latest call has needed."""
    return {stream: (block.memory, block.needs[-1]) for stream, block in ring.wire_memory._blocks.items()}


@pytest.mark.parametrize("has_backward", [False, True])
def test_a_host_that_runs_ahead_holds_no_more_memory(has_backward: bool) -> None:
    """The GPU is busy while the host makes several calls, which allocate no wire buffers."""

    def peak(ring: SimulatedRing, *, is_ahead: bool) -> int:
        attend = attention(ring)
        inputs = [nccl_stand_in.to_device(x) for x in local_inputs(ring)]

        def call() -> None:
            out = attend(*inputs)
            if has_backward:
                torch.autograd.grad(out, inputs, out.detach())

        for _ in range(2):  # the second call makes the block
            call()
            nccl_stand_in.synchronize()
        ((stream, (memory, need)),) = kept(ring).items()
        assert need == len(memory) > 0
        nccl_stand_in.reset_peak()
        is_free = threading.Event()
        if is_ahead:
            nccl_stand_in.current_stream().wait_for(is_free)
        for _ in range(8):
            call()
            if not is_ahead:
                nccl_stand_in.synchronize()
        is_free.set()
        assert kept(ring)[stream][0] is memory
        assert kept(ring)[stream][1] == need
        return nccl_stand_in.peak_bytes()

    ahead, behind = (max(run(2, partial(peak, is_ahead=is_ahead), seconds=60)) for is_ahead in (True, False))
    assert ahead <= 1.2 * behind, f"{ahead} bytes, and {behind} of a host that waits for the GPU"


@pytest.mark.parametrize("batch", [0, 1])
def test_exchanges_give_their_memory_back(batch: int) -> None:
    """Also if a batch is empty, so that no hop and no tile follows them."""

    def call(ring: SimulatedRing) -> Any:
        attend = attention(replace(ring, ulysses_size=2))
        inputs = [nccl_stand_in.to_device(x[:batch]) for x in local_inputs(ring)]
        for _ in range(2):
            out = attend(*inputs)
            torch.autograd.grad(out, inputs, out.detach())
        nccl_stand_in.synchronize()
        return len(kept(ring))

    assert run(2, call, seconds=60) == [1, 1]


def test_calls_on_two_streams_share_no_memory() -> None:
    """The first stream is busy while the host makes calls on both."""

    def call(ring: SimulatedRing) -> Any:
        attend = attention(ring)
        inputs = [nccl_stand_in.to_device(x.detach()) for x in local_inputs(ring)]
        other, is_free = nccl_stand_in.Stream(), threading.Event()
        expected = attend(*inputs), attend(*[2 * x for x in inputs])
        doubled = [2 * x for x in inputs]
        nccl_stand_in.synchronize()
        with torch.cuda.stream(other):
            attend(*doubled)
            nccl_stand_in.synchronize()
        nccl_stand_in.current_stream().wait_for(is_free)
        first = attend(*inputs)
        with torch.cuda.stream(other):
            second = attend(*doubled)
        is_free.set()
        nccl_stand_in.synchronize()
        other.synchronize()
        assert len(kept(ring)) == 2
        return [torch.equal(*both) for both in zip(expected, (first, second), strict=True)]

    assert run(2, call, seconds=60) == [[True, True]] * 2


def call_differently(ring: SimulatedRing, difference: str) -> Ended:
    """Make calls of equal sizes that differ between the ranks. All ranks have agreed on each of them before.

    The host of rank 0 is late, so that rank 1 has to wait for its report.
    """
    inputs, modules = local_inputs(ring), (attention(ring), attention(ring))
    modules[0](*inputs)
    modules[1](*inputs)
    modules[0](*inputs, key_padding_mask=None, is_causal=True)
    ring.synchronize()
    odd = ring.rank == 1
    attend = modules[odd] if difference == "modules" else partial(modules[0], is_causal=odd)

    def follow(*hop: Any) -> None:
        time.sleep(0.0 if odd else 0.6)
        Agreement.follow(ring.agreement, *hop)

    with mock.patch.object(ring.agreement, "follow", follow):
        return ending(lambda: (attend(*inputs), ring.synchronize()))


@pytest.mark.parametrize(
    ("difference", "named"),
    [
        pytest.param("is_causal", "is_causal (rank 0: False, rank 1: True", marks=MORE_CASES),
        ("modules", "order of calls (rank 0: attention 1"),
    ],
)
def test_calls_of_equal_sizes_that_differ(difference: str, named: str) -> None:
    """NCCL pairs their messages."""
    for error in run(2, partial(call_differently, difference=difference), seconds=60):
        error.check(RingMismatchError, named)


def test_memory_of_a_hop_that_nobody_waits_for_is_not_reused() -> None:
    """A tile raises while a hop is posted: a stream that waits for the hop is recorded on all its buffers."""
    recorded: list[tuple[Tensor, Any, list[bool]]] = []

    def call(ring: SimulatedRing) -> Any:
        error, stream = ending(lambda: attention(ring)(*local_inputs(ring))), nccl_stand_in.watching_stream()
        work = ring.communicator.latest
        stream.add(lambda: [seen.append(work.is_completed()) for _, other, seen in recorded if other is stream])
        stream.synchronize()
        assert not kept(ring)  # no later call gets the memory
        return error

    def record_stream(buffer: Tensor, stream: Any) -> None:
        recorded.append((buffer, stream, []))

    # The ranks are threads, so they share the patches.
    no_room = mock.patch.object(engine_run, "by_kernel", side_effect=MemoryError("no room for a tile"))
    late = mock.patch.object(nccl_stand_in, "DELAY", 0.2)
    with no_room, late, mock.patch.object(Tensor, "record_stream", record_stream):
        errors = run(2, call)
    for error in errors:
        error.check(MemoryError)
    payloads = [buffer for buffer, _, _ in recorded if buffer.numel() > 8]
    assert len(payloads) == 4  # each rank sends one buffer and receives one
    assert all(seen == [True] for _, _, seen in recorded), recorded


def test_memory_of_a_failed_wait_is_not_reused() -> None:
    buffers = [mock.Mock(spec=Tensor) for _ in range(2)]
    work = mock.Mock(wait=mock.Mock(side_effect=RuntimeError("NCCL communicator was aborted")))
    with pytest.raises(RuntimeError, match="aborted"):
        WorkTransfer([work], buffers).wait(timedelta(seconds=1))
    assert all(buffer.record_stream.call_count == 1 for buffer in buffers)


def test_a_wait_that_blocks_the_host_has_the_deadline_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    work = mock.Mock()
    WorkTransfer([work], []).wait(timedelta(seconds=5))
    first, _ = work.wait.call_args_list
    assert timedelta(seconds=4) < first.args[0] <= timedelta(seconds=5)


def test_a_header_on_the_host_is_never_zero() -> None:
    """Whatever was received. Until a header has arrived, it is zero."""
    headers = Headers.of(5, [1, 2], DEVICE)
    headers.numbers[1:] = torch.tensor([headers.value, 0])
    arrived = cases.copy_to_host(headers.numbers)
    assert all(arrived.tolist())
    assert headers.difference(arrived.tolist()) == (
        "rank 2 sent no header, but bytes of another message; expected was hop 5 of the call with hash 0x0000"
    )
    assert headers.difference([headers.value] * 3) is None
    assert "rank 2 sent no header" in headers.difference([headers.value, headers.value, 123])


def post(hops: Hops, step: int) -> PostedHop:
    """Post a hop in which this rank receives 4 bytes from rank 1."""
    incoming = {1: torch.zeros(4, dtype=torch.uint8)}
    return hops.post(step, Hop(), {}, incoming, RowFormat(1, 4, 4, torch.float32), delivery=0)


@THOROUGH
@pytest.mark.parametrize("use", matrix_but("post", of=("begin", "post")))
def test_a_lost_peer_is_reported_without_synchronize(use: str) -> None:
    """The next call raises when it begins. A call that has begun raises when it posts its next hop."""

    def call(ring: SimulatedRing) -> Any:
        attend, inputs = attended(ring)
        begin(ring)
        if ring.rank == 1:
            return None
        if use == "begin":
            attend(*inputs)  # returns garbage, as over NCCL
            assert ring.communicator.is_aborted.wait(10)  # the stream goes on
            return ending(lambda: begin(ring))
        hops = Hops(
            ring.rank, attend.ring_pass, begin(ring), ring.agreement, ring.traffic, CallMemory(DEVICE), range(2)
        )
        post(hops, 0).wait()
        assert ring.communicator.is_aborted.wait(10)
        return ending(lambda: post(hops, 1))

    results = run(2, call)
    results[0].check(RingPeerError, "waited in step", "the hop did not end on the GPU")


def test_an_error_of_nccl_ends_the_wait_at_once() -> None:
    """Long before the deadline. A completed hop of an aborted communicator is no mismatch."""

    def call(ring: SimulatedRing) -> Any:
        for seq_len in (8, 9):
            begin(ring, seq_len)
        hop = hop_from(ring, 1 - ring.rank)
        ring.agreement.follow(begin(ring), "rank waited", hop)
        ring.agreement.connections.followed.has_error = lambda: True
        ring.communicator.abort()
        return ending(ring.synchronize)

    for error in run(2, call, seconds=60):
        error.check(RingPeerError, "NCCL reported an error")


def test_a_new_configuration_does_not_wait_for_a_closed_ring() -> None:
    """Long before the deadline: the rank that closed the ring will not publish a configuration."""

    def call(ring: SimulatedRing) -> Any:
        begin(ring, 8)
        if ring.rank == 1:
            return ring.agreement.report_error("forward", ValueError("broken"))
        return ending(lambda: begin(ring, 9))

    error, _ = run(2, call, seconds=60)
    error.check(RingPeerError, "rank 1 raised ValueError: broken")


@pytest.mark.parametrize("after_hops", [False, True])
def test_a_failed_hop_reaches_the_world_of_a_training(after_hops: bool) -> None:
    """If the ring is a part of the world, the other rings learn of it before they reduce or step."""
    failure = RingPeerError("lost")
    events = mock.Mock(spec=Events, world=mock.Mock())
    events.ring = mock.Mock(**{f"{'synchronize' if after_hops else 'check'}.side_effect": failure})
    with pytest.raises(RingPeerError, match="lost"):
        Events.agree(events, "step", {}, after_hops=after_hops)
    events.world.agreement.report_error.assert_called_once_with("step", failure)


def test_a_refused_call() -> None:
    """The waiting rank raises long before its deadline, and names the refusal."""

    def call(ring: SimulatedRing) -> Any:
        attend, inputs = attended(ring)
        refused = ring.rank == 1
        first = ending(lambda: (attend(*inputs, is_causal=7 if refused else False), ring.synchronize()))
        while refused and not ring.store.check(["failed"]):
            time.sleep(0.01)  # the other rank must not learn of the refusal from this rank's next call
        return first, ending(lambda: (attend(*inputs), ring.synchronize())) if refused else None

    (mismatch, _), (refusal, later) = run(2, call, seconds=60)
    refusal.check(TypeError)
    for error in (mismatch, later):
        error.check(RingMismatchError, "rank 1 refused its arguments with TypeError: is_causal = 7")


@pytest.mark.parametrize(
    ("how", "where"),
    [
        ("raises", "attention"),
        pytest.param("vanishes", "unshard", marks=MORE_CASES),
        pytest.param("raises", "unshard", marks=MORE_CASES),
        pytest.param("vanishes", "attention", marks=MORE_CASES),
    ],
)
def test_a_post_that_waits_for_a_lost_peer(how: str, where: str) -> None:
    """NCCL connects to a new peer while the host posts a hop, without a timeout."""

    def call(ring: SimulatedRing) -> Any:
        attend, inputs = attended(ring)
        ring.unshard(inputs[0])
        ring.synchronize()
        begin(ring)
        if ring.rank == 1:
            if how == "raises":
                ring.agreement.report_error("a tile", MemoryError("no room"))
            return None
        ring.communicator.forget()
        part = partial(attend, *inputs) if where == "attention" else partial(ring.unshard, inputs[0])
        return ending(lambda: (part(), ring.synchronize()))

    results = run(4, call, seconds=60 if how == "raises" else 5)
    for rank in (0, 2, 3):
        error = results[rank]
        error.check(RingPeerError, within=10)
        assert ("no room" in error.message) == (how == "raises"), error


class LostStore:
    """A store of a host that is gone. Requests fail, or take until ``answers`` is set, as when the network is gone."""

    def __init__(self, answers: threading.Event | None) -> None:
        self.answers, self.num_checks = answers, 0

    def check(self, keys: object) -> bool:
        self.num_checks += 1
        return self.set(keys)

    def set(self, *_: object) -> bool:
        if self.answers is None or self.answers.wait(30):
            raise dist.DistNetworkError("the store is gone")
        return False


@THOROUGH
@pytest.mark.parametrize("hangs", matrix_but(False, of=(False, True)), ids=["fails", "hangs"])
def test_a_lost_store_changes_no_deadline(hangs: bool) -> None:
    """The host of the store died with the peer. The watchdog asks the store only once."""
    answers = threading.Event() if hangs else None

    def call(ring: SimulatedRing) -> Any:
        made = begin(ring)
        if ring.rank == 0:
            return None
        hop = hop_from(ring, 0)
        ring.agreement.follow(made, "rank 1 waited", hop)
        ring.agreement.notices.store = store = LostStore(answers)
        with ring.agreement.waiting(made, mock.Mock(), time.monotonic):  # collectives of a framework, for example
            assert ring.communicator.is_aborted.wait(10)
        return ending(ring.synchronize), store.num_checks

    _, (error, num_checks) = run(2, call)
    if answers is not None:
        answers.set()
    assert num_checks <= 2  # by the watchdog, and to collect reports
    error.check(RingPeerError, "the hop did not end on the GPU")


def ring_with_closed_peer() -> tuple[SimulatedRing, Agreement, Call]:
    """Rank 0 of a ring of two in a call. Rank 1 has closed the ring. No watchdog runs."""
    store, configuration = HashStore(), Configuration({"seq_len": 8})
    ring, peer = (SimulatedRing.of(store, rank, 2, seconds=8) for rank in range(2))
    meet(ring, peer)
    publish_configuration(store, 1, 0, configuration)
    call = ring.agreement.begin(configuration)
    store.set("failed/1", json.dumps({"calls": {}, "raised": None, REFUSED: {}}))
    store.set("failed", "1")
    return ring, ring.agreement, call


def test_hops_of_an_aborted_communicator_are_no_mismatch() -> None:
    """The abort that ends a wait of the host also ends hops, which have received nothing."""
    ring, agreement, call = ring_with_closed_peer()
    hop = hop_from(ring, 1, call.tag(0))
    hop.headers.numbers[1] = 123
    agreement.follow(call, "rank 0 waited", hop)

    def wait() -> None:
        with agreement.waiting(call):
            agreement.waits.end_vain_wait()
            nccl_stand_in.watching_stream().synchronize()
            assert hop.is_over()
            agreement.check()

    with pytest.raises(RingPeerError, match="rank 0 waited"):
        wait()


def test_a_hop_that_is_posted_in_vain_is_abandoned() -> None:
    """The wait was ended, but the post came to an end itself."""
    ring, agreement, call = ring_with_closed_peer()
    transfer = mock.Mock()

    def ring_pass(*_: object) -> Any:
        agreement.waits.end_vain_wait()
        return transfer

    hops = Hops(0, ring_pass, call, agreement, ring.traffic, CallMemory(DEVICE), range(2))
    with pytest.raises(RingPeerError), running(hops):
        post(hops, 0)
    assert transfer.abandon.call_count == 1


def test_a_captured_call_is_refused() -> None:
    """All ranks raise, and the ring goes on."""
    capturing: set[int] = set()  # threads, which are ranks

    def is_capturing() -> bool:
        return threading.get_ident() in capturing

    def call(ring: SimulatedRing) -> Any:
        begin(ring)
        if ring.rank == 1:
            capturing.add(threading.get_ident())
        error = ending(lambda: begin(ring, 9))
        capturing.discard(threading.get_ident())
        return error, ending(lambda: begin(ring, 9)), ring.abort.call_count

    with (
        mock.patch.object(torch.cuda, "is_initialized", return_value=True),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", side_effect=is_capturing),
    ):
        (mismatch, *after), (refusal, *after_refusal) = run(2, call, seconds=60)
    refusal.check(RuntimeError, "a call on a ring of 2 ranks cannot be captured in a CUDA graph")
    mismatch.check(RingMismatchError, "rank 1 refused")
    for again, num_aborts in (after, after_refusal):
        assert (again.error, num_aborts) == ("no error", 0), again
