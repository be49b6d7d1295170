"""The timing of kernels, and what ``info`` shows of it. A CPU kernel and Triton's interpreter stand for a GPU's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command_line import shown
from kernel_cases import CPU

from ring_backends import dilated_attention
from ring_backends.cli import info
from ring_backends.comparison import kernel_probe
from ring_backends.comparison.kernel_probe import _Branch, measure_kernels
from ring_backends.kernels import KernelInputs, kernels

HALVES = {"all_rows": (4, 8), "head_dims": (16,), "dtypes": (torch.float32,)}
INPUTS = KernelInputs(CPU, torch.float32, 16)
KERNELS = [kernel.name for kernel in kernels() if kernel.name != "math" and not kernel.not_supported_reasons(INPUTS)]


def test_every_usable_kernel_is_timed_in_every_case() -> None:
    found = measure_kernels(CPU, **HALVES)  # type: ignore[arg-type]
    cases = [(time["kernel"], time["dtype"], time["head_dim"], time["rows"], time["rate"]) for time in found["times"]]
    assert cases == [(kernel, "float32", 16, rows, rate) for rows in (4, 8) for rate in (1, 4) for kernel in KERNELS]
    assert all(time["forward_seconds"] > 0 and time["backward_seconds"] > 0 for time in found["times"])


@pytest.mark.parametrize("name", KERNELS)
def test_the_timed_calls_compute_attention(name: str) -> None:
    """Into empty sums, the forward and backward of the branch are those of ``dilated_attention``."""
    (kernel,) = (kernel for kernel in kernels() if kernel.name == name)
    branch = _Branch(CPU, torch.float32, 16, 8, 2, rate=4)
    leaves = tuple(x.clone().requires_grad_() for x in (branch.inputs.query, branch.inputs.key, branch.inputs.value))
    out, lse = dilated_attention(*leaves, [32], [4], is_causal=True, kernel="math", return_lse=True)
    branch.calls(kernel)[0]()
    sums = branch.out.sums
    torch.testing.assert_close([sums.out, sums.lse], [out.detach(), lse.transpose(1, 2)])
    branch.calls(kernel)[1]()  # made after the forward, whose out it saves
    torch.testing.assert_close([*branch.grads.sums], [*torch.autograd.grad(out, leaves, branch.grad_out)])
    assert kernel.reads_in_place == (name == "triton_dilated")


def test_info_times_kernels_only_with_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    times = [
        {"kernel": "aten_cuda_flash", "dtype": "bfloat16", "head_dim": 64, "rows": 256, "rate": 1}
        | {"forward_seconds": 0.001, "backward_seconds": 0.0035}
    ]
    found = {"device": "NVIDIA H100", "times": times}
    monkeypatch.setattr(kernel_probe, "measure_kernels", lambda device: found)
    hardware = dict.fromkeys(("latency_seconds", "bytes_per_second", "forward_flops_per_second"), 1.0)
    probe = {"hardware": hardware | {"backward_flops_per_second": 1.0}, "ranks": 2, "transport": "gloo"}
    probe |= {"device": "CPU", "latency_seconds": 1.0, "bytes_per_second": 1.0, "dtype": "float32", "head_dim": 64}
    monkeypatch.setattr(info.local_probe, "measure", lambda *_: probe | {"kernel": "math"})
    file = tmp_path / "info.json"
    if not torch.cuda.is_available():
        assert "Kernels with their copies" not in shown("info --probe --json", file)
        assert "kernel_times" not in json.loads(file.read_text())
    monkeypatch.setattr(info, "_kernel_times", lambda device: None if device == "cpu" else found)
    assert "Kernels with their copies" not in shown("info --device cpu --probe --json", file)
    text = shown("info --probe --json", file)
    for part in ("Kernels with their copies and merges, NVIDIA H100", "1.000 ms", "3.500 ms"):
        assert part in text
    assert json.loads(file.read_text())["kernel_times"] == found


def test_info_says_which_kernel_auto_takes() -> None:
    rows = info.choices("cpu")
    calls = {row["call"]: row["kernel"] for row in rows}
    assert calls["float32, head_dim 64"] == "aten_cpu_flash"
    assert calls["bfloat16, head_dim 128, dropout"] == "math"
    assert all(row["why"] for row in rows)
