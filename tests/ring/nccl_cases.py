"""Rings over the strict stand-in for NCCL in one process. Each rank is a thread with streams of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ring_backends.attention import RingDilatedAttention
from ring_backends.ring import stream_hops
from ring_backends.ring.agreement import Agreement
from ring_backends.ring.calls import Call, Configuration
from ring_backends.ring.ring import Ring
from ring_backends.ring.stream_hops import StreamHop
from ring_backends.ring.transfer import Transfer, post_works
from ring_backends.ring.watchdog import Watchdog
from ring_backends.testing import nccl_stand_in
from ring_backends.testing.failing_calls import ending
from ring_backends.testing.nccl_stand_in import Communicator, Process

SEQ_LEN = 16

copy_to_host = stream_hops._copy_to_host


@pytest.fixture(autouse=True)
def process() -> Iterator[Process]:
    """Replace CUDA and its streams by the simulated ones, in the tests of a module that imports this."""
    with nccl_stand_in.simulated_gpu() as simulated:
        yield simulated


@dataclass(frozen=True)
class SimulatedRing(Ring):
    """A ring over the stand-in, with the package's own headers, agreement and watchdog."""

    communicator: Communicator = None
    abort: mock.Mock = None
    store: HashStore = None

    @classmethod
    def of(cls, store: HashStore, rank: int, size: int, seconds: float) -> SimulatedRing:
        communicator = Communicator(store, rank, size)
        abort = mock.Mock(side_effect=communicator.abort)
        agreement = Agreement(store, rank, size, timedelta(seconds=seconds), abort)
        return cls(
            size=size,
            rank=rank,
            ranks=tuple(range(size)),
            agreement=agreement,
            timeout=agreement.timeout,
            connected=set(),
            communicator=communicator,
            abort=abort,
            store=store,
        )

    def post(self, outgoing: Any, incoming: Any, tag: int) -> Transfer:
        return post_works(mock.Mock(), lambda *parts: [self.communicator.post(*parts)], outgoing, incoming, tag)


class Attention(RingDilatedAttention):
    def ring_pass(self, outgoing: Any, incoming: Any, tag: int) -> Transfer:
        return self.ring.post(outgoing, incoming, tag)


def run(size: int, part: Callable[[SimulatedRing], object], seconds: float = 2.0) -> list[Any]:
    """Run ``part`` on every rank. Returns its result, or how it failed, by rank. It takes at most 20 s."""
    store, gpu = HashStore(), nccl_stand_in.gpu()
    rings = [SimulatedRing.of(store, rank, size, seconds) for rank in range(size)]
    watchdogs = [Watchdog() for _ in rings]  # the rings of one watchdog are those of one rank
    results: list[Any] = [None] * size

    def run_rank(rank: int) -> None:
        def keep() -> None:
            with gpu:
                rings[rank].communicator.meet(rings[rank].peers, rings[rank].peers)
                results[rank] = part(rings[rank])
                nccl_stand_in.synchronize()

        ended = ending(keep)
        if ended.error != "no error":
            results[rank] = ended

    for watchdog, ring in zip(watchdogs, rings, strict=True):
        watchdog.add(ring.agreement.waits)
    threads = [threading.Thread(target=run_rank, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)  # less than the deadline of rings that must fail before it
        assert not thread.is_alive()
    for watchdog in watchdogs:
        watchdog.stop(10)
    return results


def meet(*rings: SimulatedRing) -> None:
    """Connect all ranks, which run in one thread."""
    threads = [
        threading.Thread(target=ring.communicator.meet, args=(ring.peers, ring.peers), daemon=True) for ring in rings
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)


def attention(ring: SimulatedRing) -> Attention:
    """A module with one segment and without dilation."""
    return Attention([SEQ_LEN], [1], ring=ring)


def local_inputs(ring: Ring) -> list[Tensor]:
    """The rank's rows of query, key and value."""
    whole = torch.randn(3, 1, SEQ_LEN, 2, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [ring.shard(x).requires_grad_() for x in whole]


def attended(ring: SimulatedRing) -> tuple[Attention, list[Tensor]]:
    """Make a call, which has succeeded on every rank. Returns the module and its inputs."""
    attend, inputs = attention(ring), local_inputs(ring)
    attend(*inputs)
    ring.synchronize()
    return attend, inputs


def hop_from(ring: SimulatedRing, peer: int, tag: int = 7) -> StreamHop:
    """Post a hop that receives four bytes, and wait for it as the CPU does over NCCL."""
    return ring.post({}, {peer: torch.zeros(4, dtype=torch.uint8)}, tag).wait(timedelta(seconds=1))


def begin(ring: Ring, seq_len: int = 8) -> Call:
    """Begin a call."""
    return ring.agreement.begin(Configuration({"seq_len": seq_len}))
