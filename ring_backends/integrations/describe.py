"""Short texts for arguments and parameters, so that the ranks of a ring can compare them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ring_backends.errors import RingMismatchError
from ring_backends.ring.collectives import agree
from ring_backends.ring.ring import Ring

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def describe(value: Any) -> str:
    """Return a text that differs if two arguments differ. For a tensor it holds dtype, shape and a checksum."""
    if hasattr(value, "to_dict"):  # a configuration of transformers
        value = str(value.to_dict())
    if not isinstance(value, Tensor):
        return str(value) if isinstance(value, (bool, int, float, str, list, tuple)) else type(value).__name__
    return f"{value.dtype} {[*value.shape]} checksum {int(checksum(value)) & (2**64 - 1):016x}"


def checksum(tensor: Tensor) -> Tensor:
    """A checksum of a tensor's bits: int64, on the tensor's device.

    It depends on the order of the elements along the first two dimensions. It adds the elements of all other
    dimensions, so that large tensors need little extra memory.
    """
    bits = tensor.detach().contiguous()
    if tensor.dtype != torch.bool:
        bits = bits.view(-1).view(_INTEGERS[tensor.element_size()]).view(tensor.shape)
    sums = bits.sum([*range(2, tensor.dim())], dtype=torch.int64) if tensor.dim() > 2 else bits.long()
    weights = torch.arange(1, 2 * sums.numel() + 1, 2, device=tensor.device).mul_(0x9E3779B1)
    return (sums.reshape(-1) * weights).sum()


def agree_on_parameters(ring: Ring, model: nn.Module, name: str) -> None:
    """Check that all ranks have the same parameters.

    If a rank has parameters that are sharded or on the meta device, their values cannot be compared, and none are.

    Args:
        name: what the user calls the model, for the error.

    Raises:
        RingMismatchError: they differ.
    """
    if ring.size == 1:
        return
    without_values = sum(parameter.is_meta or isinstance(parameter, DTensor) for parameter in model.parameters())
    if any(number for number, *_ in agree(ring, f"parameters of {name}", numbers=[without_values])):
        return
    # With one dimension more, rows of matrices are added, and need little memory.
    parameters = {path: describe(parameter[None]) for path, parameter in model.named_parameters()}
    try:
        agree(ring, f"use_ring of {name}", parameters)
    except RingMismatchError as error:
        raise RingMismatchError(
            f"{name}: before use_ring, load the same checkpoint on every rank, or build the model after the same "
            f"torch.manual_seed. {error}"
        ) from None
