"""The command line: printed text, written files and exit codes.

Starting ranks takes seconds, so several tests share each such run. Commands that start no ranks run in this process.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer
from command_line import check_refusal, environment, interrupt, invoke, kill, refused, run, shown, start

import ring_backends
from ring_backends.cli import app, training_run
from ring_backends.cli.compare import CompareOptions
from ring_backends.cli.text import Document, standard_library_sources
from ring_backends.cli.train import TrainOptions, options_path
from ring_backends.comparison import rank
from ring_backends.cost.branches import default_branches
from ring_backends.ring.launch import RankFailedError, launch
from ring_backends.ring.launch import start as start_ranks
from ring_backends.testing.marks import THOROUGH

SMALL = "--seq-len 512 --embed-dim 32 --num-layers 1"


def train(cwd: Path, arguments: str) -> Run:
    done = run(f"-m ring_backends train --json run.json {SMALL} {arguments}".split(), cwd)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads((cwd / "run.json").read_text()), done.stdout, cwd


def losses(result: dict[str, Any]) -> list[float]:
    return [step["loss"] for step in result["steps"]]


Run = tuple[dict[str, Any], str, Path]
"""The content of the --json file of ``train``, the printed text, and the folder."""


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("one"), "--steps 4")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("two"), "--steps 2 --nproc-per-node 2 --save checkpoint.pt")


# Help and errors


def test_help_lists_every_command_and_version_is_printed() -> None:
    text = shown("--help")
    assert all(command in text for command in ("train", "compare", "plan", "info", "convert"))
    assert invoke("--version").output == f"ring-backends {ring_backends.__version__}\n"


def test_train_and_compare_pass_the_size_of_buffers_to_initialize(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = mock.Mock()
    adapter.initialize.side_effect = InterruptedError
    for module in (training_run, rank):
        monkeypatch.setattr(module, "load_adapter", lambda name: adapter)
    branches: dict[str, Any] = {"segment_lengths": (16,), "dilation_rates": (1,), "device": "cpu"}
    compared = CompareOptions(**branches, buffer_bytes=8, ulysses_size="2").setup()
    for call in (
        partial(training_run.run, TrainOptions(**branches, buffer_bytes=7, ulysses_size="auto")),
        partial(next, rank.measure(compared, "native", Path())),
    ):
        with pytest.raises(InterruptedError):
            call()
    calls = [call.kwargs for call in adapter.initialize.call_args_list]
    assert [(options["buffer_bytes"], options["ulysses_size"]) for options in calls] == [(7, "auto"), (8, 2)]


def test_train_help_names_the_options_of_the_contract() -> None:
    options = "--backend --segment-lengths --dilation-rates --text --seq-len --steps --nproc-per-node --json"
    text = shown("train --help")
    assert all(option in text for option in options.split())


@pytest.mark.parametrize(
    ("command", "first"),
    [
        ("train", "--seq-len --nproc-per-node --backend --steps --save --help"),
        ("generate", "--prompt --max-new-tokens --temperature --nproc-per-node --backend --help"),
        ("compare", "--seq-len --nproc-per-node --segment-lengths --dilation-rates --plot --help"),
        ("plan", "--seq-len --ring-size --heads --segment-lengths --dilation-rates --help"),
        ("info", "--verbose --probe --nproc-per-node --dtype --device --json --help"),
        ("convert", "--heads --kind --segment-lengths --dilation-rates --seq-len --help"),
    ],
)
def test_help_shows_the_options_first_that_most_users_need(command: str, first: str) -> None:
    panel = shown(f"{command} --help").partition("─ Options ─")[2].partition("╰")[0]
    assert re.findall(r"^│[ *]+(--[\w-]+)", panel, re.MULTILINE) == first.split()


@pytest.mark.parametrize(
    "arguments", ["--stepz 3", "--steps many", "--steps 0", "--seed 99999999999999999999999", "--seed -1"]
)
def test_errors_of_the_parser(arguments: str) -> None:
    assert arguments.split()[0] in refused(f"train {arguments}")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--segment-lengths 64,512", "--dilation-rates: dilation_rates is missing beside segment_lengths"),
        ("--segment-lengths 64,x --dilation-rates 1,2", "--segment-lengths: .* 'x' is not an integer or none; "),
        ("--segment-lengths none --dilation-rates none", "--dilation-rates: .* 'none' is not an integer; write"),
        ("--window-lengths 64,some,8", "--window-lengths: .* 'some' is not an integer or none; write for .* 2048,none"),
        ("--window-lengths 64 none", "--window-lengths: window_lengths has 2 entries and segment_lengths has 3: give"),
        ("--window-lengths none 0 none", r"--window-lengths: window_lengths\[1\] = 0: must be at least 1"),
        ("--window-lengths 8,8,8 --padding zeros", "--window-lengths: .* with padding='zeros': .* padding='masked'"),
        ("--offset some", "--offset: offset = 'some': .*'every'"),
        ("--segment-lengths 64 0 --dilation-rates 1 2", r"--segment-lengths: segment_lengths\[1\] = 0"),
        ("--segment-lengths 64,512 --dilation-rates 1,-2", r"--dilation-rates: dilation_rates\[1\] = -2"),
        ("--segment-lengths 8 --dilation-rates 1 2", "--segment-lengths: segment_lengths has 1 entries"),
        ("--head-mode some", "--head-mode: head_mode = 'some'"),
        ("--head-mode grouped --heads 2", "--head-mode: head_mode='grouped' with 2 heads"),
        ("--layout zig", "--layout: layout = 'zig': .* contiguous, zigzag"),
        ("--dtype fp8", "--dtype: dtype = 'fp8'"),
        ("--ulysses-size 3", "--ulysses-size: ulysses_size = 3: must divide the 4 query heads"),
        ("--ring-size 6 --ulysses-size 4", "--ulysses-size: ulysses_size = 4: must divide the 6 ranks of the ring"),
        ("--ulysses-size 0", "--ulysses-size: ulysses_size = '0': expected a number of at least 1, or auto"),
        ("--ulysses-size abc", "--ulysses-size: ulysses_size = 'abc': expected a number of at least 1, or auto"),
        ("--lr -1", r"--lr: lr = -1\.0: must be above 0"),
        ("--lr nan", "--lr: lr = nan: must be above 0 and finite"),
        ("--resume", "--resume: there is no checkpoint without --save"),
        ("--save-every 2", "--save-every: there is no checkpoint without --save"),
        ("--json no/such/directory.json", "--json: json = 'no/such/directory.json'"),
        ("--json .", r"--json: json = '\.': is a directory; give the path of a file"),
        ("--json run --save run", "--json: json = 'run': is save, too, and would replace it; give another path"),
        ("--text no-such-file", "--text: text = 'no-such-file': not a file"),
        ("--nproc-per-node 10000", "--nproc-per-node: nproc_per_node = 10000: this process may use .* at most"),
        ("--seq-len 1000000000", "--text: .* with seq_len = 1,000,000,000: at least 2,000,000,002"),
    ],
)
def test_an_error_is_one_line_that_names_the_option(arguments: str, line: str) -> None:
    check_refusal(line, f"train {arguments}")


@pytest.mark.parametrize("text", ["8192", "8_192", "8,192", "8.192e3", "81.92E+2"])
def test_integers_may_be_written_with_separators_and_exponents(text: str) -> None:
    options = "--ring-size 2 --latency 1 --bandwidth 1 --flops 1 --dilation-rates 1,2"
    for words in (f"--seq-len {text}", f"--seq-len={text}"):
        of_branch = text.replace(",", "")
        printed = shown(f"plan {words} {options} --segment-lengths {of_branch} none")
        assert "8,192 tokens" in printed
        assert "│      0 │          8,192 │" in printed


@pytest.mark.parametrize("text", ["1M", "1.5", "1,00", "1e-3", "", "_1", "--heads"])
def test_other_integers_are_refused_with_an_example(text: str) -> None:
    done = invoke("plan --ring-size 2 --seq-len", text)
    assert done.exit_code == 2
    assert (
        f"--seq-len: {text!r} is not an integer; write for example 1000000, 1_000_000, 1,000,000 or 1e6" in done.output
    )


def test_an_option_has_one_name_and_one_default_dtype_in_every_command() -> None:
    commands = {name: command.params for name, command in typer.main.get_command(app).commands.items()}
    flags_of: dict[str, set[str]] = {}
    for params in commands.values():
        for param in params:
            flags_of.setdefault(str(param.name).removeprefix("num_"), set()).add(param.opts[0])
    assert {name: flags for name, flags in flags_of.items() if len(flags) > 1} == {}
    defaults = {name: param.default for name, params in commands.items() for param in params if param.name == "dtype"}
    assert defaults == dict.fromkeys(("train", "compare", "plan", "info"), "auto")


def test_results_do_not_replace_an_input(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(1000))
    (tmp_path / "link").symlink_to(text)
    check_refusal("--json: .*: is text, too, and", f"train --seq-len 64 --text {text} --json {tmp_path / 'link'}")


@THOROUGH
def test_an_error_of_a_rank_is_one_line() -> None:
    check_refusal("--backend: backend = 'horovod': no such adapter", f"train {SMALL} --steps 1 --backend horovod")


# Training text


def test_the_default_text_is_the_standard_library_in_a_fixed_order() -> None:
    paths = standard_library_sources()
    assert paths == standard_library_sources()
    assert {"abc.py", "ast.py", "argparse.py"} <= {path.name for path in paths}
    assert not any({"site-packages", "__pycache__", "test"} & set(path.parts[-3:]) for path in paths)
    assert sum(path.stat().st_size for path in paths) > 20 * 131072


def test_windows_are_consecutive_wrap_around_and_exclude_the_evaluation_text(tmp_path: Path) -> None:
    text = bytes(range(100))
    paths = [tmp_path / f"{index}.txt" for index in range(4)]
    for path, (begin, end) in zip(paths, [(0, 7), (7, 7), (7, 57), (57, 100)], strict=True):
        path.write_bytes(text[begin:end])
    document = Document(paths, seq_len=20)
    assert document.num_bytes == 100
    assert document.evaluation_window() == text[79:]
    assert document.num_windows == 3
    assert [document.window(index) for index in range(4)] == [text[0:21], text[20:41], text[40:61], text[0:21]]
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


def test_training_learns_and_reports(one_rank: Run) -> None:
    result, printed, _ = one_rank
    assert [step["step"] for step in result["steps"]] == [1, 2, 3, 4]
    assert 5.3 < losses(result)[0] < 5.8
    assert losses(result)[-1] < losses(result)[0] - 0.2
    assert 3.0 < result["evaluation_loss"] < 5.8
    assert result["bytes_sent"] == result["messages_sent"] == [0]
    assert result["peak_memory_bytes"][0] > 2**20
    assert result["tokens_per_second"] > 0
    assert result["versions"]["torch"]
    assert result["versions"]["ring_backends"] == ring_backends.__version__
    assert result["options"].items() >= {"seq_len": 512, "segment_lengths": [128, 256, 512]}.items()
    lines = printed.splitlines()
    assert [bool(re.match(r"step \d/4  loss \d", line)) for line in lines] == [False, True, True, True, True, False]
    for reached in ("loss", "evaluation loss", "tokens/s", "peak memory", "bytes per rank"):
        assert reached in lines[-1]


def test_two_ranks_train_as_one_and_use_the_ring(one_rank: Run, two_ranks: Run) -> None:
    result, printed, _ = two_ranks
    assert losses(result) == pytest.approx(losses(one_rank[0])[:2], abs=1e-3)
    assert len(result["bytes_sent"]) == len(result["peak_memory_bytes"]) == 2
    assert min(result["bytes_sent"]) > 0
    assert f"sent {result['bytes_sent'][0]:,} / {result['bytes_sent'][1]:,} bytes per rank." in printed.splitlines()[-1]
    assert printed.count("step 1/2") == 1, "only rank 0 prints"


@pytest.mark.matrix(reason="trains twice")
def test_a_resumed_run_equals_an_uninterrupted_one(one_rank: Run, two_ranks: Run) -> None:
    stopped, _, cwd = two_ranks
    options = "--nproc-per-node 2 --save checkpoint.pt --resume --layout zigzag --buffer-bytes 0"
    result, printed, _ = train(cwd, f"--steps 4 {options}")
    assert "resumed checkpoint.pt after step 2" in printed
    assert [step["step"] for step in result["steps"]] == [3, 4]
    assert losses(stopped) + losses(result) == pytest.approx(losses(one_rank[0]), abs=1e-3)
    assert result["evaluation_loss"] == pytest.approx(one_rank[0]["evaluation_loss"], abs=1e-3)


@pytest.mark.matrix(reason="starts the ranks of three more runs")
def test_two_rings_train_on_the_windows_of_one(tmp_path: Path) -> None:
    one, _, _ = train(tmp_path, "--steps 3 --batch-size 4")
    two, _, _ = train(tmp_path, "--steps 3 --batch-size 2 --nproc-per-node 2 --ring-size 1")
    assert losses(two) == pytest.approx(losses(one), abs=1e-3)


@THOROUGH
def test_a_locale_without_utf_8(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"to be or not to be, " * 60)
    train = f"-m ring_backends train {SMALL} --steps 1 --text text"
    for arguments, wanted in {
        "-m ring_backends train --help": "N,N,?",
        train: r"loss \d\.\d+ \? \d\.\d+ in 1 steps",
    }.items():
        done = run(arguments.split(), tmp_path, environment(PYTHONIOENCODING="latin-1"))
        assert done.returncode == 0, done.stderr
        assert re.search(wanted, done.stdout)


@THOROUGH
def test_resuming_with_other_options_is_refused(two_ranks: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(two_ranks[2])
    message = r"--lr: lr = 0\.5: the run that saved checkpoint\.pt had 0\.003"
    check_refusal(message, f"train {SMALL} --save checkpoint.pt --resume --lr 0.5")


def test_lists_with_spaces_a_text_file_and_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text").write_bytes(b"to be or not to be, " * 20)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    options = "--segment-lengths 16 none --window-lengths none 48 --dilation-rates 1 2 --offset every --seq-len 64"
    options += " --steps 2 --tied --max-grad-norm 1 --json run.json --save checkpoint.pt"
    more = "--activation-checkpointing --dtype bf16 --kv-heads 2 --batch-size 2 --nproc-per-node 3"
    text = shown(f"train {options} {more} --text", tmp_path / "text")
    assert "branches (16, 1), (whole sequence, 2, window 48)" in text
    assert "--nproc-per-node 3 is not used, because a launcher" in text
    for file in ("run.json", "checkpoint.pt.options.json"):
        found = json.loads(Path(file).read_text())
        found = found.get("options", found)
        assert (found["segment_lengths"], found["window_lengths"]) == ([16, None], [None, 48])
        assert found["offset"] == "every"


def test_lines_off_a_terminal_come_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, lines = [0.0], [0.0]
    monkeypatch.setattr(training_run.time, "monotonic", lambda: clock[0])
    console = mock.Mock(print=lambda text: lines.append(clock[0]))
    state = mock.Mock(options=mock.Mock(steps=1000), last_line=0.0, console=console)
    for step in range(1, 50):
        seconds = 3.0 if step < 40 else 12.0
        clock[0] += seconds
        training_run.TrainingRun._show(state, {"step": step, "seconds": seconds}, mock.Mock(disable=True))
    gaps = [after - before for before, after in itertools.pairwise(lines)]
    assert gaps == [9.0] * 13 + [12.0] * 10  # a step that takes longer has a line of its own


# How ranks end


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_run_that_ends_in_a_later_save_can_be_resumed(is_resumed: bool, tmp_path: Path) -> None:
    file = tmp_path / "run.pt"
    for path in (file, options_path(file)):
        path.write_text("of an earlier run")
    options = mock.Mock(save=file)
    state = mock.Mock(options=options, is_first=True, options_are_own=is_resumed)
    state._write_options = lambda path: options_path(path).write_text("own")
    seen: list[bool] = []
    state.state.save = lambda path: seen.append(options_path(path).exists())
    for _ in range(2):
        training_run.TrainingRun._save(state)
    assert seen == [is_resumed, True]
    assert options_path(file).read_text() == "own"


def test_ctrl_c_names_resume_only_if_this_run_saved(tmp_path: Path) -> None:
    file, started = tmp_path / "run.pt", time.time() - 1
    branches: dict[str, Any] = {"segment_lengths": (16,), "dilation_rates": (1,)}
    assert TrainOptions(**branches).after_interrupt(started) == ""
    options = TrainOptions(**branches, save=file)
    assert "had not been saved yet; with --save-every N" in options.after_interrupt(started)
    file.touch()
    options_path(file).touch()
    assert options.after_interrupt(started) == f"To go on from {file}, run the same command with --resume."
    os.utime(options_path(file), (started - 1000, started - 1000))  # an earlier run saved it
    assert "--resume" not in options.after_interrupt(started)
    assert "--resume" in TrainOptions(**branches, save=file, resume=True).after_interrupt(started)


def test_ctrl_c_prints_what_the_command_advises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ring_backends.cli.launch", interrupted)
    done = invoke(f"train {SMALL} --save", tmp_path / "run.pt")
    assert done.exit_code == 130
    assert done.stderr.startswith("ring-backends: interrupted. ")
    assert "--save-every" in done.stderr
    assert invoke(f"train {SMALL}").stderr == "ring-backends: interrupted.\n"


def running() -> dict[int, int]:
    """The parent of each process that is not a zombie, by its id, from /proc."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has just ended
            state, parent, *_ = stat.read_text().rpartition(")")[2].split()
            if state != "Z":
                found[int(stat.parent.name)] = int(parent)
    return found


