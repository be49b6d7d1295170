"""The parts of gpu.py run on the CPU with tiny calls, and the rival methods compute the same attention."""

from __future__ import annotations

import itertools
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import gpu
import gpu_blocks
import gpu_clock
import gpu_parts
import pytest
import torch
from flex_method import flex_method
from gpu_clock import Budget, Clock, gaps_share, or_note
from longnet_method import longnet_method
from report import table
from typer.testing import CliRunner

from ring_backends.kernels import triton_launch
from ring_backends.testing.reference import reference_attention

CPU = torch.device("cpu")
CLOCK = Clock(CPU, 1)
BRANCHES = ((16, 1), (32, 2), (64, 8))  # rates below and above the number of heads


def tensors(num_heads: int, kv_heads: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(2, 64, heads, 16) for heads in (num_heads, kv_heads, kv_heads))


def expected(query: Any, key: Any, value: Any, is_causal: bool) -> torch.Tensor:
    lengths, rates = zip(*BRANCHES, strict=True)
    return reference_attention(query, key, value, lengths, rates, is_causal=is_causal)[0]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_longnet_method_agrees_with_the_reference(heads: tuple[int, int], is_causal: bool) -> None:
    query, key, value = tensors(*heads)
    out = longnet_method(query, key, value, BRANCHES, is_causal=is_causal)
    torch.testing.assert_close(out.double(), expected(query, key, value, is_causal), atol=1e-6, rtol=1e-5)


def test_longnet_method_with_one_branch_has_the_exact_gradient() -> None:
    # With one branch its weight is 1, so a weight without a gradient changes nothing.
    query, key, value = (x.requires_grad_() for x in tensors(4, 2))
    reference = tuple(x.detach().double().requires_grad_() for x in (query, key, value))
    grad = torch.randn_like(query)
    out = longnet_method(query, key, value, ((32, 2),), is_causal=True)
    exact = reference_attention(*reference, [32], [2], is_causal=True)[0]
    found = torch.autograd.grad(out, (query, key, value), grad)
    for ours, theirs in zip(found, torch.autograd.grad(exact, reference, grad.double()), strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-4)


def test_longnet_method_refuses_uneven_segments() -> None:
    with pytest.raises(ValueError, match=r"\(48, 1\) does not divide 64 tokens"):
        longnet_method(*tensors(4, 4), [(48, 1)], is_causal=True)
    with pytest.raises(ValueError, match="4 heads: must be a multiple of the rate 3"):
        longnet_method(*(x[:, :48] for x in tensors(4, 4)), [(48, 3)], is_causal=True)


@pytest.mark.parametrize("is_causal", [False, True])
def test_flex_method_agrees_with_the_reference(is_causal: bool) -> None:
    query, key, value = tensors(4, 2)
    attend = flex_method(BRANCHES, 4, 64, is_causal=is_causal, device=CPU, is_compiled=False)
    torch.testing.assert_close(
        attend(query, key, value).double(), expected(query, key, value, is_causal), atol=1e-6, rtol=1e-5
    )


def test_gaps_share() -> None:
    assert gaps_share([]) is None
    assert gaps_share([(0, 4), (1, 2), (3, 6)]) == 0
    assert gaps_share([(6, 8), (0, 2), (1, 4)]) == pytest.approx(2 / 8)


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory"), "out of memory"),
        (RuntimeError("no such block\nsecond line"), "RuntimeError: no such block"),
    ],
)
def test_a_failure_is_a_note(error: Exception, note: str) -> None:
    def fail() -> dict[str, Any]:
        raise error

    assert or_note(fail) == {"note": note}


def test_a_row_may_lack_columns() -> None:
    shown = table([{"rank": 0, "note": "out of memory"}, {"rank": 1, "ms": 1.5, "spans": [1], "note": ""}])
    assert [column.header for column in shown.columns] == ["rank", "ms", "note"]
    assert [[*column.cells] for column in shown.columns] == [["0", "1"], ["-", "1.500"], ["out of memory", ""]]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_parts, "ROWS", (256, 1024))
    monkeypatch.setattr(gpu_parts, "ROWS_IN_ALL", 1024)
    monkeypatch.setattr(gpu_parts, "RING_SIZES", (2, 4))
    monkeypatch.setattr(gpu_parts, "RIVAL_LENGTHS", (16_384,))


