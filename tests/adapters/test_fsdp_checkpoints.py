"""Checkpoints of the FSDP adapter."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ring_backends.testing.failing_calls import ending
from ring_backends.testing.marks import matrix_but
from ring_backends.testing.models import OneParameter, unit_sgd
from ring_backends.testing.rings import FOUR, TWO, ring_here, ring_of
from ring_backends.testing.training_checkpoints import ADAM, Stretch, five_steps, load_and_resume
from ring_backends.testing.training_runs import Trainer
from ring_backends.testing.world import World, on_every_rank

pytest.importorskip("numpy")  # the adapter needs NumPy

from fsdp_cases import ADAPTER, every_strategy

from ring_backends.adapters import fsdp
from ring_backends.adapters.fsdp import training as fsdp_training
from ring_backends.adapters.fsdp.sharding import Strategy
from ring_backends.training.checkpoint_files import MANIFEST


def interrupt_a_load(path: str) -> str:
    """One rank gets Ctrl-C during load. Returns the name of the error of this rank."""
    state = fsdp.parallelize(OneParameter(), unit_sgd, ring_here(ADAPTER, TWO))
    state.save(path)
    interrupted = mock.patch.object(fsdp_training.CheckpointPlanner, "create_local_plan", side_effect=KeyboardInterrupt)
    with interrupted if dist.get_rank() == 1 else contextlib.nullcontext():
        try:
            state.load(path)
        except BaseException as error:
            return type(error).__name__
    return "no error"


def test_an_interrupted_load_does_not_blame_the_checkpoint(world: World, tmp_path: Path) -> None:
    errors = world.run(interrupt_a_load, str(tmp_path / "checkpoint"))
    assert errors == ["RingPeerError", "KeyboardInterrupt", "RingPeerError", "RingPeerError"]


def save_after_two_steps(path: str, strategy: str) -> Stretch:
    trainer = Trainer(ADAPTER, TWO, "zigzag", ADAM, {"strategy": strategy})
    for step in range(2):
        trainer.step(step)
    trainer.state.save(path)
    trainer.state.save(path)  # replaces the first checkpoint
    return five_steps(trainer)


@pytest.mark.matrix(reason="another strategy")
@pytest.mark.parametrize(("saved_by", "loaded_by"), [("fsdp2", "fsdp1"), ("fsdp1", "hsdp")])
def test_another_strategy_loads_the_checkpoint(world: World, tmp_path: Path, saved_by: str, loaded_by: str) -> None:
    path = str(tmp_path / "checkpoint")
    uninterrupted = world.run(save_after_two_steps, path, saved_by)[0]
    for resumed in world.run(load_and_resume, ADAPTER, TWO, replace(ADAM, seed=9), path, {"strategy": loaded_by}):
        assert resumed.losses == pytest.approx(uninterrupted.losses, rel=1e-5)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["checkpoint"]


class PartlyUsed(nn.Module):
    """A model with two layers. The loss depends on one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
        for number, parameter in enumerate(self.parameters()):
            nn.init.constant_(parameter, 0.1 * number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        moved: torch.Tensor = self.used(x)
        return moved


@pytest.mark.matrix(reason="the suite tests fsdp2 and used parameters")
@every_strategy
@on_every_rank
def test_training_resumes_with_an_unused_parameter(tmp_path: Path, strategy: Strategy) -> None:
    def go_on(state: Any, steps: int) -> list[float]:
        values = []
        for _ in range(steps):
            state.backward(state.loss((state.model(torch.ones(4)) - 2).square().sum(), 1))
            state.step()
            values.append(float(state.full_state_dict()["used.weight"].sum()))
        return values

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.1)

    ring, path = ring_of(ADAPTER, FOUR), tmp_path / "checkpoint"
    first, second = (fsdp.parallelize(PartlyUsed(), adamw, ring, strategy=strategy) for _ in range(2))
    go_on(first, 2)
    first.save(path)
    second.load(path)
    torch.testing.assert_close(go_on(second, 3), go_on(first, 3), rtol=0, atol=0)


@pytest.mark.parametrize("leftover", matrix_but(".unfinished", of=("file", ".replaced", ".unfinished")))
@on_every_rank
def test_saving_over_leftovers(tmp_path: Path, leftover: str) -> None:
    """Save over another file or the remains of an interrupted save."""
    path = tmp_path / "checkpoint"
    if dist.get_rank() == 0:
        if leftover == "file":
            path.write_text("a checkpoint of another kind")
        else:
            folder = path.with_suffix(leftover)
            (folder / "inside").mkdir(parents=True)
            (folder / MANIFEST).touch()
    dist.barrier()
    trainer = Trainer(ADAPTER, FOUR, "zigzag", ADAM, {})
    trainer.state.save(path)
    trainer.state.load(path)
    trainer.state.save(path)
    found = sorted(entry.name for entry in tmp_path.iterdir())
    assert found == ["checkpoint"], found


@on_every_rank
def test_other_files_are_refused_as_checkpoints(tmp_path: Path) -> None:
    trainer = Trainer(ADAPTER, FOUR, "zigzag", ADAM, {})
    other = Trainer(ADAPTER, FOUR, "zigzag", replace(ADAM, model="odd"), {})
    other.state.save(tmp_path / "foreign")
    ending(trainer.state.load, tmp_path / "foreign").check(ValueError, "another model, without blocks.0")
    (tmp_path / "file").touch()
    ending(trainer.state.save, tmp_path / "file" / "checkpoint").check(Exception)


@pytest.mark.matrix(reason="a rare state")
@on_every_rank
def test_a_checkpoint_from_before_the_first_step(tmp_path: Path) -> None:
    path, trainer = str(tmp_path / "checkpoint"), Trainer(ADAPTER, TWO, "zigzag", ADAM, {})
    trainer.state.save(path)
    resumed = load_and_resume(ADAPTER, TWO, replace(ADAM, seed=9), path, {}).losses
    torch.testing.assert_close(resumed, five_steps(trainer).losses, rtol=0, atol=0)
