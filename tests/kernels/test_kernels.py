"""The CPU kernels: exact in fp64, and in lower precision within twice the error of plain attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import kernel_cases as tiles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ring_backends.kernels import Kernel, TileInputs
from ring_backends.kernels.aten_cpu import AtenCpuFlashKernel, backward_dtype
from ring_backends.kernels.math import MathKernel
from ring_backends.testing.calls import difference
from ring_backends.testing.marks import matrix_but


@pytest.mark.parametrize("kernel", tiles.CPU_KERNELS, ids=tiles.kernel_id)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_fp64_matches_the_dense_softmax(kernel: Kernel, data: st.DataObject) -> None:
    banded = kernel.takes_bands and data.draw(st.booleans())
    tiles.check(kernel, data.draw(tiles.cases(head_dims=st.integers(1, 20), banded=banded)), torch.float64)


def test_math_adds_up_the_gradients_of_many_queries_in_fp32() -> None:
    query, grad_out = torch.randn(2, 1, 1, 4000, 8).bfloat16().unbind()
    key = torch.zeros(1, 1, 2, 8, dtype=torch.bfloat16)
    *_, grad_value = tiles.run_tile(MathKernel(), (query, key, key, grad_out), scale=1.0)
    wanted = (grad_out.double().sum(2, keepdim=True) / 2).expand(-1, -1, 2, -1)
    torch.testing.assert_close(grad_value.double(), wanted, rtol=0, atol=0.05)


# Derandomized: the bound is the error of another computation, which can be small by chance.
@pytest.mark.parametrize("dtype", matrix_but(torch.bfloat16, of=tiles.PRECISIONS), ids=str)
@pytest.mark.parametrize("kernel", tiles.CPU_KERNELS, ids=tiles.kernel_id)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(case=tiles.cases(head_dims=st.integers(1, 20)))
def test_error_is_at_most_twice_that_of_plain_attention(kernel: Kernel, dtype: torch.dtype, case: tiles.Case) -> None:
    tiles.check(kernel, case, dtype)


@pytest.mark.parametrize("layout", matrix_but(*sorted(tiles.LAYOUTS)[::3], of=sorted(tiles.LAYOUTS)))
@pytest.mark.parametrize("kernel", tiles.CPU_KERNELS[:2], ids=tiles.kernel_id)
def test_longer_tiles_in_every_memory_layout(kernel: Kernel, layout: str) -> None:
    """These tiles span several internal blocks of every kernel. The causal diagonal crosses blocks."""
    case = tiles.Case(seq_q=300, seq_k=300, seq_older=77, head_dim=16, masked=True, layout=layout)
    tiles.check(kernel, case, torch.float64)


@pytest.mark.parametrize("kernel", tiles.CPU_KERNELS, ids=tiles.kernel_id)
def test_a_row_with_infinite_lse_has_no_gradient(kernel: Kernel) -> None:
    tiles.check_a_row_without_keys(kernel, torch.float64, 1e-12)


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_nan_of_another_tile_stays_in_its_row(is_causal: bool) -> None:
    """A row that is NaN because of another tile gives no gradient to keys that it does not see, or that are masked."""
    query, key, value, grad_out = (torch.randn(1, 1, 4, 8) for _ in range(4))
    key_mask = torch.tensor([[[False, True, False, False]]])
    tile = TileInputs(query, key, value, 0.5, is_causal, key_mask)
    out, lse = MathKernel().forward(tile)
    out[:, :, 1], lse[:, :, 1] = torch.nan, torch.nan
    for grad in MathKernel().backward(tile, grad_out, out, lse)[1:]:
        rows = grad[0, 0].isfinite().all(1).tolist()
        assert rows == ([False, True, True, True] if is_causal else [False, True, False, False])


@pytest.mark.parametrize("poison", matrix_but(torch.nan, torch.inf, of=(torch.nan, torch.inf, -torch.inf)))
@pytest.mark.parametrize("scale", matrix_but(0.4, of=(0.4, 0.0)))
@pytest.mark.parametrize("length", [13, 100])  # the CPU kernel looks at the inputs of short tiles, else at the results
@pytest.mark.parametrize("kernel", tiles.CPU_KERNELS, ids=tiles.kernel_id)
def test_nan_and_inf_do_not_reach_rows_that_do_not_see_them(kernel, length, scale, poison):
    case = tiles.Case(seq_q=length, seq_k=length, seq_older=0)
    query, key, value, grad_out, _ = tiles.make_inputs(case, torch.float32)
    key_mask = torch.zeros(key.shape[:-1], dtype=torch.bool)
    key_mask[:, :, 2] = True
    tile = TileInputs(query, key, value, scale, is_causal=True, key_mask=key_mask)
    out, lse = kernel.forward(tile)
    grads = kernel.backward(tile, grad_out, out, lse)

    def same(actual: Tensor, expected: Tensor) -> bool:
        """Compare bitwise for the math kernel. A NaN makes other kernels switch to it, so allow a tolerance."""
        return difference(actual, expected) <= (0 if isinstance(kernel, MathKernel) else 1e-5)

    def spoiled(x: Tensor, position: int) -> Tensor:
        return x.index_fill(2, torch.tensor([position]), poison)

    # Spoil a masked key. No result changes.
    masked = replace(tile, key=spoiled(key, 2), value=spoiled(value, 2))
    assert all(map(same, kernel.forward(masked), (out, lse)))
    assert all(map(same, kernel.backward(masked, grad_out, out, lse), grads))

    # Spoil value 7. Rows 0 to 6 do not see it and do not change. The other rows are not finite.
    out2, lse2 = kernel.forward(replace(tile, value=spoiled(value, 7)))
    assert same(out2[:, :, :7], out[:, :, :7])
    assert same(lse2, lse)
    assert not out2[:, :, 7:].isfinite().any()

    # Spoil key 7. out, LSE and query gradients of rows 0 to 6 do not change.
    found = kernel.forward(replace(tile, key=spoiled(key, 7)))
    hidden = replace(tile, key=spoiled(key, 7), value=spoiled(value, 7))
    dq, _, _ = kernel.backward(hidden, grad_out, out, lse)
    for x, y in zip((*found, dq), (out, lse, grads[0]), strict=True):
        assert same(x[:, :, :7], y[:, :, :7])

    # Spoil query 3 and its gradient. Later keys, which it does not see, keep their gradients.
    _, dk, dv = kernel.backward(replace(tile, query=spoiled(query, 3)), spoiled(grad_out, 3), out, lse)
    assert same(dk[:, :, 4:], grads[1][:, :, 4:])
    assert same(dv[:, :, 4:], grads[2][:, :, 4:])
    assert not dv[:, :, [0, 1, 3]].isfinite().any()

    # Spoil the last query, which sees all keys except the masked one.
    last = length - 1
    _, dk, dv = kernel.backward(replace(tile, query=spoiled(query, last)), spoiled(grad_out, last), out, lse)
    assert (dk[:, :, 2] == 0).all()
    assert (dv[:, :, 2] == 0).all()


def cpu_with(*instructions: str, architecture: str = "x86_64") -> Any:
    """Pretend that the CPU has these instructions, and no others for bf16 and fp16."""
    names = ("avx512_bf16", "amx_bf16", "avx512_fp16", "amx_fp16")
    found = {name: name in instructions for name in names} | {"architecture": architecture}
    return mock.patch("torch.cpu.get_capabilities", return_value=found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("instruction", ["avx512_bf16", "amx_bf16", "avx512_fp16", "amx_fp16", "none"])
def test_half_precision_gradients_need_instructions_for_their_dtype(instruction: str, dtype: torch.dtype) -> None:
    suffix = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "")
    with cpu_with(instruction):
        assert backward_dtype(dtype) == (dtype if instruction.endswith(suffix) else torch.float32)
    with cpu_with(instruction, architecture="arm64"):
        assert backward_dtype(dtype) == dtype
    with mock.patch("torch.cpu.get_capabilities", return_value={"architecture": "x86_64"}):
        assert backward_dtype(dtype) == (torch.float32 if suffix else dtype)


@pytest.mark.parametrize("instructions", [(), ("amx_bf16", "amx_fp16")], ids=["fp32", "half"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", sorted(tiles.LAYOUTS))
def test_half_precision_on_any_cpu(instructions: tuple[str, ...], dtype: torch.dtype, layout: str) -> None:
    case = tiles.Case(seq_q=100, seq_k=100, head_dim=16, masked=True, layout=layout)
    with cpu_with(*instructions):
        tiles.check(AtenCpuFlashKernel(), case, dtype)


@pytest.mark.parametrize("is_causal", [False, True])
def test_math_needs_memory_linear_in_the_sequence(is_causal: bool) -> None:
    largest_of = {}
    for seq in (512, 1024):
        query, key = torch.randn(1, 2, seq, 8), torch.randn(1, 1, seq, 8)
        with tiles.CountOperators() as launched:
            tiles.run_tile(tiles.MathInBlocks(64), (query, key, key, query), is_causal=is_causal, scale=0.3)
        largest_of[seq] = max(shape.numel() for _, shape in launched.results)
    # Two query heads share one key head. The inputs are the largest tensors, because the scores of a block are smaller.
    assert largest_of == {512: 2 * 512 * 8, 1024: 2 * 1024 * 8}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["query", "key"])
def test_an_infinite_number_in_half_precision(dtype: torch.dtype, name: str) -> None:
    """The operator of torch returns a finite out for some rows that are NaN, but no finite LSE."""
    generator = torch.Generator().manual_seed(0)
    rows = {x: torch.randn(1, 2, 64, 16, generator=generator).to(dtype) for x in ("query", "key", "value")}
    rows[name][0, 0, 32, 3] = torch.inf
    tile = TileInputs(**rows, scale=0.25)
    got, expected = (kernel.forward(tile) for kernel in (AtenCpuFlashKernel(), MathKernel()))
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2, equal_nan=True)
