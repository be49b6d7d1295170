"""Descriptions of models, optimizers and options, as plain values that ranks can compare."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ring_backends.torch_internals import internal
from ring_backends.training.checkpoint_files import as_loadable

Buffers = list[tuple[nn.Module, str]]
"""Buffers as (module, name), since a module may assign another tensor to a buffer."""


def describe_model(model: nn.Module, *, with_shapes: bool = True) -> dict[str, object]:
    """Every parameter and every persistent buffer, by name.

    Args:
        with_shapes: False for a model whose parameters are shards, whose shapes differ between ranks.
    """

    def describe(tensor: Tensor) -> str:
        return f"{tensor.dtype} {[*tensor.shape] if with_shapes else ''}"

    described: dict[str, object] = {
        f"parameter {name}": f"{describe(parameter)}, {'trained' if parameter.requires_grad else 'frozen'}"
        for name, parameter in model.named_parameters()
    }
    for name, module in model.named_modules():
        for buffer in _persistent_names(module):
            described[f"buffer {name}.{buffer}"] = describe(getattr(module, buffer))
    return described


def persistent_buffers(model: nn.Module) -> Buffers:
    """The buffers in a model's state_dict, such as BatchNorm's statistics. Steps copy only these between ranks."""
    return [(module, buffer) for module in model.modules() for buffer in _persistent_names(module)]


def _persistent_names(module: nn.Module) -> list[str]:
    own: dict[str, Tensor] = {}
    internal(module, "_save_to_state_dict", "a comparison of buffers")(own, "", True)
    return [name for name, _ in module.named_buffers(recurse=False) if name in own]


def describe_settings(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """The settings of an optimizer's parameter groups. A value that is not plain is described by its class."""
    settings: dict[str, object] = {}
    for index, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name == "params":
                continue
            if isinstance(value, Tensor):
                # Reading a number from a GPU would synchronize with it.
                value = value.tolist() if value.device.type == "cpu" else f"a tensor on {value.device.type}"
            settings[f"{name} of parameter group {index}"] = _text(value)
    return settings


def describe_options(options: Mapping[str, Any]) -> dict[str, object]:
    """The arguments that must be equal on all ranks. A value that is not plain is described by its class."""
    return {name: _text(_shared(options[name])) for name in sorted(options) if name not in _RANK_SPECIFIC}


_RANK_SPECIFIC = frozenset({"device_id", "device_ids", "output_device", "nvme_path", "output_path"})
"""Arguments and entries of configurations that may differ between ranks and hosts."""


def _shared(value: Any) -> Any:
    """The part of a value that must be equal on all ranks. For a device this is its type."""
    if isinstance(value, Mapping):
        return {name: _shared(value[name]) for name in sorted(value, key=str) if name not in _RANK_SPECIFIC}
    if isinstance(value, (list, tuple)):
        return [_shared(item) for item in value]
    return value.type if isinstance(value, torch.device) else value


def describe_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, object]:
    """The index of every parameter in the optimizer. Frameworks that shard the optimizer rely on it.

    Args:
        names: names of the model's parameters, by ``id``.
    """
    places: dict[str, object] = {"optimizer": type(optimizer).__name__}
    for index, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            places[f"parameter {names[id(parameter)]}"] = f"number {place} of parameter group {index}"
    return places


_OF_WRAPPERS = ("_fsdp_wrapped_module.", "_fpw_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
"""The parts of parameters' names that wrapping modules add."""


def own_name(name: str) -> str:
    """The name of a parameter without the parts of wrapping modules."""
    for part in _OF_WRAPPERS:
        name = name.replace(part, "")
    return name


def parameter_names(model: nn.Module, names_in: Callable[[nn.Parameter], Sequence[str]]) -> dict[int, list[str]]:
    """The model's own names of its parameters, by ``id``. A parameter in several places has its alphabetically first.

    Args:
        names_in: the names of the parameters in a flat parameter, relative to its module; of others, none.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        module = name[: name.rfind(".") + 1]
        found = [own_name(module + inside) for inside in names_in(parameter)] or [own_name(name)]
        names[id(parameter)] = min(names.get(id(parameter), found), found)
    return names


def _text(value: object) -> str:
    try:
        return repr(as_loadable(value, ""))
    except ValueError:
        return str(type(value))


def make_settings_loadable(optimizer: torch.optim.Optimizer) -> None:
    """Convert settings of the parameter groups that could not be loaded again, such as NumPy numbers.

    Raises:
        ValueError: a setting cannot be converted; the message names it.
    """
    for index, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name != "params":
                group[name] = as_loadable(value, f"optimizer.param_groups[{index}][{name!r}]")


def check_count(name: str, count: object) -> int | float:
    """Convert a count of tokens, or a sum of their weights, to a Python number.

    Raises:
        ValueError, TypeError: ``count`` is not a finite number, or tensor of one element, of at least 0.
    """
    value: Any = count
    if isinstance(count, Tensor):
        if count.numel() != 1:
            raise ValueError(f"{name} has shape {[*count.shape]}: expected one number; pass its sum.")
        value = count.item()
    elif hasattr(count, "item"):  # a NumPy number
        value = count.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} = {count!r}: expected a number, or a tensor of one element; convert it with float().")
    if not math.isfinite(value) or value < 0:
        raise ValueError(
            f"{name} = {value}: must be finite and at least 0; pass a number of tokens, or the sum of their weights."
        )
    return value
