"""The kernel and dtype that ``auto`` selects, and the errors if none is usable."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_cases import CPU, CUDA, CUDA_KERNELS
from torch import Tensor
from torch.nn import attention

from ring_backends import DilatedPattern, SequenceLayout
from ring_backends.engine.call import AttentionCall, AttentionInputs, kernels_of_call, look_up
from ring_backends.kernels import (
    KernelInputs,
    aten_cudnn,
    auto_dtype,
    available_kernels,
    explain_choice,
    kernel_names,
    kernels,
    resolve_dtype,
    select_kernel,
    triton_launch,
)
from ring_backends.kernels.aten_cudnn import AtenCudaCudnnKernel
from ring_backends.kernels.operators import replaced_flash
from ring_backends.kernels.steps import StepRows
from ring_backends.ring.ring import Ring
from ring_backends.score_mods import softcap
from ring_backends.testing.marks import THOROUGH

Setup = Callable[..., None]
"""What a fixture returns. A test calls it to set up a GPU."""


@pytest.fixture
def gpu_of(monkeypatch: pytest.MonkeyPatch) -> Setup:
    """A function that makes torch report a GPU of a given compute capability."""

    def claim(
        capability: tuple[int, int], flash: bool = True, cudnn: int = 91600, triton: Any = "no Triton", hip: Any = None
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: flash)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(triton_launch, "import_failure", lambda: triton)

    return claim


def inputs_of(dtype: torch.dtype = torch.bfloat16, head_dim: int = 128, **options: Any) -> KernelInputs:
    """A call on a GPU."""
    return KernelInputs(CUDA, dtype, head_dim, **options)


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


FP16, FP32 = {"dtype": torch.float16}, {"dtype": torch.float32}
STEP = {"needs_grad": False, "is_step": True}


@pytest.mark.parametrize(
    ("capability", "gpu", "inputs", "expected"),
    [
        ((8, 0), {}, {"head_dim": 64}, "aten_cuda_flash"),
        ((9, 0), {}, {**FP16, "head_dim": 256}, "aten_cuda_flash"),
        ((9, 0), {}, {"head_dim": 64, "has_key_mask": True}, "aten_cuda_efficient"),
        ((8, 6), {}, {"head_dim": 256}, "aten_cuda_efficient"),
        ((8, 0), {}, {**FP32, "head_dim": 64}, "aten_cuda_efficient"),
        ((8, 0), {}, {**FP32, "head_dim": 66}, "math"),
        ((8, 0), {}, {"head_dim": 100}, "math"),
        ((8, 0), {}, {"dtype": torch.float64, "head_dim": 64}, "math"),
        ((7, 5), {}, {**FP16, "head_dim": 64}, "aten_cuda_efficient"),
        ((7, 5), {}, {"head_dim": 64}, "math"),
        ((6, 1), {}, {**FP32, "head_dim": 33, "has_key_mask": True}, "aten_cuda_efficient"),
        ((3, 7), {}, {**FP32, "head_dim": 64}, "math"),
        ((9, 0), {}, {"head_dim": 64, "has_documents": True}, "math"),
        ((9, 0), {}, {"head_dim": 64, "has_dropout": True}, "math"),
        # cuDNN comes first on Hopper, and only in a correct version.
        ((9, 0), {}, {}, "aten_cuda_cudnn"),
        ((8, 0), {}, {}, "aten_cuda_flash"),
        ((10, 0), {}, {}, "aten_cuda_flash"),
        ((12, 0), {}, {}, "aten_cuda_flash"),
        *((capability, {"flash": False}, {}, "aten_cuda_cudnn") for capability in ((9, 0), (8, 0), (10, 0), (12, 0))),
        ((9, 0), {"cudnn": 91002}, {}, "aten_cuda_flash"),
        ((9, 0), {"cudnn": 91002, "hip": "7.0"}, {}, "math"),
        # A step of decoding prefers flash.
        ((9, 0), {}, STEP, "aten_cuda_flash"),
        ((9, 0), {"flash": False}, STEP, "aten_cuda_cudnn"),
        # Triton comes first only with masks, documents or dropout.
        ((9, 0), {"triton": None}, {"head_dim": 64}, "aten_cuda_cudnn"),
        ((9, 0), {"triton": None}, {"head_dim": 64, "has_key_mask": True}, "triton_dilated"),
        ((9, 0), {"triton": None}, {"head_dim": 64, "has_documents": True}, "triton_dilated"),
        ((9, 0), {"triton": None}, {"head_dim": 64, "has_dropout": True}, "triton_dilated"),
    ],
    ids=str,
)
def test_cuda_prefers_what_the_gpu_can_run(gpu_of, capability, gpu, inputs, expected):
    gpu_of(capability, **gpu)
    assert select_kernel("auto", inputs_of(**inputs)).name == expected


def test_cudnn_is_refused_in_a_wrong_version_and_where_results_must_repeat(gpu_of, monkeypatch):
    gpu_of((9, 0))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert select_kernel("auto", inputs_of()).name == "aten_cuda_flash"
    with pytest.raises(ValueError, match="deterministic"):
        select_kernel("aten_cuda_cudnn", inputs_of())
    gpu_of((9, 0), cudnn=91002)
    with pytest.raises(ValueError, match=r"cuDNN 9\.15\.1 .*91002"):
        select_kernel("aten_cuda_cudnn", inputs_of())


def test_rocm_takes_triton_only_where_it_is_switched_on(gpu_of, monkeypatch):
    gpu_of((9, 4), triton=None, hip="7.0")
    masked, precise = inputs_of(has_key_mask=True), inputs_of(torch.float64)
    for value, name in ((None, "math"), ("0", "math"), ("1", "triton_dilated")):
        monkeypatch.delenv("RING_BACKENDS_TRITON_ON_ROCM", raising=False)
        if value is not None:
            monkeypatch.setenv("RING_BACKENDS_TRITON_ON_ROCM", value)
        assert [select_kernel("auto", inputs).name for inputs in (inputs_of(), masked, precise)] == [name, name, "math"]
        if value != "1":
            with pytest.raises(ValueError, match="none has run it; set RING_BACKENDS_TRITON_ON_ROCM=1"):
                select_kernel("triton_dilated", inputs_of())
    rows = StepRows(*[torch.empty(1, 8, 2, 128, dtype=torch.bfloat16)] * 3, 1.0)
    for kernel, blocks in triton_launch._AMPERE_BLOCKS.items():
        assert triton_launch.block_sizes(kernel, rows, is_interpreted=False) == blocks[128]
    gpu_of((9, 4), triton="Triton is not installed", hip="7.0")
    assert select_kernel("auto", inputs_of()).name == "math"


def test_rocm_warns_of_the_math_kernel(gpu_of, monkeypatch):
    pattern, layout = DilatedPattern([8], [1]), SequenceLayout(8, 1)

    def chosen(name: str = "auto", **inputs: Any) -> str:
        return kernels_of_call(name, inputs_of(**inputs), pattern, layout)[0].name

    gpu_of((9, 4), triton=None, hip="7.0")
    monkeypatch.delenv("RING_BACKENDS_TRITON_ON_ROCM", raising=False)
    with pytest.warns(UserWarning, match="several times as long .*set RING_BACKENDS_TRITON_ON_ROCM=1") as told:
        assert chosen() == "math"
    assert len(told) == 1
    monkeypatch.setenv("RING_BACKENDS_TRITON_ON_ROCM", "1")
    with pytest.warns(UserWarning, match=r"cannot run the call: it supports .*torch\.float32 only\.$"):
        assert chosen(dtype=torch.float64) == "math"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen() == "triton_dilated"
        assert chosen("math") == "math"
        gpu_of((7, 0), hip=None)
        assert chosen() == "math"


class Replacement:
    """The handle of an implementation that replaces nothing."""

    def remove(self) -> None:
        pass


@pytest.fixture
def activate() -> Iterator[Callable[[], None]]:
    """A function that activates another flash attention in torch's registry, under the name "FA of a test"."""
    name = "FA of a test"
    if not hasattr(attention, "current_flash_attention_impl"):
        pytest.skip("this release of torch has no registry of flash attentions")
    attention.register_flash_attention_impl(name, register_fn=Replacement)
    yield lambda: attention.activate_flash_attention_impl(name)
    if attention.current_flash_attention_impl() == name:
        attention.restore_flash_attention_impl()
    del attention._registry._FLASH_ATTENTION_IMPLS[name]


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_flash_is_refused_while_the_program_has_replaced_its_operators(gpu_of, activate, capability):
    """torch replaces no operator of cuDNN and none of the CPU."""
    gpu_of(capability)
    by_cudnn, wide = inputs_of(), inputs_of(head_dim=256)
    activate()
    assert [select_kernel("auto", inputs).name for inputs in (by_cudnn, wide)] == [
        "aten_cuda_cudnn",
        "aten_cuda_efficient",
    ]
    assert select_kernel("auto", KernelInputs(CPU, torch.bfloat16, head_dim=64)).name == "aten_cpu_flash"
    assert available_kernels()["aten_cuda_cudnn"] is None
    told = (available_kernels()["aten_cuda_flash"], explain_choice(wide)[1])
    assert all("FlashAttention 2 by FA of a test" in str(text) for text in told)
    with pytest.raises(ValueError, match=r"restore_flash_attention_impl\(\) undoes this"):
        select_kernel("aten_cuda_flash", by_cudnn)
    attention.restore_flash_attention_impl()
    assert select_kernel("aten_cuda_flash", by_cudnn).name == "aten_cuda_flash"


