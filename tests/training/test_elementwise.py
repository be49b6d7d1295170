"""Optimizers whose step of a parameter is not that of its parts are recognised."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ring_backends.training.elementwise import check_elementwise

WHAT_TO_DO = "the framework cuts it; use another one"


class Normalized(torch.optim.SGD):
    """Its step has the gradient's direction, and the length of the learning rate."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad /= parameter.grad.norm()
        super().step()


class OfTheUser(torch.optim.SGD):
    """An optimizer with an argument that the check does not know."""

    def __init__(self, parameters: Any, *, schedule: list[float]) -> None:
        super().__init__(parameters, lr=schedule[0])


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(3, 3))


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop"])
@pytest.mark.parametrize("lr", [0.0, 0.01])
def test_optimizers_by_element(name: str, lr: float) -> None:
    check_elementwise(getattr(torch.optim, name)([parameter()], lr=lr), WHAT_TO_DO)


@pytest.mark.parametrize("optimizer", [torch.optim.Adafactor, torch.optim.Muon, Normalized])
def test_other_optimizers(optimizer: Any) -> None:
    with pytest.raises(ValueError, match=rf"returned {optimizer.__name__}: .* the framework cuts it; use another one"):
        check_elementwise(optimizer([parameter()], lr=0.0), WHAT_TO_DO)


def test_an_optimizer_that_cannot_be_tried_is_accepted() -> None:
    check_elementwise(OfTheUser([parameter()], schedule=[0.1]), WHAT_TO_DO)


def test_a_check_leaves_the_optimizer_and_the_random_numbers_alone() -> None:
    weight = parameter()
    optimizer, state = torch.optim.Adam([weight]), torch.get_rng_state()
    check_elementwise(optimizer, WHAT_TO_DO)
    assert torch.equal(weight, parameter())
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), state)
