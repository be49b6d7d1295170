"""Every command of claims.py runs at tiny lengths, and its results have the expected form."""

from __future__ import annotations

import itertools
import os
import subprocess
from typing import Any

import attach
import blocks
import calls
import claims
import pytest
import slow_link
from case import DENSE_RING, Case
from claims import DIRECTIONS, SCORE_MODS
from setups import ring_setups, setup, window_setup
from typer.testing import CliRunner
from worlds import Worlds

from ring_backends import RingSchedule, SequenceLayout, available_adapters

SHRINK = 128  # the segment of 8192 tokens at rate 4 still has 16 rows


def check_calls(row: dict[str, Any], repeats: int) -> None:
    """Check the times of two contestants. With one or two calls, the median is the mean."""
    ours, others = row["calls"].values()
    assert len(ours) == len(others) == repeats
    assert row["ratio_of_medians"] == pytest.approx(sum(ours) / sum(others))


def test_overhead(worlds: Worlds) -> None:
    rows = claims.overhead(worlds, 2, SHRINK)
    assert [(row["dtype"], row["direction"]) for row in rows] == [*itertools.product(("fp32", "bf16"), DIRECTIONS)]
    for row in rows:
        check_calls(row, 2)
        ours, bare = row["calls"].values()
        assert row["median_of_ratios"] == pytest.approx((ours[0] / bare[0] + ours[1] / bare[1]) / 2)


def test_scaling(worlds: Worlds) -> None:
    setups = ring_setups(SHRINK, "fp32") | {"window": window_setup(SHRINK, 65536)}
    rows = claims.speed_ups(worlds, 1, setups)
    assert [row["tokens"] for row in rows] == [512] * 5
    for row in rows:
        (alone,), (together,), (kernels,), (kernels_twice,) = row["calls"].values()
        assert row["speed_up"] == pytest.approx(alone / together)
        assert row["bare_kernels_speed_up"] == pytest.approx(2 * kernels / kernels_twice)


def test_windows(worlds: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims.shutil, "which", lambda name: None)  # compiling takes half a minute
    rows = claims.windows(worlds, 1, SHRINK)
    assert [row["relative_to"] for row in rows] == [*[claims.SEGMENTS] * 4, *["SDPA with a mask"] * 2]
    for row in rows:
        check_calls(row, 1)


def test_scores(worlds: Worlds) -> None:
    rows = claims.scores(worlds, 1, SHRINK)
    assert [(row["direction"], row["score_mod"]) for row in rows] == [*itertools.product(DIRECTIONS, SCORE_MODS)]
    for row in rows:
        check_calls(row, 1)


def test_score_memory(worlds: Worlds) -> None:
    one, two = claims.score_memory(worlds, 32)
    assert (one["ranks"], two["ranks"]) == (1, 2)
    assert one["over_1_rank"] == 1
    assert one["peak_bytes"] > two["peak_bytes"] > 0


def test_memory(worlds: Worlds) -> None:
    rows = claims.memory(worlds, SHRINK, "fp32", "1,2")
    for row in rows:
        assert len(row["by_rank"]["peak_bytes"]) == row["ranks"]
        assert (row["buffers_share"] > 0) == (row["ranks"] > 1)
    assert rows[0]["over_1_rank"] == 1


def test_peak_memory_covers_the_call_and_its_inputs() -> None:
    # The call has 8 tensors. One rank also holds two chunks of K and V, and the sums of dK and dV: 6 more tensors. The
    # bias of a block adds 8 MiB.
    case = Case(DENSE_RING, 8192, branches=((512, 1),), num_heads=4, kv_heads=4)
    with Worlds() as worlds:
        (peak,) = worlds.peak_memory(case)["peak_bytes"]
    assert case.tensor_bytes == 8 * 8192 * 4 * 64 * 4
    assert case.tensor_bytes < peak < 3 * case.tensor_bytes


def test_million(worlds: Worlds) -> None:
    shrink = 512
    rows = claims.million(worlds, 1, shrink, 2)
    assert [row["tokens"] for row in rows] == [128, 2048]
    for row, rate in zip(rows, (32, 512), strict=True):
        seq_len = row["tokens"] * shrink
        case = setup(shrink, seq_len, ((2048, 1), (16384, 8), (seq_len, rate)))
        schedule = RingSchedule(case.pattern, SequenceLayout(case.seq_len, 2, "zigzag"), 8, 8, True)
        sizes = {"batch": 1, "head_dim": 64, "itemsize": 2}
        stated = [sum(schedule.wire_bytes(r, **sizes, backward=b) for b in (False, True)) for r in range(2)]
        assert row["sent_per_rank_bytes"] == max(stated)
    assert rows[1]["per_token_over_first"] == pytest.approx(
        rows[1]["microseconds_per_token"] / rows[0]["microseconds_per_token"]
    )


def test_attach() -> None:
    pytest.importorskip("transformers")
    (row,) = attach.attach(2, 32)
    check_calls(row, 2)


def test_blocks() -> None:
    if reason := available_adapters()["fsdp"]:
        pytest.skip(reason)
    rows = blocks.blocks(2, 16, "fsdp")
    assert [row["part"] for row in rows] == ["forward", "step"]
    for row in rows:
        check_calls(row, 2)


def test_hidden_hops_cleans_up_its_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_link, "TIMEOUT", 120.0)
    try:
        rows = slow_link.hidden_hops("20mbit", 1, SHRINK)
    except slow_link.NoNamespacesError as error:
        pytest.skip(str(error))
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=30).stdout
    assert f"ring{os.getpid()}-" not in left
    assert [row["hops"] for row in rows] == ["hidden", "synchronous"] * 3
    for row in rows:
        assert 0 <= row["waited_share"] < 1
    # A rank sends 0.6 MiB, which takes 0.26 s on this link. Its tiles take a few milliseconds, so it waits in any case.
    plain = rows[-2:]
    for row in plain:
        assert row["waited_share"] > 0.3
        assert row["wire_share"] == pytest.approx(row["sent_per_rank_bytes"] * 8 / 20e6 / row["seconds"])


def test_hidden_hops_without_root_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_link.shutil, "which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(slow_link.os, "geteuid", lambda: 1000)
    shown = CliRunner().invoke(claims.app, ["hidden-hops"])
    assert (shown.exit_code, shown.stderr.startswith("hidden-hops: ")) == (1, True)
    assert "needs root" in shown.stderr


@pytest.mark.parametrize("rate", ["fast", "10", "1.5mbit"])
def test_invalid_rates_are_refused(rate: str) -> None:
    with pytest.raises(ValueError, match=f"rate = '{rate}': write a whole number"):
        slow_link.bits_per_second(rate)


def test_too_large_shrink_is_refused() -> None:
    def shrunk(shrink: int) -> Any:
        return ring_setups(shrink, "fp32")

    assert shrunk(2048)["dilated"].branches == ((1, 1), (4, 4), (32, 16))
    with pytest.raises(ValueError, match="shrink = 4096: a segment of 2048"):
        shrunk(4096)


def test_tiny_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "CALLS_AT_ONCE", 2)
    rows = calls.tiny_calls(1)
    assert [row["relative_to"] for row in rows[:2]] == ["by hand"] * 2
    assert all(row["median_of_ratios"] > 0 for row in rows)


def test_latency() -> None:
    forward, backward = calls.latency(0.1, 16384, 1)
    assert (forward["hops"], backward["hops"]) == ({"spread": 1, "around": 7}, {"spread": 4, "around": 14})
