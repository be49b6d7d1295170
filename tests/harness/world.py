"""A world of long-lived ranks for tests. The ranks start once, join one gloo group, and serve many calls.

No rank can hang or end the test session. An error describes *every* rank, because the rank that raises is often not the
one at fault. A rank that hangs is killed, and its stacks are shown. After a rank is lost, the next call starts new
ranks.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ring_backends.ring.launch import environment_variables
from ring_backends.testing.rank import LEAVE, STACK_SIGNAL, Outcome, rank_main, reference_to

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, SpawnContext

__all__ = ["Outcome", "RanksFailedError", "World", "on_every_rank"]

Test = TypeVar("Test", bound=Callable[..., None])

PRELOADED: set[str] = set()
"""Names of modules that the server of ranks imports besides those of its first world, if they can be imported."""

Ranks: TypeAlias = "Iterable[int] | None"
"""The ranks that make a call. None means all."""


class RanksFailedError(RuntimeError):
    """A call did not return on every rank. ``outcomes`` has one outcome per rank.

    The message has a line about every rank that failed, and then what each rank shows at length.
    """

    def __init__(self, what: str, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes
        asked = [outcome for outcome in outcomes if outcome.status != "not asked"]
        failed = [outcome for outcome in asked if outcome.status != "returned"]
        header = f"{what} failed on {len(failed)} of {len(asked)} ranks"
        super().__init__("\n".join([header, *(outcome.line for outcome in failed), *map(str, asked)]))


class World:
    """``size`` ranks in one gloo group. Each rank is a process with one torch thread.

    The first call starts the ranks. The first call after :meth:`close`, or after a rank hung or died, starts new ranks,
    which have empty caches. Ranks share standard output and error with this process. They end with this process.

    Args:
        size: number of ranks.
        start_timeout: seconds in which all ranks have to import torch and join.
        call_timeout: default timeout of a call in seconds.
        grace: seconds that the other ranks have left after a rank has failed in :meth:`run`.
        preload: dotted names of modules that ranks will import. On Linux without a GPU, the fork server imports the
            modules of the first world of this process.
        environment: environment variables of the ranks. The ranks are then new processes, without ``preload``, instead
            of forks of the server, which has read its environment already.
        prepare: a function at the top level of a module. Each rank calls it before it joins.
    """

    def __init__(
        self,
        size: int,
        *,
        start_timeout: float = 120,
        call_timeout: float = 120,
        grace: float = 5,
        preload: Iterable[str] = (),
        environment: Mapping[str, str] | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        if size < 1:
            raise ValueError(f"size = {size}: a world has at least 1 rank.")
        self.size = size
        self.start_timeout = start_timeout
        self.call_timeout = call_timeout
        self.grace = grace
        self.preload = tuple(preload)
        self.environment = dict(environment or {})
        self.prepare = prepare
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._store: TCPStore | None = None
        self._stack_folder: tempfile.TemporaryDirectory[str] | None = None
        # Also runs at exit, before the clean-up of multiprocessing, which would wait forever for a stopped rank.
        self._finalizer = weakref.finalize(self, _kill, self._processes)

    def run(
        self, function: Callable[..., Any], *args: Any, ranks: Ranks = None, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call ``function(*args, **kwargs)`` on every rank and return the results by rank.

        Args:
            function: a function at the top level of a module. It gets its rank from ``torch.distributed``.
            ranks: the ranks that call it. None means all. The result of any other rank is None.
            timeout: seconds. None means ``call_timeout``.

        Raises:
            RanksFailedError: a rank raised, died or did not answer in time. After the first failure, the other ranks
                have ``grace`` seconds left.
            ValueError: ``function`` cannot be found by its name, or a rank is not in the world.
        """
        outcomes = self.run_collect(function, *args, ranks=ranks, timeout=timeout, grace=self.grace, **kwargs)
        if any(outcome.status not in ("returned", "not asked") for outcome in outcomes):
            raise RanksFailedError(f"{function.__module__}.{function.__qualname__}", outcomes)
        return [outcome.value for outcome in outcomes]

    def run_collect(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: Ranks = None,
        silent: Iterable[int] = (),
        timeout: float | None = None,
        grace: float | None = None,
        **kwargs: Any,
    ) -> list[Outcome]:
        """Like :meth:`run`, for calls that should fail. Returns one :class:`Outcome` per rank and raises no error.

        Every rank has the whole ``timeout``, even if other ranks fail, unless ``grace`` limits it. The world does not
        wait for the ``silent`` ranks after all other ranks have answered.
        """
        request = pickle.dumps((reference_to(function), pickle.dumps((args, kwargs))))
        asked = sorted(range(self.size) if ranks is None else set(ranks))
        if not set(asked) <= set(range(self.size)):
            raise ValueError(f"ranks = {asked}: the ranks of this world are 0 to {self.size - 1}.")
        lost = [rank for rank, process in enumerate(self._processes) if not process.is_alive()]
        if lost:
            how = ", ".join(f"rank {rank} {_how_it_ended(self._processes[rank])}" for rank in lost)
            warnings.warn(f"after the last call {how}; starting new ranks", RuntimeWarning, stacklevel=3)
            self._abandon()
        try:
            if not self._processes:
                self._start()
            for rank in asked:
                with contextlib.suppress(BrokenPipeError):  # the rank has just died; _wait_for() reports it
                    self._connections[rank].send_bytes(request)
            return self._wait_for(asked, self.call_timeout if timeout is None else timeout, grace, frozenset(silent))
        except BaseException:  # such as Ctrl-C: late answers would be taken for those of the next call
            self._abandon()
            raise

    def close(self) -> None:
        """Ask the ranks to exit, and kill those that do not. The next call starts new ranks."""
        for connection in self._connections:
            with contextlib.suppress(BrokenPipeError):  # that rank has left already
                connection.send_bytes(LEAVE)
        deadline = time.monotonic() + self.grace
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._abandon()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn") if self.environment else process_context(self.preload)
        # This process hosts the store, so that it survives the loss of any rank.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._stack_folder = tempfile.TemporaryDirectory(prefix="world-")
        for rank in range(self.size):
            self._stack_file(rank).touch()
            ours, theirs = context.Pipe()
            args = (rank, self.size, self._store.port, theirs, self._stack_file(rank), self.start_timeout, self.prepare)
            process = context.Process(target=rank_main, args=args, name=f"rank {rank}", daemon=True)
            with environment_variables(self.environment):
                process.start()
            theirs.close()  # otherwise the pipe would stay open after the rank ends
            self._processes.append(process)
            self._connections.append(ours)
        outcomes = self._wait_for(range(self.size), self.start_timeout, self.grace)
        if any(outcome.status != "returned" for outcome in outcomes):
            raise RanksFailedError(f"starting a world of {self.size}", outcomes)

    def _wait_for(
        self, asked: Iterable[int], timeout: float, grace: float | None, silent: frozenset[int] = frozenset()
    ) -> list[Outcome]:
        """Wait for one outcome per rank. If a rank died or did not answer, kill all ranks."""
        outcomes = {r: Outcome(r, "not asked") for r in range(self.size) if r not in asked}
        waiting = set(asked)
        deadline = time.monotonic() + timeout
        limit = f"within {timeout:g} s"
        while waiting - silent:
            sources = [source for r in waiting for source in (self._connections[r], self._processes[r].sentinel)]
            ready = wait_for_any(sources, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in sorted(waiting):
                if self._connections[rank] not in ready and self._processes[rank].sentinel not in ready:
                    continue
                outcomes[rank] = self._receive(rank)
                waiting.remove(rank)
                if grace is not None and outcomes[rank].status != "returned":
                    if time.monotonic() + grace < deadline:
                        deadline = time.monotonic() + grace
                        limit = f"within {grace:g} s of the failure of rank {rank}"
                    grace = None
        if waiting - silent:
            for rank, stacks in self._stacks(sorted(waiting)).items():
                outcomes[rank] = Outcome(rank, "no answer", message=limit, detail=stacks)
        elif waiting:
            outcomes |= {rank: Outcome(rank, "no answer", message="as expected") for rank in waiting}
        if any(outcome.status in ("no answer", "died") for outcome in outcomes.values()):
            self._abandon()
        return [outcomes[rank] for rank in range(self.size)]

    def _receive(self, rank: int) -> Outcome:
        with contextlib.suppress(EOFError, ConnectionError):  # the rank ended before or during its answer
            # The pipe may hold an answer of a rank that has ended since.
            if self._connections[rank].poll():
                answer: Outcome = pickle.loads(self._connections[rank].recv_bytes())
                return answer
        process = self._processes[rank]
        process.join(5)  # the pipe ends a moment before the process does
        return Outcome(rank, "died", message=_how_it_ended(process))

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        """The stack traces of these ranks, by rank."""
        for rank in ranks:
            pid = self._processes[rank].pid
            assert pid is not None
            with contextlib.suppress(ProcessLookupError):  # the rank has just died
                os.kill(pid, STACK_SIGNAL)
        stacks = dict.fromkeys(ranks, "")
        deadline = time.monotonic() + 3
        # A dump is complete when its file stops growing.
        while time.monotonic() < deadline:
            time.sleep(0.1)
            seen = {rank: self._stack_file(rank).read_text(errors="replace") for rank in ranks}
            if seen == stacks and all(seen.values()):
                break
            stacks = seen
        return {rank: _without_harness(text) for rank, text in stacks.items()}

    def _stack_file(self, rank: int) -> Path:
        assert self._stack_folder is not None
        return Path(self._stack_folder.name, f"rank{rank}.txt")

    def _abandon(self) -> None:
        """Kill the remaining ranks. The next call starts new ones."""
        _kill(self._processes)
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        self._store = None
        if self._stack_folder is not None:
            self._stack_folder.cleanup()
            self._stack_folder = None


def on_every_rank(body: Test) -> Test:
    """Run the body of a test on every rank of the fixture ``world``.

    The test has to be a function at the top level of a module, or a method of a class there. Its arguments are sent to
    the ranks. Of an ``AdapterSuite``, the ranks get ``adapter``, ``without`` and ``framework_options``, but no other
    attribute and no method that a test class overrides. pytest does not rewrite the assertions that ranks execute, so
    each of them has to state its values.
    """

    @functools.wraps(body)
    def test(*sent: Any, world: World | None = None, **arguments: Any) -> None:
        if world is not None:
            world.run(test, *sent, arguments, timeout=max(240, world.call_timeout))
        else:  # on a rank
            *suite, received = sent
            returned = body(*suite, **received)  # a generator would not have run
            assert returned is None, f"{body.__qualname__} returned {returned!r}, expected None"

    signature, fixture = inspect.signature(body), inspect.Parameter("world", inspect.Parameter.KEYWORD_ONLY)
    vars(test)["__signature__"] = signature.replace(parameters=[*signature.parameters.values(), fixture])
    return cast(Test, test)


def process_context(preload: Iterable[str]) -> SpawnContext | ForkServerContext:
    """The multiprocessing context of ranks. On Linux, a fork server with torch starts a new world in a second.

    Each process has one server. Only the ``preload`` of the first caller takes effect. With a GPU, the server imports
    only torch: a framework that initializes CUDA during import would make CUDA unusable in forked processes.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    modules = () if torch.cuda.is_available() else sorted({*preload, *PRELOADED})
    context.set_forkserver_preload([rank_main.__module__, *modules])
    if sys.version_info < (3, 11):
        # The server of Python 3.10 imports from its working directory first. A checkout there is not what is tested.
        before = Path.cwd()
        os.chdir(tempfile.gettempdir())
        try:
            ensure_running()
        finally:
            os.chdir(before)
    return context


def _without_harness(stacks: str) -> str:
    """A faulthandler dump without the frames of the rank's main loop and without its watchdog thread."""
    threads = [thread for thread in stacks.split("\n\n") if " in _end_with_parent" not in thread]
    kept = [re.sub(r"\n[^\n]* in _call_by_reference\n.*", "", thread, flags=re.DOTALL) for thread in threads]
    return "\n\n".join(kept) or "(no stacks: the process is stopped, or not yet up)"


def _kill(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.kill()  # SIGKILL also ends a rank that is stopped or blocked in C++
    for process in processes:
        process.join()
    processes.clear()


def _how_it_ended(process: BaseProcess) -> str:
    code = process.exitcode
    if code is None:
        return "closed its pipe but is still running"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
