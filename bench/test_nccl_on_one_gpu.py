"""nccl_on_one_gpu.py with the stand-in for NCCL: its parts, table and file, failures, and how processes end."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import nccl_on_one_gpu
import pytest
import torch
import typer
from nccl_parts import PARTS

from ring_backends import cli
from ring_backends.testing.marks import THOROUGH

HERE = Path(__file__).parent
SCRIPT = HERE / "nccl_on_one_gpu.py"

PLANTED = f"""
import os, signal, socket, sys, time
from pathlib import Path

sys.path.insert(0, {str(HERE)!r})
import nccl_on_one_gpu
from nccl_parts import PARTS, Part


def fails(gpu):
    private = f"{{Path.home()}} {{os.getcwd()}}/x.py {{socket.gethostname()}} 10.1.2.3"
    raise ValueError(f"rank {{os.environ['RANK']}}: {{private}}")


def hangs(gpu):
    time.sleep(1000)


def dies(gpu):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


PARTS.clear()
for part, seconds in ((fails, 60), (hangs, 8), (dies, 60)):
    PARTS[part.__name__] = Part(part, (2,), seconds, "")
PARTS["missing"] = Part(fails, (2,), 9, "", package="no_such_package")
PARTS["works"] = Part(lambda gpu: "ranks that work", (2,), 60, "")
nccl_on_one_gpu.app()
"""


def run(folder: Path, *options: str, script: Path = SCRIPT, seconds: float = 280) -> tuple[int, str, dict[str, Any]]:
    """The exit status, the output and the file of a run with the stand-in, of a user whose home is in the folder."""
    file = folder / "found.json"
    # A program of bench/ imports modules beside it.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, str(script), "--stand-in", "--json", str(file), *options],
        cwd=folder,
        env={**inherited, "HOME": str(folder / "home"), "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
    )
    assert file.exists(), done.stdout
    for private in (str(folder), str(HERE.parent), str(Path.home()), sys.prefix):
        assert private not in file.read_text()
    assert re.search(rf"\b{re.escape(socket.gethostname())}\b", file.read_text()) is None
    return done.returncode, done.stdout, json.loads(file.read_text())


def test_a_part_with_the_stand_in(tmp_path: Path) -> None:
    status, output, found = run(tmp_path, "--part", "other-call")
    assert status == 0, output
    (row,) = found["parts"]
    assert row.keys() == {"name", "ranks", "passed", "seconds", "transport", "saw"}
    assert (row["name"], row["ranks"], row["passed"], row["transport"]) == ("other-call", 2, True, "stand-in")
    assert "RingMismatchError after" in row["saw"]
    assert found["torch"] == torch.__version__
    assert found.keys() == {"parts", "torch", "nccl", "cuda", "driver", "device", "ring_backends", "command"}
    assert found["command"] == [SCRIPT.name, "--stand-in", "--json", "found.json", "--part", "other-call"]
    assert re.search(r"^ *other-call +2 +passed +[\d.]+ +stand-in +.*RingMismatchError", output, re.MULTILINE), output


SOME_PARTS = ("stopped", "zero2", "cuda-graph")


@THOROUGH
@pytest.mark.timeout(1500)
def test_parts_with_the_stand_in(tmp_path: Path, soak: int) -> None:
    """All parts with ``--soak 2``."""
    names = SOME_PARTS if soak == 1 else tuple(PARTS)
    status, output, found = run(tmp_path, *(f"--part={name}" for name in names), seconds=1400)
    assert status == 0, output
    assert [(row["name"], row["ranks"]) for row in found["parts"]] == [(x, n) for x in names for n in PARTS[x].ranks]
    for row in found["parts"]:
        may_not_run = PARTS[row["name"]].needs_gpu or PARTS[row["name"]].package is not None
        assert row["passed"] or (may_not_run and row["saw"].startswith("not run: ")), row


@THOROUGH
def test_other_parts_run_after_one_that_fails(tmp_path: Path) -> None:
    """The errors of all ranks are shown, and the stacks of ranks that do not answer."""
    script = tmp_path / "planted.py"
    script.write_text(PLANTED)
    status, output, found = run(tmp_path, script=script)
    assert status == 1, output
    saw = {row["name"]: (row["passed"], row["saw"]) for row in found["parts"]}
    assert saw == {
        "fails": (False, "; ".join(f"rank {rank}: ValueError: rank {rank}: ~ ./x.py HOST ADDRESS" for rank in (0, 1))),
        "hangs": (False, saw["hangs"][1]),
        "dies": (False, saw["dies"][1]),
        "missing": (None, "not run: no_such_package is not installed"),
        "works": (True, "ranks that work"),
    }
    for shown in (saw["hangs"][1], output):
        assert [shown.count(text) for text in ("no answer within 24 s", "in hangs\n")] == [2, 2]
    assert saw["dies"][1].startswith("rank 0: alive; rank 1: the process ended with status -9")


@pytest.mark.parametrize("stand_in", [False, True])
def test_everything_adds_two_commands(monkeypatch: pytest.MonkeyPatch, stand_in: bool) -> None:
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        name, *words = command[3:]
        known = {flag for option in commands[name].params for flag in option.opts}
        assert {word for word in words if word.startswith("--")} <= known, command
        return subprocess.CompletedProcess(command, 1, stderr="no room")

    commands: Any = typer.main.get_command(cli.app).commands
    monkeypatch.setattr(subprocess, "run", run)
    found = nccl_on_one_gpu.run_commands(4, stand_in)
    assert found == {"compare": {"error": "no room"}, "probe": {"error": "no room"}}


def test_the_transport_is_that_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that was to share a GPU fails if NCCL has not connected its ranks by sockets."""

    def ask_ranks(log: str, *options: Any) -> dict[int, dict[str, Any]]:
        (options[-1] / "nccl-0.log").write_text(f"host:7:8 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] {log}\n")
        return {0: {"passed": True, "saw": "hops"}}

    for log, shares, transport, passed in (
        ("[send] via NET/Socket/0", True, "NET/Socket", True),
        ("via SHM/direct/direct", True, "SHM/direct", False),
        ("via P2P/CUMEM", False, "P2P/CUMEM", True),
        ("nothing", False, None, False),
    ):
        monkeypatch.setattr(nccl_on_one_gpu, "ask_ranks", partial(ask_ranks, log))
        row = nccl_on_one_gpu.run_part("communicator", PARTS["communicator"], 2, False, shares)
        assert (row["transport"], row["passed"]) == (transport, passed), row


def test_texts_have_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setattr(nccl_on_one_gpu.getpass, "getuser", lambda: "ada")
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-7.example.org")
    for text, shown in {
        'File "/home/ada/my project/run.py", line 3': 'File "run.py", line 3',
        "no /opt/conda/lib/libnccl.so, ~/x/y.txt": "no libnccl.so, y.txt",
        "gpu-7 and gpu-7.example.org at 10.0.0.7:29500 or 127.0.0.1": "HOST and HOST at ADDRESS:29500 or 127.0.0.1",
        "fe80::1, [2001:db8:0:0:0:0:0:7]:29500, c10d::Work, 12:30:59": "ADDRESS, [ADDRESS]:29500, c10d::Work, 12:30:59",
        "ada, Canada, NET/Socket/0, 1/2, [1, 2]": "USER, Canada, NET/Socket/0, 1/2, [1, 2]",
    }.items():
        assert nccl_on_one_gpu.without_names([text, 7, None]) == [shown, 7, None]
