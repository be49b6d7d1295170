"""Starts the ranks of one machine as processes, and makes sure that they end together.

Each rank is a new Python interpreter with the environment variables that torchrun sets. The ranks communicate over the
loopback interface. The parent process does not import torch. An error in one rank, Ctrl-C or the death of the parent
ends all ranks.

``torch.multiprocessing.start_processes`` and torch's elastic launcher are not used, for three reasons:

- They import torch in the parent.
- They report the rank that failed first. That rank may only have lost its connection to the rank that caused the error.
- They end ranks with signals that Python handles. A rank that waits in C++ for a hop does not handle signals. With
  ``start_processes``, such a rank outlives its parent until the hop times out, even after Ctrl-C.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from ring_backends.errors import AdapterUnavailableError, RingMismatchError, RingPeerError
from ring_backends.ring.launcher import under_launcher

TRACEBACK_VARIABLE = "RING_BACKENDS_TRACEBACK"
"""Name of an environment variable. If it is set, every error message includes the traceback."""

_NUMPY_WARNING = "Failed to initialize NumPy"
_COLLECT_SECONDS = 0.5  # to wait for further errors after the first, which may be a consequence of a later one
_STOP_SECONDS = 2.0  # between SIGTERM and SIGKILL


@dataclass(frozen=True, order=True)
class Failure:
    """Why a rank ended.

    Attributes:
        status: the exit status: 2 if an argument or the installation cannot work, else 1.
        text: the message. It includes the traceback of an exception that the package does not raise itself.
        is_consequence: whether the rank ended only because another rank failed.
    """

    status: int
    text: str
    is_consequence: bool = False


class RankFailedError(RuntimeError):
    """A rank that :func:`launch` started has failed. ``rank`` is its number, and ``failure`` is the reason."""

    def __init__(self, rank: int, failure: Failure) -> None:
        super().__init__(f"rank {rank}: {failure.text}")
        self.rank = rank
        self.failure = failure


def describe(error: BaseException) -> Failure:
    """Describe an exception for the user. The text includes the traceback if :data:`TRACEBACK_VARIABLE` is set."""
    is_usage = isinstance(error, (ValueError, AdapterUnavailableError))
    is_expected = is_usage or isinstance(error, (RingMismatchError, RingPeerError, OSError))
    if not is_expected or os.environ.get(TRACEBACK_VARIABLE):
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()
    else:
        text = str(error) if is_usage else f"{type(error).__name__}: {error}"
    return Failure(2 if is_usage else 1, text, is_consequence=isinstance(error, RingPeerError))


def refuse_launcher(what: str) -> None:
    """Refuse to start ranks in a process that a launcher has started.

    Args:
        what: what starts its own ranks, for the error.

    Raises:
        ValueError: a launcher has started this process.
    """
    if under_launcher():
        raise ValueError(
            f"nproc_per_node: a launcher has started this process as a rank, but {what} starts its own ranks; run the "
            "command without torchrun, srun or mpirun."
        )


def launch(target: Callable[..., Any], args: tuple[object, ...], num_ranks: int) -> list[Any]:
    """Run ``target(*args)`` in ``num_ranks`` new processes, and return the results by rank.

    The arguments and the errors are those of :func:`start`, except that ``target`` is an ordinary function.
    """
    with start(_once, (target, *args), num_ranks) as ranks:
        return ranks.step()


def _once(target: Callable[..., Any], *args: object) -> Iterator[Any]:
    yield target(*args)


class Ranks:
    """Ranks that :func:`start` has started. All of them run the same generator function, one step at a time."""

    def __init__(self, processes: Sequence[SpawnProcess], connections: Sequence[Connection]) -> None:
        self._processes, self._connections = processes, connections
        self._has_stepped = False

    def step(self) -> list[Any]:
        """Let all ranks run to their next ``yield``, and return the yielded values by rank. They then wait.

        Raises:
            RankFailedError: a rank raised an exception or died. All other ranks have been stopped.
        """
        if self._has_stepped:
            self.resume()
        self._has_stepped = True
        try:
            return _collect(self._processes, self._connections)
        except RankFailedError:
            _stop(self._processes)
            raise

    def resume(self) -> None:
        """Let all ranks run on from their last ``yield``."""
        for rank in self._connections:
            with contextlib.suppress(OSError):  # a rank that has died
                rank.send(None)


@contextlib.contextmanager
def start(target: Callable[..., Iterator[Any]], args: tuple[object, ...], num_ranks: int) -> Iterator[Ranks]:
    """Start ``num_ranks`` processes that run ``target(*args)`` step by step.

    At the end of the ``with`` block, the generators run on, and their processes are stopped if they do not end soon.

    Args:
        target: a module-level generator function. Its process has RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and
            MASTER_PORT in the environment.
        args: the arguments of ``target``. They must be picklable.
        num_ranks: number of ranks, at least 1. Each rank gets cores // num_ranks threads, unless OMP_NUM_THREADS is
            set.

    Raises:
        ValueError: ``num_ranks`` is more than this machine can run: 64, or eight per core if that is more.
        RankFailedError: a rank raised an exception or died. All other ranks have been stopped.
        KeyboardInterrupt: the user pressed Ctrl-C. All ranks have been stopped.
    """
    most = max(64, 8 * num_cores())
    if num_ranks > most:
        raise ValueError(
            f"nproc_per_node = {num_ranks}: this process may use {num_cores()} cores, which run at most {most} ranks; "
            "start fewer."
        )
    context = multiprocessing.get_context("spawn")
    processes: list[SpawnProcess] = []
    connections: list[Connection] = []
    # Only this process holds the writing end. When it dies, for whatever reason, the ranks read end-of-file and exit.
    parent_alive, _held = context.Pipe(duplex=False)
    with _reserved_port() as port:
        try:
            with _ranks_ignore_interrupts(), environment_variables(_shared_environment(num_ranks, port)):
                for rank in range(num_ranks):
                    own, of_rank = context.Pipe()
                    with environment_variables({"RANK": str(rank), "LOCAL_RANK": str(rank)}):
                        process = context.Process(
                            target=_run_rank, args=(target, args, of_rank, parent_alive), name=f"rank {rank}"
                        )
                        process.start()
                    of_rank.close()
                    processes.append(process)
                    connections.append(own)
            ranks = Ranks(processes, connections)
            yield ranks
            ranks.resume()
            for process in processes:
                process.join(_STOP_SECONDS)
        finally:
            _stop(processes)
            _held.close()


def _run_rank(
    target: Callable[..., Iterator[Any]], args: tuple[object, ...], parent: Connection, parent_alive: Connection
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=_exit_with_parent, args=(parent_alive,), daemon=True).start()
    try:
        for result in target(*args):
            parent.send((time.time(), result))
            _wait_for(parent)
    except BaseException as error:
        failure = describe(error)
        parent.send((time.time(), failure))
        sys.stdout.flush()
        os._exit(failure.status)  # skips destructors: that of a process group may wait for other ranks


def _exit_with_parent(parent_alive: Connection) -> None:
    _wait_for(parent_alive)  # which sends nothing


def _wait_for(parent: Connection) -> None:
    """Wait for a message of the parent process. End this process if the parent has ended."""
    try:
        parent.recv()
    except (EOFError, OSError):
        os._exit(1)


def _collect(processes: Sequence[SpawnProcess], connections: Sequence[Connection]) -> list[Any]:
    """Return what each rank sends next, by rank."""
    results: dict[int, Any] = {}
    failures: list[tuple[bool, float, int, Failure]] = []
    pending = dict(enumerate(connections))
    deadline: float | None = None
    while pending and (deadline is None or time.monotonic() < deadline):
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = connection.wait(list(pending.values()), timeout)
        for rank, of_rank in list(pending.items()):
            if of_rank not in ready:
                continue
            del pending[rank]
            try:
                when, result = of_rank.recv()
            except (EOFError, ConnectionResetError):
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
    return [results[rank] for rank in range(len(processes))]


def _describe_exit(exitcode: int | None) -> Failure:
    if exitcode is None or exitcode >= 0:
        return Failure(1, f"the process ended with status {exitcode} before it returned a result.")
    name = signal.Signals(-exitcode).name
    hint = " (out of memory?)" if name == "SIGKILL" else ""
    return Failure(1, f"{name} ended the process{hint}.")


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
    """Block SIGINT while ranks start, so that they inherit the blocked signal.

    Ctrl-C sends SIGINT to every process of the terminal. Here, a SIGINT takes effect when the block ends.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    resource_tracker.ensure_running()  # start it first, since starting it unblocks the signal
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """Find a free port. A bound socket reserves it, and rank 0 can still listen on it."""
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


def num_cores() -> int:
    """The number of cores that this process may use; taskset, a container or a batch system may withhold some."""
    return len(os.sched_getaffinity(0))


def _shared_environment(num_ranks: int, port: int) -> dict[str, str]:
    threads = max(1, num_cores() // num_ranks)
    warning_filters = [os.environ.get("PYTHONWARNINGS", ""), f"ignore:{_NUMPY_WARNING}"]
    return {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "PYTHONWARNINGS": ",".join(filter(None, warning_filters)),
    }


@contextlib.contextmanager
def environment_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process for a while. Others are not touched, since other threads read them."""
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
