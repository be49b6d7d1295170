"""The commands of claims.py at tiny lengths: their rows have the expected form, and their files can be read again."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import claims
import groups
import pytest
import recurrent_layers
import slides
import slow_link
import tiny_calls
import torch
import training_steps
from case import DENSE_RING, ONE_DEVICE, Case
from clock import in_turns
from decoding import decoding
from ranks import DIRECTIONS, Worlds
from report import Row, compared, read_rows, report, table
from typer.testing import CliRunner

from ring_backends import available_adapters
from ring_backends.testing.hosts import NoHostsError

SHRINK = 128  # the segment of 8192 tokens at rate 4 still has 16 rows


def check_calls(rows: list[Row], repeats: int) -> None:
    """Check the times of two contestants. With one or two calls, the median is the mean."""
    for row in rows:
        ours, others = row["calls"].values()
        assert len(ours) == len(others) == repeats
        assert row["ratio_of_medians"] == pytest.approx(sum(ours) / sum(others))


def test_contestants_take_turns() -> None:
    made: list[str] = []

    def begin(name: str) -> Any:
        made.append(name)
        number = len(made)
        return lambda: float(number)

    found = in_turns([lambda: begin("ours"), lambda: begin("its")], 2, warm_up=1)
    assert made == ["ours", "its"] * 3
    assert found == [[3, 5], [4, 6]]
    row = compared(seconds=found[0], its=found[1])
    assert (row["seconds"], row["its"]) == (4, 5)
    assert (row["ratio_of_medians"], row["median_of_ratios"]) == (4 / 5, pytest.approx((3 / 4 + 5 / 6) / 2))


def test_overhead(worlds: Worlds) -> None:
    rows = [*claims.overhead(worlds, 2, SHRINK)]
    assert [(row["dtype"], row["direction"]) for row in rows] == [*itertools.product(("fp32", "bf16"), DIRECTIONS)]
    check_calls(rows, 2)


def test_scaling(worlds: Worlds) -> None:
    rows = [row for calls in ("dilated", "plain", "window") for row in claims.scaling(worlds, calls, 1, SHRINK)]
    assert [row["tokens"] for row in rows] == [512] * 5
    for row in rows:
        (alone,), (together,), (kernels,), (kernels_twice,) = row["calls"].values()
        assert row["speed_up"] == pytest.approx(alone / together)
        assert row["bare_kernels_speed_up"] == pytest.approx(2 * kernels / kernels_twice)


def test_options(worlds: Worlds) -> None:
    rows = [*claims.options(worlds, 1, SHRINK)]
    assert len({row["option"] for row in rows}) == 7
    check_calls(rows, 1)


def test_slides(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, with the tests' stand-in for gigapath, whose attention is dense."""

    here = SimpleNamespace(run=lambda function, *args: [function(*args)])
    folder = Path(__file__).parents[1] / "tests" / "integrations"
    for path in (folder, folder / "stand_ins"):
        monkeypatch.syspath_prepend(path)
    monkeypatch.setattr(slides, "World", lambda *args, **options: contextlib.nullcontext(here))
    (row,) = slides.slides("64", threads=torch.get_num_threads(), repeats=1)
    assert row["class"] == "gigapath_reference"
    assert 0 < row["error"] < 1e-4
    check_calls([row], 1)
    assert min(row["call_bytes"], row["published_call_bytes"]) >= 0


def test_memory(worlds: Worlds) -> None:
    rows = [*claims.memory(worlds, SHRINK, "fp32", "1,2")]
    for row in rows:
        assert len(row["by_rank"]["peak_bytes"]) == row["ranks"]
        assert (row["buffers_share"] > 0) == (row["ranks"] > 1)
    assert rows[0]["over_1_rank"] == 1
    short, long = claims.million(worlds, 1, 512, 2)
    assert (short["tokens"], long["tokens"], short["per_token_over_first"]) == (128, 2048, 1)
    assert long["sent_per_rank_bytes"] >= short["sent_per_rank_bytes"] > 0
    one, two = claims.score_memory(worlds, 32)
    assert (one["ranks"], two["ranks"], one["over_1_rank"]) == (1, 2, 1)
    assert one["peak_bytes"] > two["peak_bytes"] > 0


def test_peak_memory_covers_the_call_and_its_inputs() -> None:
    # The call has 8 tensors. One rank also holds two chunks of K and V, and the sums of dK and dV: 6 more tensors. The
    # bias of a block adds 8 MiB.
    case = Case(DENSE_RING, 8192, branches=((512, 1),), num_heads=4, kv_heads=4)
    with Worlds() as worlds:
        (peak,) = worlds.peak_memory(case)["peak_bytes"]
    assert case.tensor_bytes == 8 * 8192 * 4 * 64 * 4
    assert case.tensor_bytes < peak < 3 * case.tensor_bytes


