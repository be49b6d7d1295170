"""``compare``: what it measures, shows and writes; the all-gather method and the fp64 numbers that it brings along."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import socket
import stat
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from typer.testing import CliRunner

import ring_backends
from ring_backends import available_adapters, plotting
from ring_backends.cli import app
from ring_backends.comparison import compare, exact
from ring_backends.comparison.all_gather import AllGatherExecutor, all_gather_attention
from ring_backends.comparison.rank import local_inputs
from ring_backends.comparison.setup import TENSORS
from ring_backends.engine.inputs import AttentionInputs
from ring_backends.ring.launch import Failure, RankFailedError
from ring_backends.ring.ring import Ring
from ring_backends.schedule.layout import LayoutKind, SequenceLayout
from ring_backends.schedule.pattern import DilatedPattern
from ring_backends.schedule.ring_schedule import RingSchedule
from ring_backends.testing.fine_cuts import fine_cuts
from ring_backends.testing.reference import reference_attention
from ring_backends.testing.rings import FOUR, TWO, RingSpec, ring_here
from ring_backends.testing.world import World

NATIVE = "ring_backends.adapters.native"


def tensors(seq_len: int, heads: int, kv_heads: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """query, key, value and the gradient of out."""
    generator = torch.Generator().manual_seed(seq_len)
    sizes = (heads, kv_heads, kv_heads, heads)
    return [torch.randn(2, seq_len, size, 4, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]


def by_reference(inputs: list[Tensor], pattern: DilatedPattern, is_causal: bool) -> list[Tensor]:
    """out, dq, dk and dv."""
    *leaves, grad_out = (x.double() for x in inputs)
    leaves = [x.requires_grad_() for x in leaves]
    out, _ = reference_attention(
        *leaves,
        pattern.segment_lengths,
        pattern.dilation_rates,
        is_causal=is_causal,
        head_mode=pattern.head_mode,
        offset=pattern.offset,
    )
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


# The fp64 numbers


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    ("seq_len", "heads", "kv_heads", "lengths", "rates"),
    [
        (96, 4, 4, (16, 48, 96), (1, 2, 4)),
        (101, 6, 3, (7, 40, 500), (1, 3, 5)),
        (50, 2, 1, (50,), (7,)),  # most positions are covered by no head
        (5, 2, 2, (3,), (8,)),  # a rate above the segment length
    ],
)
def test_the_fp64_numbers_are_the_references(
    monkeypatch: pytest.MonkeyPatch,
    seq_len: int,
    heads: int,
    kv_heads: int,
    lengths: tuple[int, ...],
    rates: tuple[int, ...],
    is_causal: bool,
) -> None:
    inputs = [x[:1] for x in tensors(seq_len, heads, kv_heads)]
    wanted = by_reference(inputs, DilatedPattern(lengths, rates), is_causal)
    for query_rows in (512, 3):
        monkeypatch.setattr(exact, "_QUERY_ROWS", query_rows)
        got = exact.exact_attention(*(x[0].detach() for x in inputs), lengths, rates, is_causal=is_causal)
        for what, ours, reference in zip(TENSORS, got, wanted, strict=True):
            assert (ours - reference[0]).abs().max() < 1e-13, what


# The all-gather method


def gathered(
    rings: RingSpec,
    inputs: list[Tensor],
    pattern: DilatedPattern,
    is_causal: bool,
    layout: LayoutKind,
    cut: bool = False,
) -> list[Tensor]:
    """Run by every rank: out, dq, dk and dv by the all-gather method, put together."""
    ring = ring_here(NATIVE, rings)
    assert ring is not None
    ring, seq_len = ring.with_layout(layout), inputs[0].shape[1]
    *leaves, grad_out = (ring.shard(x) for x in inputs)
    leaves = [x.clone().requires_grad_() for x in leaves]
    with fine_cuts() if cut else contextlib.nullcontext():
        out = all_gather_attention(*leaves, pattern, ring, is_causal=is_causal, seq_len=seq_len)
        grads = torch.autograd.grad(out, leaves, grad_out)
    return [ring.unshard(x.detach(), seq_len=seq_len) for x in (out, *grads)]


CASES = {
    "several branches": (96, 4, 4, DilatedPattern((16, 48, 96), (1, 2, 4))),
    "nothing divides anything": (101, 6, 3, DilatedPattern((7, 40, 101), (1, 3, 5))),
    "no branch crosses": (64, 2, 1, DilatedPattern((4, 8), (1, 2))),
    "grouped": (90, 6, 2, DilatedPattern.grouped((10, 45, 90), (1, 2, 4))),
    "offsets by block": (70, 4, 2, DilatedPattern((16, 64, 128), (1, 2, 4), offset="block")),
    "shorter than the ring": (3, 2, 2, DilatedPattern((3,), (1,))),
}


HOW_CUT: list[tuple[RingSpec, LayoutKind, bool]] = [
    (TWO, "contiguous", False),
    (FOUR, "zigzag", False),
    (FOUR, "contiguous", True),
]


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_all_gather_is_exact(world: World, name: str, is_causal: bool) -> None:
    seq_len, heads, kv_heads, pattern = CASES[name]
    inputs = tensors(seq_len, heads, kv_heads)
    wanted = by_reference(inputs, pattern, is_causal)
    plain = [x.detach() for x in inputs]
    for rings, layout, cut in HOW_CUT:
        for rank, got in enumerate(world.run(gathered, rings, plain, pattern, is_causal, layout, cut)):
            for what, ours, reference in zip(TENSORS, got, wanted, strict=True):
                assert (ours - reference).abs().max() < 1e-12, f"{what}, rank {rank} of {rings} {layout}"


def test_all_gather_sums_in_fp32(world: World) -> None:
    inputs = tensors(256, 2, 2, torch.bfloat16)
    pattern = DilatedPattern((64, 256), (1, 2))
    got, *_ = world.run(gathered, FOUR, inputs, pattern, True, "contiguous")
    for ours, reference in zip(got, by_reference(inputs, pattern, True), strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.double() - reference).abs().max() < 2**-7 * reference.abs().max()


def tcp_bytes_sent() -> int:
    """What this process' sockets have sent, but for what a busy machine made TCP send again.

    Linux counts it: tcpi_bytes_sent and, behind it, tcpi_bytes_retrans of struct tcp_info.
    """
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            descriptor = os.dup(int(name))
        except OSError:  # the one that listed the directory
            continue
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            continue
        with socket.socket(fileno=descriptor) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                sent, sent_again = struct.unpack_from("QQ", information, 200)
                total += sent - sent_again
    return total


def collectives(rings: RingSpec, inputs: list[Tensor], pattern: DilatedPattern) -> dict[str, Any]:
    """Run by every rank: the collectives of one call with the bytes they were given, and bytes stated and sent."""
    ring = ring_here(NATIVE, rings)
    assert ring is not None
    seq_len = inputs[0].shape[1]
    *leaves, grad_out = (ring.shard(x) for x in inputs)
    query, key, value = (x.clone().requires_grad_() for x in leaves)
    dist.barrier()
    before = tcp_bytes_sent()
    with (
        mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as all_gather,
        mock.patch.object(dist, "reduce_scatter", wraps=dist.reduce_scatter) as reduce_scatter,
    ):
        out = all_gather_attention(query, key, value, pattern, ring, is_causal=True, seq_len=seq_len)
        torch.autograd.grad(out, (query, key, value), grad_out)
    dist.barrier()
    stated = AttentionInputs(query, key, value, is_causal=True, seq_len=seq_len)
    return {
        "all-gather": [call.args[1].nbytes for call in all_gather.call_args_list],
        "reduce-scatter": [call.args[0].nbytes for call in reduce_scatter.call_args_list],
        "stated": AllGatherExecutor.of(stated, pattern, ring).wire_bytes(key),
        "sent": tcp_bytes_sent() - before,
    }


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="reads what Linux counts per socket")
def test_all_gather_moves_only_rows_that_others_need_and_says_how_many(world: World) -> None:
    # A shard is 4,096 rows. (2048, 1) stays within it. Of (8192, 4), which two ranks share, the first has to give 1,024
    # rows for each of 4 (key/value head, offset) pairs, and of (16384, 16) 256 rows for each of 4.
    pattern = DilatedPattern((2048, 8192, 16384), (1, 4, 16))
    rows = 4 * 1024 + 4 * 256
    gathered, reduced = rows * 2 * (2 * 4) * 2, rows * 2 * (2 * 4) * 4  # batch 2; K and V of 4; bf16 and fp32
    for found in world.run(collectives, FOUR, tensors(16384, 4, 2, torch.bfloat16), pattern):
        assert found["all-gather"] == [gathered, gathered]
        assert found["reduce-scatter"] == [reduced]
        assert found["stated"] == {"forward": 3 * gathered, "backward": 3 * gathered + 2 * 3 * reduced}
        stated = sum(found["stated"].values())
        assert stated <= found["sent"] < 1.01 * stated


def test_all_gather_calls_no_collective_where_no_branch_crosses(world: World) -> None:
    for found in world.run(collectives, FOUR, tensors(128, 2, 2), DilatedPattern((16, 32), (1, 2))):
        assert found["all-gather"] == found["reduce-scatter"] == []
        assert found["stated"] == {"forward": 0, "backward": 0}


# The command


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_inputs_are_the_same_however_they_are_sharded(layout: LayoutKind) -> None:
    def inputs(ring: Ring) -> tuple[Tensor, ...]:
        return local_inputs(ring, 2501, 4, 2, 8, torch.bfloat16, torch.device("cpu"))

    whole = inputs(Ring())
    assert [tuple(x.shape) for x in whole] == [(1, 2501, heads, 8) for heads in (4, 2, 2, 4)]
    assert len({x[0, row, 0, 0].item() for x in whole for row in (0, 1024, 2048)}) == 12
    for rank in range(3):
        ring = Ring(size=3, rank=rank, ranks=(0, 1, 2), layout_kind=layout)
        for local, global_ in zip(inputs(ring), whole, strict=True):
            assert torch.equal(local, ring.shard(global_))


SMALL = ("--seq-len", "512", "--num-heads", "4", "--num-kv-heads", "2", "--head-dim", "8", "--repeats", "2")
BRANCHES = ("--segment-lengths", "64", "512", "--dilation-rates", "1", "4")


def invoke(*arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["compare", *arguments])


def test_help_says_what_is_measured() -> None:
    shown = invoke("--help")
    assert shown.exit_code == 0
    said = " ".join(shown.output.split())
    for words in ("median of the timed calls", "increase of the resident set", "all-reduce", "from their fp64 values"):
        assert words in said


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """What a small comparison of two ranks writes and prints."""
    file = tmp_path_factory.mktemp("compare") / "compare.json"
    done = invoke(*SMALL, *BRANCHES, "--layout", "zigzag", "--json", str(file))
    assert done.exit_code == 0, done.stderr
    return json.loads(file.read_text()), done.stdout


def test_every_adapter_the_all_gather_method_and_one_rank_are_compared(compared: tuple[dict[str, Any], str]) -> None:
    result, printed = compared
    names = [*available_adapters(), "all-gather", "one rank"]
    assert [row["name"] for row in result["rows"]] == names
    lines = printed.splitlines()
    assert lines[0].startswith(
        "512 tokens, zigzag, causal, 4 heads (2 for keys and values) of 8, float32; branches (64, 1)"
    )
    for name, reason in {**available_adapters(), "all-gather": None, "one rank": None}.items():
        (line,) = (line for line in lines if re.match(rf" ?{name} ", line))
        assert ("unusable" in line) == (reason is not None)


def test_the_rows_hold_what_was_measured(compared: tuple[dict[str, Any], str]) -> None:
    result, _ = compared
    rows = {row["name"]: row for row in result["rows"] if row["unusable"] is None}
    pattern = DilatedPattern((64, 512), (1, 4))
    schedule = RingSchedule(pattern, SequenceLayout(512, 2, "zigzag"), 4, 2, True)
    for name, row in rows.items():
        assert row["failed"] is None
        assert row["ranks"] == len(row["peak_memory_bytes"]) == (1 if name == "one rank" else 2)
        assert [len(calls) for calls in row["calls"]["forward_seconds"]] == [2] * row["ranks"]
        assert row["forward_seconds"] > 0
        assert row["backward_seconds"] > 0
        assert set(row["errors"]) == {"out", "dq", "dk", "dv"}
        assert all(0 < error < 1e-5 for error in row["errors"].values()), row
        assert row["bytes_are_computed"] == (name == "all-gather")
        if name not in ("one rank", "all-gather"):
            for direction, sent in row["bytes_sent"].items():
                sizes = {"batch": 1, "head_dim": 8, "itemsize": 4, "backward": direction == "backward"}
                assert sent == [schedule.wire_bytes(rank, **sizes) for rank in range(2)]
    assert rows["one rank"]["bytes_sent"] == {"forward": [0], "backward": [0]}
    assert rows["all-gather"]["bytes_sent"]["forward"][0] > 0
    assert result["versions"]["torch"] == torch.__version__
    assert "CPU" in result["device"]
    assert result["options"]["seq_len"] == 512
    assert result["options"]["segment_lengths"] == [64, 512]
    assert result["options"]["device"] == "cpu"


def rank_result() -> dict[str, Any]:
    return {
        "device": "CPU with 1 thread per rank",
        "forward_seconds": [1.0, 3.0, 2.0],
        "backward_seconds": [2.0, 2.0, 8.0],
        "peak_memory_bytes": 3 * 2**20,
        "bytes_sent": {"forward": 1000, "backward": 2000},
        "bytes_are_computed": False,
        "largest_error": dict.fromkeys(TENSORS, 1e-6),
        "largest": dict.fromkeys(TENSORS, 2.0),
        "spans": [("forward", "call", 5.0, 6.0), ("forward", "tile", 5.2, 5.9), ("backward", "call", 7.0, 8.0)],
    }


@pytest.fixture
def without_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks answer without being started; of the adapters one cannot be used, and one goes wrong."""

    def launch(target: Any, args: tuple[Any, ...], num_ranks: int) -> list[Any]:
        if target is compare._prepare:
            adapters = {"native": None, "absent": "absent is not installed; pip install absent", "broken": None}
            return [{"setup": args[0], "adapters": adapters, "versions": {"torch": "2"}, "device": "CPU"}]
        if args[1] == "broken":
            raise RankFailedError(1, Failure(1, "Traceback\n  it\nRuntimeError: it broke"))
        slower = {**rank_result(), "forward_seconds": [0.5, 0.5, 2.5], "peak_memory_bytes": 5 * 2**20}
        return [rank_result(), slower][:num_ranks]

    monkeypatch.setattr(compare, "launch", launch)


