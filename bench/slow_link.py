"""Measures hops over a slow link between two network namespaces.

The namespaces are connected by a veth pair, whose rate tc limits. One rank with one thread runs in each namespace.

On one machine, the cores that compute also copy the bytes of a hop. So overlapping hops with tiles saves no time there.
Over a link that is slower than memory, overlapping saves time. This module measures the share of its time that a rank
waits for hops. It compares overlapped hops with synchronous hops. A rank waits for a synchronous hop as soon as it has
posted it.

It needs Linux, root, and the commands ip and tc.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from case import CALLS, PLAIN, SYNCHRONOUS, Case
from report import Dtype, Repeats, Row, Shrink

CONTESTANTS = ("native", SYNCHRONOUS)
TIMEOUT = 3600.0
"""Seconds that the ranks may take."""


class NoNamespacesError(RuntimeError):
    """This machine cannot make network namespaces or limit the rate of links. The message says why."""


def hidden_hops(
    rates: Annotated[str, typer.Option(help="Rates of the link, in the notation of tc.")] = "1gbit,100mbit",
    repeats: Repeats = 5,
    shrink: Shrink = 1,
    dtype: Dtype = "fp32",
) -> Iterator[Row]:
    """Measure the share of time that two ranks wait for hops over a slow link, with and without overlap.

    `wire share` is the time that the link needs for the bytes, divided by the time of the call.
    """
    # The ranks of a contiguous causal ring wait for each other even if hops are fast.
    calls = {name: CALLS["dilated"][name] for name in ("dilated", "dilated, causal, zigzag")}
    calls["plain, causal, zigzag"] = PLAIN.shortened(4)
    for rate in rates.split(","):
        bits = bits_per_second(rate)
        cases = [
            case.but(contestant=contestant, ring_size=2, dtype=dtype).shortened(shrink)
            for case, contestant in itertools.product(calls.values(), CONTESTANTS)
        ]
        with limited_link(rate) as namespaces:
            ranks = _run_ranks(namespaces, cases, repeats)
        for (setup, contestant), *by_rank in zip(itertools.product(calls, CONTESTANTS), *ranks, strict=True):
            seconds = statistics.median(max(call["seconds"] for call in calls) for calls in zip(*by_rank, strict=True))
            waited = (statistics.median(call["wait_seconds"] / call["seconds"] for call in calls) for calls in by_rank)
            sent = max(calls[0]["bytes"] for calls in by_rank)
            yield {
                "link": rate,
                "setup": setup,
                "hops": "synchronous" if contestant == SYNCHRONOUS else "hidden",
                "seconds": seconds,
                "waited_share": max(waited),
                "wire_share": sent * 8 / bits / seconds,
                "sent_per_rank_bytes": sent,
                "by_rank": by_rank,
            }


def bits_per_second(rate: str) -> float:
    """Convert a rate in the notation of tc, for example ``"100mbit"``, to bits per second.

    Raises:
        ValueError: the rate is not a whole number with a known unit.
    """
    units = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}
    parts = re.fullmatch(rf"(\d+)({'|'.join(units)})", rate)
    if parts is None:
        raise ValueError(f"rate = {rate!r}: write a whole number and one of {', '.join(units)}, for example 100mbit.")
    return int(parts[1]) * units[parts[2]]


@contextlib.contextmanager
def end_on_sigterm(command: str) -> Iterator[None]:
    """Let SIGTERM end a command by an exception, so that it deletes its namespaces. Otherwise it would end at once."""
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(f"{command}: terminated."))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def limited_link(rate: str) -> Iterator[list[str]]:
    """Make two network namespaces that reach only each other, with the addresses 10.231.0.1 and 10.231.0.2.

    The link between them has the rate ``rate`` in each direction.

    Raises:
        NoNamespacesError: a command or a right is missing, or the system refused a command.
    """
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            raise NoNamespacesError(f"the command {command} is not installed; install iproute2.")
    names = [f"ring{os.getpid()}-{end}" for end in range(2)]
    with end_on_sigterm("hidden-hops"):
        try:
            for name in names:
                _run(f"ip netns add {name}")
            first, second = (f"name ring0 netns {name}" for name in names)
            _run(f"ip link add {first} type veth peer {second}")
            for end, name in enumerate(names):
                _run(f"ip -n {name} addr add 10.231.0.{1 + end}/24 dev ring0")
                _run(f"ip -n {name} link set lo up")
                _run(f"ip -n {name} link set ring0 up")
                # burst: the largest segment that the kernel sends at once. limit: bytes that wait in the queue.
                _run(f"tc -n {name} qdisc add dev ring0 root tbf rate {rate} burst 256kb limit 4mb")
            yield names
        finally:
            for name in names:  # this also deletes both ends of the link
                subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=30, check=False)


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise NoNamespacesError(f"{command}: {done.stderr.strip() or f'status {done.returncode}'}.")


def _run_ranks(namespaces: list[str], cases: list[Case], repeats: int) -> list[list[list[dict[str, Any]]]]:
    """Start one rank per namespace, with the environment variables of torchrun. Return its calls, by rank and case.

    Raises:
        RuntimeError: a rank failed, or took longer than :data:`TIMEOUT` seconds. The message contains its output.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        Path(folder, "cases").write_bytes(pickle.dumps(cases))
        processes = []
        for number, name in enumerate(namespaces):
            environment = {
                "RANK": str(number),
                "LOCAL_RANK": "0",
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "10.231.0.1",
                "MASTER_PORT": "29400",
                "GLOO_SOCKET_IFNAME": "ring0",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            }
            command = ["ip", "netns", "exec", name, sys.executable, __file__, folder, str(repeats)]
            output = stack.enter_context(Path(folder, f"output-{number}").open("w"))
            process = subprocess.Popen(command, env=os.environ | environment, stdout=output, stderr=output)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        for process in processes:  # a rank whose peer has ended ends too
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(TIMEOUT)
        if any(process.returncode != 0 for process in processes):
            outputs = (Path(folder, f"output-{number}").read_text() for number in range(2))
            raise RuntimeError(f"a rank failed, or took longer than {TIMEOUT:g} s:\n" + "\n".join(outputs))
        return [json.loads(Path(folder, f"{number}.json").read_text()) for number in range(2)]


def _rank_main(folder: str, repeats: str) -> None:
    import ranks
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    found: list[list[dict[str, Any]]] = []
    given: list[Case] = pickle.loads(Path(folder, "cases").read_bytes())
    for together in zip(given[::2], given[1::2], strict=True):
        rounds = [[ranks.timed(case, "both") for case in together] for _ in range(1 + int(repeats))][1:]
        found += [list(calls) for calls in zip(*rounds, strict=True)]
        ranks.forget()
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank_main(*sys.argv[1:])
