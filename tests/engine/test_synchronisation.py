"""A call on a GPU never makes the host wait.

Tensors on device "meta" stand for those on a GPU. They have no values to read, and a mode refuses
copies.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from kernel_cases import each_gpu_kernel, skip_if_refused
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ring_backends import DilatedPattern
from ring_backends.engine.binding import Binding
from ring_backends.engine.cache import KeyValueCache
from ring_backends.engine.call import AttentionCall, AttentionInputs, check_call
from ring_backends.engine.decoding import check_step
from ring_backends.engine.run import backward, forward
from ring_backends.engine.wire import Hops
from ring_backends.kernels import KernelInputs
from ring_backends.kernels.constants import constant
from ring_backends.ring.members import Traffic
from ring_backends.ring.ring import Ring
from ring_backends.ring.wire_memory import CallMemory
from ring_backends.testing.marks import matrix_but


class RefuseCopies(TorchDispatchMode):
    """Refuses operators that copy between the host and device "meta". A meta tensor itself refuses to be read."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        assert func is not torch.ops.aten.index.Tensor, "torch copies an index that is a list, unseen by this mode"
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
        # An operator takes a number on the host as an argument of its launch.
        devices = {x.device.type for x in tensors if x.dim() or x.is_meta}
        assert len(devices) <= 1, f"{func} copies between {devices}"
        return result


class RefuseCopiedNumbers(TorchFunctionMode):
    """Refuses tensors of Python's numbers on device "meta": torch makes them on the host, unseen by the mode above."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        assert func not in (torch.tensor, torch.as_tensor) or isinstance(args[0], Tensor) or not result.is_meta, (
            f"{func.__name__} copies {args[0]}"
        )
        return result


def no_hops(device: str = "meta") -> Hops:
    """Hops that post nothing, with buffers on ``device``."""
    transfer = mock.Mock(**{"wait.return_value": None})
    memory, ring_ranks = CallMemory(torch.device(device)), range(64)
    return Hops(
        0, lambda outgoing, incoming, tag: transfer, mock.MagicMock(), mock.MagicMock(), Traffic(), memory, ring_ranks
    )


def inputs_on_gpu(ring_size: int, dtype: torch.dtype) -> AttentionInputs:
    length = 300 // ring_size
    query = torch.empty(2, length, 6, 16, device="meta", dtype=dtype)
    key, value = (torch.empty(2, length, 3, 16, device="meta", dtype=dtype) for _ in range(2))
    return AttentionInputs(query, key, value, is_causal=True, seq_len=300)


def run(call: AttentionCall, inputs: AttentionInputs, hops: Hops | None) -> tuple[Tensor, ...]:
    out, lse = forward(call, inputs, hops)
    return backward(call, inputs, out, lse, torch.empty_like(out), hops)


def score_mod(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.tanh(score) - head * (q_idx - kv_idx)


NEEDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "key mask": {"has_key_mask": True},
    "documents": {"has_documents": True},
    "dropout": {"has_dropout": True},
    "zero keys": {},
    "score_mod": {"score_mod": score_mod},
}


@pytest.mark.parametrize("ring_size", matrix_but(4, of=(1, 4)))
@pytest.mark.parametrize("option", matrix_but("plain", of=NEEDS))
@each_gpu_kernel
def test_no_call_makes_the_host_wait(kernel: Any, option: str, ring_size: int) -> None:
    dtype = torch.float32 if torch.float16 not in kernel.dtypes else torch.float16
    skip_if_refused(kernel, KernelInputs(torch.device("meta"), dtype, 16, **NEEDS[option]))
    pattern = DilatedPattern([64, 300], [1, 3], padding="zeros" if option == "zero keys" else "masked")
    ring = Ring(size=ring_size, ranks=tuple(range(ring_size)), layout_kind="zigzag")
    with RefuseCopies(), RefuseCopiedNumbers():
        inputs = inputs_on_gpu(ring_size, dtype)
        marks = inputs.query.shape[:2]
        options: dict[str, dict[str, Any]] = {
            "key mask": {"key_padding_mask": torch.empty(marks, dtype=torch.bool, device="meta")},
            "documents": {"document_ids": torch.empty(marks, dtype=torch.int64, device="meta")},
            "dropout": {"dropout_p": 0.1, "dropout_seed": torch.zeros(1, dtype=torch.int64, device="cpu")},
            "score_mod": {"score_mod": score_mod},
            "zero keys": {"is_causal": False},
        }
        inputs = replace(inputs, **options.get(option, {}))
        with mock.patch("ring_backends.engine.call.select_kernel", return_value=kernel):
            inputs, call = check_call(inputs, pattern, ring, None, kernel.name)
        grads = run(call, inputs, None if ring_size == 1 else no_hops())
    assert [x.shape for x in grads] == [x.shape for x in (inputs.query, inputs.key, inputs.value)]


@pytest.mark.parametrize("has_mask", matrix_but(True, of=(False, True)))
@each_gpu_kernel
def test_no_step_of_decoding_makes_the_host_wait(kernel: Any, has_mask: bool) -> None:
    dtype = torch.float32 if torch.float16 not in kernel.dtypes else torch.float16
    skip_if_refused(kernel, KernelInputs(torch.device("meta"), dtype, 16, has_key_mask=has_mask, needs_grad=False))
    # With rate 2, heads 0, 2, 4, ... of the first offset have the key/value heads 0, 0, 1, 2, 2, 3.
    pattern = DilatedPattern([64, 300], [1, 2], window_lengths=[None, 2])
    binding = Binding(pattern, Ring(), None, kernel.name)
    cache = KeyValueCache(binding.ring, pattern)
    with RefuseCopies(), RefuseCopiedNumbers():
        query = torch.empty(2, 1, 12, 16, device="meta", dtype=dtype)
        key, value = (torch.empty(2, 1, 4, 16, device="meta", dtype=dtype) for _ in range(2))
        ignored = torch.empty(2, 1, device="meta", dtype=torch.bool) if has_mask else None
        for _ in range(4):
            step = check_step(binding, cache, AttentionInputs(query, key, value, ignored))
            out, lse = step.local_result()
            cache.append(key, value, ignored)
    assert out.shape == (2, 12, 1, 16)
    assert lse.shape == (2, 12, 1)


def test_constants_are_copied_once() -> None:
    like = torch.empty(1)
    assert constant((3, 1, 2), like).tolist() == [3, 1, 2]
    assert constant((3, 1, 2), like) is constant((3, 1, 2), like)
