"""Every kernel against a dense softmax written here, tile by tile, as ring attention uses them.

A case is two tiles of keys under one softmax: the first may be causal, the second (older keys) never is. Each
kernel runs both tiles forward, the results are merged, and both tiles run backward with the merged out and
LSE. fp64 must agree to 1e-10; a lower precision may be off by twice what plain torch attention in the same
dtype is off by, plus a floor of a few roundings.

The CUDA kernels run twice: on a GPU where there is one (marker gpu), and everywhere against a model of the
CUDA operators that checks what the real ones ask of their arguments and reproduces what is odd in their
results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ring_backends.kernels import (
    Kernel,
    KernelInputs,
    auto_dtype,
    available_kernels,
    kernel_names,
    kernels,
    resolve_dtype,
    select_kernel,
)
from ring_backends.kernels.aten_cpu import AtenCpuFlashKernel
from ring_backends.kernels.aten_cuda import (
    AtenCudaCudnnKernel,
    AtenCudaEfficientKernel,
    AtenCudaFlashKernel,
)
from ring_backends.kernels.math import MathKernel
from ring_backends.kernels.merge import statistics_dtype

CPU_KERNELS = [AtenCpuFlashKernel(), MathKernel(), MathKernel(block=4)]
CUDA_KERNELS = [AtenCudaFlashKernel(), AtenCudaEfficientKernel(), AtenCudaCudnnKernel()]
PRECISIONS = [torch.float32, torch.bfloat16, torch.float16]


def kernel_id(value: object) -> str | None:
    if isinstance(value, MathKernel):
        return f"math-block{value.block}"
    return value.name if isinstance(value, Kernel) else None


# ---- cases ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    batch: int = 2
    kv_heads: int = 2
    repeats: int = 2
    seq_q: int = 9
    seq_k: int = 9
    seq_older: int = 5
    head_dim: int = 8
    is_causal: bool = True
    masked: bool = False
    layout: str = "contiguous"
    seed: int = 0

    @property
    def scale(self) -> float:
        return 1.3 * self.head_dim**-0.5


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "heads inside": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "head_dim outside": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "every second element": lambda x: torch.stack([x, x + 1], dim=-1).flatten(-2)[..., ::2],
    "odd offset": lambda x: torch.nn.functional.pad(x, (1, 7))[..., 1:-7],
}


def rows_outside(lse: Tensor) -> Tensor:
    """The memory layout in which the CPU operator returns its LSE."""
    return lse.transpose(1, 2).contiguous().transpose(1, 2)


@st.composite
def cases(draw: st.DrawFn, *, head_dims: st.SearchStrategy[int], masks: bool = True) -> Case:
    is_causal = draw(st.booleans())
    seq_q = draw(st.integers(1, 33))
    return Case(
        batch=draw(st.integers(1, 2)),
        kv_heads=draw(st.integers(1, 3)),
        repeats=draw(st.integers(1, 3)),
        seq_q=seq_q,
        seq_k=seq_q if is_causal else draw(st.integers(1, 33)),
        seq_older=draw(st.integers(1, 17)),
        head_dim=draw(head_dims),
        is_causal=is_causal,
        masked=masks and draw(st.booleans()),
        layout=draw(st.sampled_from(sorted(LAYOUTS))),
        seed=draw(st.integers(0, 2**31)),
    )


def make_inputs(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """query, key, value, grad_out in `dtype` (values, not yet laid out) and the key mask of all keys."""
    generator = torch.Generator().manual_seed(case.seed)
    heads, seq_k = case.kv_heads * case.repeats, case.seq_k + case.seq_older

    def normal(num_heads: int, seq: int) -> Tensor:
        x = torch.randn(case.batch, num_heads, seq, case.head_dim, generator=generator, dtype=torch.float64)
        return x.to(dtype)

    query, key, value = normal(heads, case.seq_q), normal(case.kv_heads, seq_k), normal(case.kv_heads, seq_k)
    key_mask = torch.rand(case.batch, case.kv_heads, seq_k, generator=generator) < 0.4
    # Rows that see nothing (first head), only the older tile (last head), or nothing at the start (causal).
    key_mask[0, 0] = True
    key_mask[-1, -1, : case.seq_k] = True
    key_mask[..., 0] = True
    return query, key, value, normal(heads, case.seq_q), key_mask & case.masked


def hidden_pairs(case: Case, key_mask: Tensor) -> Tensor:
    """[B, Hq, Sq, Sk + older]: which pairs do not see each other."""
    future = torch.zeros(case.seq_q, key_mask.shape[-1], dtype=torch.bool)
    if case.is_causal:
        future[:, : case.seq_k] = torch.ones(case.seq_q, case.seq_k, dtype=torch.bool).triu(1)
    return key_mask.repeat_interleave(case.repeats, 1)[:, :, None, :] | future


def dense(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Plain attention and its LSE, in the dtype of the inputs."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    blind = hidden.all(-1, keepdim=True)
    scores = (query @ key.transpose(-1, -2) * scale).masked_fill(hidden & ~blind, -torch.inf)
    out = scores.softmax(-1).masked_fill(blind, 0.0) @ value
    return out, scores.logsumexp(-1).masked_fill(blind.squeeze(-1), -torch.inf)


def dense_with_grads(
    query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, hidden: Tensor, scale: float
) -> dict[str, Tensor]:
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]
    out, lse = dense(*leaves, hidden, scale)
    grads = torch.autograd.grad(out, leaves, grad_out)
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def magnitudes(
    query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, hidden: Tensor, scale: float
) -> dict[str, float]:
    """How large the terms are that each result sums up: what one rounding is relative to."""
    repeats = query.shape[1] // key.shape[1]
    q, do = query.abs(), grad_out.abs()
    k, v = (x.abs().repeat_interleave(repeats, 1) for x in (key, value))
    _, lse = dense(query, key, value, hidden, scale)
    signed = query @ key.repeat_interleave(repeats, 1).transpose(-1, -2) * scale
    p = torch.exp(signed - lse.unsqueeze(-1)).masked_fill(hidden, 0.0)
    ds = p * (do @ v.transpose(-1, -2) + (do * (p @ v)).sum(-1, keepdim=True)) * scale
    return {
        "out": (p @ v).max().item(),
        "lse": (q @ k.transpose(-1, -2) * scale).max().item() + 1.0,
        "dq": (ds @ k).max().item(),
        "dk": (ds.transpose(-1, -2) @ q).max().item() * repeats,
        "dv": (p.transpose(-1, -2) @ do).max().item() * repeats,
    }


def tile_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    hidden: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients' formula, with P from the LSE; rows with an infinite LSE have P = 0."""
    repeats = query.shape[1] // key.shape[1]
    k, v = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    p = torch.exp(query @ k.transpose(-1, -2) * scale - lse.unsqueeze(-1))
    p = p.masked_fill(hidden | lse.isinf().unsqueeze(-1), 0.0)
    ds = p * (grad_out @ v.transpose(-1, -2) - (grad_out * out).sum(-1, keepdim=True)) * scale
    dk, dv = ds.transpose(-1, -2) @ query, p.transpose(-1, -2) @ grad_out
    return ds @ k, *(x.unflatten(1, (-1, repeats)).sum(2) for x in (dk, dv))


