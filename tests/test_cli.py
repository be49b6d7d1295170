"""The command line: printed text, written files and exit codes.

Starting ranks takes seconds, so several tests share each such run. Commands that start no ranks run in this process.
"""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import ring_backends
from ring_backends.cli import app
from ring_backends.cli.text import Document, standard_library_sources
from ring_backends.cost.default_branches import default_branches
from ring_backends.ring.launch import RankFailedError, launch

SMALL = ["--seq-len", "512", "--embed-dim", "32", "--num-layers", "1"]
PACKAGES = str(Path(ring_backends.__file__).parent.parent)
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def environment(**extra: str) -> dict[str, str]:
    """The environment of this process, without the variables of a launcher, and with this package on the path."""
    inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    search_path = os.pathsep.join(filter(None, [PACKAGES, inherited.get("PYTHONPATH")]))
    return {**inherited, "PYTHONPATH": search_path, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **extra}


def run(*arguments: str, cwd: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ring_backends", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment(**extra), capture_output=True, text=True, timeout=240)


def invoke(*arguments: str) -> Any:
    """Run a command in this process. It must not start ranks or import new modules."""
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, list(arguments))


def train(cwd: Path, *arguments: str, **extra: str) -> tuple[dict[str, Any], str]:
    """Run ``train``. Returns the content of the --json file, and the printed text."""
    done = run("train", *SMALL, "--json", "run.json", *arguments, cwd=cwd, **extra)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads((cwd / "run.json").read_text()), done.stdout


def losses(result: dict[str, Any]) -> list[float]:
    return [step["loss"] for step in result["steps"]]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    return train(tmp_path_factory.mktemp("one"), "--steps", "4")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    cwd = tmp_path_factory.mktemp("two")
    return *train(cwd, "--steps", "2", "--nproc-per-node", "2", "--save", "checkpoint.pt"), cwd


ANOTHER_ERROR = pytest.mark.matrix(reason="another error")

# Help and errors


def test_help_lists_every_command_and_version_is_printed() -> None:
    shown = invoke("--help")
    assert shown.exit_code == 0
    assert all(command in shown.output for command in ("train", "compare", "plan", "info", "convert"))
    assert invoke("--version").output == f"ring-backends {ring_backends.__version__}\n"


def test_train_help_names_the_options_of_the_contract() -> None:
    shown = invoke("train", "--help")
    assert shown.exit_code == 0
    for option in (
        "backend",
        "segment-lengths",
        "dilation-rates",
        "text",
        "seq-len",
        "steps",
        "nproc-per-node",
        "json",
    ):
        assert f"--{option}" in shown.output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--stepz", "3"], "--stepz"),
        (["--steps", "many"], "--steps"),
        (["--steps", "0"], "--steps"),
        (["--seed", "99999999999999999999999"], "--seed"),
        (["--seed", "-1"], "--seed"),
    ],
)
def test_errors_of_the_parser(arguments: list[str], named: str) -> None:
    refused = invoke("train", *arguments)
    assert refused.exit_code == 2
    assert named in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--segment-lengths", "64,512"], "--dilation-rates: dilation_rates is missing beside segment_lengths"),
        (["--segment-lengths", "64,x", "--dilation-rates", "1,2"], "--segment-lengths: .* 'x' is no integer"),
        (
            ["--segment-lengths", "64", "0", "--dilation-rates", "1", "2"],
            r"--segment-lengths: segment_lengths\[1\] = 0",
        ),
        (["--segment-lengths", "64,512", "--dilation-rates", "1,-2"], r"--dilation-rates: dilation_rates\[1\] = -2"),
        (["--segment-lengths", "8", "--dilation-rates", "1", "2"], "--segment-lengths: segment_lengths has 1 entries"),
        (["--head-mode", "some"], "--head-mode: head_mode = 'some'"),
        (["--head-mode", "grouped", "--num-heads", "2"], "--head-mode: head_mode='grouped' with 2 heads"),
        (["--layout", "zig"], "--layout: layout = 'zig': .* contiguous, zigzag"),
        (["--dtype", "fp8"], "--dtype: dtype = 'fp8'"),
        (["--lr", "-1"], r"--lr: lr = -1\.0: must be above 0"),
        (["--lr", "nan"], "--lr: lr = nan: must be above 0 and finite"),
        (["--resume"], "--resume: there is no checkpoint without --save"),
        (["--save-every", "2"], "--save-every: there is no checkpoint without --save"),
        (["--json", "no/such/directory.json"], "--json: json = 'no/such/directory.json'"),
        (["--text", "no-such-file"], "--text: text = 'no-such-file': not a file"),
        (["--seq-len", "1000000000"], "--text: .* with seq_len = 1,000,000,000: at least 2,000,000,002"),
    ],
)
def test_an_error_is_one_line_that_names_the_option(arguments: list[str], line: str) -> None:
    refused = invoke("train", *arguments)
    assert refused.exit_code == 2
    assert re.fullmatch(f"ring-backends train: error: {line}.*\n", refused.stderr), refused.stderr


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--backend", "horovod"], "--backend: backend = 'horovod': no such adapter"),
        pytest.param(
            ["--num-heads", "5"], "--embed-dim: embed_dim = 32: num_heads = 5 must divide it", marks=ANOTHER_ERROR
        ),
        pytest.param(["--ring-size", "2"], "--ring-size: ring_size = 2: must divide", marks=ANOTHER_ERROR),
        pytest.param(["--kernel", "fast"], "--kernel: kernel = 'fast'", marks=ANOTHER_ERROR),
    ],
)
def test_an_error_of_a_rank_is_one_line(arguments: list[str], line: str) -> None:
    refused = invoke("train", *SMALL, "--steps", "1", *arguments)
    assert refused.exit_code == 2
    assert re.fullmatch(f"ring-backends train: error: {line}.*\n", refused.stderr), refused.stderr