def test_kernels_alone() -> None:
    rows = list(gpu_parts.kernels_alone(CLOCK, Budget(9), 64))
    assert [(row["rows"], row["head_dim"], row["layout"]) for row in rows] == [
        *itertools.product((4, 16), (64, 128), ("contiguous", "rows 4 apart"))
    ]
    for row in rows:
        flops = 4 * 16 * 16 * row["head_dim"] * (row["rows"] + 1) / 2
        assert row["forward_TFLOPs"] == pytest.approx(flops / row["forward_ms"] * 1e3 / 1e12)
        assert row["backward_TFLOPs"] == pytest.approx(2.5 * flops / row["backward_ms"] * 1e3 / 1e12)


def test_strided_tiles_have_the_shape_of_contiguous_ones() -> None:
    contiguous, strided = (gpu_parts._tile(CPU, 2, 8, 64, is_strided) for is_strided in (False, True))
    assert contiguous.shape == strided.shape == (2, 16, 8, 64)
    assert strided.stride() == (32 * 16 * 64, 64, 4 * 16 * 64, 1)


def test_one_device() -> None:
    rows = list(gpu_parts.one_device(CLOCK, Budget(9), 1024))
    calls = [(128, 64), (128, 128), (1024, 128), (1024, 64)]
    kernels = [("auto", *call) for call in calls] + [("aten_cpu_flash", *call) for call in calls]
    assert [(row["kernel"], row["tokens"], row["head_dim"]) for row in rows] == kernels
    for row, other in zip(rows[:4], rows[4:], strict=True):
        assert row["bare_kernels_forward_ms"] == other["bare_kernels_forward_ms"]
    for row in rows:
        assert row["forward_ratio"] == pytest.approx(row["forward_ms"] / row["bare_kernels_forward_ms"])
        assert row["peak_bytes"] > 0


def test_rivals() -> None:
    rows = list(gpu_parts.rivals(CLOCK, Budget(9), 64))
    assert [row["rival"] for row in rows] == ["LongNet's method", "flex_attention"] * 2
    for longnet, flex in itertools.pairwise(rows[:2]):
        assert longnet["backward_ratio"] > 0
        assert flex["backward_ratio"] is None
        assert flex["note"] == "rival: no backward on the CPU"


def test_ring_ranks() -> None:
    rows = list(gpu_parts.ring_ranks(CLOCK, Budget(9), 512))
    assert [(row["tokens"], row["ranks"]) for row in rows[::2]] == [*itertools.product((256, 2048), (2, 4))]
    for row in rows:
        assert row["us_per_tile"] == pytest.approx(row["ms"] * 1e3 / row["tiles"])
        assert row["host_ms"] > 0
        assert row["idle_share"] is None


def test_synchronizations() -> None:
    rows = list(gpu_parts.synchronizations(CLOCK, Budget(9), 512))
    names = ["plain", "key_padding_mask", "document_ids", "dropout", "one rank of 8"]
    assert [row["call"] for row in rows] == names


class FakeTime:
    """Stands for the module ``time``. Its clock only shows what was added to it."""

    now = 0.0
    monotonic = time.monotonic

    def perf_counter(self) -> float:
        return self.now


class FakeKernel:
    """Stands for a Triton kernel: records its launches, takes 1 s per 16 keys, and compiles no blocks of 128 rows."""

    def __init__(self, name: str, launched: list[tuple[str, dict[str, Any]]], clock: FakeTime) -> None:
        self.name, self.launched, self.clock = name, launched, clock

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self._launch

    def _launch(self, *inputs: Any, **constants: Any) -> None:
        if constants["BLOCK_Q"] == 128:
            raise RuntimeError("out of resource: shared memory\nsecond line")
        self.launched.append((self.name, constants))
        self.clock.now += constants["BLOCK_K"] / 16


def slowly(computation: Any, clock: FakeTime) -> Any:
    def compute(*arguments: Any) -> None:
        computation(*arguments)
        clock.now += 5.0  # the rest of the call must not count

    return compute