def largest(x: Tensor) -> float:
    return x.masked_fill(~x.isfinite(), 0.0).abs().max().item()


def error(actual: Tensor, expected: Tensor) -> float:
    """Largest deviation; infinities must sit where they are expected, and a NaN is an infinite error."""
    actual, expected = actual.cpu().double(), expected.double()
    assert actual.shape == expected.shape
    same = actual == expected
    return torch.where(same, 0.0, (actual - expected).abs()).nan_to_num(nan=torch.inf).max().item()


# ---- the check -----------------------------------------------------------------------------------


def run_tiles(kernel: Kernel, case: Case, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """out, lse, dq, dk, dv of both tiles under one softmax, merged in fp64."""
    *tensors, key_mask = make_inputs(case, dtype)
    query, key, value, grad_out = (LAYOUTS[case.layout](x.to(device)) for x in tensors)
    key_mask = key_mask.to(device)
    versions = [x._version for x in (query, key, value, grad_out, key_mask)]
    tiles: list[dict[str, Any]] = []
    for keys, is_causal in ((slice(0, case.seq_k), case.is_causal), (slice(case.seq_k, None), False)):
        mask = key_mask[:, :, keys] if case.masked else None
        options = {"is_causal": is_causal, "scale": case.scale, "key_mask": mask}
        tiles.append({"key": key[:, :, keys], "value": value[:, :, keys], "options": options})

    outs, lses = [], []
    for tile in tiles:
        out, lse = kernel.forward(query, tile["key"], tile["value"], **tile["options"])
        assert out.dtype == dtype
        assert lse.dtype == statistics_dtype(dtype)
        outs.append(out.double())
        lses.append(lse.double())
    lse = torch.logaddexp(*lses)
    shift = lse.masked_fill(lse == -torch.inf, 0.0)
    out = sum(
        tile_out * torch.exp(tile_lse - shift).unsqueeze(-1) for tile_out, tile_lse in zip(outs, lses, strict=True)
    )
    assert isinstance(out, Tensor)

    grads = []
    for tile in tiles:
        grads.append(
            kernel.backward(
                grad_out,
                query,
                tile["key"],
                tile["value"],
                LAYOUTS[case.layout](out.to(dtype)),
                rows_outside(lse.to(statistics_dtype(dtype))),
                **tile["options"],
            )
        )
        assert all(grad.dtype in (dtype, statistics_dtype(dtype)) for grad in grads[-1])
    assert versions == [x._version for x in (query, key, value, grad_out, key_mask)], "an input was edited"
    (dq1, dk1, dv1), (dq2, dk2, dv2) = grads
    return {
        "out": out,
        "lse": lse,
        "dq": dq1.double() + dq2.double(),
        "dk": torch.cat([dk1, dk2], dim=2),
        "dv": torch.cat([dv1, dv2], dim=2),
    }


def check(kernel: Kernel, case: Case, dtype: torch.dtype, device: str = "cpu") -> None:
    *tensors, key_mask = make_inputs(case, dtype)
    hidden = hidden_pairs(case, key_mask)
    exact = [x.double() for x in tensors]
    expected = dense_with_grads(*exact, hidden, case.scale)
    actual = run_tiles(kernel, case, dtype, device)
    errors = {name: error(actual[name], expected[name]) for name in expected}
    if dtype == torch.float64:
        limits = dict.fromkeys(expected, 1e-10)
    else:
        plain = dense_with_grads(*tensors, hidden, case.scale)
        # The backward is given the merged out, of tiles rounded to dtype: what that costs is not its doing.
        rounded = actual["out"].cpu().to(dtype).double()
        grads = tile_backward(exact[3], *exact[:3], rounded, expected["lse"], hidden, case.scale)
        given = {name: error(grad, expected[name]) for name, grad in zip(("dq", "dk", "dv"), grads, strict=True)}
        sizes = magnitudes(*exact, hidden, case.scale)
        limits = {
            name: 2.0 * error(plain[name], expected[name])
            + given.get(name, 0.0)
            + torch.finfo(dtype).eps * largest(expected[name])
            + 8.0 * torch.finfo(torch.float32).eps * sizes[name]
            for name in expected
        }
    assert all(errors[name] <= limits[name] for name in expected), (kernel.name, errors, limits)


@pytest.mark.parametrize("kernel", CPU_KERNELS, ids=kernel_id)
@settings(max_examples=40, deadline=None)
@given(case=cases(head_dims=st.integers(1, 20)))
def test_fp64_matches_the_dense_softmax(kernel: Kernel, case: Case) -> None:
    check(kernel, case, torch.float64)


# Derandomized: the yardstick is the error of another computation, which now and then is small by luck.
@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("kernel", CPU_KERNELS, ids=kernel_id)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(case=cases(head_dims=st.integers(1, 20)))
def test_error_is_at_most_twice_that_of_plain_attention(kernel: Kernel, dtype: torch.dtype, case: Case) -> None:
    check(kernel, case, dtype)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("kernel", CPU_KERNELS[:2], ids=kernel_id)
def test_longer_tiles_in_every_memory_layout(kernel: Kernel, layout: str) -> None:
    """More than one block of every kernel's own blocking, the diagonal crossing the blocks."""
    case = Case(seq_q=300, seq_k=300, seq_older=77, head_dim=16, masked=True, layout=layout)
    check(kernel, case, torch.float64)


# ---- rows and keys that do not see each other ----------------------------------------------------


@pytest.mark.parametrize("kernel", CPU_KERNELS, ids=kernel_id)
def test_a_row_without_lse_gives_and_gets_no_gradient(kernel: Kernel) -> None:
    query, key, value, grad_out, _ = make_inputs(Case(seq_older=0), torch.float64)
    options: dict[str, Any] = {"is_causal": True, "scale": 0.4, "key_mask": None}
    out, lse = kernel.forward(query, key, value, **options)
    lse[:, :, 4] = -torch.inf
    out[:, :, 4] = 0.0
    dq, dk, dv = kernel.backward(grad_out, query, key, value, out, lse, **options)
    grad_out[:, :, 4] = 0.0
    lse[:, :, 4] = 0.0
    dq0, dk0, dv0 = kernel.backward(grad_out, query, key, value, out, lse, **options)
    assert (dq[:, :, 4] == 0).all()
    assert max(error(dq, dq0), error(dk, dk0), error(dv, dv0)) < 1e-12


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kernel", CPU_KERNELS, ids=kernel_id)
def test_cpu_kernels_keep_nan_and_inf_from_those_who_do_not_see_them(kernel: Kernel, poison: float) -> None:
    options: dict[str, Any] = {"is_causal": True, "scale": 0.4}
    query, key, value, grad_out, _ = make_inputs(Case(seq_q=13, seq_k=13, seq_older=0), torch.float32)
    key_mask = torch.zeros(key.shape[:-1], dtype=torch.bool)
    key_mask[:, :, 2] = True
    out, lse = kernel.forward(query, key, value, key_mask=key_mask, **options)
    grads = kernel.backward(grad_out, query, key, value, out, lse, key_mask=key_mask, **options)

    def same(actual: Tensor, expected: Tensor) -> bool:
        """To the last bit, but that a NaN makes another kernel take over."""
        return torch.equal(actual, expected) if isinstance(kernel, MathKernel) else error(actual, expected) < 1e-5

    def spoiled(x: Tensor, *at: int) -> Tensor:
        x = x.clone()
        for position in at:
            x[:, :, position] = poison
        return x

    # A masked key: nothing changes anywhere.
    out2, lse2 = kernel.forward(query, spoiled(key, 2), spoiled(value, 2), key_mask=key_mask, **options)
    assert same(out2, out)
    assert same(lse2, lse)
    grads2 = kernel.backward(
        grad_out, query, spoiled(key, 2), spoiled(value, 2), out, lse, key_mask=key_mask, **options
    )
    assert all(same(a, b) for a, b in zip(grads, grads2, strict=True))

    # A value in the future of rows 0 to 6: they do not change, the others do show it.
    out2, lse2 = kernel.forward(query, key, spoiled(value, 7), key_mask=key_mask, **options)
    assert same(out2[:, :, :7], out[:, :, :7])
    assert same(lse2, lse)
    assert not out2[:, :, 7:].isfinite().any()

    # A key in their future: neither out, LSE nor query gradient of theirs changes.
    out2, lse2 = kernel.forward(query, spoiled(key, 7), value, key_mask=key_mask, **options)
    assert same(out2[:, :, :7], out[:, :, :7])
    assert same(lse2[:, :, :7], lse[:, :, :7])
    dq, _, _ = kernel.backward(
        grad_out, query, spoiled(key, 7), spoiled(value, 7), out, lse, key_mask=key_mask, **options
    )
    assert same(dq[:, :, :7], grads[0][:, :, :7])

    # A row: later keys, which it does not see, get the gradients they had from the other rows.
    _, dk, dv = kernel.backward(
        spoiled(grad_out, 3), spoiled(query, 3), key, value, out, lse, key_mask=key_mask, **options
    )
    assert same(dk[:, :, 4:], grads[1][:, :, 4:])
    assert same(dv[:, :, 4:], grads[2][:, :, 4:])
    assert not dv[:, :, [0, 1, 3]].isfinite().any()

    # A row that sees everything but the masked key.
    _, dk, dv = kernel.backward(
        spoiled(grad_out, 12), spoiled(query, 12), key, value, out, lse, key_mask=key_mask, **options
    )
    assert (dk[:, :, 2] == 0).all()
    assert (dv[:, :, 2] == 0).all()


@pytest.mark.parametrize("kernel", CPU_KERNELS, ids=kernel_id)
def test_tiles_that_no_kernel_takes(kernel: Kernel) -> None:
    query, key = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 3, 8)
    for empty in (key[:, :, :0], key[:0]):
        with pytest.raises(AssertionError):
            kernel.forward(query, empty, empty, is_causal=False, scale=1.0, key_mask=None)
    with pytest.raises(AssertionError, match="square"):
        kernel.forward(query, key, key, is_causal=True, scale=1.0, key_mask=None)


