"""The modelled table: what a call would cost on a GPU, from a run on tensors of device "meta".

The time of a call's attention kernels is their FLOPs, divided by a rate. All other launches take the bytes that they
move, divided by a bandwidth. The host takes the same time for every launch. Rules for counting:

- An operator is one launch, apart from :data:`LAUNCHES`. Views, allocations and tensors without elements are none.
- Attention operators move no bytes here. What flash's backward copies outside of its kernels counts. Its sums over
  grouped heads do not: the bare operator makes them too.
- Every other operator reads its inputs and writes its outputs once. Expanded dims are read once.
- A hop is one launch, and moves no bytes on the device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from case import Case
from replay import OF_RINGS, ON_ONE_GPU, flops, replay
from report import Json, Row, report, table
from rich.console import Console
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ring_backends.engine import call as engine_call
from ring_backends.kernels import Kernel, KernelInputs, kernels, triton_dilated, triton_launch
from ring_backends.kernels import rows as dilated
from ring_backends.kernels.choice import MAX_ROWS_IN_PLACE, MAX_ROWS_OF_WINDOW
from ring_backends.kernels.rows import ADD, gathered_shape

CASES = {**ON_ONE_GPU, **OF_RINGS}
RATES = {"forward": 600e12, "backward": 450e12}
"""FLOP/s of the attention kernels."""
BYTES_PER_SECOND = 4e12
LAUNCH_SECONDS = 80e-6
"""Measured on the machine of an H100: the host of a replayed rank of 8 took 3.5 ms for 45 launches, and 8.1 for 100."""
KERNELS = {"flash": "aten_cuda_flash", "auto": "auto", "triton_dilated": "triton_dilated"}

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


def model(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table of docs/performance.md.")] = False,
    json: Json = None,
) -> None:
    """Print the modelled launches, bytes and times of the calls of `one-device` and `ring`, on any machine.

    The kernels are `aten_cuda_flash`, with Triton's gathers and merges of rows; those that `auto` takes on a Hopper
    GPU: cuDNN, and `triton_dilated` for dilated rows; and `triton_dilated` for all rows. All are at the same rates.
    """
    constants = {"rates": RATES, "bytes_per_second": BYTES_PER_SECOND, "launch_seconds": LAUNCH_SECONDS}
    rows = [row for name, case in CASES.items() for kernel in KERNELS for row in modelled(name, case, kernel)]
    if not markdown:
        report("modelled", constants, rows, json)
        return
    columns = {"launches": ",", "kernels_ms": ".1f", "other_ms": ".1f", "kernels_share": ".0%", "host_ms": ".1f"}
    titles = ("launches", "kernels, ms", "other, ms", "kernels' share", "host, ms")
    lines: list[Row] = []
    for both in zip(rows[::2], rows[1::2], strict=True):
        cells = (" / ".join(format(row[name], form) for row in both) for name, form in columns.items())
        lines.append({name: both[0][name] for name in ("call", "kernel")} | dict(zip(titles, cells, strict=True)))
    Console(width=160, highlight=False).print(table(lines, markup=True))


def modelled(name: str, case: Case, kernel: str) -> Iterator[Row]:
    """Model the forward and the backward of the rank with most work."""
    counter = LaunchCounter()
    with on_a_hopper_gpu(), row_launches(counter), triton_launches(counter):
        call = replay(case, torch.device("meta"), KERNELS[kernel])
        call.backward(call.forward())  # fills the caches of plans and tables
        out = None
        for direction in RATES:
            counter.reset()
            call.ring.traffic.reset()
            call.attention.num_hops = 0
            with counter:
                out = call.forward() if out is None else call.backward(out)
            if case.ring_size > 1:
                counter.count("hop", launches=call.attention.num_hops)
            launches, other_bytes = sum(counter.launches.values()), sum(counter.bytes.values())
            kernels_ms = flops(case, backward=direction == "backward") / RATES[direction] * 1e3
            other_ms, host_ms = other_bytes / BYTES_PER_SECOND * 1e3, launches * LAUNCH_SECONDS * 1e3
            yield {
                "call": name,
                "kernel": kernel,
                "pass": direction,
                "launches": launches,
                "kernels_ms": kernels_ms,
                "other_GB": other_bytes / 1e9,
                "other_ms": other_ms,
                "kernels_share": kernels_ms / (kernels_ms + other_ms),
                "host_ms": host_ms,
                "sent_bytes": call.ring.traffic.bytes,
                "launches_by_operator": dict(counter.launches),
                "bytes_by_operator": dict(counter.bytes),
            }


class LaunchCounter(TorchDispatchMode):
    """Counts launches, and the bytes that operators other than attention move, by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        self.launches: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def count(self, name: str, num_bytes: int = 0, launches: int = 1) -> None:
        self.launches[name] += launches
        self.bytes[name] += num_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if func.is_view or name in _ALLOCATIONS or not any(x.numel() for x in _tensors(result) if x.is_meta):
            return result
        if name not in ATTENTION:
            self.count(name, _bytes_moved(func, args, kwargs, result), LAUNCHES.get(name, 1))
            return result
        self.count(name, 0, ATTENTION[name])
        if name == "_scaled_dot_product_flash_attention_backward":
            # aten makes grad_out and out [B, S, H, D] contiguous (torch's attention_backward.cu and flash_api.cpp).
            for x in (args[0], args[4]):
                if not x.transpose(1, 2).is_contiguous():
                    self.count("contiguous in flash's backward", 2 * _size(x))
        return result


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


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
    return written + (min(read, written) if name == "index_select" else read)


