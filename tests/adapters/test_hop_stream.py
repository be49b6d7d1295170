"""The order of events of FSDP's ring pass on a GPU, with a mocked device. No GPU runs here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("numpy")

from ring_backends.adapters.fsdp import ring_pass
from ring_backends.ring.ring import Ring
from ring_backends.ring.stream_hops import StreamHop
from ring_backends.ring.transfer import Transfer

DEVICE = torch.device("cuda", 0)
FOLLOWED = mock.Mock(spec=StreamHop)


class Stream:
    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events, self.device = name, events, DEVICE

    def wait_stream(self, other: Stream) -> None:
        self.events.append(f"{self.name} waits for {other.name}")


class Recorded(Transfer):
    def __init__(self, events: list[str], current: list[str], error: Exception | None) -> None:
        self.events, self.current, self.error = events, current, error

    def wait(self, timeout: timedelta) -> StreamHop:
        self.events.append(f"wait on {self.current[-1]}")
        if self.error is not None:
            raise self.error
        return FOLLOWED

    def abandon(self) -> None:
        self.events.append("abandon")


def hop(error: Exception | None = None) -> tuple[list[str], list[Any]]:
    """Post a hop and wait for it. Returns the events in order, and the buffers."""
    events: list[str] = []
    current = ["compute"]
    streams = {name: Stream(name, events) for name in ("compute", "hops")}

    @contextlib.contextmanager
    def use(stream: Stream) -> Iterator[None]:
        current.append(stream.name)
        yield
        current.pop()

    def post(*_: object) -> Transfer:
        events.append(f"post on {current[-1]}")
        return Recorded(events, current, error)

    buffers = [mock.Mock(spec=Tensor, device=DEVICE) for _ in range(2)]
    ring = mock.Mock(spec=Ring, post=post)
    with (
        mock.patch.object(ring_pass, "_hop_stream", return_value=streams["hops"]),
        mock.patch.object(torch.cuda, "current_stream", side_effect=lambda _: streams[current[-1]]),
        mock.patch.object(torch.cuda, "stream", use),
    ):
        transfer = ring_pass.post_hop(ring, {1: buffers[0]}, {1: buffers[1]}, 7)
        events.append("a tile")
        with contextlib.suppress(RuntimeError):
            assert transfer.wait(timedelta(seconds=1)) is FOLLOWED
    return events, buffers


def test_a_hop_runs_on_its_own_stream() -> None:
    events, buffers = hop()
    posted = ["hops waits for compute", "post on hops"]
    assert events == [*posted, "a tile", "wait on hops", "compute waits for hops"]
    assert not any(buffer.record_stream.called for buffer in buffers)


def test_memory_of_a_failed_hop_is_not_reused_while_it_may_still_run() -> None:
    events, buffers = hop(RuntimeError("peer is gone"))
    assert events[-1] == "wait on hops"
    assert all(buffer.record_stream.call_count == 1 for buffer in buffers)
