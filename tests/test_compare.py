"""`compare` and the all-gather method that it holds against the ring."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from ring_backends import available_adapters, planner
from ring_backends.cli import app, compare
from ring_backends.cli.all_gather import AllGatherWalk, all_gather_attention
from ring_backends.cli.report import Failure, RankFailedError
from ring_backends.layout import LayoutKind, SequenceLayout
from ring_backends.pattern import DilatedPattern
from ring_backends.reference import reference_attention
from ring_backends.schedule import RingSchedule
from ring_backends.testing.threads import ThreadRing, run_in_threads

# The all-gather method


def tensors(seq_len: int, heads: int, kv_heads: int, dtype: torch.dtype) -> list[Tensor]:
    """query, key, value and the gradient of out."""
    generator = torch.Generator().manual_seed(seq_len)
    sizes = (heads, kv_heads, kv_heads, heads)
    return [torch.randn(2, seq_len, size, 4, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]


def exact(inputs: list[Tensor], pattern: DilatedPattern, is_causal: bool) -> list[Tensor]:
    """out, dq, dk and dv by the reference."""
    query, key, value, grad_out = (x.double() for x in inputs)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    options = {"head_mode": pattern.head_mode, "offset": pattern.offset, "padding": pattern.padding}
    out, _ = reference_attention(
        *leaves, pattern.segment_lengths, pattern.dilation_rates, is_causal=is_causal, **options
    )
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out)]


def gathered(
    inputs: list[Tensor], pattern: DilatedPattern, is_causal: bool, ring_size: int, layout: LayoutKind
) -> list[Tensor]:
    """out, dq, dk and dv by the all-gather method on a ring of threads, put together."""
    seq_len = inputs[0].shape[1]

    def attend(ring: ThreadRing) -> list[Tensor]:
        query, key, value, grad_out = (ring.shard(x) for x in inputs)
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        out = all_gather_attention(*leaves, pattern, ring, is_causal=is_causal, seq_len=seq_len)
        grads = torch.autograd.grad(out, leaves, grad_out)
        return [ring.unshard(x.detach(), seq_len=seq_len) for x in (out, *grads)]

    results = run_in_threads(ring_size, attend, layout=layout)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))
    return results[0]


CASES = {
    "one branch over everything": (64, 2, 2, DilatedPattern((64,), (1,))),
    "several branches": (96, 4, 4, DilatedPattern((16, 48, 96), (1, 2, 4))),
    "nothing divides anything": (101, 6, 3, DilatedPattern((7, 40, 101), (1, 3, 5))),
    "no branch crosses": (64, 2, 1, DilatedPattern((4, 8), (1, 2))),
    "grouped": (90, 6, 2, DilatedPattern.grouped((10, 45, 90), (1, 2, 4))),
    "zero padding": (70, 4, 2, DilatedPattern.torchscale((16, 64, 128), (1, 2, 4))),
    "shorter than the ring": (3, 2, 2, DilatedPattern((3,), (1,))),
}


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_all_gather_is_exact(name: str, is_causal: bool, layout: LayoutKind) -> None:
    seq_len, heads, kv_heads, pattern = CASES[name]
    inputs = tensors(seq_len, heads, kv_heads, torch.float64)
    wanted = exact(inputs, pattern, is_causal)
    for ring_size in (1, 2, 4):
        got = gathered(inputs, pattern, is_causal, ring_size, layout)
        for what, ours, reference in zip(("out", "dq", "dk", "dv"), got, wanted, strict=True):
            assert (ours - reference).abs().max() < 1e-12, f"{what} on {ring_size} ranks"


def test_all_gather_is_exact_however_finely_heads_and_hops_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "MIN_HOP_BYTES", 1)
    monkeypatch.setattr(planner, "MIN_BLOCK_BYTES", 1)
    inputs = tensors(97, 6, 3, torch.float64)
    pattern = DilatedPattern((20, 97), (1, 3))
    for got, wanted in zip(gathered(inputs, pattern, True, 3, "contiguous"), exact(inputs, pattern, True), strict=True):
        assert (got - wanted).abs().max() < 1e-12


def test_all_gather_sums_in_fp32() -> None:
    inputs = tensors(256, 2, 2, torch.bfloat16)
    pattern = DilatedPattern((64, 256), (1, 2))
    for got, wanted in zip(gathered(inputs, pattern, True, 2, "contiguous"), exact(inputs, pattern, True), strict=True):
        assert got.dtype == torch.bfloat16
        assert (got.double() - wanted).abs().max() < 2**-7 * wanted.abs().max()


class CountingRing(ThreadRing):
    """A ring of threads that counts what its collectives are given."""

    given: ClassVar[list[tuple[str, int]]] = []

    def all_gather(self, tensor: Tensor) -> Tensor:
        self.given.append(("all-gather", tensor.nbytes))
        return super().all_gather(tensor)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        self.given.append(("reduce-scatter", tensor[0].nbytes))
        return super().reduce_scatter(tensor)


def test_all_gather_moves_only_rows_that_others_need_and_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CountingRing, "given", [])
    pattern = DilatedPattern((16, 64, 128), (1, 2, 4))

    def attend(plain: ThreadRing) -> dict[str, int]:
        ring = CountingRing(**{field.name: getattr(plain, field.name) for field in fields(plain)})
        query, key, value, grad_out = (ring.shard(x) for x in tensors(128, 4, 2, torch.bfloat16))
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        out = all_gather_attention(*leaves, pattern, ring, is_causal=True, seq_len=128)
        torch.autograd.grad(out, leaves, grad_out)
        return AllGatherWalk.of(query, key, pattern, ring, is_causal=True, seq_len=128).wire_bytes(key)

    stated = run_in_threads(4, attend)
    # A shard is 32 rows. (16, 1) stays within it. (64, 2) crosses once, and a rank's later neighbour needs 16 rows from
    # the even ranks for each of 4 (key/value head, offset) pairs; (128, 4) needs 8 rows for each of 4.
    rows = 4 * 16 + 4 * 8
    gathered, reduced = rows * 2 * (2 * 4) * 2, rows * 2 * (2 * 4) * 4
    assert Counter(CountingRing.given) == {("all-gather", gathered): 8, ("reduce-scatter", reduced): 4}
    assert stated == [{"forward": 3 * gathered, "backward": 3 * gathered + 2 * 3 * reduced}] * 4


def test_all_gather_is_not_called_where_no_branch_crosses() -> None:
    def stated(ring: ThreadRing) -> dict[str, int]:
        key = torch.empty(1, 32, 2, 4)
        pattern = DilatedPattern((16, 32), (1, 2))
        return AllGatherWalk.of(key, key, pattern, ring, is_causal=False, seq_len=64).wire_bytes(key)

    assert run_in_threads(2, stated) == [{"forward": 0, "backward": 0}] * 2


# The command

SMALL = ("--seq-len", "512", "--num-heads", "4", "--num-kv-heads", "2", "--head-dim", "8", "--repeats", "2")
BRANCHES = ("--segment-lengths", "64", "512", "--dilation-rates", "1", "4")


def invoke(*arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["compare", *arguments])


def test_help_says_what_is_measured() -> None:
    shown = invoke("--help")
    assert shown.exit_code == 0
    said = " ".join(shown.output.split())
    for words in ("median of the timed calls", "increase of the resident set", "all-reduce", "computed in fp64"):
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
        "difference": dict.fromkeys(compare.TENSORS, 1e-6),
        "largest": dict.fromkeys(compare.TENSORS, 2.0),
    }


@pytest.fixture
def without_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks answer without being started; of the adapters one cannot be used, and one goes wrong."""

    def launch(target: Any, args: tuple[Any, ...], num_ranks: int) -> list[Any]:
        if target is compare._available_adapters:
            return [{"native": None, "absent": "absent is not installed; pip install absent", "broken": None}]
        if target is compare._prepare:
            return [{"options": args[0], "versions": {"torch": "2"}, "device": "CPU"}]
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


def test_the_default_is_the_pattern_of_the_documents(without_ranks: None) -> None:
    assert invoke().stdout.startswith(
        "65,536 tokens, contiguous, causal, 8 heads of 64, fp32; branches (2048, 1), (8192, 4), (65536, 16); ring of 2"
    )


def test_plot_draws_a_file(without_ranks: None, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    invoke("--plot", str(tmp_path / "bars.svg"))
    drawn = (tmp_path / "bars.svg").read_text()
    assert drawn.startswith("<?xml")
    refused = invoke("--plot", str(tmp_path / "bars.docx"))
    assert refused.exit_code == 2
    assert "--plot: plot = " in refused.stderr
    assert ".svg" in refused.stderr


def test_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "find_spec", lambda name: None)
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
def test_what_cannot_work_is_one_line_that_names_the_option(arguments: list[str], line: str) -> None:
    refused = invoke(*arguments)
    assert refused.exit_code == 2
    assert re.fullmatch(f"ring-backends compare: error: {line}.*\n", refused.stderr), refused.stderr


def test_a_launchers_world_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused = invoke()
    assert refused.exit_code == 2
    assert "run it without torchrun" in refused.stderr
