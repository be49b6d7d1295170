"""Hops over a slow link: two network namespaces, a veth pair whose rate tc limits, a rank of one thread on either side.

On one machine a hop is a copy by the same cores that compute, so hiding it gains nothing. Over a link that is slower
than memory it does: this measures the share of a call that is left waiting, with the hops hidden behind the tiles and
with each waited for as soon as it is posted.

Needs Linux, root, and the commands ip and tc.
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
from options import Dtype, Json, Repeats, Shrink
from report import Row, report
from setups import ring_setups

CONTESTANTS = ("native", SYNCHRONOUS)
_UNITS = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}
_PORT = "29400"


class NoNamespacesError(RuntimeError):
    """The machine cannot make network namespaces or limit links; the message says why."""


def hidden_hops_command(
    rates: Annotated[str, typer.Option(help="Of the link, as tc writes them.")] = "1gbit,100mbit",
    repeats: Repeats = 5,
    shrink: Shrink = 1,
    dtype: Dtype = "fp32",
    json: Json = None,
) -> None:
    """Two ranks at the ends of a slow link: the share of a call that waits for hops, with and without overlap."""
    options = {"rates": rates, "repeats": repeats, "shrink": shrink, "dtype": dtype}
    try:
        rows = [row for rate in rates.split(",") for row in hidden_hops(rate, repeats, shrink, dtype)]
    except NoNamespacesError as error:
        print(f"hidden-hops: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    report("hidden hops", options, rows, json)


def hidden_hops(rate: str, repeats: int, shrink: int, dtype: str, timeout: float = 3600.0) -> list[Row]:
    """Rows per setup and contestant, at one rate of the link. ``wire_share``: bytes sent / rate, over the call."""
    setups = {
        name: dataclasses.replace(case, ring_size=2)
        for name, case in ring_setups(shrink, dtype, plain_tokens=16384).items()
        if not name.endswith("contiguous")  # whose ranks wait for each other, however fast the hops
    }
    cases = [dataclasses.replace(case, contestant=name) for case in setups.values() for name in CONTESTANTS]
    with limited_link(rate) as namespaces:
        ranks = _run_ranks(namespaces, cases, repeats, timeout)
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
    """A rate in the notation of tc, for example ``"100mbit"``."""
    for unit, factor in _UNITS.items():
        if rate.endswith(unit) and rate.removesuffix(unit).isdigit():
            return int(rate.removesuffix(unit)) * factor
    raise ValueError(f"rate = {rate!r}: write a whole number and one of {', '.join(_UNITS)}, such as 100mbit.")


@contextlib.contextmanager
def limited_link(rate: str) -> Iterator[list[str]]:
    """Two network namespaces that reach each other at 10.231.0.1 and .2, at ``rate`` either way, and no one else.

    Raises:
        NoNamespacesError: with what is missing, or what the system refused.
    """
    bits_per_second(rate)
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            raise NoNamespacesError(f"the command {command} is not installed; install iproute2.")
    if os.geteuid() != 0:
        raise NoNamespacesError("making network namespaces needs root; run it as root, in a container of its own, say.")
    names = [f"ring{os.getpid()}-{end}" for end in range(2)]
    # Else SIGTERM would end this process without the clean-up below.
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
            # Room for a segment as large as the kernel hands out at once, and for what is under way.
            _run("tc", "-n", name, "qdisc", "add", "dev", "ring0", "root", "tbf", "rate", rate, "burst", "256kb",
                 "limit", "4mb")  # fmt: skip
        yield names
    finally:
        signal.signal(signal.SIGTERM, previous)
        for name in names:  # with a namespace goes its end of the link, and with that the other end
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=30, check=False)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise NoNamespacesError(f"{' '.join(command)}: {done.stderr.strip() or f'status {done.returncode}'}.")


def _run_ranks(namespaces: list[str], cases: list[Case], repeats: int, timeout: float) -> list[list[dict[str, Any]]]:
    """What each rank, started as torchrun would, found of each case.

    Raises:
        RuntimeError: a rank failed, with what it said; or ``timeout`` seconds have passed.
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
            said = stack.enter_context(Path(folder, f"said-{number}").open("w"))
            process = subprocess.Popen(command, env=os.environ | environment, stdout=said, stderr=said)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        deadline = time.monotonic() + timeout
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            if any(process.poll() for process in processes):
                break
            time.sleep(0.05)
        for number, process in sorted(enumerate(processes), key=lambda entry: not entry[1].poll()):
            if process.poll() != 0:
                how = f"took longer than {timeout:g} s" if process.poll() is None else "failed"
                raise RuntimeError(f"rank {number} {how}:\n{Path(folder, f'said-{number}').read_text()}")
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