def test_replacing_flash_changes_what_was_chosen_before(gpu_of, activate):
    """Single rows beside cuDNN, and kept calls."""
    gpu_of((9, 0))
    sizes, rows = (CUDA, torch.bfloat16, 72, 72), AttentionInputs(*(torch.ones(1, 8, 2, 4) for _ in range(3)))

    def found() -> tuple[str, AttentionCall]:
        of_single_rows = aten_cudnn._kernel_of_single_rows(*sizes, replaced_flash())
        return of_single_rows.name, look_up(rows, DilatedPattern([8], [1]), Ring(), None, "math")[1]

    (before, kept), (_, again) = found(), found()
    activate()
    after, other = found()
    assert (before, after) == ("aten_cuda_flash", "math")
    assert kept is again
    assert other is not kept


def test_which_kernels_call_a_score_mod(gpu_of: Setup) -> None:
    def branching(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score if q_idx > kv_idx else -score

    gpu_of((9, 0))
    assert select_kernel("auto", inputs_of(score_mod=softcap(30.0))).name == "math"
    gpu_of((9, 0), triton=None)
    capped, branches = (inputs_of(head_dim=64, score_mod=score_mod) for score_mod in (softcap(30.0), branching))
    assert select_kernel("auto", capped).name == "triton_dilated"
    assert select_kernel("auto", replace(capped, has_dropout=True)).name == "math"
    assert select_kernel("auto", branches).name == "math"
    with pytest.raises(ValueError, match=r"aten_cuda_flash: .*it cannot call a score_mod"):
        select_kernel("aten_cuda_flash", capped)
    why = "it cannot translate the score_mod: RuntimeError: .* meta tensors"
    with pytest.raises(ValueError, match=f"triton_dilated: .*{why}"):
        select_kernel("triton_dilated", branches)


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "expected", "refused"),
    [
        (64, 100, "math", ["aten_cuda_flash", "aten_cuda_cudnn", "aten_cuda_efficient"]),
        (100, 128, "aten_cuda_flash", ["aten_cuda_cudnn", "aten_cuda_efficient"]),
        (192, 128, "aten_cuda_cudnn", []),
        (192, 64, "aten_cuda_flash", ["aten_cuda_cudnn"]),
        (64, 512, "aten_cuda_efficient", ["aten_cuda_flash", "triton_dilated"]),
    ],
)
def test_values_of_another_width(gpu_of, head_dim, value_dim, expected, refused):
    """Kernels that take one width get the wider one. The others take both."""
    gpu_of((9, 0))
    inputs = inputs_of(head_dim=head_dim, value_dim=value_dim)
    assert select_kernel("auto", inputs).name == expected
    for name in refused:
        with pytest.raises(ValueError, match=rf"value_dim={value_dim}, .*\n  {name}: .*(head|value)_dim must be"):
            select_kernel(name, inputs)


