"""Training checkpoints: a resumed training equals an uninterrupted one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from ring_backends.testing.capabilities import AdapterSuite, core, requires
from ring_backends.testing.failing_calls import ODD_RANK, Ended, ending
from ring_backends.testing.marks import matrix_but
from ring_backends.testing.rings import FOUR, TWO, TWO_OF_TWO, RingSpec
from ring_backends.testing.training_runs import Precision, Recipe, State, Trainer, every_precision
from ring_backends.testing.world import World

ADAM = Recipe(dtype=torch.float32, optimizer="adam", rate=0.02)


class Stretch(NamedTuple):
    """Steps of one rank: the number of earlier steps, the whole-batch loss of each step, and the final state."""

    step_count: int
    losses: list[float]
    state: State


def five_steps(trainer: Trainer) -> Stretch:
    step_count = trainer.state.step_count
    losses = [trainer.step(step) for step in range(step_count, step_count + 5)]
    return Stretch(step_count, losses, trainer.state.full_state_dict())


def save_and_load(
    adapter: str, rings: RingSpec, recipe: Recipe, path: str, options: Mapping[str, Any]
) -> tuple[Stretch, Stretch]:
    """Take two steps, save, and take five more. Returns these five, and those of a run that loads the checkpoint."""
    trainer = Trainer(adapter, rings, "zigzag", recipe, options)
    for step in range(2):
        trainer.step(step)
    trainer.state.save(path)
    uninterrupted = five_steps(trainer)
    return uninterrupted, load_and_resume(adapter, rings, replace(recipe, seed=99), path, options)


def load_and_resume(
    adapter: str,
    rings: RingSpec,
    recipe: Recipe,
    path: str,
    options: Mapping[str, Any],
    batches_of: RingSpec | None = None,
) -> Stretch:
    """Load a checkpoint in a run with other initial parameters, and take five steps."""
    trainer = Trainer(adapter, rings, "zigzag", recipe, options, batches_of)
    trainer.step(7)
    trainer.state.load(path)
    return five_steps(trainer)


def load_during_a_step(adapter: str, path: str, options: Mapping[str, Any]) -> tuple[Ended, bool]:
    """Call load() between backward() and step(). Returns the error, and whether a load after the step restores."""
    trainer = Trainer(adapter, FOUR, "contiguous", Recipe(dtype=torch.float32), options)
    trainer.state.save(path)
    saved = trainer.state.full_state_dict()
    ((tokens, labels),) = trainer.micro_batches(0)
    trainer.state.backward(trainer.loss(tokens, labels, None))
    refused = ending(lambda: trainer.state.load(path))
    trainer.state.step()
    trainer.state.load(path)
    return refused, trainer.has_state(saved)


def save_a_setting(adapter: str, path: str, kind: str, options: Mapping[str, Any]) -> tuple[Ended, list[Any], bool]:
    """Save an optimizer setting of an unusual type on all ranks, or on one rank only.

    Returns:
        How the save ended; the settings that a new run loads; and whether a checkpoint exists.
    """
    numpy = import_module("numpy")  # mypy also runs in environments without NumPy
    settings: dict[str, Any] = {"number of NumPy": numpy.float64(0.25), "object": object(), "object on one rank": 0.25}
    setting = object() if "one rank" in kind and dist.get_rank() == ODD_RANK else settings[kind]
    trainer = Trainer(adapter, TWO, "contiguous", ADAM, options)
    trainer.step(0)
    name = "lr" if kind == "number of NumPy" else "decay"
    for group in trainer.state.optimizer.param_groups:
        group[name] = setting
    ended = ending(lambda: trainer.state.save(path))
    dist.barrier()
    if ended.error != "no error":
        return ended, [], Path(path).exists()
    resumed = Trainer(adapter, TWO, "contiguous", ADAM, options)
    resumed.state.load(path)
    return ended, [group[name] for group in resumed.state.optimizer.param_groups], Path(path).exists()


def load_another_optimizer(adapter: str, path: str, options: Mapping[str, Any]) -> Ended:
    trainer = Trainer(adapter, TWO, "contiguous", ADAM, options)
    trainer.step(0)
    trainer.state.save(path)
    other = Trainer(adapter, TWO, "contiguous", replace(ADAM, optimizer="momentum"), options)
    return ending(lambda: other.state.load(path))


@requires("training", "save and load")
class TrainingCheckpointTests(AdapterSuite):
    @every_precision
    @pytest.mark.parametrize("rings", matrix_but(TWO, of=(FOUR, TWO)), ids=["1x4", "2x2"])
    def test_training_resumes_from_a_checkpoint(
        self, world: World, rings: RingSpec, precision: Precision, tmp_path: Path
    ) -> None:
        recipe = Recipe(dtype=precision.dtype, optimizer="adam", rate=0.02)
        path = str(tmp_path / "checkpoint")
        options = self.framework_options
        for uninterrupted, resumed in world.run(save_and_load, self.adapter, rings, recipe, path, options):
            assert (uninterrupted.step_count, resumed.step_count) == (2, 2)
            assert resumed.losses == uninterrupted.losses
            assert len(set(resumed.losses)) == 5
            assert list(resumed.state) == list(uninterrupted.state)
            for name, tensor in uninterrupted.state.items():
                assert torch.equal(resumed.state[name], tensor), name
        assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]

    def test_loading_during_a_step_is_refused(self, world: World, tmp_path: Path) -> None:
        options = self.framework_options
        for refused, restored in world.run(load_during_a_step, self.adapter, str(tmp_path / "it"), options):
            refused.check(RuntimeError, "load() after 1 backward calls")
            assert restored

    @core
    @requires("another ring size")
    def test_a_checkpoint_resumes_with_another_ring_size(self, world: World, pair: World, tmp_path: Path) -> None:
        recipe = Recipe(dtype=torch.float32, optimizer="adam", rate=0.02)
        path, options = str(tmp_path / "checkpoint"), self.framework_options
        uninterrupted, _ = world.run(save_and_load, self.adapter, FOUR, recipe, path, options)[0]
        elsewhere = replace(recipe, seed=99)
        for resumed in pair.run(load_and_resume, self.adapter, TWO_OF_TWO, elsewhere, path, options, FOUR):
            assert resumed.step_count == 2
            assert resumed.losses == pytest.approx(uninterrupted.losses, rel=1e-5)

    @pytest.mark.parametrize("kind", ["number of NumPy", "object", "object on one rank"])
    def test_saved_settings_can_be_loaded(self, world: World, tmp_path: Path, kind: str) -> None:
        pytest.importorskip("numpy")
        path = str(tmp_path / "checkpoint")
        for ended, settings, exists in world.run(save_a_setting, self.adapter, path, kind, self.framework_options):
            if kind == "number of NumPy":
                assert ended.error == "no error", ended
                assert {(setting, type(setting)) for setting in settings} == {(0.25, float)}
            else:
                ended.check(ValueError, "param_groups[0]['decay'] is a builtins.object")
            assert exists == (kind == "number of NumPy")

    def test_the_state_of_another_optimizer_is_refused(self, world: World, tmp_path: Path) -> None:
        path = str(tmp_path / "checkpoint")
        for ended in world.run(load_another_optimizer, self.adapter, path, self.framework_options):
            ended.check(ValueError, f"path = '{path}'", "state of optimizer Adam", "returned SGD")
