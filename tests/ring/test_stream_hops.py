"""Hops over NCCL, with the simulated communicator of ``nccl_cases``. No GPU runs here."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from nccl_cases import (
    DEVICE,
    SEQ_LEN,
    Cuda,
    SimulatedRing,
    Stream,
    attention,
    begin,
    check_error,
    copy_to_host,
    ended,
    hop_from,
    local_inputs,
    run,
    simulated_cuda,
)
from torch import Tensor

from ring_backends.attention import dilated_attention
from ring_backends.engine.tiles import TileRunner
from ring_backends.errors import RingMismatchError
from ring_backends.ring.ring import Ring
from ring_backends.ring.stream_hops import FollowedHop, FollowedHops, Headers, StreamHop
from ring_backends.ring.transfer import WorkTransfer


@pytest.fixture(autouse=True)
def cuda() -> Iterator[Cuda]:
    with simulated_cuda() as fake:
        yield fake


def test_attention_over_streams_is_exact_and_its_headers_agree() -> None:
    def call(ring: SimulatedRing) -> list[Tensor]:
        inputs = local_inputs(ring)
        out = attention(ring)(*inputs, is_causal=True)
        grads = torch.autograd.grad(out.sum(), inputs)
        ring.synchronize()
        assert not ring.num_aborts[0]
        return [out.detach(), *grads]

    results = run(4, call, seconds=60, blocks=True)
    whole = local_inputs(mock.Mock(spec=Ring, shard=lambda x: x))
    expected = dilated_attention(*whole, [SEQ_LEN], [1], is_causal=True, kernel="math")
    for index, want in enumerate([expected, *torch.autograd.grad(expected.sum(), whole)]):
        torch.testing.assert_close(torch.cat([result[index] for result in results], 1), want, rtol=0, atol=1e-10)


def test_the_host_waits_for_nothing(cuda: Cuda) -> None:
    """Nothing arrives, and yet both the transfer and the ring return. Each step is in the order of the stream."""

    def call(ring: SimulatedRing) -> Any:
        tag = 7
        hop = hop_from(ring, 0, tag)
        ring.agreement.follow(begin(ring), "rank 0 waited", hop)
        before = hop.is_over()
        for message in (Headers.of(tag, [], DEVICE).numbers.view(torch.uint8), torch.ones(4, dtype=torch.uint8)):
            ring.communicator.send(0, 0, message)
        return cuda.events[threading.get_ident()], before, hop.is_over(), hop.difference()

    assert run(1, call, seconds=60) == [(["wait for the hop", "copy headers"], False, True, None)]


def call_differently(ring: SimulatedRing, difference: str) -> Exception | None:
    """Make calls of equal sizes that differ between the ranks. All ranks have agreed on each of them before."""
    inputs, modules = local_inputs(ring), (attention(ring), attention(ring))
    modules[0](*inputs)
    modules[1](*inputs)
    modules[0](*inputs, key_padding_mask=None, is_causal=True)
    ring.synchronize()
    odd = ring.rank == 1
    attend = modules[odd] if difference == "modules" else partial(modules[0], is_causal=odd)
    return ended(lambda: (attend(*inputs), ring.synchronize()))


@pytest.mark.parametrize(
    ("difference", "named"),
    [
        ("is_causal", "is_causal (rank 0: False, rank 1: True"),
        ("modules", "order of calls (rank 0: attention 1"),
    ],
)
def test_calls_of_equal_sizes_that_differ(difference: str, named: str) -> None:
    """NCCL pairs their messages."""
    for error in run(2, partial(call_differently, difference=difference)):
        check_error(error, RingMismatchError, named)


def test_without_headers_calls_of_equal_sizes_would_pass() -> None:
    """The simulated communicator finds no difference itself, so the headers found those of the test above."""
    with mock.patch.object(Headers, "difference", return_value=None):
        assert run(2, partial(call_differently, difference="modules")) == [None, None]


def test_a_mismatch_is_named_if_the_peer_reports_nothing() -> None:
    """The peer has sent the message of another hop, and does not use the ring again."""

    def call(ring: SimulatedRing) -> Any:
        made = begin(ring)
        if ring.rank == 1:
            ring.post({0: torch.zeros(4, dtype=torch.uint8)}, {}, made.tag(3))
            return None
        ring.agreement.follow(made, "rank 0 waited for a hop", hop_from(ring, 1, made.tag(2)))
        return ended(ring.synchronize)

    error, _ = run(2, call)
    text = "rank 0 waited for a hop, but rank 1 sent hop 3 of the call"
    check_error(error, RingMismatchError, text, "expected was hop 2")


def test_memory_of_a_hop_that_nobody_waits_for_is_not_reused() -> None:
    """A tile raises while a hop is posted: a stream that waits for the hop is recorded on all its buffers."""
    recorded: list[tuple[Tensor, Stream]] = []

    def call(ring: SimulatedRing) -> Any:
        return ended(lambda: attention(ring)(*local_inputs(ring)))

    def record_stream(buffer: Tensor, stream: Stream) -> None:
        recorded.append((buffer, stream))

    # The ranks are threads, so they share the patches.
    no_room = mock.patch.object(TileRunner, "forward_into", side_effect=MemoryError("no room for a tile"))
    with no_room, mock.patch.object(Tensor, "record_stream", record_stream):
        errors = run(2, call)
    assert all(isinstance(error, MemoryError) for error in errors), errors
    payloads = [buffer for buffer, _ in recorded if buffer.numel() > 8]
    assert len(payloads) == 4  # each rank sends one buffer and receives one
    assert all(stream.events[-1] == "wait for the hop" for _, stream in recorded)


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
    arrived = copy_to_host(headers.numbers)
    assert all(arrived.tolist())
    assert headers.difference(arrived.tolist()) == (
        "rank 2 sent no header, but bytes of another message; expected was hop 5 of the call with hash 0x0000"
    )


def test_payload_in_place_of_a_header_is_a_difference() -> None:
    headers = Headers.of(5, [2], DEVICE)
    assert headers.difference([headers.value, headers.value]) is None
    assert "rank 2 sent no header, but bytes of another message" in headers.difference([headers.value, 123])


def test_finished_hops_are_freed_by_the_thread_of_the_ring() -> None:
    """The watchdog removes them. It must not free their tensors, for which it might wait."""
    hops = FollowedHops()
    removed = []
    for _ in range(2):
        headers = Headers.of(5, [], DEVICE)
        hop = StreamHop(headers, headers.numbers)
        hops.add(FollowedHop(hop, mock.Mock(), "rank 0 waited", seconds=1))
        assert hops.first_failure() is None
        assert not hops
        removed.append(weakref.ref(hop))
        del hop
    assert removed[0]() is None
    assert removed[1]() is not None


def test_headers_reach_the_host_whatever_the_default_device_is() -> None:
    numbers = torch.ones(2, dtype=torch.int64)
    with torch.device("meta"):
        assert copy_to_host(numbers).device.type == "cpu"
