"""Exit codes: a finished process exits with 0, and a failed one with the code of its failure.

A thread of gloo returns to the interpreter after its collective has ended. If the interpreter is already being
finalized, the process ends with SIGABRT. That is rare. These tests make it frequent: the threads of gloo run only
when their core is idle.

``python -m ring_backends.testing.process_exit MODULE WAY COUNT`` starts two ranks COUNT times and prints their exit
codes.
"""

from __future__ import annotations

import ast
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import NoReturn
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ring_backends.testing.capabilities import AdapterSuite, core, requires
from ring_backends.testing.marks import matrix_but

NUM_RANKS = 2

WAYS: dict[str, int] = {
    "return": 0,
    "Ctrl-C": -signal.SIGINT,
    "failed ring": 1,
    "child of multiprocessing": 0,
}
"""The ways to end a process, with their exit codes."""

TIMEOUT = timedelta(seconds=60)


def take_part(adapter: str, way: str) -> None:
    """Run attention, training and collectives on a rank, before it exits."""
    backend = import_module(adapter)
    ring = backend.initialize(timeout=TIMEOUT)
    attention = backend.RingDilatedAttention([4, 8], [1, 2], ring=ring)
    state = backend.parallelize(nn.Linear(8, 8), lambda parameters: torch.optim.SGD(parameters, lr=0.1), ring)
    if way == "failed ring" and ring.rank == 1:
        attention.ring_pass = mock.Mock(side_effect=ConnectionError("on purpose"))
    for _ in range(2):
        x = state.model(torch.ones(1, 4, 8)).unflatten(2, (2, 4))
        state.backward(state.loss(attention(x, x, x).sum(), 4))
        state.step()
    starve_threads_of_gloo()
    state.full_state_dict()
    ring.unshard(torch.ones(1, 3))
    # A program may gather its last loss.
    dist.all_gather([torch.empty(3) for _ in range(NUM_RANKS)], torch.ones(3))


def leave(way: str) -> None:
    if way == "Ctrl-C":
        # A shell lets the jobs that it starts in the background ignore the signal, and they pass this on.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.raise_signal(signal.SIGINT)


def starve_threads_of_gloo() -> None:
    """Pin all threads to one core, and run those of gloo only when that core is idle."""
    core = min(os.sched_getaffinity(0))
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})
        if (thread / "comm").read_text().strip() == "pt_gloo_runloop":
            os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))


def _run_ranks(adapter: str, way: str) -> list[int]:
    """Fork the ranks from this process, which has imported their modules. Returns their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {"WORLD_SIZE": str(NUM_RANKS), "LOCAL_WORLD_SIZE": str(NUM_RANKS), "MASTER_ADDR": "127.0.0.1"}
    children = []
    for rank in range(NUM_RANKS):
        child = os.fork()
        if child == 0:
            os.environ.update(environment, MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank))
            _be_a_rank(adapter, way)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _be_a_rank(adapter: str, way: str) -> NoReturn:
    """Run one rank to the end of the interpreter, as a script does."""
    if way == "child of multiprocessing":
        child = multiprocessing.get_context("spawn").Process(target=take_part, args=(adapter, way))
        child.start()
        child.join()
        sys.exit(child.exitcode)
    take_part(adapter, way)
    leave(way)
    sys.exit(0)


def main(adapter: str, way: str, count: int) -> None:
    torch.set_num_threads(1)
    import_module(adapter)
    codes: Counter[int] = Counter()
    for _ in range(count):
        codes.update(_run_ranks(adapter, way))
    print(dict(codes))


def check_exit_codes(adapter: str, way: str, count: int, folder: Path) -> None:
    """Run the ranks ``count`` times, and check every exit code."""
    command = [sys.executable, "-m", "ring_backends.testing.process_exit", adapter, way, str(count)]
    log = folder / "log"
    with log.open("w") as output:
        done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=output, text=True, timeout=1100)
    assert done.returncode == 0, log.read_text()
    codes: dict[int, int] = ast.literal_eval(done.stdout.splitlines()[-1])
    if codes != {WAYS[way]: NUM_RANKS * count}:
        pytest.fail(f"exit codes {codes}; all should be {WAYS[way]}:\n{log.read_text()[-10_000:]}")


@core
@requires("training")
class ProcessExitTests(AdapterSuite):
    @pytest.mark.parametrize("way", matrix_but(of=WAYS, reason="keeps the ranks from a processor for ten seconds"))
    @pytest.mark.timeout(1200)
    def test_a_process_ends_with_its_own_exit_code(self, tmp_path: Path, way: str, soak: int) -> None:
        """At exit, this package waits for gloo. Without the wait, every third run has another exit code."""
        if not Path("/proc/self/task").is_dir():
            pytest.skip("needs /proc to identify threads")
        check_exit_codes(self.adapter, way, soak * (4 if way == "return" else 1), tmp_path)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
