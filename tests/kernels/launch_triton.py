"""Launches Triton kernels twice on a GPU that need not be there, and prints whether the launches are the same, as JSON.

Run it without ``TRITON_INTERPRET``. Triton compiles for a GPU of compute capability 9.0. What would start a kernel
records the compiled kernel and its arguments instead. The second launch of each pair finds the compiled kernel without
Triton.
"""

from __future__ import annotations

import itertools
import json
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import compile_triton
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ring_backends.kernels import rows as dilated
from ring_backends.kernels import triton_launch
from ring_backends.schedule.rows import DilatedRows, head_runs

Started = list[tuple[Any, ...]]
"""The function, the grid and the arguments of each start of a kernel; of tensors, their pointers."""


class Launcher:
    started: ClassVar[Started] = []

    def __init__(self, *args: Any) -> None:
        pass

    def __call__(self, *args: Any) -> None:
        *grid, _, function, _, _, _, _ = args[:9]
        self.started.append((function, tuple(grid), _values(args[9:])))


def _values(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_values, value))
    return value.data_ptr() if isinstance(value, torch.Tensor) else getattr(value, "cache_key", value)


def without_pointers(value: Any) -> Any:
    """The values, with the same text for all pointers. Two calls have other tensors."""
    if isinstance(value, (tuple, list)):
        return [*map(without_pointers, value)]
    return "pointer" if isinstance(value, int) and value >= 2**32 else value


LOADED = itertools.count(1)
PROPERTIES = {"max_shared_mem": 232_448, "multiprocessor_count": 132, "warpSize": 32}

DRIVER = SimpleNamespace(
    launcher_cls=Launcher,
    utils=SimpleNamespace(
        load_binary=lambda *args: (0, next(LOADED), 32, 0, 1024), get_device_properties=lambda device: PROPERTIES
    ),
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 7,
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
)
"""A driver without a GPU."""


def launches(call: Any, *, finds_compiled: bool) -> Started:
    """What ``call`` starts; with ``finds_compiled``, without Triton's lookup."""
    before = len(Launcher.started)
    with mock.patch.object(JITFunction, "run", side_effect=AssertionError) if finds_compiled else mock.MagicMock():
        call()
    return Launcher.started[before:]


def main() -> None:
    knobs.runtime.launch_enter_hook = None
    driver.set_active(DRIVER)
    rows = DilatedRows(0, 2, 256, 2, 128, head_runs(range(4), [0, 1, 0, 1]))
    gathered = torch.zeros(4, 4, 128, 64, dtype=torch.bfloat16)
    whole = torch.zeros(2, 512, 4, 64, dtype=torch.bfloat16)
    unaligned = torch.zeros(whole.numel() + 1, dtype=torch.bfloat16)[1:].view(whole.shape)

    with (
        mock.patch.object(dilated, "can_launch", return_value=True),
        mock.patch.object(triton_launch, "capability", return_value=(9, 0)),
    ):
        report: dict[str, Any] = {}
        for name in ("rows", "plain", "documents, dropout", "soft cap"):
            attend = partial(compile_triton.attend, name)
            call = partial(compile_triton.move_and_merge_rows if name == "rows" else attend, 64, torch.bfloat16)
            first, second = launches(call, finds_compiled=False), launches(call, finds_compiled=True)
            report[name] = [len(first), without_pointers(first) == without_pointers(second)]
        aligned, other, again = (
            launches(partial(dilated.gather_many, [dilated.Rows(tensor, rows, gathered)]), finds_compiled=found)[0]
            for tensor, found in ((whole, False), (unaligned, False), (whole, True))
        )
        report["alignment"] = [aligned[0] != other[0], aligned == again]
    print(json.dumps(report))


if __name__ == "__main__":
    main()
