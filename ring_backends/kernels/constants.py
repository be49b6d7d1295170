"""Small tensors that do not change, held on each device, so that later calls copy nothing from the host."""

from __future__ import annotations

from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from ring_backends.torch_internals import has_values, untraced

Held = TypeVar("Held")

_captured: list[object] = []


def constant(numbers: tuple[int, ...], like: Tensor) -> Tensor:
    """The numbers as int64 [len(numbers)] on the device of ``like``. Nobody may change the tensor."""
    if not has_values(like):
        return like.new_empty(len(numbers), dtype=torch.int64)
    return keep_if_captured(_constant(numbers, like.device), like.device)


def scalar(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor with one number and no dims. Nobody may change it."""
    return keep_if_captured(_scalar(value, dtype, device), device)


def keep_if_captured(held: Held, device: torch.device) -> Held:
    """Return ``held``, whose tensors lie on ``device``. A CUDA graph that is being captured may read them forever."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        _captured.append(held)
    return held


@lru_cache(maxsize=4096)
@untraced
def _constant(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)


@lru_cache(maxsize=256)
@untraced
def _scalar(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=dtype, device=device)
