"""The order in which ``"auto"`` prefers the CUDA kernels on a GPU, and the reason in words.

The order comes from measurements of the GPU if the environment variable :data:`PROBE_VARIABLE` names a file that
``ring-backends info --probe --json FILE`` wrote on such a GPU. Otherwise it depends on the compute capability. Whether
a kernel can run a call is decided elsewhere (``Kernel.not_supported_reasons``).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ring_backends.kernels.base import KernelInputs

PROBE_VARIABLE = "RING_BACKENDS_PROBE"


class Preference(NamedTuple):
    """Names of kernels, the preferred one first, and why. Kernels that are not named come later."""

    names: tuple[str, ...]
    reason: str


NO_PREFERENCE = Preference((), "the first kernel of the list that can run the call")

_FLASH_FIRST = ("aten_cuda_flash", "aten_cuda_cudnn")
_CUDNN_FIRST = ("aten_cuda_cudnn", "aten_cuda_flash")
_BY_MAJOR = {
    8: Preference(_FLASH_FIRST, "compute capability 8.x: FlashAttention 2 was written for it; not measured"),
    9: Preference(
        _CUDNN_FIRST,
        "compute capability 9.x: on an H100, cuDNN ran at 563 TFLOP/s and FlashAttention 2 at 298 (forward, head_dim "
        "128, 2,048 rows)",
    ),
}
MAX_ROWS_IN_PLACE = 2048
_IN_PLACE = (
    f"dilated segments of at most {MAX_ROWS_IN_PLACE:,} rows: it copies no rows, and one launch computes a step; on an "
    "H100, it was as fast in a forward as cuDNN with its copies, and faster in a backward (2,048 rows)"
)
MAX_ROWS_OF_WINDOW = 1024
_WINDOW = Preference(
    _FLASH_FIRST,
    f"windows of at most {MAX_ROWS_OF_WINDOW:,} rows: FlashAttention takes them whole; for cuDNN, they are cut into "
    "triangles, some of which are copied; estimated, not measured",
)
_OTHERWISE = Preference(_FLASH_FIRST, "no figures are known for this compute capability")
_STEP = Preference(_FLASH_FIRST, "a step of decoding: cuDNN would make and keep a plan for each number of keys")


def preference(inputs: KernelInputs) -> Preference:
    """The preferred kernels for a call.

    Raises:
        ValueError: :data:`PROBE_VARIABLE` names a file without measurements of kernels.
    """
    if inputs.device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return NO_PREFERENCE
    if inputs.is_step:
        return _STEP
    major, _ = torch.cuda.get_device_capability(inputs.device)
    default = _BY_MAJOR.get(major, _OTHERWISE)
    if inputs.has_window and (inputs.rows or 0) <= MAX_ROWS_OF_WINDOW and default.names == _CUDNN_FIRST:
        default = _WINDOW
    if inputs.is_dilated and (inputs.rows or 0) <= MAX_ROWS_IN_PLACE:
        default = Preference(("triton_dilated", *default.names), _IN_PLACE)
    path = os.environ.get(PROBE_VARIABLE)
    if not path:
        return default
    found, name = read_kernel_times(path), torch.cuda.get_device_name(inputs.device)
    if found["device"] != name:
        return default._replace(reason=f"{default.reason} ({PROBE_VARIABLE} was measured on {found['device']})")
    return _measured(found, inputs) or default._replace(
        reason=f"{default.reason} ({PROBE_VARIABLE} has no times in {inputs.dtype})"
    )


def _measured(found: Mapping[str, Any], inputs: KernelInputs) -> Preference | None:
    """The kernels by their measured time in the closest measured case; None if the dtype was not measured."""
    dtype = str(inputs.dtype).removeprefix("torch.")
    times = [time for time in found["times"] if (time["dtype"], time["rate"] > 1) == (dtype, inputs.is_dilated)]
    if not times:
        return None
    rows = max(time["rows"] for time in times) if inputs.rows is None else inputs.rows

    def distance(time: Mapping[str, Any]) -> tuple[float, float]:
        return abs(math.log2(time["head_dim"] / inputs.head_dim)), abs(math.log2(time["rows"] / max(1, rows)))

    closest = min(times, key=distance)
    alike = [time for time in times if (time["head_dim"], time["rows"]) == (closest["head_dim"], closest["rows"])]
    seconds = {time["kernel"]: time["forward_seconds"] + time["backward_seconds"] for time in alike}
    names = tuple(sorted(seconds, key=lambda name: seconds[name]))
    listed = ", ".join(f"{name} {seconds[name] * 1e3:.3g} ms" for name in names)
    return Preference(names, f"measured here with head_dim {closest['head_dim']}, {closest['rows']:,} rows: {listed}")


def read_kernel_times(path: str) -> dict[str, Any]:
    """The measurements of kernels in a file of ``ring-backends info --probe --json``.

    Raises:
        ValueError: the file cannot be read, or holds no such measurements.
    """
    try:
        modified = Path(path).stat().st_mtime_ns
        return _read(path, modified)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{PROBE_VARIABLE} = {path!r}: holds no measurements of kernels ({type(error).__name__}: {error}); write "
            "the file with `ring-backends info --probe --json FILE` on a machine with a GPU, or unset the variable."
        ) from error


@lru_cache(maxsize=8)
def _read(path: str, modified: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(path).read_text())["kernel_times"]
    times = [
        {
            "kernel": str(time["kernel"]),
            "dtype": str(time["dtype"]),
            **{name: int(time[name]) for name in ("head_dim", "rows", "rate")},
            **{name: float(time[name]) for name in ("forward_seconds", "backward_seconds")},
        }
        for time in found["times"]
    ]
    if any(time["head_dim"] < 1 or time["rows"] < 1 for time in times):  # type: ignore[operator]
        raise ValueError("head_dim and rows must be at least 1")
    return {"device": str(found["device"]), "times": times}
