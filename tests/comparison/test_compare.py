"""``ring-backends compare``: rows for every adapter, the all-gather method and one rank, and the report."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from command_line import check_refusal, invoke, refused, run, shown
from native_ranks import native_ring
from torch import Tensor

from ring_backends import available_adapters, plotting
from ring_backends.adapters import native
from ring_backends.comparison import compare
from ring_backends.comparison.rank import Span, local_inputs, record_spans
from ring_backends.comparison.setup import TENSORS
from ring_backends.ring.launch import Failure, RankFailedError
from ring_backends.ring.ring import Ring
from ring_backends.schedule.layout import LayoutKind, SequenceLayout
from ring_backends.schedule.pattern import DilatedPattern
from ring_backends.schedule.ring_schedule import RingSchedule
from ring_backends.testing.world import World


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


SMALL = "--seq-len 512 --heads 4 --kv-heads 2 --head-dim 8 --repeats 2"


EVERY_ADAPTER = pytest.mark.matrix(reason="starts two ranks for each adapter")
BRANCHES = "--segment-lengths 64 512 none --dilation-rates 1 4 1 --window-lengths none none 100"


def test_help_says_what_is_measured() -> None:
    text = " ".join(shown("compare --help").split())
    for words in ("median of the timed calls", "increase of the resident set", "all-reduce", "from their fp64 values"):
        assert words in text


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The written result and the printed text of a small comparison on two ranks."""
    file = tmp_path_factory.mktemp("compare") / "compare.json"
    printed = shown(f"compare {SMALL} {BRANCHES} --layout zigzag --json", file)
    return json.loads(file.read_text()), printed


@EVERY_ADAPTER
def test_every_adapter_the_all_gather_method_and_one_rank_are_compared(compared: tuple[dict[str, Any], str]) -> None:
    result, printed = compared
    reasons = {**available_adapters(), "all-gather": None, "one rank": None}
    assert [row["name"] for row in result["rows"]] == [*reasons]
    lines = printed.splitlines()
    assert lines[0].startswith(
        "512 tokens, zigzag, causal, 4 heads (2 for keys and values) of 8, float32; "
        "branches (64, 1), (512, 4), (whole sequence, 1, window 100); ring of 2"
    )
    for name, reason in reasons.items():
        (line,) = (line for line in lines if re.match(rf" ?{name} ", line))
        assert ("unusable" in line) == (reason is not None)


@EVERY_ADAPTER
def test_the_rows_hold_what_was_measured(compared: tuple[dict[str, Any], str]) -> None:
    result, _ = compared
    rows = {row["name"]: row for row in result["rows"] if row["unusable"] is None}
    pattern = DilatedPattern((64, 512, None), (1, 4, 1), window_lengths=(None, None, 100))
    schedule = RingSchedule(pattern, SequenceLayout(512, 2, "zigzag"), 4, 2, True)
    for name, row in rows.items():
        assert row["failed"] is None
        assert row["ranks"] == len(row["peak_memory_bytes"]) == (1 if name == "one rank" else 2)
        for part in ("forward", "backward"):
            calls = row["calls"][f"{part}_seconds"]
            assert [len(of_rank) for of_rank in calls] == [2] * row["ranks"]
            least, most = sorted(map(max, zip(*calls, strict=True)))
            assert row[f"{part}_range"] == [least, most]
            assert least > 0
            assert row[f"{part}_seconds"] == pytest.approx((least + most) / 2)
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
    stated = {"segment_lengths": [64, 512, None], "window_lengths": [None, None, 100], "seq_len": 512, "device": "cpu"}
    assert result["options"].items() >= stated.items()


def spans_here() -> list[Span]:
    """The spans of a forward and a backward of this rank, on a ring of two."""
    attention = native.RingDilatedAttention([64], [1], ring=native_ring())
    leaves = [torch.randn(1, 32, 2, 8, requires_grad=True) for _ in range(3)]
    return record_spans(
        lambda: attention(*leaves), lambda out: torch.autograd.grad(out.sum(), leaves), torch.device("cpu")
    )