@pytest.mark.parametrize(("capability", "expected"), [((10, 0), True), ((8, 0), False), ((12, 0), False)])
def test_gpus_with_latent_attention_in_cudnn(gpu_of: Setup, capability: tuple[int, int], expected: bool) -> None:
    gpu_of(capability)
    reasons = AtenCudaCudnnKernel().not_supported_reasons(inputs_of(head_dim=192, value_dim=128))
    assert reasons == ([] if expected else ["head_dim must be at most 128 on this GPU"])


def test_dilated_rows_may_have_a_kernel_of_their_own(gpu_of: Setup) -> None:
    def chosen(lengths: list[int], rates: list[int], ring_size: int = 1, **options: bool) -> tuple[str, str | None]:
        inputs, layout = inputs_of(**options), SequenceLayout(2**17, ring_size)
        dense, in_place = kernels_of_call("auto", inputs, DilatedPattern(lengths, rates), layout)
        assert all(rates[branch] > 1 for branch in in_place)
        (name,) = {kernel.name for kernel in in_place.values()} or {None}
        return dense.name, name

    gpu_of((9, 0), triton=None)
    assert chosen([2048, 8192], [1, 4]) == ("aten_cuda_cudnn", "triton_dilated")
    assert chosen([2048, 2**17], [1, 4]) == ("aten_cuda_cudnn", None)  # 32,768 rows
    assert chosen([2048, 2**17], [1, 4], ring_size=16) == ("aten_cuda_cudnn", "triton_dilated")  # 2,048 in each piece
    assert chosen([2048, 8192, 2**17], [1, 4, 4]) == ("aten_cuda_cudnn", "triton_dilated")
    assert chosen([2048], [1]) == ("aten_cuda_cudnn", None)
    assert chosen([8192], [4]) == ("triton_dilated", None)
    assert chosen([2048, 8192], [1, 4], has_dropout=True) == ("triton_dilated", None)
    gpu_of((9, 0))
    assert chosen([2048, 8192], [1, 4]) == ("aten_cuda_cudnn", None)


