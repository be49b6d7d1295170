"""A type of device that torch does not know: its tensors hold tensors of the CPU, which compute for it.

It stands for accelerators such as XPU, MPS and HPU. As for these, no operator takes tensors of two devices, gloo sends
no tensor of it, and ``is_cuda`` is false.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree, backend_registration

NAME = "fake"

can_start = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
"""Whether this release of torch can have a device in Python."""

dtypes: set[torch.dtype] = set()
"""The dtypes of all tensors that this process has made on the device."""

_libraries: list[torch.library.Library] = []


class FakeDeviceTensor(Tensor):
    """A tensor on the fake device. ``held`` is the tensor on the CPU that has its values."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> FakeDeviceTensor:
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        made = Tensor._make_wrapper_subclass(cls, held.size(), **layout, dtype=held.dtype, device=f"{NAME}:0")
        made.held = held
        dtypes.add(held.dtype)
        return made

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(operator, args, kwargs or {})


def _compute(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Apply an operator to the tensors that those of the fake device hold."""
    if operator.namespace == "c10d":
        raise RuntimeError(f"No backend type associated with device type {NAME}")
    given, structure = _pytree.tree_flatten((args, kwargs))
    is_moved = isinstance(kwargs.get("device"), torch.device) and kwargs["device"].type == "cpu"
    is_copied = operator is torch.ops.aten.copy_.default
    if not is_copied:
        others = [x for x in given if type(x) is Tensor and x.dim() > 0]  # a number may be a tensor of the CPU
        assert is_moved or kwargs.get("device") or not others, f"{operator} takes tensors of two devices"
    held = [_held(x) for x in given]
    of_cpu, options = _pytree.tree_unflatten(held, structure)
    known = {id(x.held): x for x in given if isinstance(x, FakeDeviceTensor)}

    def wrapped(x: Any) -> Any:
        if not isinstance(x, Tensor) or is_moved or (is_copied and type(args[0]) is Tensor):
            return x
        return known.get(id(x)) if id(x) in known else FakeDeviceTensor(x)

    return _pytree.tree_map(wrapped, operator(*of_cpu, **options))


def _held(x: Any) -> Any:
    if isinstance(x, FakeDeviceTensor):
        return x.held
    return torch.device("cpu") if isinstance(x, torch.device) and x.type == NAME else x


def _tensor(*args: Any, device: Any = None, make: Any = torch.tensor, **options: Any) -> Tensor:
    """``torch.tensor``, which calls no operators in Python."""
    is_fake = device is not None and torch.device(device).type == NAME
    return make(*args, **options).to(device) if is_fake else make(*args, device=device, **options)


def start() -> None:
    """Give this process the device. A process cannot lose it again."""
    if not _libraries:
        backend_registration._setup_privateuseone_for_python_backend(NAME)
        _libraries.append(torch.library.Library("_", "IMPL"))
        torch.tensor = _tensor
        _libraries[0].fallback(lambda operator, *args, **kwargs: _compute(operator, args, kwargs), "PrivateUse1")