def test_spans_of_all_ranks_share_one_clock(pair: World) -> None:
    of_ranks = pair.run(spans_here)
    for part in ("forward", "backward"):
        whole = [next(span for span in spans if span[:2] == (part, "call")) for spans in of_ranks]
        for spans, (_, _, first, last) in zip(of_ranks, whole, strict=True):
            inside = [span for span in spans if span[0] == part and span[1] != "call"]
            assert {"tile", "post"} <= {what for _, what, _, _ in inside}
            assert all(first <= begin <= end <= last for _, _, begin, end in inside)
        # The ranks begin together. Neither can end before the other has begun.
        assert max(begin for _, _, begin, _ in whole) < min(end for _, _, _, end in whole)


def test_the_profiler_prints_nothing(tmp_path: Path) -> None:
    code = "from ring_backends.comparison.rank import *; import torch\n"
    code += "print(len(record_spans(lambda: 1, lambda result: result, torch.device('cpu'))))"
    done = run(["-c", code], tmp_path)
    assert (done.stdout, done.stderr) == ("2\n", "")


def rank_result() -> dict[str, Any]:
    return {
        "device": "CPU with 1 thread per rank",
        "peak_memory_bytes": 3 * 2**20,
        "bytes_sent": {"forward": 1000, "backward": 2000},
        "bytes_are_computed": False,
        "largest_error": dict.fromkeys(TENSORS, 1e-6),
        "largest": dict.fromkeys(TENSORS, 2.0),
    }


