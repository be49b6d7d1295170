"""Earlier names: results and gradients of calls with whole tensors equal the reference."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from native_ranks import assert_near
from torch import Tensor

from ring_backends import compat
from ring_backends.testing.reference import reference_attention
from ring_backends.testing.world import World, on_every_rank

PATTERN = (5, 13, 40), (1, 2, 3)
N, HEADS, HEAD_DIM = 37, 7, 8
CLASSES = ("RingDilatedAttentionV2", "RingDilatedAttentionV2Collective", "RingDilatedAttentionV2Flash",
           "RingDilatedAttentionV2Robust")  # fmt: skip


@pytest.fixture(autouse=True)
def warns_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_warned", set())


def tensors() -> list[Tensor]:
    torch.manual_seed(0)
    return list(torch.randn(4, 2, N, HEADS, HEAD_DIM, dtype=torch.float64))


def with_gradients(attend: Any) -> list[Tensor]:
    """out, dq, dk and dv."""
    *rows, grad_out = tensors()
    out = attend(*(x.requires_grad_() for x in rows))
    return [out.detach(), *torch.autograd.grad(out, rows, grad_out)]


def expected(is_causal: bool) -> list[Tensor]:
    """out and gradients of the earlier base class, computed with the dense reference."""
    options: Any = {"is_causal": is_causal, "head_mode": "grouped", "offset": "branch"}
    return with_gradients(lambda *rows: reference_attention(*rows, *PATTERN, **options)[0] / len(PATTERN[0]))


def made(name: str, *args: Any, **options: Any) -> Any:
    """What an earlier name makes, without its warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return getattr(compat, name)(*args, **options)


def called(name: str, is_causal: bool, **options: Any) -> list[Tensor]:
    attention = made(name, *PATTERN, **options)
    return with_gradients(lambda *rows: attention(*rows, is_causal))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "name", [*CLASSES, "create_ring_dilated_attention_v2_collective", "create_production_ring_attention"]
)
def test_one_process_equals_the_reference(name: str, is_causal: bool) -> None:
    assert_near(called(name, is_causal), expected(is_causal))


@pytest.mark.parametrize("is_causal", [False, True])
def test_whole_tensors_on_every_rank(pair: World, is_causal: bool) -> None:
    for got in pair.run(called, "RingDilatedAttentionV2Robust", is_causal, min_seq_length_for_ring=8192):
        assert_near(got, expected(is_causal))


@on_every_rank
def test_modules_share_a_ring() -> None:
    first, second = (made("RingDilatedAttentionV2", *PATTERN).ring.agreement for _ in range(2))
    assert first is second is not None, (first, second)


@on_every_rank
def test_a_failed_ring_is_replaced() -> None:
    called("RingDilatedAttentionV2", False)
    ring = next(reversed(compat._rings.values()))
    ring.agreement.connections.failure = "a rank was lost"
    assert_near(called("RingDilatedAttentionV2", False), expected(False))
    assert next(reversed(compat._rings.values())) is not ring, compat._rings


def test_each_name_warns_once_with_the_new_spelling() -> None:
    message = r"native\.RingDilatedAttention\(.*Arguments without effect: dtype, enable_memory_pool"
    with pytest.warns(FutureWarning, match=message):
        compat.RingDilatedAttentionV2([4], [1], enable_memory_pool=True, dtype=torch.float16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compat.RingDilatedAttentionV2([4], [1])
    with pytest.warns(FutureWarning, match="RingDilatedAttentionV2Flash"):
        compat.RingDilatedAttentionV2Flash([4], [1], flash_chunk_size=2048)


def test_a_configuration_object_is_accepted() -> None:
    lengths, rates = PATTERN
    config = SimpleNamespace(segment_lengths=lengths, dilation_rates=rates, dropout=0.0, enable_profiling=True)
    attention = made("RingDilatedAttentionProduction", config)
    assert_near(attention(*tensors()[:3]), expected(False)[0])


def test_dropout() -> None:
    attention, rows = made("RingDilatedAttentionV2", *PATTERN, dropout=0.5), tensors()[:3]
    assert not torch.allclose(attention(*rows), expected(False)[0])
    assert_near(attention.eval()(*rows), expected(False)[0])


def test_unsupported_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="RingDilatedAttentionV2 has no argument enable_magic"):
        made("RingDilatedAttentionV2", [4], [1], enable_magic=True)
    with pytest.raises(ValueError, match=r"dropout_p = 1\.5"):
        made("RingDilatedAttentionV2", [4], [1], dropout=1.5)
    with pytest.raises(ValueError, match="has no dilation_rates"):
        made("RingDilatedAttentionProduction", {"segment_lengths": [4]})
    with pytest.raises(TypeError, match="attention_type = 3"):
        made("create_dilated_attention", 3)


@on_every_rank
def test_types() -> None:
    for kind, size in (("auto", 4), ("ring", 4), ("block_sparse_ring", 4), ("standard", 1), ("improved", 1)):
        found = made("create_dilated_attention", kind, [4], [1]).ring.size
        assert found == size, (kind, found)


def layer(kind: str) -> tuple[list[Tensor], int]:
    """out, the gradients of the hidden states and of all parameters, and the size of the ring."""
    torch.manual_seed(0)
    module = made("create_multihead_dilated_attention", kind, 56, HEADS, *PATTERN).double()
    hidden = torch.randn(2, N, 56, dtype=torch.float64, requires_grad=True)
    out = module(hidden, hidden, hidden, is_causal=True)
    grads = torch.autograd.grad(out, [hidden, *module.parameters()], torch.randn(out.shape, dtype=out.dtype))
    return [out.detach(), *grads], module.ring.size


@on_every_rank
def test_the_sum_does_not_modify_the_incoming_gradient() -> None:
    ring = made("create_dilated_attention", "ring", [4], [1]).ring
    parameter = torch.zeros(3, requires_grad=True)
    shared, incoming = compat._shared(ring, parameter), torch.ones(3)
    (total,) = torch.autograd.grad(shared, parameter, incoming)
    assert incoming.tolist() == [1, 1, 1], incoming
    assert total.tolist() == [4, 4, 4], total


def test_layers(pair: World) -> None:
    wanted, _ = layer("standard")
    for got, size in pair.run(layer, "ring"):
        assert size == 2
        assert_near(got, wanted)
    module = made("create_multihead_dilated_attention", "standard", 8, 2, [4], [1])
    with pytest.raises(ValueError, match="key is another tensor than query"):
        module(torch.zeros(1, 4, 8), torch.zeros(1, 4, 8))
