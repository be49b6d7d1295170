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
import dataclasses
import itertools
import json as json_module
import os
import pickle
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from case import SYNCHRONOUS, Case
from options import Dtype, Repeats, Shrink
from report import Row
from setups import ring_setups

CONTESTANTS = ("native", SYNCHRONOUS)
_UNITS = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}
_PORT = "29400"
TIMEOUT = 3600.0
"""Seconds that the ranks may take."""


class NoNamespacesError(RuntimeError):
    """This machine cannot make network namespaces or limit the rate of links. The message says why."""


def hidden_hops(
    rates: Annotated[str, typer.Option(help="Rates of the link, in the notation of tc.")] = "1gbit,100mbit",
    repeats: Repeats = 5,
    shrink: Shrink = 1,
    dtype: Dtype = "fp32",
) -> list[Row]:
    """Measure the share of time that two ranks wait for hops over a slow link, with and without overlap."""
    return [row for rate in rates.split(",") for row in at_rate(rate, repeats, shrink, dtype)]


def at_rate(rate: str, repeats: int, shrink: int, dtype: str) -> list[Row]:
    """Measure each setup with each contestant, at one rate of the link.

    ``wire_share`` is the time that the link needs for the bytes, divided by the time of the call.
    """
    setups = {
        name: dataclasses.replace(case, ring_size=2)
        for name, case in ring_setups(shrink, dtype, plain_tokens=16384).items()
        if not name.endswith("contiguous")  # its ranks wait for each other even if hops are fast
    }
    cases = [dataclasses.replace(case, contestant=name) for case in setups.values() for name in CONTESTANTS]
    with limited_link(rate) as namespaces:
        ranks = _run_ranks(namespaces, cases, repeats)
    rows = []
    for index, (setup, contestant) in enumerate(itertools.product(setups, CONTESTANTS)):
        calls = [found[index] for found in ranks]
        seconds = [max(times) for times in zip(*(found["seconds"] for found in calls), strict=True)]
        median = statistics.median(seconds)
        rows.append(
            {
                "link": rate,
                "setup": setup,
                "hops": "synchronous" if contestant == SYNCHRONOUS else "hidden",
                "seconds": median,
                "waited_share": max(
                    statistics.median(
                        wait / own for wait, own in zip(found["wait_seconds"], found["seconds"], strict=True)
                    )
                    for found in calls
                ),
                "wire_share": max(found["bytes"] for found in calls) * 8 / bits_per_second(rate) / median,
                "sent_per_rank_bytes": max(found["bytes"] for found in calls),
                "by_rank": calls,
            }
        )
    return rows


def bits_per_second(rate: str) -> float:
    """Convert a rate in the notation of tc, for example ``"100mbit"``, to bits per second.

    Raises:
        ValueError: the rate is not a whole number with a known unit.
    """
    for unit, factor in _UNITS.items():
        if rate.endswith(unit) and rate.removesuffix(unit).isdigit():
            return int(rate.removesuffix(unit)) * factor
    raise ValueError(f"rate = {rate!r}: write a whole number and one of {', '.join(_UNITS)}, for example 100mbit.")


@contextlib.contextmanager
def limited_link(rate: str) -> Iterator[list[str]]:
    """Make two network namespaces that reach only each other, with the addresses 10.231.0.1 and 10.231.0.2.

    The link between them has the rate ``rate`` in each direction.

    Raises:
        NoNamespacesError: a command or a right is missing, or the system refused a command.
    """
    bits_per_second(rate)
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            raise NoNamespacesError(f"the command {command} is not installed; install iproute2.")
    if os.geteuid() != 0:
        raise NoNamespacesError("making network namespaces needs root; run it as root, for example in a container.")
    names = [f"ring{os.getpid()}-{end}" for end in range(2)]
    # Without a handler, SIGTERM would end this process without the clean-up below.
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit("hidden-hops: terminated."))
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        links = [arg for name in names for arg in ("name", "ring0", "netns", name)]
        _run("ip", "link", "add", *links[:4], "type", "veth", "peer", *links[4:])
        for end, name in enumerate(names):
            _run("ip", "-n", name, "addr", "add", f"10.231.0.{1 + end}/24", "dev", "ring0")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", "ring0", "up")
            # burst: the largest segment that the kernel sends at once. limit: bytes that wait in the queue.
            _run("tc", "-n", name, "qdisc", "add", "dev", "ring0", "root", "tbf", "rate", rate, "burst", "256kb",
                 "limit", "4mb")  # fmt: skip
        yield names
    finally:
        signal.signal(signal.SIGTERM, previous)
        for name in names:  # this also deletes both ends of the link
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=30, check=False)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise NoNamespacesError(f"{' '.join(command)}: {done.stderr.strip() or f'status {done.returncode}'}.")


def _run_ranks(namespaces: list[str], cases: list[Case], repeats: int) -> list[list[dict[str, Any]]]:
    """Start one rank per namespace, with the environment variables of torchrun. Return its results, by rank and case.

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
                "MASTER_PORT": _PORT,
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
        deadline = time.monotonic() + TIMEOUT
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            if any(process.poll() for process in processes):
                break
            time.sleep(0.05)
        for number, process in sorted(enumerate(processes), key=lambda entry: not entry[1].poll()):
            if process.poll() != 0:
                how = f"took longer than {TIMEOUT:g} s" if process.poll() is None else "failed"
                raise RuntimeError(f"rank {number} {how}:\n{Path(folder, f'output-{number}').read_text()}")
        return [json_module.loads(Path(folder, f"{number}.json").read_text()) for number in range(2)]


def _rank_main(folder: str, repeats: str) -> None:
    import rank
    import torch

    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    given: list[Case] = pickle.loads(Path(folder, "cases").read_bytes())
    for start in range(0, len(given), len(CONTESTANTS)):
        together = given[start : start + len(CONTESTANTS)]
        rounds = [[rank.timed(case, "both") for case in together] for _ in range(1 + int(repeats))][1:]
        for calls in zip(*rounds, strict=True):
            found.append(
                {
                    "seconds": [call["seconds"] for call in calls],
                    "wait_seconds": [call["wait_seconds"] for call in calls],
                    "bytes": calls[0]["bytes"],
                }
            )
        rank.forget()
    Path(folder, f"{os.environ['RANK']}.json").write_text(json_module.dumps(found))
    rank.leave()


if __name__ == "__main__":
    _rank_main(*sys.argv[1:])
