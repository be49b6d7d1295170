"""The stand-in for NCCL: what it does where gloo is more patient. Threads are the ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from nccl_cases import SimulatedRing, process, run
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ring_backends.testing import nccl_stand_in
from ring_backends.testing.failing_calls import ending
from ring_backends.testing.nccl_stand_in import Communicator, CommunicatorAbortedError

__all__ = ["process"]


def numbers(value: int, size: int = 4) -> Tensor:
    return nccl_stand_in.to_device(torch.full((size,), value, dtype=torch.uint8))


def test_messages_of_two_ranks_are_paired_in_their_order() -> None:
    def call(ring: SimulatedRing) -> Any:
        peer, sent, received = 1 - ring.rank, [numbers(7), numbers(8)], [numbers(0), numbers(0)]
        works = [ring.communicator.post([(peer, x)], [(peer, y)]) for x, y in zip(sent, received, strict=True)]
        for work in works:
            work.wait()
        return [x.tolist() for x in received]

    assert run(2, call) == [[[7] * 4, [8] * 4]] * 2


def test_messages_of_different_sizes_hang_until_the_abort() -> None:
    def call(ring: SimulatedRing) -> Any:
        peer, sent, received = 1 - ring.rank, numbers(7, 5), numbers(0)
        work = ring.communicator.post([(peer, sent)], [(peer, received)])
        time.sleep(0.2)
        hangs = not work.is_completed()
        ring.communicator.abort()
        work.wait()
        return hangs, received.tolist()

    assert run(2, call) == [(True, [0] * 4)] * 2


def test_the_host_runs_ahead_of_the_gpu() -> None:
    """Neither a wait nor an operator waits for a hop. Reading a value does."""

    def call(ring: SimulatedRing) -> Any:
        sent, received, busy = numbers(7), numbers(0), threading.Event()
        ring.communicator.stream.wait_for(busy)
        ring.communicator.post([(0, sent)], [(0, received)]).wait()
        doubled = 2 * received
        threading.Timer(0.2, busy.set).start()
        started = time.monotonic()
        return doubled.tolist(), time.monotonic() - started > 0.1

    assert run(1, call) == [([14] * 4, True)]


def test_freed_memory_is_overwritten_in_the_order_of_its_stream() -> None:
    def call(ring: SimulatedRing) -> Any:
        busy, received = threading.Event(), numbers(0)
        ring.communicator.stream.wait_for(busy)
        work = ring.communicator.post([(0, numbers(7))], [(0, received)])  # the sent tensor ends here
        nccl_stand_in.synchronize()
        busy.set()
        work.wait()
        return received.tolist()

    assert run(1, call) == [[255] * 4]


def aborted_while(part: Callable[[Communicator], object]) -> None:
    """Check that ``part`` waits on the host, until the communicator is aborted."""
    alone = Communicator(HashStore(), 0, 2)
    threading.Timer(0.2, alone.abort).start()
    started = time.monotonic()
    ending(part, alone).check(CommunicatorAbortedError)
    assert time.monotonic() - started > 0.1


def test_the_first_operation_waits_for_all_ranks() -> None:
    aborted_while(lambda communicator: communicator.post([(0, numbers(7))], [(0, numbers(0))]))


def test_the_first_message_of_two_ranks_waits_for_both() -> None:
    """Both ranks have joined, and only one of them posts."""

    def call(ring: SimulatedRing) -> Any:
        ring.communicator.forget()
        if ring.rank == 1:
            return None
        threading.Timer(0.2, ring.communicator.abort).start()
        return ending(ring.communicator.post, [(1, numbers(7))], [])

    error, _ = run(2, call)
    error.check(CommunicatorAbortedError)
