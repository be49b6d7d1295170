"""The cross entropy in chunks equals torch's over all rows, with its gradients and a fraction of its memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_cases import CountOperators
from native_ranks import assert_near
from torch import Tensor, nn
from torch.nn import functional as F

from ring_backends.testing.marks import THOROUGH
from ring_backends.training import chunked_cross_entropy

BATCH, SEQ, FEATURES, WORDS = 2, 37, 8, 50


def make_inputs(dtype: torch.dtype) -> tuple[Tensor, nn.Linear, Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(WORDS, (BATCH, SEQ))
    labels[:, ::5] = -100
    rows = torch.randn(BATCH, SEQ, FEATURES, dtype=dtype, requires_grad=True)
    return rows, nn.Linear(FEATURES, WORDS).to(dtype), labels


@pytest.mark.parametrize("chunk_rows", [1, 7, 37, 1000])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"ignore_index": 3}], ids=str)
def test_chunks_equal_all_rows(chunk_rows: int, options: dict[str, Any]) -> None:
    rows, head, labels = make_inputs(torch.float64)
    if "ignore_index" in options:
        labels[labels == -100] = 3
    leaves = [rows, *head.parameters()]
    got = chunked_cross_entropy(rows, head, labels, chunk_rows=chunk_rows, **options)
    wanted = F.cross_entropy(head(rows).flatten(0, 1), labels.flatten(), reduction="sum", **options)
    assert_near(got, wanted)
    of_loss = torch.tensor(0.3, dtype=torch.float64)
    assert_near(*(torch.autograd.grad(loss, leaves, of_loss) for loss in (got, wanted)))


def test_logits_in_bf16_are_summed_in_fp32() -> None:
    rows, head, labels = make_inputs(torch.bfloat16)
    got = chunked_cross_entropy(rows, head, labels, chunk_rows=8)
    assert got.dtype == torch.float32
    wanted = F.cross_entropy(head(rows).float().flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=0)


class Doubled(nn.Linear):
    """A head whose weight is computed, as in a parametrization."""

    def forward(self, rows: Tensor) -> Tensor:
        return F.linear(rows, 2 * self.weight, self.bias)


@pytest.mark.parametrize("kind", ["linear", "doubled", "table"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_chunks_in_low_precision_are_added_in_fp32(kind: str, dtype: torch.dtype) -> None:
    """600 chunks of one row give as good gradients as one chunk: in bf16, 256 + 1 is 256."""
    torch.manual_seed(0)
    rows, labels = torch.randn(1, 600, 8, dtype=dtype, requires_grad=True), torch.randint(WORDS, (1, 600))
    table = nn.Embedding(WORDS, 8).to(dtype).weight
    layer = (Doubled if kind == "doubled" else nn.Linear)(8, WORDS).to(dtype)
    head = (lambda x: x @ table.T) if kind == "table" else layer
    leaves = [rows, table] if kind == "table" else [rows, *layer.parameters()]
    one, many = (
        torch.autograd.grad(chunked_cross_entropy(rows, head, labels, chunk_rows=size) / 100, leaves)
        for size in (600, 1)
    )
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    weight = 2 * wide[1] if kind == "doubled" else wide[1]
    logits = F.linear(wide[0], weight, *wide[2:])
    wanted = torch.autograd.grad(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / 100, wide)
    for got, best, grad in zip(many, one, wanted, strict=True):
        assert (got - grad).norm() <= 2 * max((best - grad).norm(), torch.finfo(dtype).eps / 2 * grad.norm())


def test_a_backward_can_be_repeated() -> None:
    """Also with gradients of the gradients."""
    rows, head, labels = make_inputs(torch.float64)
    leaves = [rows, *head.parameters()]
    found = []
    for loss in (
        chunked_cross_entropy(rows, head, labels, chunk_rows=7),
        F.cross_entropy(head(rows).flatten(0, 1), labels.flatten(), reduction="sum"),
    ):
        grads = [torch.autograd.grad(loss, leaves, retain_graph=True, create_graph=create) for create in (False, True)]
        squares = torch.stack([grad.square().sum() for grad in grads[1]]).sum()
        found.append([*grads[0], *grads[1], *torch.autograd.grad(squares, leaves)])
    assert_near(*found)


def test_backwards_through_a_part_of_the_heads_weight() -> None:
    """A graph outside of the loss has backwards of its own, before and after that of the loss."""
    rows, head, labels = make_inputs(torch.float64)
    part = head.weight.sin()
    weight = part + head.weight.cos()
    (wanted,) = torch.autograd.grad(part.square().sum(), [head.weight], retain_graph=True)
    got = chunked_cross_entropy(rows, lambda x: x @ weight.T, labels, chunk_rows=7)
    loss = F.cross_entropy((rows @ weight.T).flatten(0, 1), labels.flatten(), reduction="sum")
    for _ in range(2):
        assert_near(torch.autograd.grad(part.square().sum(), [head.weight], retain_graph=True), (wanted,))
        leaves = [rows, head.weight]
        assert_near(*(torch.autograd.grad(each, leaves, retain_graph=True) for each in (got, loss)))


def test_a_backward_after_one_that_failed() -> None:
    rows, head, labels = make_inputs(torch.float64)
    num_chunks = 0

    def fail_in_the_third_chunk(grad: Tensor) -> None:
        nonlocal num_chunks
        num_chunks += 1
        if num_chunks == 3:
            raise OSError("of this test")

    def with_hook(some_rows: Tensor) -> Tensor:
        logits: Tensor = head(some_rows)
        logits.register_hook(fail_in_the_third_chunk)
        return logits

    leaves = [rows, *head.parameters()]
    loss = chunked_cross_entropy(rows, with_hook, labels, chunk_rows=7)
    with pytest.raises(OSError, match="of this test"):
        torch.autograd.grad(loss, leaves, retain_graph=True)
    wanted = torch.autograd.grad(chunked_cross_entropy(rows, head, labels, chunk_rows=7), leaves)
    assert_near(torch.autograd.grad(loss, leaves), wanted)


@THOROUGH
def test_no_tensor_has_the_logits_of_all_rows() -> None:
    """131,072 rows and 128,000 words, without values."""
    rows = torch.empty(1, 131_072, 64, device="meta", requires_grad=True)
    head = nn.Linear(64, 128_000, bias=False, device="meta")
    labels = torch.empty(1, 131_072, dtype=torch.int64, device="meta")
    with CountOperators() as launched:
        chunked_cross_entropy(rows, head, labels, chunk_rows=512).backward()
    assert max(shape.numel() for _, shape in launched.results) == 512 * 128_000


def test_no_label_gives_a_loss_of_zero_with_a_gradient() -> None:
    rows, head, labels = make_inputs(torch.float64)
    loss = chunked_cross_entropy(rows, head, torch.full_like(labels, -100))
    loss.backward()
    assert loss.item() == 0
    assert rows.grad is not None
    assert not rows.grad.any()


def test_bad_arguments_are_refused_by_name() -> None:
    rows, head, labels = make_inputs(torch.float32)
    with pytest.raises(ValueError, match=r"labels is \[2, 36\] and rows is \[2, 37, 8\]: expected one label per row"):
        chunked_cross_entropy(rows, head, labels[:, 1:])
    with pytest.raises(ValueError, match="chunk_rows = 0: must be at least 1"):
        chunked_cross_entropy(rows, head, labels, chunk_rows=0)
    with pytest.raises(TypeError, match=r"chunk_rows = 2\.0: expected an int"):
        chunked_cross_entropy(rows, head, labels, chunk_rows=2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"labels is torch\.int32: expected int64"):
        chunked_cross_entropy(rows, head, labels.int())
