"""nccl_on_one_gpu.py with the stand-in for NCCL: its parts, table and file, failures, and how processes end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nccl_on_one_gpu
import pytest
import torch
import typer
from nccl_parts import PARTS
from typer.testing import CliRunner

from ring_backends import cli
from ring_backends.testing.marks import THOROUGH

HERE = Path(__file__).parent
SCRIPT = HERE / "nccl_on_one_gpu.py"

PLANTED = f"""
import os, signal, socket, sys, time
from pathlib import Path

sys.path.insert(0, {str(HERE)!r})
import nccl_on_one_gpu
from nccl_parts import PARTS, NotRunError, Part


def fails(gpu):
    private = f"{{Path.home()}} {{os.getcwd()}}/x.py {{socket.gethostname()}} 10.1.2.3"
    raise ValueError(f"rank {{os.environ['RANK']}}: {{private}}")


def hangs(gpu):
    Path(f"pid-{{os.environ['RANK']}}").write_text(str(os.getpid()))
    time.sleep(1000)


def dies(gpu):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def cannot_run(gpu):
    raise NotRunError("no framework")


PARTS.clear()
for part, seconds in ((fails, 60), (hangs, 8), (dies, 60), (cannot_run, 60)):
    PARTS[part.__name__] = Part(part, (2,), seconds, "")
PARTS["missing"] = Part(fails, (2,), 9, "", package="no_such_package")
PARTS["works"] = Part(lambda gpu: "ranks that work", (2,), 60, "")
nccl_on_one_gpu.app()
"""


def environment(folder: Path) -> dict[str, str]:
    """Variables of a user whose home is in this folder. A program of bench/ imports modules beside it."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return {**inherited, "HOME": str(folder / "home"), "COLUMNS": "200"}


def run(folder: Path, *options: str, script: Path = SCRIPT, seconds: float = 280) -> tuple[int, str, dict[str, Any]]:
    """The exit status, the output and the file of a run with the stand-in."""
    file = folder / "found.json"
    done = subprocess.run(
        [sys.executable, str(script), "--stand-in", "--json", str(file), *options],
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
    )
    assert file.exists(), done.stdout
    check_no_names(file.read_text(), folder)
    return done.returncode, done.stdout, json.loads(file.read_text())


def check_no_names(text: str, folder: Path) -> None:
    for private in (str(folder), str(HERE.parent), str(Path.home()), sys.prefix):
        assert private not in text
    assert re.search(rf"\b{re.escape(socket.gethostname())}\b", text) is None


def planted(folder: Path) -> Path:
    script = folder / "planted.py"
    script.write_text(PLANTED)
    return script


def test_a_part_with_the_stand_in(tmp_path: Path) -> None:
    status, output, found = run(tmp_path, "--part", "other-call")
    assert status == 0, output
    (row,) = found["parts"]
    assert row.keys() == {"name", "ranks", "passed", "seconds", "transport", "saw"}
    assert (row["name"], row["ranks"], row["passed"], row["transport"]) == ("other-call", 2, True, "stand-in")
    assert "RingMismatchError after" in row["saw"]
    assert 0 < row["seconds"] < 280
    assert found["torch"] == torch.__version__
    assert found.keys() == {"parts", "torch", "nccl", "cuda", "driver", "device", "ring_backends", "command"}
    assert found["command"] == [SCRIPT.name, "--stand-in", "--json", "found.json", "--part", "other-call"]
    assert re.search(r"^ *other-call +2 +passed +\d+\.\d +stand-in +.*RingMismatchError", output, re.MULTILINE), output


SOME_PARTS = ("stopped", "zero2", "cuda-graph")


@THOROUGH
@pytest.mark.timeout(1500)
def test_parts_with_the_stand_in(tmp_path: Path, soak: int) -> None:
    """All parts with ``--soak 2``."""
    names = SOME_PARTS if soak == 1 else tuple(PARTS)
    status, output, found = run(tmp_path, *(f"--part={name}" for name in names), seconds=1400)
    assert status == 0, output
    expected = {(name, n): None if PARTS[name].needs_gpu else True for name in names for n in PARTS[name].ranks}
    for row in found["parts"]:
        if row["saw"].startswith("not run: ") and PARTS[row["name"]].package is not None:
            expected[row["name"], row["ranks"]] = None  # its framework is not installed here
    assert {(row["name"], row["ranks"]): row["passed"] for row in found["parts"]} == expected


