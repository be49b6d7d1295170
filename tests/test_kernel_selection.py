"""The kernel and dtype that ``auto`` selects, and the errors if none is usable."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from kernel_cases import CPU, CUDA, CUDA_KERNELS

from ring_backends.kernels import (
    KernelInputs,
    auto_dtype,
    available_kernels,
    kernel_names,
    kernels,
    resolve_dtype,
    select_kernel,
    triton_launch,
)


@pytest.fixture
def gpu_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that makes torch report an NVIDIA GPU of a given compute capability."""

    def claim(
        major: int, minor: int, *, flash: bool = True, cudnn: int | None = 91600, triton: str | None = "no Triton"
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: flash)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(triton_launch, "import_failure", lambda: triton)

    return claim


def test_cpu_prefers_flash_then_math() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        inputs = KernelInputs(CPU, dtype, head_dim=33, has_key_mask=True)
        assert select_kernel("auto", inputs).name == "aten_cpu_flash"
        assert select_kernel("math", inputs).name == "math"
    assert select_kernel("auto", KernelInputs(torch.device("mps"), torch.float32, 64)).name == "math"


def test_on_meta_no_device_is_a_reason() -> None:
    for dtype, expected in ((torch.bfloat16, "aten_cuda_flash"), (torch.float64, "aten_cpu_flash")):
        assert select_kernel("auto", KernelInputs(torch.device("meta"), dtype, head_dim=64)).name == expected
    for name in kernel_names():
        assert select_kernel(name, KernelInputs(torch.device("meta"), torch.float16, head_dim=64)).name == name


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "has_key_mask", "expected"),
    [
        ((8, 0), torch.bfloat16, 64, False, "aten_cuda_flash"),
        ((9, 0), torch.float16, 256, False, "aten_cuda_flash"),
        ((9, 0), torch.bfloat16, 64, True, "aten_cuda_efficient"),
        ((8, 6), torch.bfloat16, 256, False, "aten_cuda_efficient"),
        ((8, 0), torch.float32, 64, False, "aten_cuda_efficient"),
        ((8, 0), torch.float32, 66, False, "math"),
        ((8, 0), torch.bfloat16, 100, False, "math"),
        ((8, 0), torch.float64, 64, False, "math"),
        ((7, 5), torch.float16, 64, False, "aten_cuda_efficient"),
        ((7, 5), torch.bfloat16, 64, False, "math"),
        ((6, 1), torch.float32, 33, True, "aten_cuda_efficient"),
        ((3, 7), torch.float32, 64, False, "math"),
    ],
)
def test_cuda_prefers_what_the_gpu_can_run(
    gpu_of: Callable[..., None],
    capability: tuple[int, int],
    dtype: torch.dtype,
    head_dim: int,
    has_key_mask: bool,
    expected: str,
) -> None:
    gpu_of(*capability)
    assert select_kernel("auto", KernelInputs(CUDA, dtype, head_dim, has_key_mask)).name == expected


def test_cudnn_comes_after_flash_and_only_in_a_correct_version(
    gpu_of: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = KernelInputs(CUDA, torch.bfloat16, head_dim=128)
    gpu_of(9, 0, flash=False)
    assert select_kernel("auto", inputs).name == "aten_cuda_cudnn"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with pytest.raises(ValueError, match="deterministic"):
        select_kernel("aten_cuda_cudnn", inputs)
    gpu_of(9, 0, flash=False, cudnn=91002)
    with pytest.raises(ValueError, match=r"cuDNN 9\.15\.1 .*91002"):
        select_kernel("aten_cuda_cudnn", inputs)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert select_kernel("auto", inputs).name == "math"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "aten_cuda_flash"),
        ({"has_key_mask": True}, "triton_dilated"),
        ({"has_documents": True}, "triton_dilated"),
        ({"has_dropout": True}, "triton_dilated"),
    ],
)
def test_triton_comes_first_only_with_masks_documents_or_dropout(
    gpu_of: Callable[..., None], options: dict[str, bool], expected: str
) -> None:
    inputs = KernelInputs(CUDA, torch.bfloat16, head_dim=64, **options)
    gpu_of(9, 0, triton=None)
    assert select_kernel("auto", inputs).name == expected
    gpu_of(9, 0, triton="Triton is not installed")
    assert select_kernel("auto", inputs).name != "triton_dilated"
    with pytest.raises(ValueError, match="Triton is not installed"):
        select_kernel("triton_dilated", inputs)