def test_calls_on_ranks_of_their_own() -> None:
    if available_adapters()["fsdp"] is None:
        rows = [*training_steps.blocks(2, 16, "fsdp")]
        assert [row["part"] for row in rows] == ["forward", "step"]
        check_calls(rows, 2)
    if find_spec("transformers"):
        check_calls([*training_steps.attach(2, 32)], 2)
        rows = [*recurrent_layers.recurrent_layers(1, 128)]
        check_calls(rows, 1)
        assert all(row["error"] < 1e-5 for row in rows)
        assert rows[1]["sent_bytes"] > rows[0]["sent_bytes"] > 0
    (row,) = decoding("300", 1, "fp32", 3)
    assert row["sdpa_ms_per_token"] > 0
    assert row["cache_mib_per_rank"] == pytest.approx(2 * 304 * 8 * 64 * 4 / 2**20, rel=0.01)


def test_tiny_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_calls, "CALLS_AT_ONCE", 2)
    rows = [*tiny_calls.tiny_calls(1)]
    assert [row["relative_to"] for row in rows[:2]] == ["by hand"] * 2
    assert all(row["median_of_ratios"] > 0 for row in rows)


def test_hidden_hops_cleans_up_its_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_link, "TIMEOUT", 120.0)
    try:
        rows = [*slow_link.hidden_hops("20mbit", 1, SHRINK)]
        with pytest.raises(SystemExit, match="terminated"), slow_link.limited_link("20mbit"):
            os.kill(os.getpid(), signal.SIGTERM)
    except slow_link.NoNamespacesError as error:
        pytest.skip(str(error))
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=30).stdout
    assert f"ring{os.getpid()}-" not in left
    assert [row["hops"] for row in rows] == ["hidden", "synchronous"] * 3
    # A rank sends 0.6 MiB, which takes 0.26 s on this link. Its tiles take a few milliseconds, so it waits in any case.
    for row in rows[-2:]:
        assert 0.3 < row["waited_share"] < 1
        assert row["wire_share"] == pytest.approx(row["sent_per_rank_bytes"] * 8 / 20e6 / row["seconds"])


def test_groups_on_two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "TIMEOUT", 240.0)
    try:
        rows = [*groups.groups(1.0, "200mbit", "1,4", 1, SHRINK)]
    except NoHostsError as error:
        pytest.skip(str(error))
    assert [(row["setup"], row["ulysses_size"]) for row in rows] == [*itertools.product(groups.CALLS, (1, 4))]
    # One host has the outer quarters of the sequence, the other the inner ones. The last quarter is not sent. K and V
    # are sent twice, and dK and dV once. Without groups, each rank sends to all four of the other host.
    once = 3 * (3 * 32 // 4) * 2 * 8 * 64 * 4
    assert [row["between_hosts_bytes"] for row in rows[:2]] == [4 * once, once]
    for row in rows:
        assert row["tokens"] == 32
        assert row["error"] < 1e-5
        assert len(row["by_rank"]) == 8
        for direction in groups.DIRECTIONS:
            times = [of_rank[direction][0]["seconds"] for of_rank in row["by_rank"]]
            assert row[f"{direction}_seconds"] == max(times)


def test_files_of_a_command_can_be_shown_and_drawn(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    command = ["methods", "--seq-lens", "8192", "--ring-sizes", "2", "--repeats", "1", "--contestants", ONE_DEVICE]
    done = CliRunner().invoke(claims.app, [*command, "--no-memory", "--json", str(file)])
    assert done.exit_code == 0, done.output
    written = json.loads(file.read_text())
    assert written.keys() == {"claim", "command", "options", "machine", "rows"}
    (row,) = read_rows(file)
    assert (row["tokens"], row["contestant"], row["sent_bytes"]) == (8192, ONE_DEVICE, 0)
    shown = CliRunner().invoke(claims.app, ["show", str(file)])
    cells = [line.split("|")[1].strip() for line in shown.output.splitlines() if "one dev" in line]
    assert cells == ["8,192"], shown.output
    pytest.importorskip("matplotlib")
    import plot

    plot.main(file)
    drawn = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    assert set(drawn) == {"by-length-fp32.svg", "by-ring-size-fp32.svg"}
    assert "<!-- one device -->" in drawn["by-length-fp32.svg"]


def test_rows_are_written_as_they_come(tmp_path: Path) -> None:
    def stopped() -> Any:
        yield {"ms": 1.5}
        raise KeyboardInterrupt

    file = tmp_path / "rows.json"
    with pytest.raises(KeyboardInterrupt):
        report("ring", {}, stopped(), file)
    assert read_rows(file) == [{"ms": 1.5}]
    file.write_text("{}")
    with pytest.raises(ValueError, match="has no rows"):
        read_rows(file)
    for file in (Path(__file__).parent / "results").glob("*.json"):
        assert table(read_rows(file), markup=True).row_count > 0
