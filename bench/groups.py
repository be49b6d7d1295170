"""Measures calls in groups of ranks (`ulysses_size`) on two simulated hosts, with a slow link between them.

Each host is a network namespace with four ranks, which have one thread each. Ranks of one host reach each other over
its loopback device. The link delays every packet, and limits the rate at which each host sends.

It needs Linux, root, and the commands ip and tc.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from case import DILATED, PLAIN, Case
from report import Dtype, Integers, Repeats, Row, Shrink, integers
from slow_link import end_on_sigterm

from ring_backends import RingSchedule, SequenceLayout
from ring_backends.kernels import resolve_dtype
from ring_backends.testing.hosts import Hosts

NUM_HOSTS, RANKS_PER_HOST = 2, 4
RING_SIZE = NUM_HOSTS * RANKS_PER_HOST
HOST_OF_RANK = [rank // RANKS_PER_HOST for rank in range(RING_SIZE)]
DIRECTIONS = ("forward", "both")
TIMEOUT = 3600.0
"""Seconds that the ranks may take."""

CALLS = {
    "dense, causal, zigzag": PLAIN.but(contestant="native", ring_size=RING_SIZE).shortened(16),
    "dilated, causal, zigzag": DILATED.but(contestant="native", ring_size=RING_SIZE, layout="zigzag").shortened(16),
}


def groups(
    delay: Annotated[float, typer.Option(min=0, help="Milliseconds by which the link delays each packet.")] = 10.0,
    rate: Annotated[str, typer.Option(help="Rate at which each host sends, in the notation of tc.")] = "200mbit",
    ulysses_sizes: Integers = "1,2,4",
    repeats: Repeats = 5,
    shrink: Shrink = 1,
    dtype: Dtype = "fp32",
) -> Iterator[Row]:
    """Measure calls of eight ranks on two hosts with a slow link between them, in groups of 1, 2 and 4 ranks.

    A call has 4,096 tokens. Hops and bytes between hosts are those of the schedule. `error` is the largest difference
    of out, dq, dk and dv to those of the first size, relative to their largest element.
    """
    sizes = integers(ulysses_sizes)
    cases = [[case.but(ulysses_size=size, dtype=dtype).shortened(shrink) for size in sizes] for case in CALLS.values()]
    by_rank = _run_ranks(cases, delay / 1e3, rate, repeats)
    for number, (setup, of_setup) in enumerate(zip(CALLS, cases, strict=True)):
        for index, case in enumerate(of_setup):
            found = [of_rank[number][index] for of_rank in by_rank]
            row: Row = {"setup": setup, "tokens": case.seq_len, "ulysses_size": case.ulysses_size, **traffic(case)}
            for direction in DIRECTIONS:
                calls = zip(*(of_rank[direction] for of_rank in found), strict=True)
                seconds = (max(call["seconds"] for call in of_ranks) for of_ranks in calls)
                row[f"{direction}_seconds"] = statistics.median(seconds)
            yield row | {"error": max(of_rank["error"] for of_rank in found), "by_rank": found}


def traffic(case: Case) -> Row:
    """The hops of a case in a forward and in a backward, and the bytes between hosts in both, as scheduled."""
    layout = SequenceLayout(case.seq_len, case.ring_size, case.layout)
    schedule = RingSchedule(
        case.pattern, layout, case.num_heads, case.kv_heads, case.causal, ulysses_size=case.ulysses_size
    )
    itemsize = resolve_dtype(case.dtype, "cpu").itemsize
    sizes: dict[str, Any] = {"batch": 1, "head_dim": case.head_dim, "itemsize": itemsize}
    of_hops = schedule.of_members[0]
    forward, backward = (of_hops.travel(**sizes, backward=direction) for direction in (False, True))
    return {
        "hops_forward": max(forward.num_hops(branch.index) for branch in of_hops.branches),
        "hops_backward": 2 * max(backward.num_hops(branch.index) for branch in of_hops.branches),
        "between_hosts_bytes": schedule.bytes_between_hosts(HOST_OF_RANK, **sizes),
    }


def _run_ranks(cases: list[list[Case]], delay: float, rate: str, repeats: int) -> list[list[list[dict[str, Any]]]]:
    """Run the cases on the ranks of all hosts. Return what :func:`measure` finds, by rank.

    Raises:
        NoHostsError: this machine cannot make network namespaces.
        RuntimeError: a rank failed, or took longer than :data:`TIMEOUT` seconds. The message contains all output.
    """
    with tempfile.TemporaryDirectory() as name, end_on_sigterm("groups"), Hosts(NUM_HOSTS, preload=[__name__]) as hosts:
        folder, deadline = Path(name), time.monotonic() + TIMEOUT
        hosts.disturb(rate, delay=delay)
        processes = hosts.call_ranks(measure, (folder, cases, repeats), folder, per_host=RANKS_PER_HOST)
        for process in processes:  # a rank whose peer has ended ends too
            process.join(max(0.0, deadline - time.monotonic()))
        if any(process.exitcode != 0 for process in processes):
            output = "\n".join(file.read_text() for file in sorted(folder.glob("*.log")))
            raise RuntimeError(f"a rank failed, or took longer than {TIMEOUT:g} s:\n{output}")
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RING_SIZE)]


def measure(folder: Path, cases: list[list[Case]], repeats: int) -> None:
    """Time the calls of each list of cases in turns on this rank, and compare their results with those of the first."""
    import ranks
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    found = []
    for together in cases:
        of_cases: list[dict[str, Any]] = [{"error": 0.0} for _ in together]
        for direction in DIRECTIONS:
            rounds = [[ranks.timed(case, direction) for case in together] for _ in range(1 + repeats)][1:]
            for of_case, calls in zip(of_cases, zip(*rounds, strict=True), strict=True):
                of_case[direction] = calls
        ranks.forget()
        first, *others = (ranks.results(case) for case in together)
        for of_case, results in zip(of_cases[1:], others, strict=True):
            differences = (float((x - y).abs().max() / y.abs().max()) for x, y in zip(results, first, strict=True))
            of_case["error"] = max(differences)
        found.append(of_cases)
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
