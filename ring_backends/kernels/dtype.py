"""The dtype that suits a device, the names of dtypes that users may give, and computation without autocast."""

from __future__ import annotations

import contextlib

import torch

_NAMES = {
    "fp16": torch.float16,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp32": torch.float32,
    "float32": torch.float32,
    "fp64": torch.float64,
    "float64": torch.float64,
}


def auto_dtype(device: torch.device | str) -> torch.dtype:
    """The dtype in which to train on ``device`` if the user does not choose one.

    On CUDA it is bf16 from compute capability 8.0 (Ampere), and fp32 below. Older GPUs have no bf16, and gradients in
    fp16 become 0 or inf without loss scaling. On the CPU and every other device it is fp32.

    Raises:
        ValueError: ``device`` is a CUDA device, and torch sees none.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return torch.float32
    if not torch.cuda.is_available():
        raise ValueError(f"device = {device}: torch sees no CUDA device here; use device='cpu'.")
    return torch.float32 if torch.cuda.get_device_capability(device) < (8, 0) else torch.bfloat16


def resolve_dtype(spec: str | torch.dtype, device: torch.device | str) -> torch.dtype:
    """The dtype that ``spec`` names.

    Args:
        spec: a torch.dtype, a name such as ``"bf16"``, or ``"auto"`` (:func:`auto_dtype`).
        device: the device for which ``"auto"`` chooses a dtype.

    Raises:
        ValueError: ``spec`` is not a dtype that attention supports.
        TypeError: ``spec`` is neither a string nor a torch.dtype.
    """
    if isinstance(spec, torch.dtype):
        if spec in _NAMES.values():
            return spec
    elif not isinstance(spec, str):
        raise TypeError(
            f"dtype = {spec!r}: expected a string or a torch.dtype, got {type(spec).__name__}; use one of {_choices()}."
        )
    elif spec == "auto":
        return auto_dtype(device)
    elif spec in _NAMES:
        return _NAMES[spec]
    raise ValueError(f"dtype = {spec!r}: attention computes in fp16, bf16, fp32 or fp64; use one of {_choices()}.")


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Switch autocast off, since it would run matrix products in half precision. Some devices have no autocast."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def _choices() -> str:
    return ", ".join(repr(name) for name in ("auto", *_NAMES))