def test_the_slowest_rank_counts_and_adapters_that_do_not_run_have_a_row(without_ranks: None, tmp_path: Path) -> None:
    done = invoke("--json", str(tmp_path / "compare.json"))
    lines = {line.split("  ")[0].strip(): " ".join(line.split()) for line in done.stdout.splitlines()}
    assert lines["native"] == "native 2.500 s 2.000 s 5 MiB 3.0 kB 5e-07 5e-07 5e-07 5e-07 CPU with 1 thread per rank"
    assert lines["one rank"].startswith("one rank 2.000 s 2.000 s 3 MiB 3.0 kB")
    assert lines["absent"] == "absent - - - - - - - - unusable: absent is not installed; pip install absent"
    assert lines["broken"] == "broken - - - - - - - - failed: RuntimeError: it broke"
    assert done.exit_code == 1
    assert done.stderr.startswith("ring-backends compare: error: rank 1: broken: Traceback")
    rows = {row["name"]: row for row in json.loads((tmp_path / "compare.json").read_text())["rows"]}
    assert rows["absent"]["unusable"] == "absent is not installed; pip install absent"
    assert rows["broken"]["failed"].endswith("it broke")
    assert rows["native"]["peak_memory_bytes"] == [3 * 2**20, 5 * 2**20]


