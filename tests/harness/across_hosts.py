"""Rings over several hosts and bad networks. Not part of AdapterTests, because it needs root and minutes."""

from __future__ import annotations

import os
import pickle
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from ring_backends.errors import RingPeerError
from ring_backends.testing.calls import FP64_TOLERANCE, Results, check_results, difference, expected, local_call, whole
from ring_backends.testing.capabilities import AdapterSuite, requires
from ring_backends.testing.failing_calls import SMALL_CASE, Ended, ending
from ring_backends.testing.faults import BOUND
from ring_backends.testing.hosts import Hosts, NoHostsError
from ring_backends.testing.marks import once_but
from ring_backends.testing.rings import backend
from ring_backends.testing.strategies import AttentionCase

NEEDS_HOSTS = "RING_BACKENDS_NEEDS_HOSTS"
"""Environment variable: if it is set, tests fail instead of being skipped on a machine without namespaces."""

TIMEOUT = 6.0
"""Timeout in seconds of rings whose peers are lost."""

PATIENCE = 120.0
"""Seconds in which a rank has to start or to end. Shorter bounds are checked with times that the ranks measure."""

_IN_GROUPS = replace(SMALL_CASE, ulysses_size=2)
"""On four ranks, a rank exchanges rows for heads with one host, and its hops go to another one."""

_LARGE = replace(SMALL_CASE, seq_len=1024, segment_lengths=(1024,), head_dim=16)
"""On four ranks, a hop has 256 KiB. It takes a tenth of a second at 20 Mbit/s."""


NUM_HOSTS = 4
_RATE = "20mbit"


LOSSES = ("link-of-first", "first", "second")
"""The host whose link is cut, or that disappears."""


class Report(NamedTuple):
    """How the calls of a rank ended, and how it left; whether the last results equal the first; and these."""

    ended: Ended
    left: Ended
    is_equal: bool
    results: Results


def make_calls(adapter: str, folder: Path, timeout: float, case: AttentionCase, max_calls: int) -> None:
    """Run the rank that the variables of torchrun name. Its report is written to ``folder/RANK.pickle``."""
    torch.set_num_threads(1)
    module, rank = backend(adapter), int(os.environ["RANK"])
    # On a busy machine, the first call of a process takes seconds. Its ring has a long timeout.
    patient = module.initialize(timeout=timedelta(seconds=PATIENCE))
    made = [local_call(adapter, patient, case).results()]
    call = local_call(adapter, module.initialize(timeout=timedelta(seconds=timeout)), case)
    for number in range(max_calls):
        ended = ending(lambda: made.append(call.results()))
        made[1:-1] = []
        if ended.error != "no error":
            break
        (folder / f"{rank}.progress").write_text(str(number + 1))
    first, last = made[0].computed(), made[-1].computed()
    equal = first.keys() == last.keys() and all(difference(last[name], first[name]) == 0 for name in first)
    report = Report(ended, ending(dist.destroy_process_group), equal, made[0])
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(report))


class Ranks:
    """One rank on every host."""

    def __init__(
        self,
        hosts: Hosts,
        adapter: str,
        folder: Path,
        timeout: float,
        case: AttentionCase = SMALL_CASE,
        max_calls: int = 5,
    ) -> None:
        self.folder, self.size = folder, len(hosts.names)
        self.processes = hosts.call_ranks(make_calls, (adapter, folder, timeout, case, max_calls), folder)

    def wait_for_calls(self, number: int, seconds: float = PATIENCE) -> None:
        """Wait until every rank has made ``number`` calls."""
        deadline = time.monotonic() + seconds
        while any(self._calls(rank) < number for rank in range(self.size)):
            assert time.monotonic() < deadline, self.output()
            assert all(process.is_alive() for process in self.processes), self.output()
            time.sleep(0.02)

    def _calls(self, rank: int) -> int:
        try:
            return int((self.folder / f"{rank}.progress").read_text() or "0")
        except FileNotFoundError:
            return 0

    def report(self, rank: int, deadline: float) -> Report:
        """The report of a rank. It has to end before the monotonic clock shows ``deadline``."""
        process = self.processes[rank]
        process.join(max(0.1, deadline - time.monotonic()))
        assert not process.is_alive(), f"rank {rank} did not end in time\n{self.output()}"
        assert process.exitcode == 0, self.output()
        report: Report = pickle.loads((self.folder / f"{rank}.pickle").read_bytes())
        assert report.left.error == "no error", report
        return report

    def output(self) -> str:
        """The output of all ranks."""
        files = [self.folder / f"{rank}.log" for rank in range(self.size)]
        return "\n".join(f"--- {file.name}:\n{file.read_text()}" for file in files if file.exists())


@pytest.fixture
def hosts(adapters: list[str]) -> Iterator[Hosts]:
    try:
        with Hosts(NUM_HOSTS, preload=[__name__, *adapters]) as made:
            yield made
    except NoHostsError as error:
        if NEEDS_HOSTS in os.environ:
            raise
        pytest.skip(str(error))


class HostTests(AdapterSuite):
    def test_calls_over_a_bad_network(self, hosts: Hosts, tmp_path: Path) -> None:
        """The network is slow, and delays, reorders and loses packets."""
        hosts.disturb(_RATE, delay=0.01, jitter=0.02, loss=0.02)
        ranks = Ranks(hosts, self.adapter, tmp_path, timeout=60, case=_IN_GROUPS)
        reports = [ranks.report(rank, time.monotonic() + PATIENCE) for rank in range(NUM_HOSTS)]
        for report in reports:
            assert report.ended.error == "no error", report
            assert report.is_equal
        results = whole([report.results for report in reports], _IN_GROUPS.seq_len, "contiguous")
        check_results(results, expected(_IN_GROUPS), FP64_TOLERANCE)

    @requires("a lost rank")
    @pytest.mark.parametrize("loss", once_but("link-of-first", of=LOSSES))
    def test_a_host_is_lost(self, hosts: Hosts, loss: str, tmp_path: Path) -> None:
        """The host is lost during a hop, because hops take most of the time of a call."""
        is_cut, lost = loss.startswith("link"), int(loss.endswith("second"))
        hosts.disturb(rate=_RATE)
        ranks = Ranks(hosts, self.adapter, tmp_path, timeout=TIMEOUT, case=_LARGE, max_calls=1000)
        ranks.wait_for_calls(2)
        at = time.monotonic()
        if is_cut:
            hosts.cut.add(lost)
        else:
            hosts.lose(lost)
        for rank in range(NUM_HOSTS):
            if rank == lost and not is_cut:
                continue
            report = ranks.report(rank, at + PATIENCE)
            report.ended.check(RingPeerError, within=TIMEOUT + BOUND)
            pattern = rf"rank {rank} waited in step \d+ of (forward|backward)"
            assert re.search(pattern, report.ended.message), report
            assert report.left.seconds < BOUND, report
