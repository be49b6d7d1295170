"""The modelled table: what a call would cost on a GPU, from a run on tensors of device "meta".

The time of a call's attention kernels is their FLOPs, divided by a rate. All other launches take the bytes that they
move, divided by a bandwidth. The host takes the same time for every launch, and more for a hop. Rules for counting:

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
from types import SimpleNamespace
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from case import Case
from ranks import DIRECTIONS
from replay import OF_RINGS, ON_ONE_GPU, RING_SIZES, flops, replay
from report import Integers, Json, Row, integers, report, table
from rich.console import Console
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ring_backends.comparison.rank import record_spans
from ring_backends.cost.hardware import DEFAULT_POST_SECONDS
from ring_backends.engine import call as engine_call
from ring_backends.engine import wire_buffers
from ring_backends.kernels import Kernel, KernelInputs, kernels, launch_records, triton_dilated, triton_launch
from ring_backends.kernels import rows as dilated
from ring_backends.kernels.choice import MAX_ROWS_IN_PLACE, MAX_ROWS_OF_WINDOW
from ring_backends.kernels.launch_records import Runtime
from ring_backends.kernels.rows import ADD, TAKE, Sums, gathered_shape
from ring_backends.schedule.trees import MESSAGE_COST

CASES = ON_ONE_GPU | {
    f"{name}, one rank of {size}": case.but(ring_size=size) for name, case in OF_RINGS.items() for size in RING_SIZES
}
RATES = {"forward": 600e12, "backward": 450e12}
"""FLOP/s of the attention kernels."""
BYTES_PER_SECOND = 4e12
MEASURED_LAUNCH_SECONDS = 80e-6
"""Measured on the machine of an H100: the host of a replayed rank of 8 took 3.5 ms for 45 launches, and 8.1 for 100."""
LAUNCH_SECONDS = 15e-6
"""The aim for a launch whose arguments, except for pointers, are known beforehand."""
HOP_SECONDS = DEFAULT_POST_SECONDS
"""Estimated: how much longer than a launch the host takes to post a hop over NCCL and to wait for it."""
MESSAGE_SECONDS = MESSAGE_COST * HOP_SECONDS
"""For each further message of a hop, in the ratio that the planner assumes."""
KERNELS = {"flash": "aten_cuda_flash", "auto": "auto", "triton_dilated": "triton_dilated"}

ATTENTION = {
    "_scaled_dot_product_flash_attention": 1,
    "_scaled_dot_product_flash_attention_backward": 3,  # rowsum(dO ∘ O); dQ, dK and dV; dQ from fp32
    "_scaled_dot_product_cudnn_attention": 2,  # a fill of a counter, and the kernel
    "_scaled_dot_product_cudnn_attention_backward": 6,  # the same 4, and with grouped heads 2 sums
}
"""Attention operators, with the most kernels that each launches. Those of cuDNN are from a profile on an H100."""

LAUNCHES = {"masked_fill": 2}  # a clone, and a fill in place
NO_HOOKS = SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None)
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}
_WRITE_ONLY = {"copy_", "fill_", "zero_"}
_SHAPE_ONLY = {"full_like", "new_full", "new_zeros", "zeros_like"}  # they read no values of their tensor


def model(
    kernels: Annotated[str, typer.Option(help="Names of the kernels, as explained above.")] = ",".join(KERNELS),
    ring_sizes: Integers = "1,2,4,8,16,32,64",
    launch_seconds: Annotated[
        float, typer.Option(min=0, help="The host's time per launch. Measured before the last changes: 80e-6.")
    ] = LAUNCH_SECONDS,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a table of docs/performance.md.")] = False,
    json: Json = None,
) -> None:
    """Print the modelled launches, bytes and times of the calls of `one-device` and `ring`, on any machine.

    The kernels are `flash`: `aten_cuda_flash`, with Triton's gathers and merges of rows; `auto`, those that it takes on
    a Hopper GPU: cuDNN, and `triton_dilated` for dilated rows; and `triton_dilated` for all rows. All are at the same
    rates.

    `kernels_share` is `kernels_ms` / max(`kernels_ms` + `other_ms`, `host_ms`): the share of a call's time in which
    attention kernels run, if hops take no time.
    """
    constants = {
        "rates": RATES,
        "bytes_per_second": BYTES_PER_SECOND,
        "launch_seconds": launch_seconds,
        "hop_seconds": HOP_SECONDS,
        "message_seconds": MESSAGE_SECONDS,
    }
    sizes = integers(ring_sizes)
    rows = [
        row
        for name, case in CASES.items()
        if case.ring_size in sizes
        for kernel in kernels.split(",")
        for row in modelled(name, case, kernel, launch_seconds)
    ]
    if not markdown:
        report("modelled", constants, rows, json)
        return
    columns = {
        "tiles": ",",
        "launches": ",",
        "kernels_ms": ".1f",
        "other_ms": ".1f",
        "host_ms": ".1f",
        "kernels_share": ".0%",
    }
    titles = ("tiles", "launches", "kernels, ms", "other, ms", "host, ms", "kernels' share")
    lines: list[Row] = []
    for both in zip(rows[::2], rows[1::2], strict=True):
        cells = (" / ".join(format(row[name], form) for row in both) for name, form in columns.items())
        lines.append({name: both[0][name] for name in ("call", "kernel")} | dict(zip(titles, cells, strict=True)))
    Console(width=160, highlight=False).print(table(lines, markup=True))


def modelled(name: str, case: Case, kernel: str, launch_seconds: float = LAUNCH_SECONDS) -> Iterator[Row]:
    """Model the forward and the backward of the rank with most work."""
    counter, meta = LaunchCounter(), torch.device("meta")
    with on_a_hopper_gpu(), row_launches(counter), triton_launches(counter):
        call = replay(case, meta, KERNELS[kernel])
        spans = record_spans(call.forward, call.backward, meta)  # fills the caches of plans and tables, too
        out = None
        for direction in DIRECTIONS:
            counter.reset()
            call.ring.traffic.reset()
            call.attention.num_hops = call.attention.num_messages = 0
            with counter:
                out = call.forward() if out is None else call.backward(out)
            num_hops, num_messages = call.attention.num_hops, call.attention.num_messages
            if num_hops:
                counter.count("hop", launches=num_hops)
            launches, other_bytes = sum(counter.launches.values()), sum(counter.bytes.values())
            kernels_ms = flops(case, backward=direction == "backward") / RATES[direction] * 1e3
            other_ms = other_bytes / BYTES_PER_SECOND * 1e3
            hop_seconds = num_hops * HOP_SECONDS + (num_messages - num_hops) * MESSAGE_SECONDS
            host_ms = (launches * launch_seconds + hop_seconds) * 1e3
            yield {
                "call": name,
                "ring_size": case.ring_size,
                "kernel": kernel,
                "pass": direction,
                "tiles": sum(part == direction and what == "tile" for part, what, *_ in spans),
                "launches": launches,
                "hops": num_hops,
                "messages": num_messages,
                "kernels_ms": kernels_ms,
                "other_GB": other_bytes / 1e9,
                "other_ms": other_ms,
                "host_ms": host_ms,
                "kernels_share": kernels_ms / max(kernels_ms + other_ms, host_ms),
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
    """Count the launches of the Triton kernels that gather, scatter, add, fill and merge rows, or add up dK and dV."""

    def size(tensor: Tensor, rows: Any) -> int:
        return math.prod(gathered_shape(tensor, rows)) * tensor.itemsize

    def move_rows(moves: Sequence[Any], *, same_rows: bool = False) -> None:
        moved = 0
        for (tensor, rows, values), move in moves:
            moved += (size(values, rows) if same_rows else _size(values)) * (2 if move == TAKE else 1)
            moved += size(tensor, rows) * (2 if move in (ADD, TAKE) else 1)
        counter.count("move rows", moved, -(-len(moves) // dilated.MAX_TENSORS))

    def merge_rows(
        out: Tensor, lse: Tensor, rows: Any, tile_out: Tensor, tile_lse: Tensor, same_rows: bool, takes: bool
    ) -> None:
        read = sum(size(x, rows) if same_rows else _size(x) for x in (tile_out, tile_lse))
        read += size(tile_lse, rows) if takes else 0
        counter.count("merge rows", read + 2 * (size(out, rows) + size(lse, rows)))

    def add_parts(into: Tensor, summands: Tensor, sums: Sums) -> None:
        of_part = (part.length * (2 * into.itemsize + len(part.sources) * summands.itemsize) for part in sums.parts)
        counter.count("add parts", sum(of_part))

    def can_launch(*tensors: Tensor) -> bool:
        return all(x.is_meta for x in tensors)

    replaced: dict[str, Any] = {"can_launch": can_launch, "_launch_moves": move_rows, "_launch_merge": merge_rows}
    with mock.patch.multiple(dilated, **replaced), mock.patch.object(wire_buffers, "add_parts", add_parts):
        yield


@contextlib.contextmanager
def triton_launches(counter: LaunchCounter) -> Iterator[None]:
    """Let ``triton_dilated`` prepare its launches on meta tensors, and count them instead of running them."""

    class Counted:
        """Stands for a kernel, and for what Triton compiles of it."""

        function = packed_metadata = None

        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Counted]:
            return self.run

        def run(self, *args: Any, **kwargs: Any) -> Counted:
            counter.count(self.name)
            return self

    counted = triton_launch.Kernels(*map(Counted, triton_launch.Kernels._fields[:-1]), is_interpreted=False)
    replaced: dict[str, Any] = {"kernels": lambda: counted, "capability": lambda device: (9, 0)}
    with (
        mock.patch.multiple(triton_launch, **replaced),
        mock.patch.object(launch_records, "runtime", return_value=Runtime(lambda device: 0, NO_HOOKS)),
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