@THOROUGH
def test_other_parts_run_after_one_that_fails(tmp_path: Path) -> None:
    """The errors of all ranks are shown, and the stacks of ranks that do not answer."""
    status, output, found = run(tmp_path, script=planted(tmp_path))
    assert status == 1, output
    saw = {row["name"]: (row["passed"], row["saw"]) for row in found["parts"]}
    assert saw == {
        "fails": (False, "; ".join(f"rank {rank}: ValueError: rank {rank}: ~ ./x.py HOST ADDRESS" for rank in (0, 1))),
        "hangs": (False, saw["hangs"][1]),
        "dies": (False, saw["dies"][1]),
        "cannot_run": (None, "not run: no framework"),
        "missing": (None, "not run: no_such_package is not installed"),
        "works": (True, "ranks that work"),
    }
    for shown in (saw["hangs"][1], output):
        assert [shown.count(text) for text in ("no answer within 24 s", "in hangs\n")] == [2, 2]
    assert saw["dies"][1].startswith("rank 0: alive; rank 1: the process ended with status -9")


@THOROUGH
def test_an_interrupt_ends_all_processes(tmp_path: Path) -> None:
    command = [sys.executable, str(planted(tmp_path)), "--stand-in", "--part", "hangs"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment(tmp_path)) as process:
        files = [tmp_path / f"pid-{rank}" for rank in range(2)]
        end = time.monotonic() + 120
        while not all(file.exists() and file.read_text() for file in files):
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) != 0
    assert not any(Path("/proc", file.read_text()).exists() for file in files)


@pytest.mark.parametrize("stand_in", [False, True])
def test_everything_adds_two_commands(monkeypatch: pytest.MonkeyPatch, stand_in: bool) -> None:
    """The first command writes its file, and the second fails."""

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[:3] == [sys.executable, "-m", "ring_backends"]
        assert options["timeout"] == 600
        name, *words = command[3:]
        known = {flag for option in commands[name].params for flag in option.opts}
        assert {word for word in words if word.startswith("--")} <= known, command
        assert words[words.index("--nproc-per-node") + 1] == "4"
        if name == "compare":
            Path(words[words.index("--json") + 1]).write_text('{"rows": []}')
        return subprocess.CompletedProcess(command, 0 if name == "compare" else 1, stderr="no room")

    commands: Any = typer.main.get_command(cli.app).commands
    monkeypatch.setattr(subprocess, "run", run)
    assert nccl_on_one_gpu.run_commands(4, stand_in) == {"compare": {"rows": []}, "probe": {"error": "no room"}}


@pytest.mark.parametrize(
    ("options", "text"), [(["--part", "nothing"], "--part nothing: there is no such part"), ([], "torch finds no GPU")]
)
def test_what_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch, options: list[str], text: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("COLUMNS", "200")
    shown = CliRunner().invoke(nccl_on_one_gpu.app, options)
    assert shown.exit_code == 2
    assert text in shown.output


def test_the_parts_are_listed() -> None:
    shown = CliRunner().invoke(nccl_on_one_gpu.app, ["--list"])
    assert shown.exit_code == 0
    assert all(name in shown.output for name in PARTS)


def test_ranks_on_one_gpu_are_hosts_with_one_gpu_each(tmp_path: Path) -> None:
    shared, own = (nccl_on_one_gpu.environment(1, 2, 29511, False, shares, tmp_path) for shares in (True, False))
    expected = {"RANK": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NCCL_HOSTID": "ring-1", "NCCL_NET": "Socket"}
    assert shared.items() >= expected.items()
    assert own.items() >= {"RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}.items()
    assert {name for name in own if name.startswith("NCCL")} == {"NCCL_DEBUG", "NCCL_DEBUG_FILE"}


@pytest.mark.parametrize(
    ("log", "shares", "transport", "passed"),
    [
        ("Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0", True, "NET/Socket", True),
        ("Channel 00/0 : 0[0] -> 1[0] via SHM/direct/direct", True, "SHM/direct", False),
        ("Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM", False, "P2P/CUMEM", True),
        ("nothing", False, None, False),
    ],
)
def test_the_transport_is_that_of_the_log(
    monkeypatch: pytest.MonkeyPatch, log: str, shares: bool, transport: str | None, passed: bool
) -> None:
    def ask_ranks(*options: Any) -> dict[int, dict[str, Any]]:
        (options[-1] / "nccl-0.log").write_text(f"host:7:8 [0] NCCL INFO {log}\n")
        return {0: {"passed": True, "saw": "hops"}}

    monkeypatch.setattr(nccl_on_one_gpu, "ask_ranks", ask_ranks)
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