# ---- the math kernel's own promises --------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """Records the element count of the largest tensor that any operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.numel())
        return result


@pytest.mark.parametrize("is_causal", [False, True])
def test_math_needs_memory_linear_in_the_sequence(is_causal: bool) -> None:
    largest_of = {}
    for seq in (512, 1024):
        query = torch.randn(1, 2, seq, 8)
        key = torch.randn(1, 1, seq, 8)
        options: dict[str, Any] = {"is_causal": is_causal, "scale": 0.3, "key_mask": None}
        kernel = MathKernel(block=64)
        with LargestTensor() as recorder:
            out, lse = kernel.forward(query, key, key, **options)
            kernel.backward(out, query, key, key, out, lse, **options)
        largest_of[seq] = recorder.numel
    # Both query heads share the keys of one; the inputs are the largest where the scores of a block are not.
    assert largest_of == {512: 2 * 512 * 8, 1024: 2 * 1024 * 8}


def test_math_ignores_autocast() -> None:
    query, key, value, grad_out, _ = make_inputs(Case(seq_older=0), torch.float32)
    options: dict[str, Any] = {"is_causal": True, "scale": 0.4, "key_mask": None}

    def run() -> list[Tensor]:
        out, lse = MathKernel().forward(query, key, value, **options)
        return [out, lse, *MathKernel().backward(grad_out, query, key, value, out, lse, **options)]

    expected = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = run()
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


