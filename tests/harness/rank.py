"""The main loop of a rank in a test world, and the transport of calls and outcomes.

Functions are sent by name and file, not by pickle. Ranks therefore find test modules that pytest imported under
another name (``--import-mode=importlib``). Arguments and results, tensors included, are sent as bytes. Shared memory
and file descriptors would be lost with their rank.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

STACK_SIGNAL = signal.SIGUSR1
LEAVE = b""
# Longer than any call. The world reports a hang with all stacks, before the group times out.
_GROUP_TIMEOUT = timedelta(hours=1)


@dataclass(frozen=True)
class Outcome:
    """How one call ended on one rank.

    Attributes:
        status: ``"returned"``, ``"raised"``, ``"no answer"``, ``"died"``, or ``"not asked"``.
        value: what the function returned.
        error_types: the class of the raised error and its bases, as ``module.name``. Empty without an error.
        message: ``str`` of the error, or one line that says why there is no answer.
        detail: the traceback, or the stacks of a rank that did not answer.
    """

    rank: int
    status: Literal["returned", "raised", "no answer", "died", "not asked"]
    value: Any = None
    error_types: tuple[str, ...] = ()
    message: str = ""
    detail: str = ""

    @property
    def error_type(self) -> str | None:
        """The raised error's class name, without its module."""
        return self.error_types[0].rpartition(".")[2] if self.error_types else None

    @property
    def line(self) -> str:
        """The outcome in one line, of at most 300 characters."""
        what = self.status if self.error_type is None else f"raised {self.error_type}"
        return f"rank {self.rank} {what}: {self.message}".partition("\n")[0][:300]

    def raised(self, error_class: type[BaseException]) -> bool:
        """Whether the rank raised an ``error_class`` or a subclass of it."""
        return _dotted(error_class) in self.error_types

    def check(self, error_class: type[BaseException], *texts: str) -> None:
        """Check that the rank raised ``error_class``, and that its message contains the texts."""
        assert self.raised(error_class), self
        for text in texts:
            assert text in self.message, self

    def __str__(self) -> str:
        if self.status == "raised":
            return f"--- rank {self.rank} raised {self.error_type}:\n{self.detail.rstrip()}"
        colon = ": " if self.message else ""
        return f"--- rank {self.rank} {self.status}{colon}{self.message}\n{self.detail}".rstrip()


def rank_main(
    rank: int,
    size: int,
    port: int,
    connection: Connection,
    stack_file: Path,
    start_timeout: float,
    prepare: Callable[[], None] | None,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends the ranks
    stacks = stack_file.open("w")
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    threading.Thread(target=_end_with_parent, name="end with parent", daemon=True).start()
    connection.send_bytes(_outcome_of(rank, _join, rank, size, port, start_timeout, prepare))
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            break
        if request == LEAVE:
            break
        connection.send_bytes(_outcome_of(rank, _call_by_reference, request))
    if dist.is_initialized():
        dist.destroy_process_group()


def _join(rank: int, size: int, port: int, start_timeout: float, prepare: Callable[[], None] | None) -> None:
    torch.set_num_threads(1)
    if prepare is not None:
        prepare()
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo0" if sys.platform == "darwin" else "lo",
    )
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=start_timeout))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_GROUP_TIMEOUT)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait_for_any([parent.sentinel])
    os._exit(1)


def _outcome_of(rank: int, function: Callable[..., Any], *args: Any) -> bytes:
    try:
        return pickle.dumps(Outcome(rank, "returned", function(*args)))
    except BaseException as error:  # SystemExit too: the rank reports every error and continues
        at = error.__traceback__
        while at is not None and at.tb_next is not None and at.tb_frame.f_code.co_filename == __file__:
            at = at.tb_next
        return pickle.dumps(
            Outcome(
                rank,
                "raised",
                error_types=tuple(map(_dotted, type(error).__mro__)),
                message=str(error),
                detail="".join(traceback.format_exception(type(error), error, at)),
            )
        )


def _call_by_reference(request: bytes) -> Any:
    (module_name, file, name), arguments = pickle.loads(request)
    # Import the function's module before unpickling arguments, because it may define their classes.
    function = attrgetter(name)(_load_module(module_name, file))
    args, kwargs = pickle.loads(arguments)
    return function(*args, **kwargs)


def reference_to(function: Callable[..., Any]) -> tuple[str, str | None, str]:
    """(module name, module file, qualified name)."""
    module = sys.modules.get(getattr(function, "__module__", ""))
    name: str = getattr(function, "__qualname__", repr(function))
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if module is None or found is not function:
        raise ValueError(
            f"function = {name}: the ranks find a function by its module and name, so it must be defined "
            "at a module's top level; move it there, and pass the variables of its closure as arguments."
        )
    return module.__name__, getattr(module, "__file__", None), name


def _load_module(name: str, file: str | None) -> types.ModuleType:
    """The module with this name *and* file. It is imported by file if the name does not lead to this file."""
    loaded = sys.modules.get(name)
    if loaded is not None and _is_same_file(getattr(loaded, "__file__", None), file):
        return loaded
    if loaded is None:
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:  # its parent package does not exist
            spec = None
        if spec is not None and _is_same_file(spec.origin, file):
            return importlib.import_module(name)
    if file is None:
        raise ModuleNotFoundError(f"module {name} has no file, and the rank cannot import it by name", name=name)
    # Unpickling imports the parent packages of a dotted name. pytest invents them, so they are created here.
    parents = name.split(".")[:-1]
    for depth in range(1, len(parents) + 1):
        parent = ".".join(parents[:depth])
        sys.modules.setdefault(parent, types.ModuleType(parent))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _is_same_file(path: str | None, other: str | None) -> bool:
    return path == other or (
        path is not None and other is not None and os.path.realpath(path) == os.path.realpath(other)
    )


def _dotted(error_class: type) -> str:
    return f"{error_class.__module__}.{error_class.__qualname__}"
