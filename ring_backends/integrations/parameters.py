"""Compares the parameters of a model between the ranks of a ring."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor

from ring_backends.errors import RingMismatchError
from ring_backends.ring.collectives import agree
from ring_backends.ring.describe import describe_tensor
from ring_backends.ring.ring import Ring


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
    parameters = {path: describe_tensor(parameter[None]) for path, parameter in model.named_parameters()}
    try:
        agree(ring, f"use_ring of {name}", parameters)
    except RingMismatchError as error:
        raise RingMismatchError(
            f"{name}: before use_ring, load the same checkpoint on every rank, or build the model after the same "
            f"torch.manual_seed. {error}"
        ) from None