def test_block_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[str, dict[str, Any]]] = []
    names = triton_launch.Kernels._fields[:-1]
    clock = FakeTime()
    monkeypatch.setattr(gpu_clock, "time", clock)
    fakes = triton_launch.Kernels(*(FakeKernel(name, launched, clock) for name in names), is_interpreted=False)
    monkeypatch.setattr(triton_launch, "kernels", lambda: fakes)
    monkeypatch.setattr(triton_launch, "capability", lambda device: (9, 0))
    fastest, failing = triton_launch.Blocks(32, 8, 8, 3), triton_launch.Blocks(128, 16, 8, 2)
    candidates = (triton_launch.Blocks(64, 64, 4, 3), fastest, failing)
    monkeypatch.setattr(gpu_blocks, "CANDIDATES", candidates)

    for name in ("forward", "backward"):
        monkeypatch.setattr(gpu_blocks, name, slowly(getattr(gpu_blocks, name), clock))

    rows = list(gpu_blocks.block_sizes(CLOCK, Budget(9), 1024))
    calls = [(row["options"], row["head_dim"], row["kernel"]) for row in rows if row["in_use"]]
    assert calls == [*itertools.product(("none", "documents, dropout"), (128, 64), gpu_blocks.PRODUCTS)]
    timed = [row for row in rows if row["ms"] is not None]
    # Two calls warm up, and one is timed.
    for row, (name, constants) in zip(timed, launched[::3], strict=True):
        assert (row["kernel"], row["head_dim"]) == (name, constants["HEAD_DIM"])
        assert (row["queries"], row["keys"]) == (constants["BLOCK_Q"], constants["BLOCK_K"])
        assert (row["warps"], row["stages"]) == (constants["num_warps"], constants["num_stages"])
        assert (row["options"] == "none") == (constants["WORDS"] == 0)
        # 128 tokens of 16 heads in segments of 8; of these, 2 rows are dilated, which see 3 pairs.
        flops = gpu_blocks.PRODUCTS[name] * 2 * row["head_dim"] * 16 * 16 * 3
        seconds = row["keys"] / 16
        assert row["ms"] == pytest.approx(1000 * seconds)
        assert row["TFLOPs"] == pytest.approx(flops / seconds / 1e12)
    failed = [row["note"] for row in rows if row["ms"] is None]
    assert failed == ["RuntimeError: out of resource: shared memory"] * 8
    # dK and dV would read past the 32 numbers of a segment.
    assert {row["queries"] for row in rows if row["kernel"] == "grad_key_value"} == {32}
    stages = [row["stages"] for row in timed if (row["queries"], row["keys"]) == fastest[:2]]
    assert stages == [3, 1, 2, 4] * 12


def test_only_warnings_of_synchronizations_count(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def call() -> None:
        for _ in range(2):
            gpu_parts.warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        gpu_parts.warnings.warn("something else", stacklevel=1)

    found = gpu_parts.sync_warnings(call)
    assert len(found) == 2
    assert all(__file__ in where for where in found)
    assert modes == ["warn", "default"]


@pytest.mark.parametrize("name", [*gpu.PARTS])
def test_without_a_gpu_a_part_says_so(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shown = CliRunner().invoke(gpu.app, [name])
    assert shown.exit_code == 1
    assert "No CUDA device" in shown.output


def test_all_writes_a_file_per_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)  # a program of bench/ imports modules beside it
    monkeypatch.setattr(gpu, "PARTS", {name: gpu.PARTS[name] for name in ("syncs", "blocks")})
    shown = CliRunner().invoke(gpu.app, ["all", "--device", "cpu", "--directory", str(tmp_path), "--shrink", "512"])
    assert shown.exit_code == 0, shown.output
    assert "tests: left out" in shown.output
    assert "blocks: left out" in shown.output
    assert [file.name for file in tmp_path.iterdir()] == ["gpu-syncs.json"]
    written = json.loads((tmp_path / "gpu-syncs.json").read_text())
    assert written["claim"] == "gpu syncs"
    assert written["options"]["shrink"] == 512
    assert written["machine"]["versions"]["torch"] == torch.__version__
    assert {row["call"] for row in written["rows"]} >= {"plain", "dropout"}


def test_all_continues_after_a_part_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def run(command: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        assert timeout == 180
        if "ring" in command:
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, 1 if "pytest" in command else 0)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(subprocess, "run", run)
    shown = CliRunner().invoke(gpu.app, ["all", "--minutes", "2"])
    assert shown.exit_code == 1
    assert "failed: tests, ring" in shown.output
    assert [command[2] for command in commands[1:]] == [*gpu.PARTS]
    assert commands[0][2:4] == ["pytest", "--gpu"]
    assert commands[1][3:] == ["--device=cuda", "--shrink=1", "--repeats=5", "--minutes=2.0"]


def test_rows_are_written_as_they_come(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def stopped(*_: Any) -> Any:
        yield {"ms": 1.5}
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "PARTS", {"ring": stopped})
    file = tmp_path / "ring.json"
    shown = CliRunner().invoke(gpu.app, ["ring", "--device", "cpu", "--json", str(file)])
    assert shown.exit_code != 0
    assert "ms 1.500" in shown.output
    assert json.loads(file.read_text())["rows"] == [{"ms": 1.5}]


def test_a_spent_budget_leaves_cases_out() -> None:
    assert list(gpu_parts.one_device(CLOCK, Budget(0), 1024)) == []
    shown = CliRunner().invoke(gpu.app, ["ring", "--device", "cpu", "--shrink", "512", "--minutes", "0"])
    assert shown.exit_code == 1
    assert "no case fits" in shown.output
