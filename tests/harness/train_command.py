"""``ring-backends train`` with an adapter: losses equal those of one native rank, also after a resume."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ring_backends.cli import app
from ring_backends.registry import adapter_modules
from ring_backends.testing.capabilities import AdapterSuite, core, requires

STEPS = 4
KILLED_STEPS = 6
"""Number of steps of the run that is killed. It saves after each step."""


def train(folder: Path, backend: str, num_ranks: int, *options: str) -> dict[int, float]:
    """Run ``train`` on a short sequence, and return the loss of each step."""
    if num_ranks == 1:
        alone = CliRunner().invoke(app, arguments(folder, backend, *options))
        assert alone.exit_code == 0, alone.output
    else:
        with started(folder, backend, num_ranks, *options) as process:
            try:
                process.communicate(timeout=240)
            finally:
                _kill(process)
        assert process.returncode == 0, (folder / "errors.log").read_text()
    return {record["step"]: record["loss"] for record in result(folder)["steps"]}


def arguments(folder: Path, backend: str, *options: str) -> list[str]:
    written = str(folder / "result.json")
    return ["train", "--seq-len", "512", "--json", written, "--backend", backend, *options]


def started(folder: Path, backend: str, num_ranks: int, *options: str) -> subprocess.Popen[bytes]:
    """Start ``train`` in its own process group."""
    command = [sys.executable, "-m", "ring_backends", *arguments(folder, backend, *options)]
    with (folder / "errors.log").open("wb") as errors:
        return subprocess.Popen(
            [*command, "--nproc-per-node", str(num_ranks)],
            cwd=folder,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )


def result(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return read


def kill_while_it_saves(process: subprocess.Popen[bytes], folder: Path, moment: float) -> None:
    """Kill the run when part of a checkpoint exists, or up to 20 ms later."""
    unfinished, is_there, deadline = folder / "checkpoint.unfinished", False, time.monotonic() + 200
    while process.poll() is None and not is_there and time.monotonic() < deadline:
        if unfinished.exists():
            os.killpg(process.pid, signal.SIGSTOP)
            is_there = unfinished.exists()
            os.killpg(process.pid, signal.SIGCONT if moment or not is_there else signal.SIGKILL)
        time.sleep(0.0005)
    time.sleep(0.02 * moment)
    _kill(process)
    assert is_there, "the test never saw an unfinished checkpoint"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill all processes of the run at once, as when a machine fails."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


STARTS_PROCESSES = pytest.mark.matrix(reason="starts up to eight processes; test_cli.py also tests the command")


@core
@requires("training", "save and load")
class TrainCommandTests(AdapterSuite):
    @STARTS_PROCESSES
    def test_train_stopped_and_resumed_has_the_losses_of_one_rank(self, tmp_path: Path) -> None:
        wanted = train(tmp_path, "native", 1, "--steps", str(STEPS))
        first = train(tmp_path, self.backend_name, 2, "--steps", "2", "--save", "checkpoint")
        rest = train(tmp_path, self.backend_name, 2, "--steps", str(STEPS), "--save", "checkpoint", "--resume")
        assert list(first | rest) == list(wanted)
        assert len(wanted) == len(first) + len(rest) == STEPS
        assert first | rest == pytest.approx(wanted, abs=1e-4)

    @STARTS_PROCESSES
    def test_train_killed_and_resumed_ends_with_the_same_parameters(self, tmp_path: Path, soak: int) -> None:
        options = ["--steps", str(KILLED_STEPS), "--embed-dim", "256"]
        train(tmp_path, self.backend_name, 2, *options)
        undisturbed = result(tmp_path)
        saving = [*options, "--save", "checkpoint", "--save-every", "1", "--resume"]
        num_kills = 2 * soak
        for index in range(num_kills):
            with started(tmp_path, self.backend_name, 2, *saving) as process:
                kill_while_it_saves(process, tmp_path, index / num_kills)
        (tmp_path / "result.json").unlink()
        train(tmp_path, self.backend_name, 2, *saving)
        assert result(tmp_path)["parameters_sha256"] == undisturbed["parameters_sha256"]
        assert result(tmp_path)["evaluation_loss"] == undisturbed["evaluation_loss"]
        assert not [*tmp_path.glob("checkpoint.unfinished")]

    @property
    def backend_name(self) -> str:
        return next(name for name, module in adapter_modules().items() if module == self.adapter)