def children(pid: int) -> set[int]:
    return {child for child, parent in running().items() if parent == pid}


def wait_for_end(pids: set[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while alive := pids & running().keys():
        assert time.monotonic() < deadline, f"still alive: {alive}"
        time.sleep(0.05)


@pytest.fixture
def started(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    """Start Python, and kill it after the test."""

    def start_here(*arguments: str) -> Any:
        process = start(arguments, tmp_path)
        request.addfinalizer(lambda: kill(process))
        return process

    return start_here


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


@THOROUGH
@needs_proc
def test_ctrl_c_ends_every_rank_with_one_message(started: Any) -> None:
    process = started(*f"-u -m ring_backends train {SMALL} --steps 1000000 --nproc-per-node 2".split())
    assert process.stdout.readline().startswith("native adapter")
    time.sleep(1.0)
    ranks = children(process.pid)
    assert len(ranks) >= 2
    interrupt(process)
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


@needs_proc
def test_ranks_run_a_generator_step_by_step_to_its_end(tmp_path: Path) -> None:
    """``filter(eval, texts)`` is a generator that every rank can import. It yields the texts with a true value."""
    ended = tmp_path / "ended"
    fails_on_rank1 = "__import__('os').environ['RANK'] == '0' or int('x')"
    failing_texts, steady_texts = ("1", fails_on_rank1), ("1", "2", "3", f"open({str(ended)!r}, 'w').close()")
    with (
        start_ranks(filter, (eval, failing_texts), 2) as failing,
        start_ranks(filter, (eval, steady_texts), 1) as steady,
    ):
        assert failing.step() == ["1", "1"]
        assert steady.step() == ["1"]
        with pytest.raises(RankFailedError, match="rank 1: invalid literal"):
            failing.step()
        assert not children(os.getpid()).isdisjoint(process.pid for process in steady._processes)
        assert children(os.getpid()).isdisjoint(process.pid for process in failing._processes)
        assert [steady.step(), steady.step()] == [["2"], ["3"]]
        assert not ended.exists()
    assert ended.exists()


@pytest.mark.parametrize(
    ("call", "status", "message"),
    [
        ((int, ("x",), 2), 2, "rank 0: invalid literal|rank 1: invalid literal"),
        ((os.abort, (), 1), 1, "SIGABRT ended the process"),
    ],
    ids=["an error", "a death"],
)
def test_failures_of_a_rank_are_reported_once(call: Any, status: int, message: str) -> None:
    with pytest.raises(RankFailedError, match=message) as raised:
        launch(*call)
    assert raised.value.failure.status == status
