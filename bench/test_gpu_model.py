"""The counts and the table of gpu.py's model."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import gpu
import gpu_cases
import gpu_counts
import gpu_model
import pytest
import torch
from case import Case
from gpu_counts import LaunchCounter
from gpu_replay import Replay, busiest_rank, local_copies
from typer.testing import CliRunner

from ring_backends.kernels.rows import Rows, add_rows, gather_many, merge_rows
from ring_backends.schedule.rows import DilatedRows, head_runs

META = torch.device("meta")
SMALL = Case("", 4096, branches=((256, 1), (1024, 4), (4096, 16)), num_heads=4, kv_heads=2, head_dim=64, dtype="bf16")
SMALL_RING = dataclasses.replace(SMALL, ring_size=4, layout="zigzag")


def test_operators_count_by_what_they_read_and_write() -> None:
    x, y, index = (torch.empty(size, device=META) for size in ((8, 16), (8, 16), (0,)))
    with LaunchCounter() as counter:
        x.view(16, 8).transpose(0, 1)  # views
        torch.empty_like(x)
        index + 1  # no elements
        x.copy_(y)
        x.add_(y)
        x.zero_()
        x + y
        x + y[:1].expand(8, 16)
        x.masked_fill(x == 0, 1.0)
        x.index_select(0, torch.empty(2, dtype=torch.int64, device=META))
    size = 8 * 16 * 4
    assert counter.launches == {
        "copy_": 1, "add_": 1, "zero_": 1, "add": 2, "eq": 1, "masked_fill": 2, "index_select": 1
    }  # fmt: skip
    assert counter.bytes["copy_"] == 2 * size
    assert counter.bytes["add_"] == 3 * size
    assert counter.bytes["zero_"] == size
    assert counter.bytes["add"] == 3 * size + 2 * size + 16 * 4
    assert counter.bytes["masked_fill"] == 2 * size + size // 4
    assert counter.bytes["index_select"] == 2 * (2 * 16 * 4)


def test_operators_on_the_cpu_launch_nothing() -> None:
    with LaunchCounter() as counter:
        torch.zeros(4) + 1
    assert not counter.launches


def test_flash_backward_copies_unless_rows_are_outermost() -> None:
    shape = (2, 4, 32, 64)
    packed = torch.empty(shape, device=META, dtype=torch.bfloat16)
    outermost = packed.transpose(1, 2).contiguous().transpose(1, 2)
    size = packed.numel() * 2
    packed, outermost = (x.transpose(1, 2) for x in (packed, outermost))
    assert [b for _, b in gpu_counts._around_flash_backward(packed, packed)] == [2 * size] * 2
    assert not [*gpu_counts._around_flash_backward(outermost, outermost)]


def test_rows_move_as_many_bytes_in_one_launch_as_they_must() -> None:
    rows = DilatedRows(0, 2, 64, 4, 16, head_runs([0, 2, 1], [0, 2, 1]))  # several runs
    tensor = torch.empty(1, 128, 3, 8, device=META)
    out, lse = torch.empty_like(tensor), tensor[..., 0]
    gathered = torch.empty(2, 3, 16, 8, device=META, dtype=torch.bfloat16)
    tile_lse = torch.empty(2, 3, 16, device=META)
    counter = LaunchCounter()
    assert len(rows.runs) > 1
    with gpu_counts.row_launches(counter), counter:
        gather_many([Rows(tensor, rows, gathered)])
        merge_rows(out, lse, rows, gathered, tile_lse)
        add_rows([Rows(out, rows, tensor), Rows(tensor, rows, out)])
    assert counter.launches == {"move rows": 2, "merge rows": 1}
    n = gathered.numel()
    assert counter.bytes == {"move rows": n * (2 + 4) + 2 * n * 3 * 4, "merge rows": n * (2 + 2 * 4) + n // 8 * 3 * 4}
    # The functions are back, and launch once per run at least.
    with LaunchCounter() as counter:
        gather_many([Rows(tensor, rows, gathered)])
        merge_rows(out, lse, rows, gathered, tile_lse)
    assert counter.launches["copy_"] >= 2 * len(rows.runs)


@pytest.mark.parametrize("case", [SMALL, SMALL_RING], ids=["one GPU", "ring"])
def test_modelled_passes(case: Case) -> None:
    given = gpu_cases.GpuCase("small", case, 0.9, (40, 80), (1, 1))
    rows = gpu_model.modelled_rows([given])
    kernels = (gpu_model.FLASH, gpu_model.AUTO, gpu_model.TRITON)
    assert [(row["kernel"], row["pass"]) for row in rows] == [*itertools.product(kernels, ("forward", "backward"))]
    for row in rows:
        assert row["launches"] == sum(row["launches_by_operator"].values())
        assert row["other_GB"] == pytest.approx(sum(row["bytes_by_operator"].values()) / 1e9)
        assert (row["sent_bytes"] > 0) == (case.ring_size > 1)
        assert ("hop" in row["launches_by_operator"]) == (case.ring_size > 1)
        assert row["targets"].count("met") + row["targets"].count("MISSED") == 4
    # Every tile of a flash kernel is one operator, so all tiles of the plan were run.
    operator = "_scaled_dot_product_flash_attention"
    assert rows[0]["launches_by_operator"][operator] == rows[0]["tiles"]
    assert rows[1]["launches_by_operator"][f"{operator}_backward"] == 3 * rows[1]["tiles"]
    of_auto = rows[2]["launches_by_operator"]
    of_cudnn = of_auto["_scaled_dot_product_cudnn_attention"] // 2  # two launches each
    assert 1 <= of_cudnn <= of_cudnn + of_auto["forward"] <= rows[2]["tiles"]
    assert rows[2]["launches"] < rows[0]["launches"]
    triton_forward, triton_backward = (row["launches_by_operator"] for row in rows[4:])
    assert 3 <= triton_forward["forward"] <= rows[4]["tiles"]
    assert triton_backward["grad_query"] == triton_backward["grad_key_value"] <= rows[5]["tiles"]


def test_a_window_is_one_tile_for_kernels_that_take_bands() -> None:
    case = dataclasses.replace(SMALL, branches=((4096, 1),), window=512)
    rows = gpu_model.modelled_rows([gpu_cases.GpuCase("small", case)])
    found = {(row["kernel"], row["pass"]): row["launches_by_operator"] for row in rows}
    assert found[gpu_model.TRITON, "forward"] == {"forward": 1}
    assert found[gpu_model.TRITON, "backward"] == {"grad_query": 1, "grad_key_value": 1}
    operator = "_scaled_dot_product_flash_attention"
    assert found[gpu_model.FLASH, "forward"][operator] == rows[0]["tiles"]
    assert found[gpu_model.FLASH, "backward"][f"{operator}_backward"] == 3 * rows[1]["tiles"]
    # 512 rows see up to 512 keys each: two triangles of every block of 512.
    pairs = 4 * (512 * 513 // 2 + 7 * (512 * 513 // 2 + 511 * 512 // 2))
    seconds = 4 * case.head_dim * pairs / gpu_model.FORWARD_FLOPS_PER_SECOND
    assert rows[0]["kernels_ms"] == pytest.approx(seconds * 1e3)


def test_flops_are_those_of_the_tiles() -> None:
    """The model's FLOPs come from the schedule. Those of the tiles of the plan are the same."""
    for case in (SMALL, SMALL_RING):
        for rank in range(case.ring_size):
            replay = Replay.of(case, META, rank=rank, kernel="aten_cuda_flash")
            for backward, products in ((False, 2), (True, 5)):
                pairs = 0
                for _, step in replay.call.plan(replay.inputs, backward=backward).steps:
                    for tile in step.all_tiles:
                        n, k = tile.queries.rows, tile.keys.rows
                        of_head = n * (n + 1) // 2 if tile.is_causal else n * k
                        pairs += tile.queries.segments * tile.queries.num_heads * of_head
                assert replay.flops(backward=backward) == products * 2 * case.head_dim * pairs


