"""Attention dropout: the mask equals its reference, passes tests of randomness, and changes with each call."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ring_backends import dilated_attention
from ring_backends.activation_checkpointing import keep_attention
from ring_backends.adapters.native import RingDilatedAttention
from ring_backends.kernels.dropout import Dropout
from ring_backends.testing.marks import THOROUGH
from ring_backends.testing.reference import _splitmix as splitmix
from ring_backends.testing.reference import reference_dropout

P = 0.3
SIZE = 512


def mask(p: float = P, *, seed: int = 0, batch: int = 1, num_heads: int = 1, replica: int = 0) -> Tensor:
    """The dropout factors, [batch, heads, queries, keys]."""
    dropout, positions = Dropout(p, replica), torch.arange(SIZE)
    queries = dropout.query_words(seed, positions, batch, range(num_heads)).transpose(1, 2)
    return dropout.weights(queries, dropout.key_words(seed, positions), torch.float64)


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.97])
def test_the_mask_equals_the_reference(p: float, seed: int) -> None:
    positions = [0, 1, 17, 2**31, 2**40 + 3, *range(100, 200)]
    dropout, rows = Dropout(p, replica=3), torch.tensor(positions)
    queries = dropout.query_words(seed, rows, 2, range(3)).transpose(1, 2)
    factors = dropout.weights(queries, dropout.key_words(seed, rows), torch.float64)
    wanted = reference_dropout(p, seed, 3, 2, 3, positions)
    assert torch.equal(factors > 0, wanted > 0)
    torch.testing.assert_close(factors, wanted, rtol=1e-15, atol=0)


def test_the_reference_in_plain_integers() -> None:
    """Hash the pair of query 1 and key 2 with Python integers."""
    seed, replica, row, head, query, key = 5, 2, 1, 3, 1, 2
    word = splitmix(seed + replica * 0x9E3779B97F4A7C15)
    for number in (row, head, query):
        word = splitmix(word + number)
    pair = word % 2**32 ^ splitmix(splitmix(~seed) + key) % 2**32
    pair = (pair ^ (pair >> 16)) * 0x7FEB352D % 2**32
    pair = ((pair ^ (pair >> 15)) + (word >> 32)) * 0x846CA68B % 2**32
    share = (pair >> 1) / 2**31  # the weight is kept if share < 1 − p: test both sides of the bound
    for p, factor in ((1 - share - 1e-6, 1 / (share + 1e-6)), (1 - share + 1e-6, 0.0)):
        factors = reference_dropout(p, seed, replica, 2, 4, range(3))
        assert float(factors[row, head, query, key]) == pytest.approx(factor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mean_weight_is_one(dtype: torch.dtype) -> None:
    dropout, rows = Dropout(1e-12, 0), torch.arange(64)
    words = dropout.query_words(1, rows, 1, range(1)).transpose(1, 2), dropout.key_words(1, rows)
    assert (dropout.weights(*words, dtype) == 1 / (1 - torch.tensor(1e-12, dtype=dtype))).all()
    for p in (0.1, P, 0.9):
        factors = mask(p, num_heads=4)
        deviation = (p / (1 - p) / factors.numel()) ** 0.5
        assert abs(float(factors.mean()) - 1) < 5 * deviation


def test_masks_of_other_rows_heads_seeds_and_replicas_are_independent() -> None:
    """Correlations between neighbours and around rectangles are below five standard deviations."""
    centred = (mask(batch=2, num_heads=3) > 0).double() - (1 - P)
    centred /= centred.square().mean().sqrt()
    others = {
        "queries": centred[:, :, 1:] * centred[:, :, :-1],
        "keys": centred[..., 1:] * centred[..., :-1],
        "query and key swapped": centred.triu(1) * centred.transpose(2, 3).triu(1),
        "diagonal": centred[:, :, 1:, 1:] * centred[:, :, :-1, :-1],
        "heads": centred[:, 1:] * centred[:, :-1],
        "rows of the batch": centred[1:] * centred[:-1],
        "rectangles": centred[:, :, 1:, 1:] * centred[:, :, :-1, :-1] * centred[:, :, 1:, :-1] * centred[:, :, :-1, 1:],
    }
    for name, changes in {"seed": {"seed": 1}, "replica": {"replica": 1}}.items():
        others[name] = centred * ((mask(batch=2, num_heads=3, **changes) > 0).double() - (1 - P)) / (P * (1 - P)) ** 0.5
    for name, products in others.items():
        assert abs(float(products.mean())) < 5 * products.numel() ** -0.5, name


def tensors(**options: object) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 40, 2, 8, generator=generator, **options) for _ in range(3)]  # type: ignore[call-overload]


def test_a_module_drops_only_in_training_mode() -> None:
    attention = RingDilatedAttention([16, 40], [1, 2], dropout_p=P)
    query, key, value = tensors()
    without = dilated_attention(query, key, value, [16, 40], [1, 2])
    assert not torch.allclose(attention(query, key, value), without)
    assert torch.equal(attention.eval()(query, key, value), without)
    assert attention.eval()(query, key, value, return_lse=True)[1].isfinite().all()


def test_the_seed_is_drawn_from_the_cpu_generator() -> None:
    attend = partial(dilated_attention, *tensors(), [16], [1], dropout_p=P)
    torch.manual_seed(3)
    first, second = attend(), attend()
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(attend(), first)
    assert torch.equal(attend(dropout_seed=7), attend(dropout_seed=7))
    state = torch.get_rng_state()
    attend(dropout_seed=7)
    dilated_attention(*tensors(), [16], [1])
    assert torch.equal(torch.get_rng_state(), state)  # no seed is drawn if none is needed


KEPT = {"use_reentrant": False, "context_fn": keep_attention, "preserve_rng_state": False}


@pytest.mark.parametrize(
    "options", [{"use_reentrant": False}, {"use_reentrant": True}, KEPT], ids=["recomputed", "reentrant", "kept"]
)
def test_a_recomputed_call_has_the_same_mask(options: dict[str, Any]) -> None:
    """Kept attention needs no state of torch's generator, although this provides the seed."""
    attention = RingDilatedAttention([16, 40], [1, 2], dropout_p=P)
    grads = []
    for attend in (attention, partial(checkpoint, attention, **options)):
        leaves = [x.requires_grad_() for x in tensors()]
        torch.manual_seed(5)
        attend(*leaves).square().sum().backward()
        grads.append([x.grad for x in leaves])
    assert all(map(torch.equal, *grads))


# Two values: torch.compile makes a symbol of a float that changes between compilations.
@THOROUGH
@pytest.mark.parametrize("dropout_p", [P / 2, P])
def test_a_compiled_module_draws_new_masks_in_one_graph(dropout_p: float) -> None:
    attention = RingDilatedAttention([16, 40], [1, 2], dropout_p=dropout_p)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    assert isinstance(compiled, nn.Module)
    query, key, value = (x.requires_grad_() for x in tensors())
    first, second = compiled(query, key, value), compiled(query, key, value)
    assert not torch.equal(first, second)
    # Backward uses the mask of forward. With values of 1, a row of out is the sum of its weights.
    ones = torch.ones_like(value).requires_grad_()
    out = compiled(query, key, ones)
    (grad,) = torch.autograd.grad(out.sum(), ones)
    torch.testing.assert_close(grad.sum(), out.sum())
