"""Agreement of ranks: a store that does not answer, refusals, timeouts, and the check of configurations."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from ring_backends.errors import RingMismatchError, RingPeerError
from ring_backends.ring.agreement import Agreement
from ring_backends.ring.calls import Call, Configuration
from ring_backends.ring.collectives import event_of, raise_difference
from ring_backends.ring.differences import describe_differences
from ring_backends.ring.events import Events
from ring_backends.ring.watchdog import Watchdog
from ring_backends.testing.failing_calls import Ended, ending
from ring_backends.testing.marks import THOROUGH, matrix_but

A_MOMENT = 1.0
"""Seconds by which a busy machine may exceed a timeout."""

HOST = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


@pytest.fixture
def host() -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """A process that hosts a store, and a client of the store in this process."""
    with subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, TCPStore("127.0.0.1", int(process.stdout.readline()), is_master=False)
        process.kill()


def agreement(store: Any, rank: int, seconds: float = 1.0) -> Agreement:
    return Agreement(store, rank, 2, timedelta(seconds=seconds), lambda: None)


@THOROUGH
@pytest.mark.parametrize("fault", matrix_but(signal.SIGKILL, of=(signal.SIGSTOP, signal.SIGKILL)))
def test_a_store_whose_host_is_gone(host: tuple[subprocess.Popen[str], Any], fault: signal.Signals) -> None:
    process, store = host
    alone = agreement(store, 0)
    process.send_signal(fault)
    ended, again = (ending(alone.begin, Configuration({"seq_len": 8})) for _ in range(2))
    ended.check(RingPeerError, "to compare configurations", within=1 + A_MOMENT)
    again.check(RingPeerError, "initialize")


@THOROUGH
def test_a_refusal_where_the_store_is_gone(host: tuple[subprocess.Popen[str], Any]) -> None:
    process, store = host
    process.send_signal(signal.SIGSTOP)
    agreement(store, 0).refuse(ValueError("w = 0"))


def run_both(*calls: Callable[[], Any]) -> list[Ended]:
    """Run the calls of two ranks in parallel. Returns how each ended."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(ending, calls, timeout=30))


def pair_on(store: Any) -> list[Agreement]:
    return [agreement(store, rank, 20.0) for rank in range(2)]


def test_ranks_agree_on_a_call_after_a_refusal() -> None:
    ranks = pair_on(HashStore())
    first, second = Configuration({"seq_len": 8}), Configuration({"seq_len": 9})
    refused, _ = run_both(lambda: ranks[0].begin(first), lambda: ranks[1].refuse(ValueError("w = 0")))
    refused.check(RingMismatchError, "rank 1 refused its arguments with ValueError: w = 0")
    calls: list[Call] = []
    for ended in run_both(*(lambda rank=rank: calls.append(rank.begin(second)) for rank in ranks)):
        assert ended.error == "no error", ended
    assert calls[0].tag(0) == calls[1].tag(0)


@THOROUGH
def test_a_call_ends_within_its_timeout() -> None:
    """The timeout includes the questions that a rank asks the store after a failed wait."""
    for seconds in (1.0, 4.0):
        ended = ending(agreement(HashStore(), 0, seconds).begin, Configuration({"seq_len": 8}))
        ended.check(RingPeerError, "waited for ranks [1] to compare configurations", within=seconds + A_MOMENT)
        assert seconds / 2 < ended.seconds, ended


def test_the_order_of_fields_is_part_of_the_configuration() -> None:
    """The order of keys matters. A JSON text has an order, but a comparison of dicts ignores it."""
    ranks = pair_on(HashStore())
    configurations = Configuration({"a": 1, "b": 2, "c": 3}), Configuration({"a": 1, "c": 3, "b": 2})
    errors = run_both(*(partial(rank.begin, mine) for rank, mine in zip(ranks, configurations, strict=True)))
    for ended in errors:
        ended.check(RingMismatchError, "the order of their fields, at place 1 (rank 0: b, rank 1: c)")