def test_importing_the_package_does_not_import_triton() -> None:
    code = "import sys, ring_backends, ring_backends.kernels; sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_error_without_a_usable_kernel_lists_inputs_and_reasons() -> None:
    inputs = KernelInputs(CPU, torch.int64, head_dim=64)
    with pytest.raises(ValueError, match="no kernel can run") as info:
        select_kernel("auto", inputs)
    message = str(info.value)
    assert str(inputs) in message
    assert "torch.int64" in message
    for kernel in kernels():
        for reason in kernel.not_supported_reasons(inputs):
            assert reason in message
        assert f"{kernel.name}: " in message


def test_a_kernel_chosen_by_name_is_never_replaced() -> None:
    with pytest.raises(ValueError, match="cpu tensors only") as info:
        select_kernel("aten_cpu_flash", KernelInputs(torch.device("mps"), torch.float32, 64))
    assert "math:" not in str(info.value)
    assert "kernel='auto'" in str(info.value)


def test_an_unknown_name_lists_the_names() -> None:
    with pytest.raises(ValueError, match="kernel = 'flash'") as info:
        select_kernel("flash", KernelInputs(CPU, torch.float32, 64))
    assert all(repr(name) in str(info.value) for name in ("auto", *kernel_names()))


def test_available_kernels_lists_every_kernel() -> None:
    answers = available_kernels()
    assert tuple(answers) == kernel_names()
    assert answers["aten_cpu_flash"] is None
    assert answers["math"] is None
    if not torch.cuda.is_available():
        assert all("CUDA device" in str(answers[kernel.name]) for kernel in CUDA_KERNELS)


def test_only_the_cuda_kernels_are_unverified() -> None:
    assert [kernel.name for kernel in kernels() if kernel.unverified is None] == ["aten_cpu_flash", "math"]


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((6, 1), torch.float32),
        ((7, 0), torch.float16),
        ((7, 5), torch.float16),
        ((8, 0), torch.bfloat16),
        ((12, 0), torch.bfloat16),
    ],
)
def test_auto_dtype_by_gpu_generation(
    gpu_of: Callable[..., None], capability: tuple[int, int], expected: torch.dtype
) -> None:
    gpu_of(*capability)
    assert auto_dtype("cuda:0") == expected
    assert resolve_dtype("auto", CUDA) == expected
    assert auto_dtype(CPU) == torch.float32
    assert auto_dtype("meta") == torch.float32


def test_resolve_dtype() -> None:
    for spec in ("fp16", "float16", torch.float16):
        assert resolve_dtype(spec, CPU) == torch.float16
    for spec in ("bf16", "bfloat16", torch.bfloat16):
        assert resolve_dtype(spec, CPU) == torch.bfloat16
    for spec in ("fp64", "float64", torch.float64):
        assert resolve_dtype(spec, CPU) == torch.float64
    for spec in ("fp32", "float32", torch.float32, "auto"):
        assert resolve_dtype(spec, CPU) == torch.float32
    for bad in ("half", "", torch.int32, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match=r"dtype = .*'bf16'"):
            resolve_dtype(bad, CPU)
    with pytest.raises(TypeError, match="dtype = 16"):
        resolve_dtype(16, CPU)  # type: ignore[arg-type]


def test_auto_dtype_of_an_absent_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device = cuda"):
        auto_dtype("cuda")
