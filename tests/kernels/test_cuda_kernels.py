"""The CUDA kernels with a CPU model of torch's operators, and on a GPU if the machine has one."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import kernel_cases as tiles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

from ring_backends.kernels import Kernel, KernelInputs, TileInputs, aten_cuda, aten_cudnn, available_kernels
from ring_backends.kernels.math import MathKernel
from ring_backends.testing.marks import THOROUGH, matrix_but, needs_gpu


class CudaOperators(TorchDispatchMode):
    """A model of the CUDA attention operators on CPU tensors. It checks their requirements and returns their results.

    Requirements and special cases follow torch's attention.cu, attention_backward.cu, flash_api.cpp and MHA.cpp.
    """

    def __init__(self, cudnn_lse_dims: int) -> None:
        super().__init__()
        self.cudnn_lse_dims = cudnn_lse_dims
        self.cudnn_plans: dict[Any, Any] = {}
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.removesuffix(".default")
        if not name.startswith("_scaled_dot_product_"):
            return func(*args, **(kwargs or {}))
        self.calls.append(name)
        model = getattr(self, name.removeprefix("_scaled_dot_product_"))
        return model(*args, **(kwargs or {}))

    def flash_attention(self, q, k, v, dropout=0.0, causal=False, debug=False, *, scale):
        demand_one_width(q, k, v)
        assert q.shape[0] <= aten_cuda.MAX_ENTRIES
        out, lse = tiles.dense(q.float(), k.float(), v.float(), causal_pairs(q, k, causal), scale)
        return out.to(q.dtype), lse, None, None, q.shape[2], k.shape[2], None, None, None

    def flash_attention_backward(self, do, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, *_, scale):
        demand_one_width(do, q, k, v, out)
        assert q.shape[0] <= aten_cuda.MAX_ENTRIES
        assert math.prod(q.shape[:2]) * (q.shape[2] + -q.shape[2] % 128) * 64 <= aten_cuda._MAX_OFFSET
        assert lse.is_contiguous()
        assert lse.shape == q.shape[:3]
        assert (cum_q, cum_k, max_q, max_k) == (None, None, q.shape[2], k.shape[2])
        return gradients(do, q, k, v, out, lse, causal_pairs(q, k, causal), scale)

    def efficient_attention(self, q, k, v, bias, compute_lse, dropout=0.0, causal=False, *, scale):
        demand_vectors(q, k, v)
        assert all(x.shape[2] * x.stride(2) < aten_cuda._MAX_OFFSET or x.is_contiguous() for x in (k, v))
        hidden = self.efficient_hidden(q, k, bias, causal)
        out, lse = tiles.dense(q.float(), k.float(), v.float(), hidden, scale)
        out = out.masked_fill(lse.unsqueeze(-1) == -torch.inf, torch.nan)
        padded = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=torch.nan)
        return out.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2), padded, None, None

    def efficient_attention_backward(
        self, do, q, k, v, bias, out, lse, seed, offset, dropout, wanted, causal=False, *, scale
    ):
        demand_vectors(do, q, k, v, out)
        # The operator reads only the batch and head strides of out. It computes the other strides.
        assert out.transpose(1, 2).is_contiguous()
        assert lse.shape[2] >= q.shape[2]
        assert all(stride % 8 == 0 for stride in lse.stride()[:2])
        assert lse.stride(2) == 1
        hidden = self.efficient_hidden(q, k, bias, causal)
        return *gradients(do, q, k, v, out, lse[:, :, : q.shape[2]], hidden, scale), None

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
        out, lse = tiles.dense(q.float(), k.float(), v.float(), causal_pairs(q, k, causal), scale)
        lse = lse if self.cudnn_lse_dims == 3 else lse.unsqueeze(-1)
        return out.to(q.dtype), lse, None, None, q.shape[2], k.shape[2], None, None, None

    def cudnn_attention_backward(
        self, do, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout, causal, *, scale
    ):
        self.demand_cudnn(q, k, v)
        # torch caches a plan by the sizes and strides of q, k and v, so those of the others must follow from these.
        strides = do.stride(), out.stride()
        plan = *(x.shape for x in (q, k, v)), *(x.stride() for x in (q, k, v))
        assert self.cudnn_plans.setdefault(plan, strides) == strides
        if torch.__version__ >= "2.14":
            assert all(x.stride() == torch.empty_like(x).stride() for x in (q, k, v))
        assert lse.is_contiguous()
        assert lse.shape == (q.shape[:3] if self.cudnn_lse_dims == 3 else (*q.shape[:3], 1))
        assert (max_q, max_k) == (q.shape[2], k.shape[2])
        return gradients(do, q, k, v, out, lse.reshape(q.shape[:3]), causal_pairs(q, k, causal), scale)

    @staticmethod
    def demand_cudnn(q: Tensor, k: Tensor, v: Tensor) -> None:
        demand_vectors(q, k, v)
        assert q.shape[0] <= aten_cudnn.MAX_ENTRIES
        assert min(q.shape[2], k.shape[2]) > 1
        assert all(stride or size == 1 for x in (q, k, v) for size, stride in zip(x.shape, x.stride(), strict=True))


def demand_vectors(*tensors: Tensor) -> None:
    """Require one dtype, a contiguous last dim, and aligned vectors of 16 bytes."""
    for x in tensors:
        assert x.dtype == tensors[0].dtype
        assert x.stride(-1) == 1
        vector = 16 // x.element_size()
        assert x.shape[-1] % vector == 0
        assert all(offset % vector == 0 for offset in (x.storage_offset(), *x.stride()[:-1]))


def demand_one_width(*tensors: Tensor) -> None:
    """Require the same of tensors of one width."""
    demand_vectors(*tensors)
    assert len({x.shape[-1] for x in tensors}) == 1


def gradients(do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *more: Any) -> tuple[Tensor, ...]:
    grads = tiles.tile_backward(*(x.float() for x in (do, q, k, v, out)), *more)
    return tuple(grad.to(q.dtype) for grad in grads)


def causal_pairs(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    hidden = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.bool)
    return hidden | torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1) if causal else hidden


def cases_of(kernel: Kernel) -> st.SearchStrategy[tiles.Case]:
    """Tiles that a kernel takes on a GPU."""
    head_dims = st.integers(1, 20) if isinstance(kernel, MathKernel) else st.sampled_from([8, 16, 24])
    has_masks = not isinstance(kernel, aten_cuda.AtenCudaPartsKernel)
    banded = st.booleans() if kernel.takes_bands else st.just(False)
    return banded.flatmap(lambda banded: tiles.cases(head_dims=head_dims, masks=has_masks, banded=banded))


@THOROUGH
@pytest.mark.parametrize("kernel", matrix_but(tiles.CUDA_KERNELS[0], of=tiles.CUDA_KERNELS), ids=tiles.kernel_id)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_cuda_kernels_on_a_model_of_the_operators(kernel: Kernel, data: st.DataObject) -> None:
    case = data.draw(cases_of(kernel))
    dtype = data.draw(st.sampled_from(kernel.dtypes))
    release = TorchVersion(data.draw(st.sampled_from(["2.13.0", "2.14.0"])))
    with (
        mock.patch.object(torch, "__version__", release),
        CudaOperators(cudnn_lse_dims=data.draw(st.sampled_from([3, 4]))) as model,
    ):
        aten_cudnn._lse_dims.clear()
        tiles.check(kernel, case, dtype)
    if min(case.seq_q, case.seq_k, case.seq_older) > 1:
        assert len([name for name in model.calls if name.endswith("_backward")]) == 2


@pytest.mark.parametrize(
    ("name", "max_entries", "max_offset", "calls"),
    [
        ("flash", 1, 2**31, 5),
        ("flash", 2, 2**31, 3),
        ("flash", 9, 2 * 3 * 128 * 64, 5),  # both key/value heads of one entry
        ("flash", 9, 3 * 128 * 64, 10),  # one of them
        ("cudnn", 2, 2**31, 3),
        ("efficient", 1, 64, 1),
    ],
)
def test_tiles_beyond_the_limits_of_the_operators(monkeypatch, name, max_entries, max_offset, calls):
    for module in (aten_cuda, aten_cudnn):
        monkeypatch.setattr(module, "MAX_ENTRIES", max_entries)
    monkeypatch.setattr(aten_cuda, "_MAX_OFFSET", max_offset)
    (kernel,) = (kernel for kernel in tiles.CUDA_KERNELS if kernel.name == f"aten_cuda_{name}")
    with CudaOperators(cudnn_lse_dims=4) as model:
        aten_cudnn._lse_dims.clear()
        tiles.check(kernel, tiles.Case(batch=5, kv_heads=2, repeats=3, layout="every second row"), torch.float16)
    assert len([name for name in model.calls if name.endswith("_backward")]) == 2 * calls  # two tiles


def test_a_head_beyond_the_limits_of_flash_is_an_error() -> None:
    rows = torch.empty(1, 8, 2**21 + 1, 128, device="meta", dtype=torch.bfloat16)
    key = rows[:, :1]
    lse = torch.empty(1, 8, 2**21 + 1, device="meta")
    kernel = aten_cuda.AtenCudaFlashKernel()
    with pytest.raises(ValueError, match=r"2097153 rows in one tile of 8 heads .*triton_dilated"):
        kernel.backward(TileInputs(rows, key, key, scale=1.0), rows, rows, lse)


@pytest.mark.parametrize("value_dim", [64, 32])
def test_cudnn_leaves_single_rows_to_flash(value_dim: int) -> None:
    query = torch.empty(2, 4, 1, 64, device="meta", dtype=torch.bfloat16)
    key = torch.empty(2, 2, 300, 64, device="meta", dtype=torch.bfloat16)
    value, grad_out = key[..., :value_dim], query[..., :value_dim]
    with tiles.CountOperators() as launched:
        out, _, *grads = tiles.run_tile(aten_cudnn.AtenCudaCudnnKernel(), (query, key, value, grad_out), scale=1.0)
    assert [x.shape for x in (out, *grads)] == [x.shape for x in (grad_out, query, key, value)]
    assert launched.counts["aten._scaled_dot_product_flash_attention.default"] == 1
    assert launched.counts["aten._scaled_dot_product_flash_attention_backward.default"] == 1


@pytest.mark.parametrize("value_dim", [16, 24])
def test_a_plan_of_cudnn_serves_every_layout_of_the_gradient(value_dim: int) -> None:
    query, key = (torch.randn(2, 7, 4, 16).transpose(1, 2) for _ in range(2))
    value = torch.randn(2, 7, 4, value_dim).transpose(1, 2)
    kernel, tile = aten_cudnn.AtenCudaCudnnKernel(), TileInputs(query, key, value, 0.3, is_causal=True)
    grad_out = torch.randn(value.shape)
    wide = torch.nn.functional.pad(grad_out, (0, 8))[..., :-8]
    with CudaOperators(cudnn_lse_dims=4) as model:
        out, lse = kernel.forward(tile)
        found = kernel.backward(tile, grad_out, out, lse)
        torch.testing.assert_close(kernel.backward(tile, wide, tiles.LAYOUTS["heads inside"](out), lse), found)
    assert len(model.cudnn_plans) == 1


def test_cudnn_refuses_torch_s_ragged_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, inputs = aten_cudnn.AtenCudaCudnnKernel(), KernelInputs(tiles.CUDA, torch.bfloat16, head_dim=64)
    for value, refuses in (("1", True), ("0", False)):
        monkeypatch.setenv("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", value)
        assert any("AVOID_RECOMPILE" in reason for reason in kernel.device_reasons(inputs, (9, 0))) == refuses


@needs_gpu
@pytest.mark.parametrize(
    ("kernel", "shape"),
    [
        (aten_cuda.AtenCudaFlashKernel(), (65_537, 1, 16, 8)),
        (aten_cudnn.AtenCudaCudnnKernel(), (65_537, 1, 16, 8)),
        (aten_cuda.AtenCudaFlashKernel(), (8300, 16, 2, 128)),
    ],
    ids=["flash-batch", "cudnn-batch", "flash-offsets"],
)
def test_tiles_beyond_the_limits_on_a_gpu(kernel: Kernel, shape: tuple[int, ...]) -> None:
    """The last entries of a large batch have the results that they have alone."""
    if kernel.not_supported_reasons(KernelInputs(tiles.CUDA, torch.bfloat16, head_dim=shape[3])):
        pytest.skip(f"{kernel.name}: {available_kernels()[kernel.name]}")
    tensors = torch.randn(4, *shape, device="cuda", dtype=torch.bfloat16)
    found = tiles.run_tile(kernel, tensors, scale=0.3)
    wanted = tiles.run_tile(kernel, tensors[:, -3:], scale=0.3)
    torch.testing.assert_close(tuple(x[-3:] for x in found), wanted)


@needs_gpu
def test_keys_far_apart_on_a_gpu() -> None:
    """Keys whose offsets take more than 31 bits (4 GiB in fp16 are allocated)."""
    memory = torch.zeros(4100, 2**19, device="cuda", dtype=torch.float16)
    key = memory[:, :64].normal_()[None, None]
    query = torch.randn(1, 1, 40, 64, device="cuda", dtype=torch.float16)
    kernel, near = aten_cuda.AtenCudaEfficientKernel(), key.contiguous()
    far, wanted = (kernel.forward(TileInputs(query, keys, keys, scale=0.125)) for keys in (key, near))
    torch.testing.assert_close(far, wanted)


@needs_gpu
@pytest.mark.parametrize("kernel", [*tiles.CUDA_KERNELS, MathKernel()], ids=tiles.kernel_id)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_kernels_on_a_gpu(kernel: Kernel, data: st.DataObject) -> None:
    dtypes = [x for x in kernel.dtypes if not kernel.not_supported_reasons(KernelInputs(tiles.CUDA, x, head_dim=8))]
    if not dtypes:
        pytest.skip(f"{kernel.name}: {available_kernels()[kernel.name]}")
    tiles.check(kernel, data.draw(cases_of(kernel)), data.draw(st.sampled_from(dtypes)), device="cuda")
