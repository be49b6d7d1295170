"""gpu.py on the CPU: its parts with tiny calls, the replayed rank, and the counts of the modelled table."""

from __future__ import annotations

import itertools
from pathlib import Path

import gpu
import gpu_model
import launch_times
import pytest
import torch
from case import Case
from gpu_model import LaunchCounter, modelled
from replay import busiest_rank, flops, schedule_of
from report import read_rows
from typer.testing import CliRunner

from ring_backends.kernels.triton_launch import Kernels
from ring_backends.schedule.planner import rank_plan

META = torch.device("meta")
SMALL = Case("", 4096, branches=((256, 1), (1024, 4), (4096, 16)), num_heads=4, kv_heads=2, head_dim=64, dtype="bf16")
SMALL_RING = SMALL.but(ring_size=4, layout="zigzag")


def test_operators_count_by_what_they_read_and_write() -> None:
    x, y, index = (torch.empty(size, device=META) for size in ((8, 16), (8, 16), (0,)))
    with LaunchCounter() as counter:
        x.view(16, 8).transpose(0, 1)  # views
        torch.empty_like(x)
        index + 1  # no elements
        torch.zeros(4) + 1  # on the CPU
        x.copy_(y)
        x.add_(y)
        x.zero_()
        x + y[:1].expand(8, 16)
        x.masked_fill(x == 0, 1.0)
        x.index_select(0, torch.empty(2, dtype=torch.int64, device=META))
    size = 8 * 16 * 4
    assert counter.launches == {
        "copy_": 1, "add_": 1, "zero_": 1, "add": 1, "eq": 1, "masked_fill": 2, "index_select": 1
    }  # fmt: skip
    assert counter.bytes == {
        "copy_": 2 * size, "add_": 3 * size, "zero_": size, "add": 2 * size + 16 * 4, "eq": size + size // 4,
        "masked_fill": 2 * size + size // 4, "index_select": 2 * (2 * 16 * 4),
    }  # fmt: skip


@pytest.mark.parametrize("case", [SMALL, SMALL_RING], ids=["one GPU", "ring"])
def test_modelled_passes(case: Case) -> None:
    rows = {(row["kernel"], row["pass"]): row for kernel in gpu_model.KERNELS for row in modelled("x", case, kernel)}
    assert [*rows] == [*itertools.product(gpu_model.KERNELS, ("forward", "backward"))]
    schedule, rank = schedule_of(case), busiest_rank(case)
    assert busiest_rank(case.but(layout="contiguous")) == case.ring_size - 1  # its queries see the most keys
    for (_, direction), row in rows.items():
        is_backward = direction == "backward"
        assert row["launches"] == sum(row["launches_by_operator"].values())
        assert row["other_GB"] == pytest.approx(sum(row["bytes_by_operator"].values()) / 1e9)
        sizes = {"batch": 1, "head_dim": 64, "itemsize": 2, "backward": is_backward, "device_type": "meta"}
        assert row["sent_bytes"] == (schedule.wire_bytes(rank, **sizes) if case.ring_size > 1 else 0)
        assert ("hop" in row["launches_by_operator"]) == (case.ring_size > 1)
        assert 1 <= row["tiles"] < row["launches"]
        added = row["bytes_by_operator"].get("add parts", 0)
        if is_backward and case.ring_size > 1:
            # dK and dV come home in one hop, in fp32. Those of own rows are read and written.
            (lot,) = rank_plan(schedule, rank, **sizes).deliveries[1:]
            own = sum(parcel.rows * parcel.num_streams for parcel in lot.own)
            arrived = int(schedule.travel(**sizes).key_rows_sent[rank])
            assert added == 4 * 2 * 64 * (arrived + 2 * own) > 0
        else:
            assert not added
    counts = {at: row["launches_by_operator"] for at, row in rows.items()}
    flash, cudnn = "_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention"
    tiles = counts["flash", "forward"][flash]
    assert counts["flash", "backward"][f"{flash}_backward"] >= 3 * len(case.branches)
    assert 2 <= counts["auto", "forward"][cudnn] // 2 + counts["auto", "forward"]["forward"] <= tiles
    assert rows["auto", "forward"]["launches"] < rows["flash", "forward"]["launches"]
    assert 3 <= counts["triton_dilated", "forward"]["forward"] <= tiles
    triton = counts["triton_dilated", "backward"]
    assert triton["grad_query"] == triton["grad_key_value"] >= 3


