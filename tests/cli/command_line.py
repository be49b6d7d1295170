"""Runs of ``ring-backends`` and of Python programs, and checks of the errors that commands print."""

from __future__ import annotations

import functools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import ring_backends
from ring_backends.cli import app

ROOT = Path(__file__).resolve().parents[2]
"""The root of the source tree."""
PACKAGE_ROOT = Path(ring_backends.__file__).absolute().parent.parent
"""The folder from which started processes import the package under test."""

_LEFT_OUT = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTEST_ADDOPTS"}
"""The variables of a launcher and of pytest."""


def environment(*path: Path, **more: str) -> dict[str, str]:
    """The environment of a started process, with these folders and this package on its path, and one thread."""
    inherited = {name: value for name, value in os.environ.items() if name not in _LEFT_OUT}
    search_path = os.pathsep.join(filter(None, [*map(str, path), str(PACKAGE_ROOT), inherited.get("PYTHONPATH")]))
    return {**inherited, "PYTHONPATH": search_path, "OMP_NUM_THREADS": "1", "COLUMNS": "250", **more}


def run(
    arguments: Sequence[str], cwd: Path, env: dict[str, str] | None = None, timeout: float = 240, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=env or environment(), timeout=timeout, **options)


def output_of(arguments: Sequence[str], cwd: Path, env: dict[str, str] | None = None, timeout: float = 240) -> str:
    """Run Python with these arguments, without an error. Returns the output and the error output together."""
    try:
        done = run(arguments, cwd, env, timeout, stderr=subprocess.STDOUT)
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout
        pytest.fail(f"{arguments} did not end within {timeout} s:\n{output}")
    assert done.returncode == 0, f"{arguments}:\n{done.stdout}"
    return done.stdout


ALONE = """
import sys
from importlib import import_module

import torch

backend = import_module(f"ring_backends.adapters.{sys.argv[1]}")
ring = backend.initialize()
attention = backend.RingDilatedAttention([4, 8], [1, 2], ring=ring)
x = torch.randn(1, 8, 1, 4)
attention(x, x, x)
assert not torch.distributed.is_initialized()
for number, options in enumerate(eval(sys.argv[2])):
    model = torch.nn.Linear(4, 4, bias=False)
    state = backend.parallelize(model, lambda x: torch.optim.SGD(x, lr=1.0), ring, max_grad_norm=0.25, **options)
    before = state.full_state_dict()["weight"]
    state.backward(state.loss(attention(state.model(x), x, x).square().sum(), 1))
    state.step()
    moved = float((state.full_state_dict()["weight"] - before).norm())
    assert state.divisor == 1
    assert abs(moved - 0.25) < 1e-5, moved
    state.save(f"checkpoint {number}")
    state.load(f"checkpoint {number}")
"""


def check_alone(folder: Path, adapter: str, *options: Mapping[str, Any], environment: Any = None) -> None:
    """Check a process without a launcher. It attends without a process group, and trains with each of the options."""
    output_of(["-c", ALONE, adapter, repr(options)], folder, environment, timeout=120)


def start(arguments: Sequence[str], cwd: Path, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start Python with these arguments in its own process group, as a terminal does."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=cwd,
        env=env or environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Reset SIGINT: background jobs of a shell ignore Ctrl-C, and their child processes inherit this.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def interrupt(process: subprocess.Popen[str]) -> str:
    """Press Ctrl-C, and check that all ranks end with one message. Returns the output."""
    os.killpg(process.pid, signal.SIGINT)
    asked = time.monotonic()
    printed, errors = process.communicate(timeout=30)  # ends when the last rank has closed its ends of the pipes
    assert time.monotonic() - asked < 5
    assert (process.returncode, errors) == (130, "ring-backends: interrupted.\n")
    return printed


def kill(process: subprocess.Popen[str]) -> None:
    """Kill a started process with its children, if it runs."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def invoke(words: str, *more: Any) -> Any:
    """Run a command in this process, with arguments that are separated by spaces, and more arguments.

    It must not start ranks or import new modules.
    """
    return CliRunner(env={"COLUMNS": "250"}).invoke(app, [*words.split(), *map(str, more)])


def shown(words: str, *more: Any) -> str:
    """Run a command as :func:`invoke`, without an error. Returns the printed text."""
    done = invoke(words, *more)
    assert done.exit_code == 0, done.output
    return done.stdout


def refused(words: str, *more: Any) -> str:
    """Run a command as :func:`invoke`, which refuses its arguments. Returns the printed error."""
    done = invoke(words, *more)
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.stderr
    return done.stderr


def check_refusal(line: str, words: str, *more: Any) -> None:
    """Check that a command refuses its arguments with one line, which begins as the pattern ``line``."""
    error = refused(words, *more)
    assert re.fullmatch(f"ring-backends {words.split()[0]}: error: {line}.*\n", error), error
