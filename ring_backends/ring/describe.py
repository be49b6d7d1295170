"""Short texts for arguments, so that the ranks of a ring can compare them."""

from __future__ import annotations

import copyreg
import inspect
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ring_backends.kernels.score_mod import closure_of, identity
from ring_backends.ring.ring import Ring

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype)
_MAX_CHARACTERS = 200


def describe(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return texts that differ if two arguments differ, by the names of their parts, such as ``processors[0].penalty``.

    A tensor is described by dtype, shape and a checksum; a function by its name, its code, its defaults and its
    closure; another object by its class and by what pickle would store. An object that is found again is described by
    its first name. What may differ between the ranks of one program is left out: the index of a device, the rank in a
    ring, the files of a tokenizer, and the parameters of a module, which may be sharded.
    """
    fields: dict[str, str] = {}
    seen: dict[int, tuple[str, Any]] = {}  # with the objects, so that no other one gets the id of one that has gone
    left = [*arguments.items()][::-1]
    while left:
        name, value = left.pop()
        if id(value) in seen:
            fields[name] = f"the same object as {seen[id(value)][0]}"
            continue
        text, parts = _read(value)
        if len(text) > _MAX_CHARACTERS:
            text = f"{text[:_MAX_CHARACTERS]}… #{zlib.crc32(text.encode()):08x}"
        if len(name) > _MAX_CHARACTERS:
            name = f"{name[:_MAX_CHARACTERS]}… {len(fields)}"
        fields[name] = text
        if parts:
            seen[id(value)] = name, value
        left += [(f"{name}{part}", held) for part, held in reversed(parts.items())]
    return fields


def _read(value: Any) -> tuple[str, dict[str, Any]]:
    """The text of a value, and its parts by what follows its name in theirs."""
    kind = type(value)
    if isinstance(value, Tensor):
        return describe_tensor(value), {}
    if isinstance(value, _PLAIN):
        return repr(value), {}
    if kind in (list, tuple, dict):
        items = list(value.items() if kind is dict else enumerate(value))
        if all(isinstance(x, _PLAIN) for item in items for x in item):
            return repr(value), {}
        return f"{kind.__name__} of {len(value)}", _items(items)
    if isinstance(value, (set, frozenset)):  # in no order, so that objects in it cannot be told apart
        return f"{kind.__name__} of {len(value)}, {sorted(repr(x) for x in value if isinstance(x, _PLAIN))}", {}
    if inspect.isfunction(value):
        defaults = {" defaults": value.__defaults__, " keyword defaults": value.__kwdefaults__}
        given = {name: x for name, x in defaults.items() if x is not None}
        return identity(value), {**given, **_attributes(closure_of(value))}
    if inspect.ismethod(value):
        return kind.__name__, {" of": value.__self__, " function": value.__func__}
    if isinstance(value, type) or inspect.ismodule(value):
        return value.__name__, {}
    if isinstance(value, torch.device):
        return value.type, {}
    if isinstance(value, Ring):
        return f"{value.layout_kind} ring of {value.size}", {}
    if isinstance(value, nn.Module) or hasattr(value, "convert_tokens_to_ids"):  # a tokenizer holds paths of its files
        return kind.__qualname__, {}
    if hasattr(value, "to_json_string"):  # a configuration of transformers
        return kind.__qualname__, _attributes(value.to_dict())
    return _read_object(value)


def _read_object(value: Any) -> tuple[str, dict[str, Any]]:
    """Read what pickle would store of an object: nothing if it cannot be pickled."""
    kind = type(value)
    try:
        reduce = copyreg.dispatch_table.get(kind)
        reduced = value.__reduce_ex__(4) if reduce is None else reduce(value)
    except Exception:
        reduced = ""
    if isinstance(reduced, str):  # the name of a function or of another global object
        return f"{kind.__qualname__} {reduced}", {}
    _, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    parts = {f" argument {index}": x for index, x in enumerate(arguments) if x is not kind}
    for part in state if isinstance(state, tuple) else (state,):  # a tuple holds attributes and slots
        if part is not None:
            parts |= _attributes(part) if isinstance(part, dict) else {" state": part}
    return kind.__qualname__, {**parts, **_items(enumerate(items or ())), **_items(pairs or ())}


def _attributes(values: Mapping[str, Any]) -> dict[str, Any]:
    return {f".{name}": value for name, value in values.items()}


def _items(pairs: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
    items: dict[str, Any] = {}
    for index, (key, value) in enumerate(pairs):
        if isinstance(key, _PLAIN):
            items[f"[{key!r}]"] = value
        else:  # its repr may be an address
            items |= {f" key {index}": key, f" value {index}": value}
    return items


def describe_tensor(tensor: Tensor) -> str:
    """The dtype, the shape, and a checksum of the values that this rank has in whole."""
    text = f"{tensor.dtype} {[*tensor.shape]}"
    if tensor.is_meta or tensor.layout != torch.strided or isinstance(tensor, DTensor):
        return text
    return f"{text} checksum {int(checksum(tensor)) & (2**64 - 1):016x}"


def checksum(tensor: Tensor) -> Tensor:
    """A checksum of a tensor's bits: int64, on the tensor's device.

    It depends on the order of the elements along the first two dimensions. It adds the elements of all other
    dimensions, so that large tensors need little extra memory.
    """
    bits = tensor.detach().contiguous()
    if tensor.is_complex():
        bits = tensor = torch.view_as_real(bits.resolve_conj())
    if tensor.dtype != torch.bool:
        bits = bits.view(-1).view(_INTEGERS[tensor.element_size()]).view(tensor.shape)
    sums = bits.sum([*range(2, tensor.dim())], dtype=torch.int64) if tensor.dim() > 2 else bits.long()
    weights = torch.arange(1, 2 * sums.numel() + 1, 2, device=tensor.device).mul_(0x9E3779B1)
    return (sums.reshape(-1) * weights).sum()