def test_the_default_pattern_is_that_of_train(without_ranks: None) -> None:
    assert invoke().stdout.startswith(
        "65,536 tokens, contiguous, causal, 8 heads of 64, fp32; branches (256, 1), (4096, 8), (65536, 32); ring of 2"
    )


def test_plot_draws_a_file(without_ranks: None, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    invoke("--plot", str(tmp_path / "bars.svg"))
    drawn = (tmp_path / "bars.svg").read_text()
    assert drawn.startswith("<?xml")
    assert "native, backward" in drawn  # matplotlib writes the text it draws as a comment
    refused = invoke("--plot", str(tmp_path / "bars.docx"))
    assert refused.exit_code == 2
    assert "--plot: plot = " in refused.stderr
    assert ".svg" in refused.stderr


def test_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plotting, "find_spec", lambda name: None)
    refused = invoke("--plot", "bars.png")
    assert refused.exit_code == 2
    assert "matplotlib is not installed; pip install 'ring-backends[plot]'" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--num-heads", "6", "--num-kv-heads", "4"],
            "--num-kv-heads: num_kv_heads = 4: must divide the 6 query heads",
        ),
        (["--segment-lengths", "64"], "--dilation-rates: dilation_rates is missing beside segment_lengths"),
        (["--layout", "zig"], "--layout: layout = 'zig': .* contiguous, zigzag"),
        (["--dtype", "fp8"], "--dtype: dtype = 'fp8'"),
        (["--json", "no/such/directory.json"], "--json: json = 'no/such/directory.json'"),
    ],
)
def test_an_error_is_one_line_that_names_the_option(arguments: list[str], line: str) -> None:
    refused = invoke(*arguments)
    assert refused.exit_code == 2
    assert re.fullmatch(f"ring-backends compare: error: {line}.*\n", refused.stderr), refused.stderr


def test_a_launchers_world_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused = invoke()
    assert refused.exit_code == 2
    assert "run it without torchrun" in refused.stderr


@pytest.mark.matrix(reason="tests/test_cli.py interrupts a run of train in the same way")
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
def test_ctrl_c_ends_every_rank_with_one_message_and_leaves_no_file(tmp_path: Path) -> None:
    packages = str(Path(ring_backends.__file__).parent.parent)
    search_path = os.pathsep.join(filter(None, [packages, os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-m", "ring_backends", "compare", "--seq-len", "1048576", "--nproc-per-node", "2"],
        env={**os.environ, "PYTHONPATH": search_path, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # As a terminal has it: a shell's background jobs, which tests may run in, ignore Ctrl-C and pass that on.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    try:
        while not list(tmp_path.iterdir()):
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(1.0)
        os.killpg(process.pid, signal.SIGINT)
        asked = time.monotonic()
        printed, said = process.communicate(timeout=30)  # ends when the last rank has closed its ends of the pipes
        assert time.monotonic() - asked < 5
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 130
    assert (printed, said) == ("", "ring-backends: interrupted.\n")
    assert list(tmp_path.iterdir()) == []