def test_differing_lists_are_shown_by_their_differences() -> None:
    names = [f"block {index}" for index in range(100)]
    text = describe_differences({0: {"parts": names}, 1: {"parts": names[:-1]}})
    assert "parts (rank 0: ['block 99'], rank 1: [])" in text
    text = describe_differences({0: {"parts": names}, 1: {"parts": [names[1], names[0], *names[2:]]}})
    assert "parts (rank 0: block 0 at place 0, rank 1: block 1 at place 0)" in text


def test_an_event_is_expected_at_the_place_where_it_came_the_last_time() -> None:
    """A forward of two parts precedes each backward. The second step has the events of the first one."""
    events = Events()
    parts = [event_of("forward", {"part": part}) for part in "ab"]
    backwards = [event_of("backward", {"backward calls": calls}) for calls in range(2)]
    step = [event for backward in backwards for event in (*parts, backward)] + [event_of("step", {})]

    def expected(made: list[Configuration]) -> list[bool]:
        return [events.is_expected(event, {"lr": 1.0}, 0) for event in made]

    assert expected(step) == [False] * 7
    assert expected(step) == [*[False] * 3, *[True] * 4]  # the first forward had no event before it
    assert expected(step) == [True] * 7
    assert expected([parts[1]]) == [False]


def test_the_values_of_an_earlier_event_are_named() -> None:
    ranks = pair_on(HashStore())
    for rank, lr in zip(ranks, (0.5, 0.25), strict=True):
        rank.events.is_expected(event_of("step", {}), {"lr": lr}, 0)
    assert ranks[0].events.summary(event_of("step", {})) != ranks[1].events.summary(event_of("step", {}))
    errors = run_both(*(partial(raise_difference, rank, {"order of calls": "count"}) for rank in ranks))
    for ended in errors:
        ended.check(RingMismatchError, "lr of step (call 0) (rank 0: 0.5, rank 1: 0.25)")
    for rank in ranks:
        assert not rank.has_failed
        assert rank.events.summary(event_of("step", {})) == ranks[0].events.summary(event_of("step", {}))


def waiting_rank(rank: Agreement, seq_len: int, ended: list[int]) -> Any:
    """A wait of ``rank`` in a call that was compared before. Its end is recorded."""
    configuration = Configuration({"seq_len": seq_len})
    rank._agreed.add(configuration.digest)
    return rank.waiting(rank.begin(configuration), lambda: ended.append(rank.rank))


def test_a_field_of_the_call_hides_one_of_the_context() -> None:
    """The context of training with whole batches has the name input_ids, and so has a field of generate()."""
    ranks = [agreement(store := HashStore(), 0), agreement(store, 1)]
    for rank in ranks:
        rank.context = {"input_ids": "of the last batch"}
    fields = [{"order of calls": "generate", "input_ids": prompt} for prompt in ("a", "b")]
    calls = [partial(raise_difference, rank, own) for rank, own in zip(ranks, fields, strict=True)]
    for ended in run_both(*calls):
        ended.check(RingMismatchError, "the ranks differ in input_ids (rank 0: a, rank 1: b)")


def test_a_long_wait_ends_if_rank_0_made_another_call() -> None:
    ranks = pair_on(HashStore())
    ended: list[int] = []

    def wait() -> None:
        with waiting_rank(ranks[0], 8, ended), waiting_rank(ranks[1], 9, ended):
            ranks[1].waits.end_vain_wait()
            assert ended == []  # rank 0 has not waited long
            ranks[0].waits.end_vain_wait()
            ranks[1].waits.end_vain_wait()

    with pytest.raises(RuntimeError, match="was ended"):
        wait()
    assert ended == [1]


def test_a_wait_that_has_finished_is_not_ended() -> None:
    """It finishes while the watchdog learns from the store that a rank has closed the ring."""
    rank, wait = agreement(HashStore(), 0), contextlib.ExitStack()
    ended: list[int] = []

    def peer_stopped(*_: object, **__: object) -> bool:
        wait.close()
        return True

    wait.enter_context(waiting_rank(rank, 8, ended))
    with mock.patch.object(rank.notices, "peer_stopped", peer_stopped):
        rank.waits.end_vain_wait()
    assert ended == []


