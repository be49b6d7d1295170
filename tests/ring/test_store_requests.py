"""Requests to the store: what one rank asks does not grow with the ring, unless a call has failed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ring_backends.errors import RingMismatchError
from ring_backends.ring.agreement import Agreement
from ring_backends.ring.calls import Call, Configuration
from ring_backends.ring.store import Notices, publish_configuration
from ring_backends.testing.failing_calls import Ended, ending

SIZES = 8, 64
ODD = 1
USUAL, DIFFERENT = (Configuration({"order of calls": "attention", "seq_len": length}) for length in (8, 16))
COMPARISON = Counter({"set": 1, "add": 2})
"""The requests of one comparison, without polls."""


class CountingStore:
    """A rank's client of a store, which counts its requests. A poll is an ``add`` of 0, and touches one key."""

    def __init__(self, store: Any) -> None:
        self.store, self.requests, self.num_polls = store, Counter[str](), 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def request(*arguments: Any) -> Any:
            if name == "add" and arguments[1] == 0:
                self.num_polls += 1
            else:
                self.requests[name] += 1
            return getattr(self.store, name)(*arguments)

        return request


def run(size: int, call: Callable[[Agreement], Any]) -> tuple[list[Ended], list[CountingStore]]:
    """Make a call on every rank of a ring, in threads. Returns how it ended, and the clients of the store, by rank."""
    store = HashStore()
    clients = [CountingStore(store) for _ in range(size)]
    with ThreadPoolExecutor(size) as pool:
        timeout = timedelta(seconds=60)
        ranks = [Agreement(client, rank, size, timeout, lambda: None) for rank, client in enumerate(clients)]
        return list(pool.map(lambda rank: ending(call, rank), ranks, timeout=90)), clients


def test_a_comparison_costs_the_same_on_every_ring() -> None:
    for size in SIZES:
        ended, clients = run(size, lambda rank: rank.begin(USUAL))
        assert {end.error for end in ended} == {"no error"}
        assert [client.requests for client in clients] == [COMPARISON] * size


@pytest.mark.parametrize("refuses", [False, True], ids=["another configuration", "a refusal"])
def test_a_difference_costs_one_request_more(refuses: bool) -> None:
    def call(rank: Agreement) -> None:
        if refuses and rank.rank == ODD:
            rank.refuse(ValueError("w = 0"))
        else:
            rank.begin(DIFFERENT if rank.rank == ODD else USUAL)

    text = f"rank {ODD} refused its arguments with ValueError: w = 0" if refuses else f"rank {ODD}: 16"
    for size in SIZES:
        ended, clients = run(size, call)
        for rank, (end, client) in enumerate(zip(ended, clients, strict=True)):
            if refuses and rank == ODD:
                assert end.error == "no error"
                assert client.requests == Counter({"set": 1, "add": 1, "append": 1})
            else:
                end.check(RingMismatchError, text, f"rank {size - 1}: 8" if not refuses else "")
                assert client.requests == COMPARISON + Counter({"multi_get": 1})


def test_absent_ranks_are_found_with_few_requests() -> None:
    size, absent, seconds = 64, [3, 40], timedelta(seconds=60)
    client: Any = CountingStore(HashStore())
    for rank in {*range(size)} - {*absent}:
        publish_configuration(client.store, rank, 0, USUAL)
    call = Call(0, USUAL, "forward", time.monotonic(), seconds)
    assert Notices(client, 0, size, seconds).absent_ranks(call) == absent
    assert set(client.requests) == {"check"}
    assert client.requests["check"] <= 1 + len(absent) * 2 * 6  # a binary search among 2⁶ ranks
