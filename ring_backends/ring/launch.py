"""Starts the ranks of one machine as processes, and makes sure that they end together.

Each rank is a fresh interpreter with the environment variables that torchrun sets. The ranks communicate over the
loopback interface. The parent process needs no torch. No rank outlives the others or the parent: an error in one rank,
Ctrl-C and the death of the parent end all of them.

``torch.multiprocessing.start_processes`` and torch's elastic launcher do less. They import torch in the parent. They
report the rank that failed first, which may only be a neighbour that lost its connection to the rank at fault. They end
ranks by signals that Python handles. A rank that waits in C++ for a hop handles none: with ``start_processes`` it
outlives the parent until its timeout, also after Ctrl-C.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from ring_backends.errors import AdapterUnavailableError, RingMismatchError, RingPeerError

TRACEBACK_VARIABLE = "RING_BACKENDS_TRACEBACK"
"""The environment variable that, if set, adds the traceback to the message of every error."""

_NUMPY_WARNING = "Failed to initialize NumPy"
_COLLECT_SECONDS = 0.5  # after the first error, for further ones: the first may be a consequence of a later one
_STOP_SECONDS = 2.0  # between SIGTERM and SIGKILL


@dataclass(frozen=True, order=True)
class Failure:
    """Why a rank ended.

    Attributes:
        status: exit status: 2 for an argument or an installation that cannot work, else 1.
        text: the message; with a traceback for an exception that the package does not raise on purpose.
        is_consequence: the rank only noticed that another one had failed.
    """

    status: int
    text: str
    is_consequence: bool = False


class RankFailedError(RuntimeError):
    """A rank that :func:`launch` started has failed; ``rank`` and ``failure`` say which one and why."""

    def __init__(self, rank: int, failure: Failure) -> None:
        super().__init__(f"rank {rank}: {failure.text}")
        self.rank = rank
        self.failure = failure


def describe(error: BaseException) -> Failure:
    """Describe an exception for a user. :data:`TRACEBACK_VARIABLE` adds the traceback."""
    is_usage = isinstance(error, (ValueError, AdapterUnavailableError))
    is_expected = is_usage or isinstance(error, (RingMismatchError, RingPeerError, OSError))
    if not is_expected or os.environ.get(TRACEBACK_VARIABLE):
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()
    else:
        text = str(error) if is_usage else f"{type(error).__name__}: {error}"
    return Failure(2 if is_usage else 1, text, is_consequence=isinstance(error, RingPeerError))


def under_launcher() -> bool:
    """Whether torchrun, or another launcher that sets its variables, started this process."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def launch(target: Callable[..., Any], args: tuple[object, ...], num_ranks: int) -> list[Any]:
    """Run ``target(*args)`` in ``num_ranks`` new processes, and return the results by rank.

    Args:
        target: a module-level function. RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set for it.
        args: its arguments, which have to be picklable.
        num_ranks: at least 1. Each rank gets cores // num_ranks threads, unless OMP_NUM_THREADS is set.

    Raises:
        RankFailedError: a rank raised an exception or died. The other ranks have been stopped.
        KeyboardInterrupt: on Ctrl-C. Every rank has been stopped.
    """
    context = multiprocessing.get_context("spawn")
    processes: list[SpawnProcess] = []
    reports: list[Connection] = []
    # Only this process holds the writing end. However it dies, the ranks then read end-of-file and exit.
    parent_alive, _held = context.Pipe(duplex=False)
    with _reserved_port() as port:
        try:
            with _ranks_ignore_interrupts(), _environment(_shared_environment(num_ranks, port)):
                for rank in range(num_ranks):
                    report, report_writer = context.Pipe(duplex=False)
                    with _environment({"RANK": str(rank), "LOCAL_RANK": str(rank)}):
                        process = context.Process(
                            target=_run_rank,
                            args=(target, args, report_writer, parent_alive),
                            name=f"rank {rank}",
                        )
                        process.start()
                    report_writer.close()
                    processes.append(process)
                    reports.append(report)
            return _collect(processes, reports)
        finally:
            _stop(processes)
            _held.close()


def _run_rank(
    target: Callable[..., Any], args: tuple[object, ...], report: Connection, parent_alive: Connection
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=_exit_with_parent, args=(parent_alive,), daemon=True).start()
    try:
        result: object = target(*args)
    except BaseException as error:
        result = describe(error)
    report.send((time.time(), result))
    report.close()
    if isinstance(result, Failure):
        sys.stdout.flush()
        os._exit(result.status)  # destructors of a process group could wait for peers


def _exit_with_parent(parent_alive: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        parent_alive.recv()
    os._exit(1)


def _collect(processes: Sequence[SpawnProcess], reports: Sequence[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[tuple[bool, float, int, Failure]] = []
    pending = dict(enumerate(reports))
    deadline: float | None = None
    while pending and (deadline is None or time.monotonic() < deadline):
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = connection.wait(list(pending.values()), timeout)
        for rank, report in list(pending.items()):
            if report not in ready:
                continue
            del pending[rank]
            try:
                when, result = report.recv()
            except EOFError:
                processes[rank].join(_STOP_SECONDS)
                when, result = time.time(), _describe_exit(processes[rank].exitcode)
            if isinstance(result, Failure):
                failures.append((result.is_consequence, when, rank, result))
                deadline = deadline or time.monotonic() + _COLLECT_SECONDS
            else:
                results[rank] = result
    if failures:
        _, _, rank, failure = min(failures)
        raise RankFailedError(rank, failure)
    for process in processes:
        process.join(_STOP_SECONDS)
    return [results[rank] for rank in range(len(processes))]


def _describe_exit(exitcode: int | None) -> Failure:
    if exitcode is None or exitcode >= 0:
        return Failure(1, f"the process ended with status {exitcode} before it was done.")
    name = signal.Signals(-exitcode).name
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return Failure(1, f"the process was ended by {name}{hint}.")


def _stop(processes: Sequence[SpawnProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.terminate()
    deadline = time.monotonic() + _STOP_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


@contextlib.contextmanager
def _ranks_ignore_interrupts() -> Iterator[None]:
    """Start the ranks with SIGINT blocked, since Ctrl-C reaches every process of a terminal; delay it here."""
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        yield
        return
    resource_tracker.ensure_running()  # it unblocks the signal when it starts
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """A free port. On Linux the kernel gives it to no other program meanwhile, and rank 0 can listen on it."""
    with socket.socket() as bound:
        if sys.platform == "linux":
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        if sys.platform != "linux":
            bound.close()
        yield port


def _shared_environment(num_ranks: int, port: int) -> dict[str, str]:
    threads = max(1, (os.cpu_count() or 1) // num_ranks)
    warning_filters = [os.environ.get("PYTHONWARNINGS", ""), f"ignore:{_NUMPY_WARNING}"]
    shared = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        "PYTHONWARNINGS": ",".join(filter(None, warning_filters)),
    }
    loopback = _loopback_interface()
    if loopback and "GLOO_SOCKET_IFNAME" not in os.environ:
        shared["GLOO_SOCKET_IFNAME"] = loopback
    return shared


def _loopback_interface() -> str | None:
    if sys.platform == "win32":
        return None
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
