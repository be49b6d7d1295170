"""``ring-backends compare``: rows for every adapter, the all-gather method and one rank, and the report."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import check_refusal, invoke, refused, shown
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


SMALL = "--seq-len 512 --num-heads 4 --num-kv-heads 2 --head-dim 8 --repeats 2"


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
        assert [len(calls) for calls in row["calls"]["forward_seconds"]] == [2] * row["ranks"]
        assert min(row["forward_seconds"], row["backward_seconds"]) > 0
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
    """Replace the launch of ranks by fixed results. One adapter is unusable, and one fails."""

    def launch(target: Any, args: tuple[Any, ...], num_ranks: int) -> list[Any]:
        if args[0] == "prepare":
            adapters = {"native": None, "absent": "absent is not installed; pip install absent", "broken": None}
            return [{"setup": args[1], "adapters": adapters, "versions": {"torch": "2"}, "device": "CPU"}]
        if args[2] == "broken":
            raise RankFailedError(1, Failure(1, "Traceback\n  it\nRuntimeError: it broke"))
        slower = {**rank_result(), "forward_seconds": [0.5, 0.5, 2.5], "peak_memory_bytes": 5 * 2**20}
        return [rank_result(), slower][:num_ranks]

    monkeypatch.setattr(compare, "launch", launch)


def test_the_slowest_rank_counts_and_adapters_that_do_not_run_have_a_row(without_ranks: None, tmp_path: Path) -> None:
    done = invoke("compare --json", tmp_path / "compare.json")
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


def test_the_default_pattern_equals_that_of_train(without_ranks: None) -> None:
    assert invoke("compare").stdout.startswith(
        "65,536 tokens, contiguous, causal, 8 heads of 64, fp32; branches (256, 1), (4096, 8), (65536, 32); ring of 2"
    )


def test_plot_draws_a_file(without_ranks: None, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    invoke("compare --plot", tmp_path / "bars.svg")
    drawn = (tmp_path / "bars.svg").read_text()
    assert drawn.startswith("<?xml")
    for text in ("native, backward", "rank 1", "computing a tile", "hop posted"):
        assert text in drawn  # matplotlib writes the text it draws as a comment
    check_refusal("--plot: plot = .*\\.svg", "compare --plot", tmp_path / "bars.docx")


def test_plot_without_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plotting, "find_spec", lambda name: None)
    assert "matplotlib is not installed; pip install 'ring-backends[plot]'" in refused("compare --plot", "bars.png")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--num-heads 6 --num-kv-heads 4", "--num-kv-heads: num_kv_heads = 4: must divide the 6 query heads"),
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