CALLS = [[(1.0, 2.0), (0.5, 2.0)], [(3.0, 2.0), (0.5, 2.0)], [(2.0, 8.0), (2.5, 2.0)]]
"""(forward, backward) seconds of two ranks, for three calls."""
SPANS = [("forward", "call", 5.0, 6.0), ("forward", "tile", 5.2, 5.9), ("backward", "call", 7.0, 8.0)]


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace ranks by fixed results. One adapter is unusable, and one fails. Returns the methods in order of steps."""
    found: list[str] = []

    def launch(target: Any, args: tuple[Any, ...], num_ranks: int) -> list[Any]:
        adapters = {"native": None, "absent": "absent is not installed; pip install absent", "broken": None}
        return [{"setup": args[0], "adapters": adapters, "versions": {"torch": "2"}, "device": "CPU"}]

    @contextlib.contextmanager
    def start(target: Any, args: tuple[Any, ...], num_ranks: int) -> Iterator[Any]:
        setup, name, _ = args
        ranks = [rank_result(), {**rank_result(), "peak_memory_bytes": 5 * 2**20}]
        factor = SLOWER.get(name, 1.0)
        calls = [[(factor * forward, factor * backward) for forward, backward in call] for call in CALLS]
        results = iter([ranks, *calls[: setup.repeats], [SPANS, SPANS]])

        def step() -> list[Any]:
            found.append(name)
            if name == "broken" and found.count(name) == 2:
                raise RankFailedError(1, Failure(1, "Traceback\n  it\nRuntimeError: it broke"))
            return next(results)[:num_ranks]

        yield mock.Mock(step=step)

    monkeypatch.setattr(compare, "launch", launch)
    monkeypatch.setattr(compare, "start", start)
    return found


SLOWER = {"all-gather": 1.5, "one rank": 6.0}
"""How many times as long as native a method takes."""


def test_methods_take_turns(turns: list[str], tmp_path: Path) -> None:
    invoke("compare --repeats 3")
    native, broken, gather, one = "native", "broken", "all-gather", "one rank"
    first, rounds = turns[:4], (turns[4:8], turns[8:11], turns[11:])
    assert first == [native, broken, gather, one]
    assert rounds == ([native, broken, gather, one], [gather, one, native], [gather, one, native])


def test_methods_whose_times_overlap_are_not_ranked(turns: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = "Forward and backward together: native"
    last = invoke("compare --repeats 3").stdout.splitlines()[-1]
    assert last == (
        f"{words} and all-gather are not ranked, because the times of their 3 calls overlap. "
        "More time than native: one rank 500%."
    )
    monkeypatch.setitem(SLOWER, "all-gather", 6.0)
    turns.clear()
    last = invoke("compare --repeats 3").stdout.splitlines()[-1]
    assert last.startswith(f"{words} is the fastest: each of its 3 calls took less time than any other. More time")
    turns.clear()
    assert "the spread is unknown, so they are not ranked" in invoke("compare --repeats 1").stdout.splitlines()[-1]


def test_the_slowest_rank_counts_and_adapters_that_do_not_run_have_a_row(turns: list[str], tmp_path: Path) -> None:
    done = invoke("compare --repeats 3 --json", tmp_path / "compare.json")
    printed = [" ".join(line.split()) for line in done.stdout.splitlines()]
    lines = {line.split("  ")[0].strip(): " ".join(line.split()) for line in done.stdout.splitlines()}
    assert lines["native"] == "native 2.500 s 2.000 s 5 MiB 2.9 KiB 5e-07 5e-07 5e-07 5e-07 CPU with 1 thread per rank"
    assert printed[printed.index(lines["native"]) + 1] == "1.000–3.000 2.000–8.000"
    assert lines["one rank"].startswith("one rank 12.000 s 12.000 s 3 MiB 2.9 KiB")
    assert lines["absent"] == "absent - - - - - - - - unusable: absent is not installed; pip install absent"
    assert lines["broken"] == "broken - - - - - - - - failed: RuntimeError: it broke"
    assert done.exit_code == 1
    assert done.stderr.startswith("ring-backends compare: error: rank 1: broken: Traceback")
    result = json.loads((tmp_path / "compare.json").read_text())
    assert result["fastest"] == ["native", "all-gather"]
    rows = {row["name"]: row for row in result["rows"]}
    assert (rows["native"]["both_seconds"], rows["native"]["both_range"]) == (5.0, [3.0, 10.5])
    assert rows["native"]["calls"]["forward_seconds"] == [[1.0, 3.0, 2.0], [0.5, 0.5, 2.5]]
    assert rows["absent"]["unusable"] == "absent is not installed; pip install absent"
    assert rows["broken"]["failed"].endswith("it broke")
    assert rows["native"]["peak_memory_bytes"] == [3 * 2**20, 5 * 2**20]


def test_the_default_pattern_equals_that_of_train(turns: list[str]) -> None:
    assert invoke("compare --repeats 3").stdout.startswith(
        "65,536 tokens, contiguous, causal, 8 heads of 64, auto; branches (256, 1), (4096, 8), (65536, 32); ring of 2"
    )


def test_plot_draws_a_file(turns: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    invoke("compare --repeats 3 --plot", tmp_path / "bars.svg")
    drawn = (tmp_path / "bars.svg").read_text()
    assert drawn.startswith("<?xml")
    for text in ("both, least to most", "native, backward", "rank 1", "computing a tile", "hop posted"):
        assert text in drawn  # matplotlib writes the text it draws as a comment
    check_refusal("--plot: plot = .*\\.svg", "compare --plot", tmp_path / "bars.docx")


def test_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plotting, "find_spec", lambda name: None)
    assert "matplotlib is not installed; pip install 'ring-backends[plot]'" in refused("compare --plot", "bars.png")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--heads 6 --kv-heads 4", "--kv-heads: num_kv_heads = 4: must divide the 6 query heads"),
        ("--window-lengths 64", "--window-lengths: window_lengths has 1 entries and segment_lengths has 3"),
        ("--layout zig", "--layout: layout = 'zig': .* contiguous, zigzag"),
    ],
)
def test_an_error_is_one_line_that_names_the_option(arguments: str, line: str) -> None:
    check_refusal(line, f"compare {arguments}")


def test_a_launchers_world_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert "run the command without torchrun" in refused("compare")