def test_short_windows_prefer_a_kernel_that_takes_bands(gpu_of: Setup) -> None:
    def chosen(lengths: list[int | None], rates: list[int], windows: list[int | None]) -> str:
        pattern = DilatedPattern(lengths, rates, window_lengths=windows)  # type: ignore[arg-type]
        return kernels_of_call("auto", inputs_of(), pattern, SequenceLayout(2**17, 1))[0].name

    gpu_of((9, 0), triton=None)
    assert chosen([None], [1], [1024]) == "triton_dilated"
    assert chosen([None], [1], [1025]) == "aten_cuda_cudnn"
    assert chosen([512], [1], [1024]) == "aten_cuda_cudnn"  # the window limits nothing
    assert chosen([None, 8192], [1, 1], [512, None]) == "aten_cuda_cudnn"  # most work is in the second branch
    assert chosen([None], [4], [4096]) == "triton_dilated"
    assert "1,024 rows" in explain_choice(inputs_of(rows=512, has_window=True))[1]
    gpu_of((9, 0))
    assert chosen([None], [1], [1024]) == "aten_cuda_cudnn"
    gpu_of((8, 0), triton=None)
    assert chosen([None], [1], [1024]) == "triton_dilated"


TOO_WIDE = "; aten_cuda_cudnn cannot: head_dim and value_dim must be .*128$"
IN_THE_SAME_LAUNCH = "^it computes key masks, documents, dropout and score_mods in the same launch$"


@pytest.mark.parametrize(
    ("capability", "inputs", "expected", "words"),
    [
        ((9, 0), {}, "aten_cuda_cudnn", "on an H100, cuDNN ran at 563 TFLOP/s"),
        ((8, 6), {}, "aten_cuda_flash", r"compute capability 8\.x.* not measured$"),
        ((10, 0), {}, "aten_cuda_flash", "no figures are known"),
        ((9, 0), {"head_dim": 256}, "aten_cuda_flash", TOO_WIDE),
        ((9, 0), {"has_key_mask": True}, "triton_dilated", IN_THE_SAME_LAUNCH),
        ((7, 5), {"dtype": torch.float16}, "aten_cuda_efficient", "^the first .*; aten_cuda_flash cannot: it needs"),
    ],
)
def test_the_choice_in_words(gpu_of, capability, inputs, expected, words):
    gpu_of(capability, triton=None)
    call = inputs_of(**inputs)
    name, why = explain_choice(call)
    assert name == expected == select_kernel("auto", call).name
    assert re.search(words, why), why