# Training text


def test_the_default_text_is_the_standard_library_in_a_fixed_order() -> None:
    paths = standard_library_sources()
    assert paths == standard_library_sources()
    assert {"abc.py", "ast.py", "argparse.py"} <= {path.name for path in paths}
    assert not any({"site-packages", "__pycache__", "test"} & set(path.parts[-3:]) for path in paths)
    assert sum(path.stat().st_size for path in paths) > 20 * 131072


def test_windows_are_consecutive_wrap_around_and_exclude_the_evaluation_text(tmp_path: Path) -> None:
    text = bytes(range(100))
    sizes = [7, 0, 50, 43]
    paths = []
    for index, size in enumerate(sizes):
        paths.append(tmp_path / f"{index}.txt")
        start = sum(sizes[:index])
        paths[-1].write_bytes(text[start : start + size])
    document = Document(paths, seq_len=20)
    assert document.num_bytes == 100
    assert document.evaluation_window() == text[79:]
    assert document.num_windows == 3
    windows = [document.window(index) for index in range(4)]
    assert windows == [text[0:21], text[20:41], text[40:61], text[0:21]]
    with pytest.raises(ValueError, match=r"100 bytes in 4 file\(s\) with seq_len = 50: at least 102 are needed"):
        Document(paths, seq_len=50)
    assert Document(paths, seq_len=49).window(0) == text[:50]


@pytest.mark.parametrize("seq_len", [1, 2, 100, 512, 131072, 10**9])
def test_the_default_pattern_ends_with_the_whole_sequence_at_little_cost(seq_len: int) -> None:
    lengths, rates = default_branches(seq_len)
    assert lengths[-1] == seq_len
    assert rates[0] == 1
    assert sum(length / rate**2 for length, rate in zip(lengths, rates, strict=True)) <= 256 + 64 + 64


# Training


def test_training_learns_and_reports(one_rank: tuple[dict[str, Any], str]) -> None:
    result, printed = one_rank
    assert [step["step"] for step in result["steps"]] == [1, 2, 3, 4]
    assert 5.3 < losses(result)[0] < 5.8
    assert losses(result)[-1] < losses(result)[0] - 0.2
    assert 3.0 < result["evaluation_loss"] < 5.8
    assert result["bytes_sent"] == result["messages_sent"] == [0]
    assert result["peak_memory_bytes"][0] > 2**20
    assert result["tokens_per_second"] > 0
    assert result["versions"]["torch"]
    assert result["versions"]["ring_backends"] == ring_backends.__version__
    assert result["options"]["seq_len"] == 512
    assert result["options"]["segment_lengths"] == [128, 256, 512]
    lines = printed.splitlines()
    assert [bool(re.match(r"step \d/4  loss \d", line)) for line in lines] == [False, True, True, True, True, False]
    for reached in ("loss", "evaluation loss", "tokens/s", "peak memory", "bytes per rank"):
        assert reached in lines[-1]


def test_two_ranks_train_as_one_and_use_the_ring(
    one_rank: tuple[dict[str, Any], str], two_ranks: tuple[dict[str, Any], str, Path]
) -> None:
    result, printed, _ = two_ranks
    assert losses(result) == pytest.approx(losses(one_rank[0])[:2], abs=1e-3)
    assert len(result["bytes_sent"]) == len(result["peak_memory_bytes"]) == 2
    assert min(result["bytes_sent"]) > 0
    assert f"sent {result['bytes_sent'][0]:,} / {result['bytes_sent'][1]:,} bytes per rank." in printed.splitlines()[-1]
    assert printed.count("step 1/2") == 1, "only rank 0 prints"


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(
    one_rank: tuple[dict[str, Any], str], two_ranks: tuple[dict[str, Any], str, Path]
) -> None:
    stopped, _, cwd = two_ranks
    options = ["--nproc-per-node", "2", "--save", "checkpoint.pt", "--resume", "--layout", "zigzag"]
    result, printed = train(cwd, "--steps", "4", *options)
    assert "resumed checkpoint.pt after step 2" in printed
    assert [step["step"] for step in result["steps"]] == [3, 4]
    assert losses(stopped) + losses(result) == pytest.approx(losses(one_rank[0]), abs=1e-3)
    assert result["evaluation_loss"] == pytest.approx(one_rank[0]["evaluation_loss"], abs=1e-3)


