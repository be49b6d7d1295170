"""Kept attention on one device: no tile is computed twice, and operator counts do not change."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from native_ranks import assert_near
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ring_backends import dilated_attention
from ring_backends.activation_checkpointing import attention_operators, keep_attention, remember_attention
from ring_backends.adapters import native
from ring_backends.testing.recording import recorded

BRANCHES = ([16, 64], [1, 2])


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 64, 4, 8, generator=generator, dtype=dtype).requires_grad_() for _ in range(3)]


def region(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    first = dilated_attention(query, key, value, *BRANCHES, is_causal=True)
    return dilated_attention(first.sin(), key, value, *BRANCHES).cos()


def tiles(run: Any) -> tuple[list[Tensor], int]:
    """The gradients, and the number of computed tiles in forward and backward."""
    tensors = inputs()
    with recorded(native.RingDilatedAttention) as recording:
        grads = torch.autograd.grad(run(region, *tensors).square().sum(), tensors)
    return list(grads), sum(event.direction == "forward" for event in recording.events)


@pytest.mark.parametrize(
    "run",
    [
        partial(checkpoint, use_reentrant=False, context_fn=keep_attention),
        lambda function, *tensors: checkpoint(remember_attention(function), *tensors, use_reentrant=False),
    ],
    ids=["kept", "remembered"],
)
def test_no_tile_is_computed_twice(run: Any) -> None:
    wanted, once = tiles(lambda function, *tensors: function(*tensors))
    again, twice = tiles(partial(checkpoint, use_reentrant=False))
    got, kept = tiles(run)
    assert (once, twice, kept) == (once, 2 * once, once)
    for grads in (got, again):
        assert_near(grads, wanted, 0)


def test_the_kept_tensors_are_out_and_lse() -> None:
    """Tensors of tiles are not kept."""
    with keep_attention()[0] as forward:
        region(*inputs(torch.bfloat16))
    stored = forward.storage[attention_operators()[0]]  # private: a list until torch 2.12, later a dict
    wrapped = itertools.chain(*(stored.values() if isinstance(stored, dict) else stored))
    kept = [(tensor.val.dtype, tuple(tensor.val.shape)) for tensor in wrapped]
    of_call = [(torch.bfloat16, (1, 64, 4, 8)), (torch.float32, (1, 64, 4)), (torch.int64, (10,))]
    assert kept == 2 * of_call


def test_remembered_tensors_belong_to_one_call() -> None:
    remembering = remember_attention(region)
    remembering(*inputs())
    with pytest.raises(RuntimeError, match=r"called a second time.*checkpoint\(remember_attention\(block\), x\)"):
        remembering(*inputs())


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["key_padding_mask", "document_ids", "sinks", "key"])
def test_a_tensor_that_changes_before_the_backward_is_refused(name: str, use_reentrant: bool) -> None:
    """As without checkpointing. The kept result is that of the tensor before the change."""
    query, key, value = inputs()
    tensors: dict[str, Any] = {
        "key_padding_mask": torch.zeros(1, 64, dtype=torch.bool),
        "sinks": torch.zeros(4).double(),
    }
    if name != "key_padding_mask":
        tensors["document_ids"] = torch.zeros(1, 64, dtype=torch.int64)
    changed = tensors.get(name, key)
    for keeps in (False, True):

        def region(query: Tensor) -> Tensor:
            return dilated_attention_with(query, key, value, tensors).sin()

        if keeps and use_reentrant:
            out = checkpoint(remember_attention(region), query, use_reentrant=True)
        else:
            out = checkpoint(region, query, use_reentrant=False, context_fn=keep_attention) if keeps else region(query)
        with torch.no_grad():
            changed[..., :3] = 1
        message = f"{name} of an attention has been changed in place" if keeps else "modified by an inplace operation"
        with pytest.raises(RuntimeError, match=message):
            out.sum().backward()


def dilated_attention_with(query: Tensor, key: Tensor, value: Tensor, tensors: Any) -> Any:
    return native.RingDilatedAttention(*BRANCHES)(query, key, value, **tensors)