def test_the_choice_in_words_on_devices_without_fused_kernels(gpu_of, monkeypatch):
    assert explain_choice(KernelInputs(torch.device("xpu"), torch.bfloat16, 64)) == (
        "math",
        "no fused kernel runs on this type of device",
    )
    gpu_of((9, 4), triton=None, hip="7.0")
    monkeypatch.delenv("RING_BACKENDS_TRITON_ON_ROCM", raising=False)
    name, why = explain_choice(inputs_of())
    assert name == "math"
    assert re.search(
        "^the first .*; triton_dilated cannot: it compiles for AMD's .*RING_BACKENDS_TRITON_ON_ROCM=1", why
    )
    monkeypatch.setenv("RING_BACKENDS_TRITON_ON_ROCM", "1")
    assert explain_choice(inputs_of())[0] == "triton_dilated"
    assert "call NVIDIA's operators" in explain_choice(inputs_of())[1]


@THOROUGH
def test_importing_the_package_does_not_import_triton() -> None:
    code = "import sys, ring_backends, ring_backends.kernels; sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_error_without_a_usable_kernel_lists_inputs_and_reasons() -> None:
    inputs = KernelInputs(CPU, torch.int64, head_dim=64)
    with pytest.raises(ValueError, match="no kernel can run") as info:
        select_kernel("auto", inputs)
    assert "torch.int64" in str(inputs)
    reasons = [reason for kernel in kernels() for reason in kernel.not_supported_reasons(inputs)]
    for part in (str(inputs), *reasons, *(f"{name}: " for name in kernel_names())):
        assert part in str(info.value)


def test_a_kernel_chosen_by_name_is_never_replaced() -> None:
    with pytest.raises(ValueError, match="cpu tensors only") as info:
        select_kernel("aten_cpu_flash", KernelInputs(torch.device("mps"), torch.float32, 64))
    assert "math:" not in str(info.value)
    assert "kernel='auto'" in str(info.value)


def test_an_unknown_name_lists_the_names() -> None:
    with pytest.raises(ValueError, match="kernel = 'flash': there is no such kernel") as info:
        select_kernel("flash", KernelInputs(CPU, torch.float32, 64))
    assert all(repr(name) in str(info.value) for name in ("auto", *kernel_names()))


def test_available_kernels_lists_every_kernel() -> None:
    answers = available_kernels()
    assert tuple(answers) == kernel_names()
    if not torch.cuda.is_available():
        assert all("CUDA device" in str(answers[kernel.name]) for kernel in CUDA_KERNELS)
    verified = [kernel.name for kernel in kernels() if kernel.unverified is None]
    assert verified == ["aten_cpu_flash", "math"]
    assert [answers[name] for name in verified] == [None, None]


DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64, "fp32": torch.float32}
GENERATIONS = {(6, 1): "fp32", (7, 0): "fp32", (7, 5): "fp32", (8, 0): "bf16", (12, 0): "bf16"}


@pytest.mark.parametrize(("capability", "name"), GENERATIONS.items())
def test_auto_dtype_by_gpu_generation(gpu_of: Setup, capability: tuple[int, int], name: str) -> None:
    gpu_of(capability)
    assert auto_dtype("cuda:0") == resolve_dtype("auto", CUDA) == DTYPES[name]
    assert auto_dtype(CPU) == auto_dtype("meta") == torch.float32


@pytest.mark.parametrize("name", DTYPES)
def test_resolve_dtype(name: str) -> None:
    dtype = DTYPES[name]
    assert {resolve_dtype(spec, CPU) for spec in (name, dtype, str(dtype).removeprefix("torch."))} == {dtype}
    assert resolve_dtype("auto", CPU) == torch.float32


@pytest.mark.parametrize("spec", ["half", "", torch.int32, torch.float8_e4m3fn, 16], ids=str)
def test_an_invalid_dtype(spec: Any) -> None:
    error, text = (TypeError, "dtype = 16") if spec == 16 else (ValueError, r"dtype = .*'bf16'")
    with pytest.raises(error, match=text):
        resolve_dtype(spec, CPU)


def test_auto_dtype_of_an_absent_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device = cuda"):
        auto_dtype("cuda")