def test_resuming_with_other_options_is_refused(
    two_ranks: tuple[dict[str, Any], str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(two_ranks[2])
    refused = invoke("train", *SMALL, "--save", "checkpoint.pt", "--resume", "--lr", "0.5")
    assert refused.exit_code == 2
    assert "--lr: lr = 0.5: the run that saved checkpoint.pt had 0.003" in refused.stderr


def test_lists_with_spaces_a_text_file_and_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text").write_bytes(b"to be or not to be, " * 20)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    branches = ["--segment-lengths", "16", "64", "--dilation-rates", "1", "2"]
    arguments = ["--seq-len", "64", "--steps", "2", "--text", str(tmp_path / "text"), "--tied", "--max-grad-norm", "1"]
    more = ["--activation-checkpointing", "--dtype", "bf16", "--num-kv-heads", "2", "--batch-size", "2"]
    done = invoke("train", *branches, *arguments, *more, "--nproc-per-node", "3")
    assert done.exit_code == 0, done.stderr
    assert "branches (16, 1), (64, 2)" in done.stdout
    assert "--nproc-per-node 3 is not used: WORLD_SIZE is set" in done.stdout


# info


@pytest.mark.matrix(reason="probes the machine")
def test_info_shows_and_writes_everything(tmp_path: Path) -> None:
    shown = invoke("info", "--probe", "--json", str(tmp_path / "info.json"))
    assert shown.exit_code == 0, shown.stderr
    for title in ("Versions", "Devices", "Adapters", "Kernels", "Which dtype", "How a hop travels", "Two local ranks"):
        assert title in shown.stdout
    found = json.loads((tmp_path / "info.json").read_text())
    assert found["adapters"]["native"] is None
    assert found["kernels"]["math"]["unusable"] is None
    assert found["devices"][0] | {"name": ""} == {"device": "cpu", "name": "", "dtype": "float32"}
    assert 0 < found["probe"]["latency_seconds"] < 10
    assert found["probe"]["bytes_per_second"] > 1e6


# How ranks end


def children(pid: int) -> list[int]:
    """The direct children of a process, from /proc."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found


def alive(pids: list[int]) -> list[int]:
    """The processes that exist and are not zombies."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            found.append(pid)
    return found


def wait_for_end(pids: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while alive(pids):
        assert time.monotonic() < deadline, f"still alive: {alive(pids)}"
        time.sleep(0.05)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    """Start commands in their own process groups, as a terminal does, and kill them after the test."""
    processes = []

    def start(*command: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            # Reset SIGINT: background jobs of a shell ignore Ctrl-C, and their child processes inherit this.
            preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


@needs_proc
def test_ctrl_c_ends_every_rank_with_one_message(started: Any) -> None:
    options = [*SMALL, "--steps", "1000000", "--nproc-per-node", "2"]
    process = started("-u", "-m", "ring_backends", "train", *options)
    assert process.stdout.readline().startswith("native adapter")
    time.sleep(1.0)
    ranks = children(process.pid)
    assert len(alive(ranks)) >= 2
    os.killpg(process.pid, signal.SIGINT)
    asked = time.monotonic()
    _, errors = process.communicate(timeout=30)
    assert time.monotonic() - asked < 5
    assert process.returncode == 130
    assert errors == "ring-backends: interrupted.\n"
    wait_for_end(ranks, 1)


LAUNCH = "from ring_backends.ring.launch import *; import os, time; print('up', flush=True); "


@needs_proc
def test_ranks_do_not_outlive_a_parent_that_is_killed(started: Any) -> None:
    process = started("-c", LAUNCH + "launch(time.sleep, (600,), 2)")
    process.stdout.readline()
    deadline = time.monotonic() + 60
    while len(children(process.pid)) < 3:  # two ranks and the resource tracker
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ranks = children(process.pid)
    process.kill()
    wait_for_end(ranks, 30)  # a rank checks its parent after its imports


def test_launch_gives_each_rank_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))  # the ranks share these cores
    assert [launch(os.getenv, (name,), 2) for name in ("RANK", "OMP_NUM_THREADS")] == [["0", "1"], ["3", "3"]]
    assert "RANK" not in os.environ


def test_an_error_in_a_rank_is_reported_once() -> None:
    with pytest.raises(RankFailedError, match=r"rank 0: invalid literal|rank 1: invalid literal") as raised:
        launch(int, ("x",), 2)
    assert raised.value.failure.status == 2


def test_a_rank_that_dies_is_reported() -> None:
    with pytest.raises(RankFailedError, match=r"SIGABRT ended the process") as raised:
        launch(os.abort, (), 1)
    assert raised.value.failure.status == 1
