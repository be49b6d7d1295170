"""Arguments that ranks compare are described by what they hold, and not by where they lie in memory."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ring_backends import Ring
from ring_backends.ring.describe import describe


def long_tensor(last: int) -> torch.Tensor:
    return torch.cat([torch.zeros(5000, dtype=torch.int64), torch.tensor([last, 0])])


def reads(value: Any) -> Callable[..., Any]:
    return lambda scores, factor=2: scores * factor + value


def cyclic(value: Any) -> list[Any]:
    items = [value]
    items.append(items)
    return items


def nested(value: Any) -> Any:
    for _ in range(5000):
        value = [value]
    return value


class Slots:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclass
class Record:
    value: Any


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda value: value,
    "list": lambda value: [1, [value]],
    "dict": lambda value: {"a": {3: value}},
    "tensor": lambda value: [long_tensor(value)],
    "long list": lambda value: [*range(5000), value, 0],
    "set": lambda value: {value, 17, "text"},
    "object": lambda value: SimpleNamespace(inner=SimpleNamespace(value=value)),
    "slots": Slots,
    "function": reads,
    "partial": lambda value: partial(reads(0), factor=value),
    "cycle": cyclic,
    "nested": nested,
    "key": lambda value: {Slots(value): 0, Slots(0): 0},
    "pattern": lambda value: re.compile(f"a{value}"),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_values_are_told_apart(wrap: Callable[[Any], Any]) -> None:
    """Equal values have equal descriptions, without an address, and others have others."""
    one, again, other = (describe({"x": wrap(value)}) for value in (1, 1, 2))
    assert one == again
    assert one != other
    assert not any("0x" in text or len(text) > 300 for field in one.items() for text in field)


def test_what_differs_between_ranks_of_one_program_is_left_out() -> None:
    """Devices are described by their type, and rings and modules by their class."""
    rings = [Ring(2, rank) for rank in range(2)]
    devices, modules = ([make(rank) for rank in range(2)] for make in (partial(torch.device, "cuda"), nn.Identity))
    for one, other in (rings, devices, modules, [threading.Lock(), threading.Lock()]):
        assert describe({"x": [one]}) == describe({"x": [other]})


def test_the_names_of_what_differs() -> None:
    found = describe({"x": [Record({"a": 1.5}), torch.zeros(2)], "y": None})
    assert found == {
        "x": "list of 2",
        "x[0]": "Record",
        "x[0].value": "{'a': 1.5}",
        "x[1]": "torch.float32 [2] checksum 0000000000000000",
        "y": "None",
    }
