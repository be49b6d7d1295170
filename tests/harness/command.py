"""The command line trains by any adapter alike: the same losses as by the native one on a single rank, resumed too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ring_backends.cli import app
from ring_backends.registry import adapter_modules
from ring_backends.testing.capabilities import AdapterSuite, requires

STEPS = 4


def train(folder: Path, backend: str, num_ranks: int, *options: str) -> dict[int, float]:
    """Run ``train`` on a short sequence, one rank in this process; the loss of each step that it took."""
    result = str(folder / "result.json")
    arguments = ["train", "--seq-len", "512", "--json", result, "--backend", backend, *options]
    if num_ranks == 1:
        alone = CliRunner().invoke(app, arguments)
        assert alone.exit_code == 0, alone.output
    else:
        command = [sys.executable, "-m", "ring_backends", *arguments, "--nproc-per-node", str(num_ranks)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
    steps = json.loads((folder / "result.json").read_text())["steps"]
    return {record["step"]: record["loss"] for record in steps}


class CommandTests(AdapterSuite):
    @requires("training", "save and load")
    def test_train_stopped_and_resumed_has_the_losses_of_one_rank(self, tmp_path: Path) -> None:
        name = next(name for name, module in adapter_modules().items() if module == self.adapter)
        wanted = train(tmp_path, "native", 1, "--steps", str(STEPS))
        first = train(tmp_path, name, 2, "--steps", "2", "--save", "checkpoint")
        rest = train(tmp_path, name, 2, "--steps", str(STEPS), "--save", "checkpoint", "--resume")
        assert list(first | rest) == list(wanted)
        assert len(wanted) == len(first) + len(rest) == STEPS
        assert first | rest == pytest.approx(wanted, abs=1e-4)
