"""Launches of Triton kernels that are worked out once, and then started for other tensors of the same kind.

Triton compiles a kernel for the dtypes, strides and alignment of its tensors, and for some numbers. It takes the host
longer to look up what was compiled than to start it. So a launch is kept as a :class:`Record`, with the plan that it
belongs to. A later call looks up the record by what its tensors are like, and fills in their pointers.

This module itself does not import Triton.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_backends.kernels.constants import keep_if_captured

LAUNCH_OPTIONS = {"enable_fp_fusion": True}
"""Triton's options for every launch. Triton 3.9 announces that later releases round between a multiplication and an
addition unless a launch says otherwise. That takes more instructions."""

KNOWN_RELEASES = ("3.6", "3.7", "3.8", "3.9")
"""The releases of Triton whose compiled kernels are started without Triton's Python. ``run`` of such a kernel takes the
grid, the stream, the loaded function, its metadata, three hooks, and the arguments. Pointers may be integers."""

MAX_RECORDS = 32
"""How many records are kept for one launch of a plan: for tensors of other kinds, and for other options."""


class Source(NamedTuple):
    """A tensor as an argument of a kernel, with four strides, so that all tensors of a dtype have the same type."""

    pointer: Tensor | None
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor | None) -> Source:
        """Strides are 0 for dims that the tensor lacks, and without a tensor."""
        if tensor is None:
            return cls(None, (0,) * 4)
        strides = (*tensor.stride(), *(0,) * (4 - tensor.dim()))
        return cls(tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor, strides)


Arrange = Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], tuple[Any, ...]]
"""(tables, sources, numbers) -> arguments: puts the arguments of a kernel in its order, without its constants.

The tables are those of the record. There is a source for each tensor of a call: the tensor and its strides. The numbers
are the floating-point numbers of the call. Tables and tensors may be given by their pointers.
"""


class Record:
    """A launch, worked out except for the tensors and the floating-point numbers that each call brings.

    Args:
        tables: the tensors that are the same in every call.
        constants: the last arguments of the kernel, in its order.
        options: Triton's options for this launch, besides :data:`LAUNCH_OPTIONS`.

    Attributes:
        made_for: what :func:`launch` compares to find the record again.
    """

    made_for: list[object]

    def __init__(
        self,
        kernel: Any,
        num_programs: int,
        tables: Sequence[Tensor],
        arrange: Arrange,
        constants: Mapping[str, Hashable],
        options: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._kernel, self._grid, self._arrange = kernel, (num_programs, 1, 1), arrange
        self._tables, self._table_pointers = tables, [x.data_ptr() for x in tables]
        self._constants, self._options = constants, options
        self._values, self._strides = tuple(constants.values()), list[tuple[int, ...]]()
        self._compiled: Any = None
        self._start: Callable[..., None] | None = None

    def run(
        self, tensors: Sequence[Tensor | None], pointers: Sequence[int | None], numbers: Sequence[Any], device: Any
    ) -> None:
        """Launch the kernel on the current device, whose index is ``device``, with tensors that have ``pointers``."""
        if self._start is not None:
            arguments = self._arrange(self._table_pointers, [*zip(pointers, self._strides, strict=True)], numbers)
            self._start(*arguments, *self._values)
            return
        sources = [Source.of(x) for x in tensors]
        arguments = self._arrange(self._tables, sources, numbers)
        if self._compiled is not None:
            self._compiled[self._grid](*arguments, *self._values)
            return
        self._compiled = self._kernel[self._grid](*arguments, **self._constants, **self._options, **LAUNCH_OPTIONS)
        if self._compiled is not None:  # the interpreter compiles nothing
            self._strides = [x.strides for x in sources]
            self._start = _starter(self._compiled, self._grid, device)


class Runtime(NamedTuple):
    """Triton's runtime, as far as it is needed to start a compiled kernel.

    Attributes:
        current_stream: returns the current stream of the device with an index.
        knobs: holds the hooks that Triton calls before and after each launch.
    """

    current_stream: Callable[[Any], int]
    knobs: Any

    @property
    def has_hooks(self) -> bool:
        """Whether a profiler, for example, has set a hook. A chain of hooks may be empty."""
        return _is_set(self.knobs.launch_enter_hook) or _is_set(self.knobs.launch_exit_hook)


def _is_set(hook: Any) -> bool:
    return hook is not None and bool(getattr(hook, "calls", True))


@cache
def runtime() -> Runtime | None:
    """Triton's runtime; None on ROCm, or if the installed release is not one of :data:`KNOWN_RELEASES`."""
    triton = importlib.import_module("triton")
    if torch.version.hip is not None or triton.__version__.rpartition(".")[0] not in KNOWN_RELEASES:
        return None
    driver = importlib.import_module("triton.runtime").driver.active
    return Runtime(driver.get_current_stream, triton.knobs.runtime)


def _starter(compiled: Any, grid: tuple[int, int, int], device: Any) -> Callable[..., None] | None:
    """Return what starts a compiled kernel with its arguments; None if only Triton can start it."""
    found = runtime()
    if found is None:
        return None
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata

    def start(*arguments: Any) -> None:
        if found.has_hooks:
            compiled[grid](*arguments)
        else:
            run(*grid, found.current_stream(device), function, metadata, None, None, None, *arguments)

    return start


def launch(
    records: list[Record],
    kernel: Any,
    key: object,
    tensors: Sequence[Tensor | None],
    work_out: Callable[[], Record],
    numbers: Sequence[Any] = (),
) -> None:
    """Launch a Triton kernel on the device of the first tensor.

    Args:
        records: the records of this launch.
        key: what the record depends on, apart from the kernel and the dtypes, strides, alignment and device of the
            tensors.
        tensors: in the order in which the record arranges them.
        work_out: makes the record if there is none for such tensors. The record must not hold the tensors.
        numbers: the floating-point numbers of this call. Triton does not compile a kernel for their values.
    """
    first = tensors[0]
    assert first is not None
    device = first.device
    pointers: list[int | None] = []
    made_for: list[object] = [key, kernel, device]
    for tensor in tensors:
        if tensor is None:
            pointers.append(None)
            made_for.append(None)
        else:
            pointer = tensor.data_ptr()
            pointers.append(pointer)
            made_for += tensor.dtype, tensor.stride(), pointer % 16 == 0
    for known in records:
        if known.made_for == made_for:
            record = known
            break
    else:
        if len(records) >= MAX_RECORDS:
            records.clear()
        record = work_out()
        record.made_for = made_for
        records.append(record)
    if not first.is_cuda:
        record.run(tensors, pointers, numbers, None)
        return
    keep_if_captured(record, device)
    if device.index == torch.cuda.current_device():
        record.run(tensors, pointers, numbers, device.index)
    else:
        with torch.cuda.device(device):
            record.run(tensors, pointers, numbers, device.index)
