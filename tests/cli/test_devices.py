"""The devices that ``info`` lists, on machines with accelerators that need not be there."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from ring_backends.cli import info
from ring_backends.kernels import triton_launch

CUDA = torch.device("cuda")
GPU = SimpleNamespace(name="Instinct MI300X", major=9, minor=4, total_memory=192 * 2**30, gcnArchName="gfx942:sramecc+")


@pytest.mark.parametrize("has_name", [True, False])
def test_other_accelerators(has_name: bool) -> None:
    accelerator = {"current_accelerator": lambda check_available: torch.device("xpu"), "device_count": lambda: 2}
    module = SimpleNamespace(get_device_name=lambda index: f"Arc {index}") if has_name else SimpleNamespace()
    with (
        mock.patch.multiple(torch.accelerator, **accelerator),
        mock.patch.object(torch, "get_device_module", return_value=module),
    ):
        found = info.collect()
    told = [tuple(device.values()) for device in found["devices"][-2:]]
    names = ("Arc 0", "Arc 1") if has_name else ("XPU", "XPU")
    assert told == [
        (f"xpu:{index}", f"{name}, not covered by the tests", "float32") for index, name in enumerate(names)
    ]
    rows = [row for row in found["kernel_choice"] if row["device"] == "xpu:1"]
    assert {(row["kernel"], row["why"]) for row in rows} == {("math", "no fused kernel runs on this type of device")}


@pytest.mark.parametrize("is_on", [False, True])
def test_a_gpu_of_amd(monkeypatch: pytest.MonkeyPatch, is_on: bool) -> None:
    cuda = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_properties": lambda index: GPU,
        "get_device_capability": lambda device=None: (9, 4),
    }
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(triton_launch, "import_failure", lambda: None)
    monkeypatch.setenv(triton_launch.ON_ROCM, str(int(is_on)))
    with (
        mock.patch.multiple(torch.cuda, **cuda),
        mock.patch.object(torch.accelerator, "current_accelerator", return_value=CUDA),
    ):
        found = info.collect()
    device = found["devices"][1]
    assert device["name"] == "Instinct MI300X, 192 GiB, gfx942:sramecc+, ROCm 7.0, not covered by the tests"
    assert device["dtype"] == "bfloat16"
    kernels = {row["call"]: row for row in found["kernel_choice"] if row["device"] == "cuda:0"}
    assert kernels["bfloat16, head_dim 128"]["kernel"] == ("triton_dilated" if is_on else "math")
    assert is_on or "set RING_BACKENDS_TRITON_ON_ROCM=1" in kernels["bfloat16, head_dim 128"]["why"]
    assert (found["kernels"]["triton_dilated"]["unusable"] is None) == is_on
    assert "which differ on ROCm" in found["kernels"]["aten_cuda_flash"]["unusable"]
