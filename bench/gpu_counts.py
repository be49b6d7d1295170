"""Counts what a call would launch and move on a GPU, from a run on tensors of device "meta".

Rules:
- An operator is one launch, apart from :data:`LAUNCHES`. Views, allocations and tensors without elements are none.
- Attention operators move no bytes here: the model gives them a time by their FLOPs. What flash's backward copies and
  outside of its kernels counts (:func:`_around_flash_backward`). Its sums over grouped heads do not: the bare operator
  makes them too.
- Every other operator reads its inputs and writes its outputs once. Expanded dims are read once.
- A hop is one launch, and moves no bytes on the device.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ring_backends.kernels import rows as dilated
from ring_backends.kernels import triton_dilated, triton_launch
from ring_backends.kernels.rows import ADD, Rows, gathered_shape
from ring_backends.schedule.rows import DilatedRows

ATTENTION = {
    "_scaled_dot_product_flash_attention": 1,
    "_scaled_dot_product_flash_attention_backward": 3,  # rowsum(dO ∘ O); dQ, dK and dV; dQ from fp32
    "_scaled_dot_product_cudnn_attention": 2,  # a fill of a counter, and the kernel
    "_scaled_dot_product_cudnn_attention_backward": 6,  # the same 4, and with grouped heads 2 sums
}
"""Attention operators, with the most kernels that each launches. Those of cuDNN are from a profile on an H100."""

LAUNCHES = {"masked_fill": 2}  # a clone, and a fill in place
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}
_WRITE_ONLY = {"copy_", "fill_", "zero_"}
_SHAPE_ONLY = {"full_like", "new_full", "new_zeros", "zeros_like"}  # they read no values of their tensor
_READ_BY_INDEX = {"index_select"}


class LaunchCounter(TorchDispatchMode):
    """Counts launches, and the bytes that operators other than attention move.

    Attributes:
        launches: by operator.
        bytes: by operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def count(self, name: str, num_bytes: int, launches: int = 1) -> None:
        self.launches[name] += launches
        self.bytes[name] += num_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if func.is_view or name in _ALLOCATIONS or not any(x.numel() for x in _tensors(result, "meta")):
            return result
        if name in ATTENTION:
            self.count(name, 0, ATTENTION[name])
            if name == "_scaled_dot_product_flash_attention_backward":
                for what, num_bytes in _around_flash_backward(*(x.transpose(1, 2) for x in (args[0], args[4]))):
                    self.count(what, num_bytes)
        else:
            self.count(name, _bytes_moved(func, args, kwargs, result), LAUNCHES.get(name, 1))
        return result


def _tensors(values: Any, device_type: str | None = None) -> list[Tensor]:
    found = (x for x in tree_leaves(values) if isinstance(x, Tensor))
    return [x for x in found if device_type in (None, x.device.type)]


def _size(tensor: Tensor) -> int:
    """Bytes of a tensor, without the copies that its expanded dims stand for."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size)
    return math.prod(sizes) * tensor.itemsize


def _bytes_moved(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    name, arguments = func.overloadpacket.__name__, func._schema.arguments
    given = {argument.name: kwargs.get(argument.name) for argument in arguments}
    given |= {argument.name: value for argument, value in zip(arguments, args, strict=False)}
    changed = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    is_read = {a.name for a in arguments if a.name not in changed or not (name in _WRITE_ONLY or a.is_out)}
    if name in _SHAPE_ONLY:
        is_read.clear()
    written = sum(map(_size, _tensors([given[n] for n in changed] if changed else result)))
    read = sum(map(_size, _tensors([given[n] for n in is_read])))
    return written + (min(read, written) if name in _READ_BY_INDEX else read)


def _around_flash_backward(grad_out: Tensor, out: Tensor) -> Iterator[tuple[str, int]]:
    """What aten's flash backward copies, as read in torch's attention_backward.cu and flash_api.cpp.

    It makes grad_out and out [B, S, H, D] contiguous.
    """
    for name, x in (("contiguous grad_out", grad_out), ("contiguous out", out)):
        if not x.is_contiguous():
            yield f"{name} in flash's backward", 2 * _size(x)


@contextlib.contextmanager
def row_launches(counter: LaunchCounter) -> Iterator[None]:
    """Count the launches of the Triton kernels that gather, scatter, add, fill and merge rows."""

    def move_rows(moves: Sequence[tuple[Rows, int]], *, same_rows: bool = False) -> None:
        moved = 0
        for (tensor, rows, values), move in moves:
            read = _size_of_rows(values, rows) if same_rows else _size(values)
            moved += read + _size_of_rows(tensor, rows) * (2 if move == ADD else 1)
        counter.count("move rows", moved, -(-len(moves) // dilated.MAX_TENSORS))

    def merge_rows(
        out: Tensor, lse: Tensor, rows: DilatedRows, tile_out: Tensor, tile_lse: Tensor, same_rows: bool
    ) -> None:
        both = (_size_of_rows(x, rows) if same_rows else _size(x) for x in (tile_out, tile_lse))
        counter.count("merge rows", sum(both) + 2 * (_size_of_rows(out, rows) + _size_of_rows(lse, rows)))

    with (
        mock.patch.object(dilated, "can_launch", lambda *tensors: all(x.is_meta for x in tensors)),
        mock.patch.object(dilated, "_launch_moves", move_rows),
        mock.patch.object(dilated, "_launch_merge", merge_rows),
    ):
        yield


def _size_of_rows(tensor: Tensor, rows: DilatedRows) -> int:
    return math.prod(gathered_shape(tensor, rows)) * tensor.itemsize


@contextlib.contextmanager
def triton_launches(counter: LaunchCounter) -> Iterator[None]:
    """Let ``triton_dilated`` prepare its launches on meta tensors, and count them instead of running them."""
    names = [name for name in triton_launch.Kernels._fields if name != "is_interpreted"]
    kernels = triton_launch.Kernels(**{name: _CountedKernel(name, counter) for name in names}, is_interpreted=False)
    with (
        mock.patch.object(triton_launch, "kernels", return_value=kernels),
        mock.patch.object(triton_launch, "capability", return_value=(9, 0)),
        mock.patch.object(triton_dilated, "has_values", return_value=True),
    ):
        yield


class _CountedKernel:
    """Stands for one kernel of ``triton_dilated``, whose time is that of its FLOPs."""

    def __init__(self, name: str, counter: LaunchCounter) -> None:
        self.name, self.counter = name, counter

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.counter.count(self.name, 0)

        return launch
