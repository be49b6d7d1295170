"""Tensors without values, on device "meta" or fake: shapes, dtypes and operators of a call, without memory."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from kernel_cases import CountOperators
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ring_backends import dilated_attention
from ring_backends.adapters.native import RingDilatedAttention
from ring_backends.kernels import kernel_names
from ring_backends.testing.marks import matrix_but


def tensors(device: str, dtype: torch.dtype, value_dim: int = 16) -> list[Tensor]:
    """Query, key and value of 1,000 tokens."""
    shapes = (6, 16), (2, 16), (2, value_dim)
    return [torch.randn(2, 1000, *shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]


def check(query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor) -> None:
    """Check the shapes, dtypes and devices of a call's results and gradients."""
    shape = (*query.shape[:3], value.shape[3])
    assert (out.shape, out.dtype, out.device) == (shape, query.dtype, query.device)
    stats = torch.float64 if query.dtype == torch.float64 else torch.float32
    assert (lse.shape, lse.dtype, lse.device) == (query.transpose(1, 2).shape[:3], stats, query.device)
    out.backward(torch.empty_like(out))
    for x in (query, key, value):
        assert (x.grad.shape, x.grad.dtype, x.grad.device) == (x.shape, x.dtype, x.device)


def test_a_second_call_is_looked_up() -> None:
    """Device "meta" has no autocast to ask for."""
    for _ in range(2):
        rows = tensors("meta", torch.float32)
        check(*rows, *dilated_attention(*rows, [64, 256], [1, 4], return_lse=True))


DTYPES = {"key_padding_mask": torch.bool, "document_ids": torch.int64}
MODES: dict[str, Any] = {"meta": nullcontext, "cpu": FakeTensorMode}


@pytest.mark.parametrize("options", [(), ("key_padding_mask",), ("document_ids",), tuple(DTYPES)])
@pytest.mark.parametrize("dropout_p", matrix_but(0.1, of=(0.0, 0.1)))
@pytest.mark.parametrize("device", matrix_but("meta", of=MODES))
def test_every_option(device: str, dropout_p: float, options: tuple[str, ...]) -> None:
    with MODES[device]():
        rows = tensors(device, torch.float32)
        marks = {name: torch.zeros(2, 1000, dtype=DTYPES[name], device=device) for name in options}
    attention = RingDilatedAttention([64, 256], [1, 4], dropout_p=dropout_p, head_mode="grouped", offset="block")
    check(*rows, *attention(*rows, is_causal=True, return_lse=True, **marks))


@pytest.mark.parametrize("value_dim", matrix_but(24, of=(16, 24)))
@pytest.mark.parametrize("kernel", ["auto", *kernel_names()])
def test_meta_tensors_stand_for_any_device(kernel: str, value_dim: int) -> None:
    dtype = torch.float16 if "cuda" in kernel else torch.float32
    rows = tensors("meta", dtype, value_dim)
    check(*rows, *dilated_attention(*rows, [64, 256], [1, 4], kernel=kernel, return_lse=True))


def attend(dtype: torch.dtype) -> Tensor:
    """The LSE of a length that no other test uses. Its plans are therefore made in the first call."""
    rows = [x[:, :997].detach().requires_grad_() for x in tensors("cpu", dtype)]
    out, lse = dilated_attention(*rows, [64, 997], [1, 5], return_lse=True)
    check(*rows, out, lse)
    return lse


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_inside_a_fake_mode(dtype: torch.dtype) -> None:
    with FakeTensorMode():
        attend(dtype)
    # The plans that were made under the mode hold real tensors.
    assert attend(dtype).isfinite().any()


def test_a_million_tokens_take_seconds_and_show_their_kernel_calls() -> None:
    length = 1_048_576
    start = time.monotonic()
    with CountOperators() as launched:
        query, key, value = torch.empty(3, 1, length, 8, 64, device="meta", dtype=torch.bfloat16, requires_grad=True)
        out = dilated_attention(query, key, value, [2048, 32_768, length], [1, 16, 512], is_causal=True)
        out.backward(torch.empty_like(out))
    assert time.monotonic() - start < 10
    forward = launched.counts["aten._scaled_dot_product_flash_attention.default"]
    backward = launched.counts["aten._scaled_dot_product_flash_attention_backward.default"]
    # Three branches. On an accelerator, tiles are cut much less than on the CPU.
    assert 3 <= forward <= backward <= 40