def test_a_window_is_one_tile_for_kernels_that_take_bands() -> None:
    case = SMALL.but(branches=((4096, 1),), window=512)
    triton = [row["launches_by_operator"] for row in modelled("x", case, "triton_dilated")]
    assert triton == [{"forward": 1}, {"grad_query": 1, "grad_key_value": 1}]
    assert [row["launches_by_operator"] for row in modelled("x", case, "auto")] == triton
    forward, backward = modelled("x", case, "flash")
    flash = "_scaled_dot_product_flash_attention"
    assert forward["launches_by_operator"][flash] > 1 < backward["launches_by_operator"][f"{flash}_backward"] // 3
    # 512 rows see up to 512 keys each: two triangles of every block of 512.
    pairs = 4 * (512 * 513 // 2 + 7 * (512 * 513 // 2 + 511 * 512 // 2))
    assert forward["kernels_ms"] == pytest.approx(4 * case.head_dim * pairs / gpu_model.RATES["forward"] * 1e3)
    assert flops(case, backward=True) == flops(case, backward=False) * 5 // 2


def test_table_and_file_of_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_model, "CASES", {"a small call": SMALL, "a small ring": SMALL_RING})
    shown = CliRunner().invoke(gpu.app, ["model", "--markdown", "--ring-sizes", "1"])
    lines = [line.split("|") for line in shown.output.splitlines() if "a small" in line]
    assert [line[1].strip() for line in lines] == ["a small call"] * 3, shown.output
    assert [line[2].strip() for line in lines] == [*gpu_model.KERNELS]
    options = ["--kernels", "auto", "--ring-sizes", "4", "--launch-seconds", "80e-6", "--json", tmp_path / "model.json"]
    CliRunner().invoke(gpu.app, ["model", *map(str, options)])
    rows = read_rows(tmp_path / "model.json")
    assert [(row["ring_size"], row["kernel"], row["pass"]) for row in rows] == [(4, "auto", x) for x in gpu.DIRECTIONS]
    for row, num_hops, num_messages in zip(rows, (1, 2), (3, 6), strict=True):
        assert (row["hops"], row["messages"]) == (num_hops, num_messages)  # to all three others in one hop, and back
        host_ms = row["launches"] * 80e-3 + num_hops * 200e-3 + (num_messages - num_hops) * 30e-3
        assert row["host_ms"] == pytest.approx(host_ms)
        assert row["kernels_share"] == pytest.approx(row["kernels_ms"] / host_ms)  # which is more than the GPU's time
    (one,) = itertools.islice(modelled("x", SMALL.but(seq_len=2**20), "auto", 0.0), 1)
    assert one["kernels_share"] == pytest.approx(one["kernels_ms"] / (one["kernels_ms"] + one["other_ms"]))


def test_one_device() -> None:
    rows = [*gpu.one_device("auto", "cpu", 1, 1024)]
    assert [(row["tokens"], row["head_dim"]) for row in rows] == [(128, 64), (128, 128), (1024, 128), (1024, 64)]
    for row in rows:
        assert row["forward_ratio"] == pytest.approx(row["forward_ms"] / row["bare_kernels_forward_ms"])
        assert row["peak_bytes"] > 0


def test_ring_and_syncs() -> None:
    rows = [*gpu.ring("2,4", "cpu", 1, 1024)]
    assert [(row["tokens"], row["ranks"]) for row in rows[::2]] == [*itertools.product((128, 1024), (2, 4))]
    for row in rows:
        assert row["us_per_tile"] == pytest.approx(row["ms"] * 1e3 / row["tiles"])
        assert row["host_ms"] > 0
        assert row["idle_share"] is None
    assert gpu.gaps_share([(6, 8), (0, 2), (1, 4)]) == pytest.approx(2 / 8)
    names = ["plain", "key_padding_mask", "document_ids", "dropout", "one rank of 8"]
    assert [row["call"] for row in gpu.syncs("cpu", 1024)] == names


def test_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_times, "OF_RINGS", {"a small call": SMALL_RING})
    rows = [*gpu.launches(1)]
    names = {*Kernels._fields, "move rows", "merge rows", "add parts"}
    for row, modelled_row in zip(rows, modelled("x", SMALL_RING, "triton_dilated"), strict=True):
        counts = modelled_row["launches_by_operator"]
        assert row["launches"] == sum(count for name, count in counts.items() if name in names)
        assert row["us_per_launch"] > 0


def test_only_warnings_of_synchronizations_count(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def call() -> None:
        gpu.warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        gpu.warnings.warn("something else", stacklevel=1)

    (where,) = gpu.sync_warnings(call)
    assert __file__ in where
    assert modes == ["warn", "default"]