def test_lists_of_a_call_may_change_after_it() -> None:
    """Rank 1 counts its next gradients in the list that its last call described."""
    ranks, names = pair_on(HashStore()), [["weight"], ["weight"]]
    ended: list[int] = []
    for rank, own in zip(ranks, names, strict=True):
        rank._agreed.add(Configuration({}).digest)
        rank.begin(Configuration({}), details={"gradients": own})
    names[1].append("bias")
    with waiting_rank(ranks[0], 8, ended), waiting_rank(ranks[1], 8, ended):
        for rank in ranks:
            rank.waits.end_vain_wait()
    assert ended == []


def test_the_refusal_of_an_earlier_call_is_named() -> None:
    """Rank 0 has made the refused call without a wait for rank 1, and waits in a later one."""
    ranks = pair_on(HashStore())
    ended: list[int] = []
    with waiting_rank(ranks[0], 8, ended):
        pass
    ranks[1].refuse(ValueError("w = 0"))
    call = ranks[0].begin(Configuration({"seq_len": 8}))
    with pytest.raises(RuntimeError, match="was ended"), ranks[0].waiting(call, lambda: ended.append(0)):
        ranks[0].waits.end_vain_wait()
    assert ended == [0]
    with pytest.raises(RingMismatchError, match="rank 1 refused its arguments with ValueError: w = 0"):
        ranks[0].fail(call, "rank 0 waited", TimeoutError())


def test_connections_are_closed_between_posts() -> None:
    """NCCL's abort frees what a post uses. A post that waits for a peer is ended by the abort."""
    events: list[str] = []
    alone = Agreement(HashStore(), 0, 1, timedelta(seconds=20), lambda: events.append("closed"))
    closing = threading.Thread(target=alone.report_error, args=("forward", ValueError("broken")))
    with alone.posting():
        closing.start()
        time.sleep(0.1)
        events.append("posted")
    closing.join(10)
    assert events == ["posted", "closed"]
    with pytest.raises(RuntimeError, match="the connections of the ring are closed"), alone.posting():
        events.append("posted again")

    stuck = Agreement(HashStore(), 0, 1, timedelta(seconds=20), lambda: events.append("ended"))
    with stuck.posting():
        stuck.report_error("forward", ValueError("broken"))
    assert events[-1] == "ended"


def test_a_refusal_is_named_after_a_later_comparison() -> None:
    """The GPU of rank 0 still waits for the refused call, while the host has compared the next one."""
    ranks = pair_on(HashStore())
    for ended in run_both(*(partial(rank.begin, Configuration({"seq_len": 8})) for rank in ranks)):
        assert ended.error == "no error", ended
    call = ranks[0].begin(Configuration({"seq_len": 8}))
    ranks[1].refuse(ValueError("w = 0"))
    for ended in run_both(*(partial(rank.begin, Configuration({"seq_len": 9})) for rank in ranks)):
        assert ended.error == "no error", ended
    with pytest.raises(RingMismatchError, match="rank 1 refused its arguments with ValueError: w = 0"):
        ranks[0].fail(call, "rank 0 waited", TimeoutError())


@THOROUGH
def test_progress_moves_the_deadline_of_a_wait() -> None:
    alone, steps = agreement(HashStore(), 0, 0.4), [0]
    alone._agreed.add(Configuration({}).digest)
    ended: list[int] = []
    with alone.waiting(alone.begin(Configuration({})), lambda: ended.append(0), lambda: steps[0]) as wait:
        for _ in range(3):
            time.sleep(0.2)
            steps[0] += 1
            assert not wait.is_late()
        time.sleep(0.4)
        assert wait.is_late()


def test_the_watchdog_continues_after_an_error() -> None:
    """The watchdog thread continues if one of its rings raises."""
    watch, checked, watched = Watchdog(), threading.Event(), []
    for examine in (mock.Mock(side_effect=TypeError("on purpose")), checked.set):
        watch.add(waits := mock.Mock(examine=examine))
        watched.append(waits)
    assert checked.wait(10)
    watch.stop(10)


def test_checks_do_not_fill_the_store() -> None:
    ranks = pair_on(store := HashStore())
    for seq_len in range(1, 30):
        configuration = Configuration({"seq_len": seq_len})
        for ended in run_both(*(partial(rank.begin, configuration) for rank in ranks)):
            assert ended.error == "no error", ended
    assert store.num_keys() <= 4
