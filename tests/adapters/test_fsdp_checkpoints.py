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

from ring_backends.errors import RingPeerError
from ring_backends.testing.failing_calls import ending
from ring_backends.testing.marks import matrix_but
from ring_backends.testing.models import TwoLayers, WithExtraState
from ring_backends.testing.rings import FOUR, TWO, ring_of
from ring_backends.testing.training_checkpoints import (
    ADAM,
    check_extra_state,
    five_steps,
    load_and_resume,
    save_and_load,
    steps_of,
)
from ring_backends.testing.training_runs import Trainer
from ring_backends.testing.world import World, on_every_rank

pytest.importorskip("numpy")  # the adapter needs NumPy

from fsdp_cases import ADAPTER, STRATEGIES, every_strategy, parallelize

from ring_backends.adapters import fsdp
from ring_backends.adapters.fsdp.sharding import Strategy
from ring_backends.training import checkpoints
from ring_backends.training.checkpoint_files import MANIFEST


@on_every_rank
def test_an_interrupted_load_does_not_blame_the_checkpoint(tmp_path: Path) -> None:
    """One rank gets Ctrl-C during load."""
    state, is_interrupted = parallelize({}, rings=TWO), dist.get_rank() == 1
    state.save(tmp_path / "checkpoint")
    interrupt = mock.patch.object(checkpoints.CheckpointPlanner, "create_local_plan", side_effect=KeyboardInterrupt)
    refused = pytest.raises(KeyboardInterrupt if is_interrupted else RingPeerError)
    with interrupt if is_interrupted else contextlib.nullcontext(), refused:
        state.load(tmp_path / "checkpoint")


TRAININGS: dict[str, tuple[str, dict[str, str]]] = {
    "native": ("ring_backends.adapters.native", {}),
    "fairscale": ("ring_backends.adapters.fairscale", {}),
    **{strategy: (ADAPTER, {"strategy": strategy}) for strategy in STRATEGIES},
}
"""Adapter and options of each training."""


READERS = (
    *(("native", "fsdp2"), ("fsdp2", "native"), ("native", "fsdp1"), ("fsdp1", "native")),
    *(("fsdp2", "fsdp1"), ("fsdp1", "hsdp"), ("hsdp", "fairscale"), ("fairscale", "fsdp2")),
)
"""The training that saves, and the one that loads."""


@pytest.mark.parametrize("pair", matrix_but(("native", "fsdp2"), ("fsdp2", "native"), of=READERS), ids=" ".join)
def test_another_adapter_or_strategy_loads_the_checkpoint(world: World, tmp_path: Path, pair: tuple[str, str]) -> None:
    for name in pair:
        pytest.importorskip(TRAININGS[name][0], exc_type=ImportError)
    (saver, options), (loader, other_options) = (TRAININGS[name] for name in pair)
    path = str(tmp_path / "checkpoint")
    uninterrupted, _ = world.run(save_and_load, saver, TWO, ADAM, path, options)[0]
    for resumed in world.run(load_and_resume, loader, TWO, replace(ADAM, seed=9), path, other_options):
        assert resumed.step_count == 2
        assert resumed.losses == pytest.approx(uninterrupted.losses, rel=1e-5)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["checkpoint"]


@pytest.mark.matrix(reason="the suite tests fsdp2 and used parameters")
@every_strategy
@on_every_rank
def test_training_resumes_with_an_unused_parameter(tmp_path: Path, strategy: Strategy) -> None:
    def go_on(state: Any, steps: int) -> list[float]:
        values = []
        for _ in range(steps):
            state.backward(state.loss((state.model(torch.ones(1, 4), 0, [0]) - 2).square().sum(), 1))
            state.step()
            values.append(float(state.full_state_dict()["layers.0.weight"].sum()))
        return values

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.1)

    ring, path = ring_of(ADAPTER, FOUR), tmp_path / "checkpoint"
    models = TwoLayers(), TwoLayers()  # one unit for both layers would also give the unused one a gradient of zeros
    first, second = (fsdp.parallelize(m, adamw, ring, strategy=strategy, blocks=[*m.layers]) for m in models)
    go_on(first, 2)
    first.save(path)
    second.load(path)
    torch.testing.assert_close(go_on(second, 3), go_on(first, 3), rtol=0, atol=0)


@every_strategy
@on_every_rank
def test_a_compiled_model_loads_its_checkpoint(tmp_path: Path, strategy: Strategy) -> None:
    model: Any = torch.compile(TwoLayers(), backend="eager")
    state = parallelize({"strategy": strategy}, model)
    saved = state.full_state_dict()
    state.save(tmp_path / "checkpoint")
    steps_of(state, 1)
    state.load(tmp_path / "checkpoint")
    torch.testing.assert_close(state.full_state_dict(), saved, rtol=0, atol=0)


@every_strategy
@on_every_rank
def test_extra_states_of_modules(tmp_path: Path, strategy: Strategy) -> None:
    model = WithExtraState({"seen": 3})
    check_extra_state(model, parallelize({"strategy": strategy}, model), tmp_path / "checkpoint")


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
    for _ in range(2):  # the second save replaces the first
        trainer.state.save(path)
        trainer.state.load(path)
    found = sorted(entry.name for entry in tmp_path.iterdir())
    assert found == ["checkpoint"], found


@on_every_rank
def test_other_files_are_refused_as_checkpoints(tmp_path: Path) -> None:
    trainer = Trainer(ADAPTER, FOUR, "zigzag", ADAM, {})
    other = Trainer(ADAPTER, FOUR, "zigzag", replace(ADAM, model="odd"), {})
    other.state.save(tmp_path / "foreign")
    ending(trainer.state.load, tmp_path / "foreign").check(
        ValueError, "it has weight, module_scale", "it lacks embedding.weight"
    )
    (tmp_path / "file").touch()
    ending(trainer.state.save, tmp_path / "file" / "checkpoint").check(Exception)


@pytest.mark.matrix(reason="a rare state")
@on_every_rank
def test_a_checkpoint_from_before_the_first_step(tmp_path: Path) -> None:
    path, trainer = str(tmp_path / "checkpoint"), Trainer(ADAPTER, TWO, "zigzag", ADAM, {})
    trainer.state.save(path)
    resumed = load_and_resume(ADAPTER, TWO, replace(ADAM, seed=9), path, {}).losses
    torch.testing.assert_close(resumed, five_steps(trainer).losses, rtol=0, atol=0)