# ---- choice --------------------------------------------------------------------------------------

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def gpu_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes torch claim an NVIDIA GPU of a given compute capability."""

    def claim(major: int, minor: int, *, flash: bool = True, cudnn: int | None = 91600) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))
        monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: flash)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
        monkeypatch.setattr(torch.version, "hip", None)

    return claim


def test_cpu_prefers_flash_then_math() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        inputs = KernelInputs(CPU, dtype, head_dim=33, has_key_mask=True)
        assert select_kernel("auto", inputs).name == "aten_cpu_flash"
        assert select_kernel("math", inputs).name == "math"
    assert select_kernel("auto", KernelInputs(torch.device("meta"), torch.float32, 64)).name == "math"


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


def test_cudnn_comes_after_flash_and_only_in_a_version_that_is_right(
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


def test_where_none_fits_the_error_has_the_inputs_and_every_kernels_reasons() -> None:
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


def test_a_kernel_asked_for_by_name_is_never_replaced() -> None:
    with pytest.raises(ValueError, match="cpu tensors only") as info:
        select_kernel("aten_cpu_flash", KernelInputs(torch.device("meta"), torch.float32, 64))
    assert "math:" not in str(info.value)
    assert "kernel='auto'" in str(info.value)


def test_an_unknown_name_lists_the_names() -> None:
    with pytest.raises(ValueError, match="kernel = 'flash'") as info:
        select_kernel("flash", KernelInputs(CPU, torch.float32, 64))
    assert all(repr(name) in str(info.value) for name in ("auto", *kernel_names()))


def test_available_kernels_speaks_of_every_kernel() -> None:
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


def test_auto_dtype_without_the_gpu_it_is_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device = cuda"):
        auto_dtype("cuda")


# ---- the CUDA kernels ----------------------------------------------------------------------------


class CudaOperators(TorchDispatchMode):
    """The CUDA attention operators on CPU tensors: what they demand of their arguments, and what they return.

    Demands and oddities are those of torch's attention.cu, attention_backward.cu, flash_api.cpp and MHA.cpp.
    """

    def __init__(self, cudnn_lse_dims: int) -> None:
        super().__init__()
        self.cudnn_lse_dims = cudnn_lse_dims
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.removesuffix(".default")
        if not name.startswith("_scaled_dot_product_"):
            return func(*args, **(kwargs or {}))
        self.calls.append(name)
        return getattr(self, name.removeprefix("_scaled_dot_product_"))(*args, **(kwargs or {}))

    def flash_attention(self, q, k, v, dropout=0.0, causal=False, debug=False, *, scale):
        demand_vectors(q, k, v)
        out, lse = dense(q.float(), k.float(), v.float(), causal_pairs(q, k, causal), scale)
        return out.to(q.dtype), lse, None, None, q.shape[2], k.shape[2], None, None, None

    def flash_attention_backward(
        self, do, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, seed, offset, *, scale
    ):
        demand_vectors(do, q, k, v, out)
        assert lse.is_contiguous()
        assert lse.shape == q.shape[:3]
        assert (max_q, max_k) == (q.shape[2], k.shape[2])
        grads = tile_backward(*floats(do, q, k, v, out), lse, causal_pairs(q, k, causal), scale)
        return tuple(grad.to(q.dtype) for grad in grads)

    def efficient_attention(self, q, k, v, bias, compute_lse, dropout=0.0, causal=False, *, scale):
        demand_vectors(q, k, v)
        hidden = self.efficient_hidden(q, k, bias, causal)
        out, lse = dense(q.float(), k.float(), v.float(), hidden, scale)
        out = out.masked_fill(lse.unsqueeze(-1) == -torch.inf, torch.nan)
        padded = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=torch.nan)
        return out.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2), padded, None, None

    def efficient_attention_backward(
        self, do, q, k, v, bias, out, lse, seed, offset, dropout, wanted, causal=False, *, scale
    ):
        demand_vectors(do, q, k, v, out)
        # The operator takes only batch and head strides of out, and computes the rest.
        assert out.transpose(1, 2).is_contiguous()
        assert lse.shape[2] >= q.shape[2]
        assert all(stride % 8 == 0 for stride in lse.stride()[:2])
        assert lse.stride(2) == 1
        hidden = self.efficient_hidden(q, k, bias, causal)
        grads = tile_backward(*floats(do, q, k, v, out), lse[:, :, : q.shape[2]], hidden, scale)
        return *(grad.to(q.dtype) for grad in grads), None

    @staticmethod
    def efficient_hidden(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
        assert q.shape[1] == k.shape[1]
        hidden = causal_pairs(q, k, causal)
        if bias is None:
            return hidden
        assert bias.dtype == q.dtype
        assert bias.shape == (*q.shape[:3], k.shape[2])
        assert bias.stride(3) == 1
        assert all(stride % 8 == 0 for stride in bias.stride()[:3])
        assert bias.untyped_storage().nbytes() // bias.element_size() % 16 == 0
        return hidden | (bias == -torch.inf)

    def cudnn_attention(self, q, k, v, bias, compute_lse, dropout=0.0, causal=False, debug=False, *, scale):
        self.demand_cudnn(q, k, v)
        out, lse = dense(q.float(), k.float(), v.float(), causal_pairs(q, k, causal), scale)
        lse = lse if self.cudnn_lse_dims == 3 else lse.unsqueeze(-1)
        return out.to(q.dtype), lse, None, None, q.shape[2], k.shape[2], None, None, None

    def cudnn_attention_backward(
        self, do, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout, causal, *, scale
    ):
        self.demand_cudnn(q, k, v)
        assert do.is_contiguous()
        assert out.is_contiguous()
        assert lse.is_contiguous()
        assert lse.shape == (q.shape[:3] if self.cudnn_lse_dims == 3 else (*q.shape[:3], 1))
        assert (max_q, max_k) == (q.shape[2], k.shape[2])
        lse = lse.reshape(q.shape[:3])
        grads = tile_backward(*floats(do, q, k, v, out), lse, causal_pairs(q, k, causal), scale)
        return tuple(grad.to(q.dtype) for grad in grads)

    @staticmethod
    def demand_cudnn(q: Tensor, k: Tensor, v: Tensor) -> None:
        demand_vectors(q, k, v)
        assert q.is_contiguous()
        assert k.is_contiguous()
        assert v.is_contiguous()
        assert q.shape[1] == k.shape[1]
        assert k.shape[2] > 1


def demand_vectors(*tensors: Tensor) -> None:
    """One dtype, contiguous last dim, and every vector of 16 bytes at an aligned address."""
    for x in tensors:
        assert x.dtype == tensors[0].dtype
        assert x.stride(-1) == 1
        vector = 16 // x.element_size()
        assert x.shape[-1] % vector == 0
        assert all(offset % vector == 0 for offset in (x.storage_offset(), *x.stride()[:-1]))


def floats(*tensors: Tensor) -> list[Tensor]:
    return [x.float() for x in tensors]


def causal_pairs(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    hidden = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.bool)
    return hidden | torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1) if causal else hidden


CUDA_CASES = {kernel.name: cases(head_dims=st.sampled_from([8, 16, 24]), masks=False) for kernel in CUDA_KERNELS}
CUDA_CASES["aten_cuda_efficient"] = cases(head_dims=st.sampled_from([8, 16, 24]))


@pytest.mark.parametrize("kernel", CUDA_KERNELS, ids=kernel_id)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_cuda_kernels_on_a_model_of_the_operators(kernel: Kernel, data: st.DataObject) -> None:
    case = data.draw(CUDA_CASES[kernel.name])
    dtype = data.draw(st.sampled_from(kernel.dtypes))
    with CudaOperators(cudnn_lse_dims=data.draw(st.sampled_from([3, 4]))) as model:
        check(kernel, case, dtype)
    if min(case.seq_k, case.seq_older) > 1:
        assert len([name for name in model.calls if name.endswith("_backward")]) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kernel", [*CUDA_KERNELS, MathKernel()], ids=kernel_id)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_kernels_on_a_gpu(kernel: Kernel, data: st.DataObject) -> None:
    dtypes = [x for x in kernel.dtypes if not kernel.not_supported_reasons(KernelInputs(CUDA, x, head_dim=8))]
    if not dtypes:
        pytest.skip(f"{kernel.name}: {available_kernels()[kernel.name]}")
    case = data.draw(CUDA_CASES.get(kernel.name, cases(head_dims=st.integers(1, 20))))
    check(kernel, case, data.draw(st.sampled_from(dtypes)), device="cuda")
