"""Start the ranks of one machine, and see to it that they end together.

Each rank is a fresh interpreter that finds torchrun's environment variables, on the loopback interface only.
The parent needs no torch. Whatever happens (an error in one rank, Ctrl-C, the death of the parent itself), no
rank outlives the others, and the user reads one message.
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
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from ring_backends.cli.report import INTERRUPTED, Failure, RankFailedError, describe, tell_interrupted

NUMPY_WARNING = "Failed to initialize NumPy"
_GRACE = 0.5  # seconds in which the ranks' errors are collected, to show the cause and not its echo
_STOP = 2.0  # seconds that a rank has to end by itself once asked to


def under_launcher() -> bool:
    """Whether torchrun, or something that speaks like it, has started this process as one of its ranks."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def launch(target: Callable[..., Any], args: tuple[object, ...], num_ranks: int) -> list[Any]:
    """Run ``target(*args)`` in ``num_ranks`` new processes and return what each returned, by rank.

    Args:
        target: a module-level function; it finds RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set.
        args: its arguments, picklable.
        num_ranks: at least 1. Each rank gets cores // num_ranks threads, unless OMP_NUM_THREADS is set.

    Raises:
        RankFailedError: a rank raised, or died; the others have been ended.
        KeyboardInterrupt: after every rank has been ended.
    """
    context = multiprocessing.get_context("spawn")
    processes: list[SpawnProcess] = []
    reports: list[Connection] = []
    # The reading end goes to every rank, the writing end stays here: when this process dies in whatever way,
    # the ranks read end-of-file and leave.
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C and decides
    threading.Thread(target=_leave_with_parent, args=(parent_alive,), daemon=True).start()
    try:
        result: object = target(*args)
    except BaseException as error:
        result = describe(error)
    report.send((time.time(), result))
    report.close()
    if isinstance(result, Failure):
        sys.stdout.flush()
        os._exit(result.status)  # a process group's destructors can wait for peers; the parent ends those


def _leave_with_parent(parent_alive: Connection) -> None:
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
                processes[rank].join(_STOP)
                when, result = time.time(), _death(processes[rank].exitcode)
            if isinstance(result, Failure):
                failures.append((result.is_echo, when, rank, result))
                deadline = deadline or time.monotonic() + _GRACE
            else:
                results[rank] = result
    if failures:
        _, _, rank, failure = min(failures)
        raise RankFailedError(rank, failure)
    for process in processes:
        process.join(_STOP)
    return [results[rank] for rank in range(len(processes))]


def _death(exitcode: int | None) -> Failure:
    if exitcode is None or exitcode >= 0:
        return Failure(1, f"the process ended with status {exitcode} before it was done.")
    name = signal.Signals(-exitcode).name
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return Failure(1, f"the process was ended by {name}{hint}.")


def _stop(processes: Sequence[SpawnProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.terminate()
    deadline = time.monotonic() + _STOP
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


@contextlib.contextmanager
def _ranks_ignore_interrupts() -> Iterator[None]:
    """Ctrl-C reaches all processes of a terminal: block it in the ranks from their start, and delay it here."""
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        yield
        return
    resource_tracker.ensure_running()  # started later, it would unblock the signal
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """A free port. On Linux nobody else is given it inside, whereas rank 0 can listen on it."""
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
    warning_filters = [os.environ.get("PYTHONWARNINGS", ""), f"ignore:{NUMPY_WARNING}"]
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


@contextlib.contextmanager
def interrupt_deadline(seconds: float = 3.0) -> Iterator[None]:
    """Inside, Ctrl-C ends this process within ``seconds`` even where one long tensor operation holds it.

    Python raises KeyboardInterrupt only once such an operation returns. Until then this waits, and after
    ``seconds`` it prints the same message and leaves with the same status.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    listener, writer = socket.socketpair()
    writer.setblocking(False)
    previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    left = threading.Event()

    def watch() -> None:
        received = listener.recv(1)
        while received and received[0] != signal.SIGINT:
            received = listener.recv(1)
        if received and not left.wait(seconds):
            tell_interrupted()
            os._exit(INTERRUPTED)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        left.set()
        signal.set_wakeup_fd(previous)
        writer.close()
        watcher.join()
        listener.close()
