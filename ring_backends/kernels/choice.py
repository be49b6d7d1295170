"""The order in which ``"auto"`` prefers the CUDA kernels on a GPU, and the reason in words.

Whether a kernel can run a call is decided elsewhere (``Kernel.not_supported_reasons``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ring_backends.kernels.base import KernelInputs


class Preference(NamedTuple):
    """Names of kernels, the preferred one first, and why. Kernels that are not named come later."""

    names: tuple[str, ...]
    reason: str


NO_PREFERENCE = Preference((), "the first kernel of the list that can run the call")
_ON_ROCM = Preference(("triton_dilated",), "a GPU of AMD: the other fused kernels call NVIDIA's operators")
_OTHER_DEVICE = Preference((), "no fused kernel runs on this type of device")

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
_IN_WINDOW = (
    f"windows of at most {MAX_ROWS_OF_WINDOW:,} rows: it takes them whole; for the other kernels, they are cut into "
    "triangles; estimated, not measured"
)
_OTHERWISE = Preference(_FLASH_FIRST, "no figures are known for this compute capability")
_STEP = Preference(_FLASH_FIRST, "a step of decoding: cuDNN would make and keep a plan for each number of keys")


def preference(inputs: KernelInputs) -> Preference:
    """The preferred kernels for a call."""
    if inputs.device.type != "cuda":
        return NO_PREFERENCE if inputs.device.type in ("cpu", "meta") else _OTHER_DEVICE
    if not torch.cuda.is_available():
        return NO_PREFERENCE
    if torch.version.hip is not None:
        return _ON_ROCM
    if inputs.is_step:
        return _STEP
    major, _ = torch.cuda.get_device_capability(inputs.device)
    default = _BY_MAJOR.get(major, _OTHERWISE)
    rows = inputs.rows or 0
    if inputs.is_dilated and rows <= MAX_ROWS_IN_PLACE:
        return Preference(("triton_dilated", *default.names), _IN_PLACE)
    if inputs.has_window and rows <= MAX_ROWS_OF_WINDOW:
        return Preference(("triton_dilated", *default.names), _IN_WINDOW)
    return default