@contextlib.contextmanager
def row_launches(counter: LaunchCounter) -> Iterator[None]:
    """Count the launches of the Triton kernels that gather, scatter, add, fill and merge rows."""

    def size(tensor: Tensor, rows: Any) -> int:
        return math.prod(gathered_shape(tensor, rows)) * tensor.itemsize

    def move_rows(moves: Sequence[Any], *, same_rows: bool = False) -> None:
        moved = 0
        for (tensor, rows, values), move in moves:
            moved += size(values, rows) if same_rows else _size(values)
            moved += size(tensor, rows) * (2 if move == ADD else 1)
        counter.count("move rows", moved, -(-len(moves) // dilated.MAX_TENSORS))

    def merge_rows(out: Tensor, lse: Tensor, rows: Any, tile_out: Tensor, tile_lse: Tensor, same_rows: bool) -> None:
        read = sum(size(x, rows) if same_rows else _size(x) for x in (tile_out, tile_lse))
        counter.count("merge rows", read + 2 * (size(out, rows) + size(lse, rows)))

    def can_launch(*tensors: Tensor) -> bool:
        return all(x.is_meta for x in tensors)

    replaced: dict[str, Any] = {"can_launch": can_launch, "_launch_moves": move_rows, "_launch_merge": merge_rows}
    with mock.patch.multiple(dilated, **replaced):
        yield


@contextlib.contextmanager
def triton_launches(counter: LaunchCounter) -> Iterator[None]:
    """Let ``triton_dilated`` prepare its launches on meta tensors, and count them instead of running them."""

    class Counted:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **kwargs: counter.count(self.name)

    counted = triton_launch.Kernels(*map(Counted, triton_launch.Kernels._fields[:-1]), is_interpreted=False)
    replaced: dict[str, Any] = {"kernels": lambda: counted, "capability": lambda device: (9, 0)}
    with (
        mock.patch.multiple(triton_launch, **replaced),
        mock.patch.object(triton_dilated, "has_values", return_value=True),
    ):
        yield


@contextlib.contextmanager
def on_a_hopper_gpu() -> Iterator[None]:
    """Let ``"auto"`` take for meta tensors what it takes on a Hopper GPU without measurements."""
    kernels_of_call, select = engine_call.kernels_of_call, engine_call.select_kernel
    named = {kernel.name: kernel for kernel in kernels()}

    def select_kernel(name: str, needs: KernelInputs) -> Kernel:
        if name != "auto":
            return select(name, needs)
        rows = needs.rows or 0
        in_place = needs.is_dilated and rows <= MAX_ROWS_IN_PLACE
        if in_place or (needs.has_window and rows <= MAX_ROWS_OF_WINDOW):
            return named["triton_dilated"]
        return named["aten_cuda_cudnn"]

    def of_gpu(name: str, needs: KernelInputs, *options: Any) -> Any:
        device = torch.device("cuda") if name == "auto" else needs.device
        return kernels_of_call(name, dataclasses.replace(needs, device=device), *options)

    with (
        mock.patch.multiple(engine_call, select_kernel=select_kernel, kernels_of_call=of_gpu),
        mock.patch.object(engine_call, "has_values", return_value=True),  # a ring refuses tensors without
    ):
        engine_call.forget_calls()
        yield
    engine_call.forget_calls()