def test_the_busiest_rank_has_most_work() -> None:
    # In a contiguous ring, causal queries of the last rank see the most keys.
    assert busiest_rank(dataclasses.replace(SMALL_RING, layout="contiguous")) == 3
    assert busiest_rank(SMALL) == 0


def test_the_replayed_rank_sends_what_its_schedule_states() -> None:
    rank = busiest_rank(SMALL_RING)
    replay = Replay.of(SMALL_RING, META, rank=rank)
    sizes = {"batch": 1, "head_dim": 64, "itemsize": 2}
    out = replay.forward()
    assert replay.ring.traffic.bytes == replay.call.schedule.wire_bytes(rank, **sizes)
    replay.ring.traffic.reset()
    replay.backward(out)
    assert replay.ring.traffic.bytes == replay.call.schedule.wire_bytes(rank, **sizes, backward=True)


def test_local_copies_fill_every_incoming_buffer() -> None:
    outgoing = {1: torch.arange(1, 9, dtype=torch.uint8)}
    incoming = {2: torch.full((12,), 77, dtype=torch.uint8), 3: torch.full((4,), 77, dtype=torch.uint8)}
    local_copies(outgoing, incoming, 0)
    assert incoming[2].tolist() == [*range(1, 9), 0, 0, 0, 0]
    assert incoming[3].tolist() == [0] * 4


def test_the_command_writes_the_modelled_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = gpu_cases.GpuCase("a small call", SMALL)
    monkeypatch.setattr(gpu, "ONE_GPU", (given,))
    monkeypatch.setattr(gpu, "WINDOWS", ())
    monkeypatch.setattr(gpu, "RINGS", ())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = tmp_path / "model.json"
    shown = CliRunner().invoke(gpu.app, ["--json", str(file)])
    assert shown.exit_code == 0, shown.output
    assert "No CUDA device; this is the modelled table." in shown.output
    assert "Modelled, not measured" in shown.output
    assert "a small call" in shown.output
    written = json.loads(file.read_text())
    assert written["claim"] == "modelled"
    assert len(written["rows"]) == 6
    assert "No CUDA device" not in CliRunner().invoke(gpu.app, ["--model"]).output
    lines = CliRunner().invoke(gpu.app, ["--model", "--markdown"]).output.splitlines()
    kernels = [line.split("|")[2].strip() for line in lines if "a small call" in line]
    assert kernels == [gpu_model.FLASH, gpu_model.AUTO, gpu_model.TRITON]
