"""Training checkpoints: a resumed training equals an uninterrupted one, and bad checkpoints and paths are refused."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ring_backends.errors import RingMismatchError
from ring_backends.testing.capabilities import core, requires
from ring_backends.testing.failing_calls import ODD_RANK, ending
from ring_backends.testing.marks import THOROUGH, matrix_but
from ring_backends.testing.models import TwoLayers, WithExtraState, randomize
from ring_backends.testing.rings import FOUR, TWO, TWO_OF_TWO, RingSpec
from ring_backends.testing.training_runs import Precision, Recipe, State, Trainer, TrainingSuite, every_precision
from ring_backends.testing.world import World, on_every_rank
from ring_backends.training import checkpoint_files
from ring_backends.training.checkpoint_files import MANIFEST

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


class Intruder:
    """Creates a directory when it is unpickled."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def __reduce__(self) -> Any:
        return os.mkdir, (self.directory,)


SPOILED = ("cut off", "text", "cut off and signed", "text and signed", "pickle with code", "torch file with code")
"""Damaged checkpoints. A signed one has valid checksums, as an attacker would provide."""


def files_of(checkpoint: Path) -> list[Path]:
    return sorted(file for file in checkpoint.rglob("*") if file.is_file())


def spoil(path: Path, how: str, made: str) -> None:
    """Damage all files of a checkpoint, except those that locate it."""
    is_signed = how.endswith(("signed", "code"))
    for file in files_of(path):
        if file.name == "latest" or (is_signed and file.name == MANIFEST):
            continue
        if how.startswith("cut off"):
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        elif how.startswith("text"):
            file.write_text("This is no checkpoint.")
        elif how == "pickle with code":
            file.write_bytes(pickle.dumps({"model": Intruder(made)}))
        else:
            with file.open("wb") as opened:
                torch.save({"model": Intruder(made)}, opened)
    if is_signed:
        sign(path)


def sign(path: Path) -> None:
    """Write valid checksums into a damaged checkpoint."""
    manifest = json.loads((path / MANIFEST).read_text())
    for name in manifest["sha256"]:
        manifest["sha256"][name] = hashlib.sha256((path / name).read_bytes()).hexdigest()
    (path / MANIFEST).write_text(json.dumps(manifest))


def changes_of(files: Sequence[Path], what: str, folder: str) -> dict[str, Callable[[Path], None]]:
    """Functions that change a copy of a checkpoint, by what they do. ``files`` are relative to the checkpoint."""
    if what == "spoiled":
        return {how: partial(spoil, how=how, made=str(Path(folder, f"made by {how}"))) for how in SPOILED}
    ways = ("damaged", "missing")
    return {f"{file} {how}": partial(damage, file=file, how=how) for file in files for how in ways}


def damage(path: Path, file: Path, how: str) -> None:
    """Flip one bit of a file of a checkpoint, or remove the file."""
    if how == "missing":
        (path / file).unlink()
        return
    content = bytearray((path / file).read_bytes())
    content[len(content) // 2] ^= 1
    (path / file).write_bytes(content)


def adam_of(model: nn.Module, how: str) -> Callable[[Any], torch.optim.Optimizer]:
    """A ``make_optimizer`` of the trained parameters: one group in the model's order, or a group for biases."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if how == "the model's":
            return torch.optim.Adam(named.values(), lr=0.02)
        groups = [
            {"params": [named[name] for name in named if "bias" not in name], "lr": 0.02},
            {"params": [named[name] for name in named if "bias" in name], "lr": 0.5},
        ]
        return torch.optim.Adam(groups[:: -1 if how == "biases first" else 1])

    return make


ORDERS = {
    "model": ((0, 1), "the model's", (1, 0), "the model's"),
    "groups": ((0, 1), "biases last", (1, 0), "biases first"),
    "tied": ((0, 1), "the model's", (1, 0), "the model's"),
}
"""The order of layers and the optimizer of the run that saves, and of the one that loads."""


def steps_of(state: Any, number: int) -> State:
    """Take steps of :class:`TwoLayers`. Returns the full state."""
    for _ in range(number):
        x = torch.full((2, 4), 0.3 * (1 + state.step_count + dist.get_rank()))
        state.backward(state.loss((state.model(x, 0) - 2).square().sum(), 8))
        state.step()
    found: State = state.full_state_dict()
    return found


def check_extra_state(model: WithExtraState, state: Any, path: Path) -> None:
    """Check that the state {"seen": 3} of a module is saved, and a state that cannot be loaded is refused."""
    assert state.full_state_dict()["_extra_state"] == {"seen": 3}
    state.save(path)
    model.extra = {"seen": 0}
    state.load(path)
    assert model.extra == {"seen": 3}
    model.extra = len
    ending(state.save, path).check(ValueError, "state_dict['_extra_state'] is a builtins.builtin_function_or_method")


class Built(nn.Module):
    """A model whose parts depend on the arguments. It trains its layers, except that it may freeze one of them."""

    def __init__(
        self,
        layers: int = 2,
        bias: bool = True,
        buffer: bool = True,
        dtype: torch.dtype = torch.float32,
        shape: tuple[int, int] = (4, 2),
        tied: bool = False,
        frozen: bool = False,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*shape, bias=bias, dtype=dtype) for _ in range(layers))
        if buffer:
            self.register_buffer("scale", torch.ones(2))
        if tied:
            self.get_submodule("layers.1").weight = self.get_parameter("layers.0.weight")
        self.layers[0].requires_grad_(not frozen)
        randomize(self.named_parameters(), 4)
        self.to(dtype)


MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"layers": 3}, "layers.2.weight"),
    "biases": ({"bias": False}, "layers.0.bias"),
    "buffer": ({"buffer": False}, "scale"),
    "dtype": ({"dtype": torch.bfloat16}, "layers.0.weight: torch."),
    "shape": ({"shape": (2, 4)}, "layers.0.weight: torch.float32 ["),
    "tied": ({"tied": True}, "layers.1.weight"),
    "frozen": ({"frozen": True}, "layers.0.weight"),
}
"""Differences from ``Built()``, and a text of the error."""

LACKING = {"tied parameters": "tied", "frozen parameters": "frozen"}
"""The models that an adapter without a capability does not train."""


@requires("training", "save and load")
class TrainingCheckpointTests(TrainingSuite):
    @pytest.mark.parametrize(
        "what", ["model", "groups", pytest.param("tied", marks=pytest.mark.requires("tied parameters"))]
    )
    @on_every_rank
    def test_parameters_in_another_order_get_their_own_states(self, what: str, tmp_path: Path) -> None:
        """Models and optimizers with the same parameters in another order: two steps more, or a refusal by name."""
        layers, optimizer, other_layers, other_optimizer = ORDERS[what]
        models = [TwoLayers(places, what == "tied") for places in (layers, other_layers)]
        made = [adam_of(model, how) for model, how in zip(models, (optimizer, other_optimizer), strict=True)]
        first, second = (self.parallelize(*arguments) for arguments in zip(models, made, strict=True))
        steps_of(first, 2)
        first.save(tmp_path / "checkpoint")
        before = steps_of(second, 1)
        ended = ending(second.load, tmp_path / "checkpoint")
        if "another order of parameters" in self.without:
            ended.check(ValueError, "layers.0.bias (number ", ", and number ")
            torch.testing.assert_close(second.full_state_dict(), before, rtol=0, atol=0)
            return
        assert ended.error == "no error", ended
        wanted, got = (steps_of(state, 2) for state in (first, second))
        torch.testing.assert_close({name: got[name] for name in wanted}, wanted, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("saves", [True, False], ids=["saves", "loads"])
    @on_every_rank
    def test_the_checkpoint_of_another_model_is_refused_by_name(self, saves: bool, tmp_path: Path) -> None:
        """Each of the other models saves, or loads. A refusal changes neither model nor optimizer."""

        def state_of(**changes: Any) -> Any:
            model = Built(**changes)
            return self.parallelize(model, adam_of(model, "the model's"))

        usual, lacking = state_of(), {name for capability, name in LACKING.items() if capability in self.without}
        usual.save(tmp_path / "usual")
        for name in (name for name in MODELS if name not in lacking):
            changes, text = MODELS[name]
            other, path = state_of(**changes), tmp_path / (name if saves else "usual")
            if saves:
                other.save(path)
            state = usual if saves else other
            before = state.full_state_dict(), len(state.optimizer.state)
            ending(state.load, path).check(ValueError, f"path = '{path}'", text)
            after = state.full_state_dict(), len(state.optimizer.state)
            torch.testing.assert_close(after, before, rtol=0, atol=0)

    @requires("frozen parameters")
    @on_every_rank
    def test_the_states_of_frozen_parameters_are_kept(self, tmp_path: Path) -> None:
        """A run whose second layer is frozen loads a checkpoint and saves it again."""

        def state_of(is_frozen: bool) -> Any:
            model = TwoLayers()
            model.get_submodule("layers.1").requires_grad_(not is_frozen)
            return self.parallelize(model, partial(torch.optim.Adam, lr=0.02))

        first, frozen, last = state_of(False), state_of(True), state_of(False)
        steps_of(first, 2)
        first.save(tmp_path / "first")
        ended = ending(frozen.load, tmp_path / "first")
        if "another order of parameters" in self.without:
            ended.check(ValueError, "layers.1.weight (number 2 of parameter group 0, and not there)")
            return
        frozen.save(tmp_path / "again")
        last.load(tmp_path / "again")
        torch.testing.assert_close(steps_of(last, 2), steps_of(first, 2), rtol=1e-5, atol=1e-6)

    @every_precision
    @pytest.mark.parametrize("rings", matrix_but(TWO, of=(FOUR, TWO)), ids=["1x4", "2x2"])
    @on_every_rank
    def test_training_resumes_from_a_checkpoint(self, rings: RingSpec, precision: Precision, tmp_path: Path) -> None:
        recipe, path = replace(ADAM, dtype=precision.dtype), str(tmp_path / "checkpoint")
        uninterrupted, resumed = save_and_load(self.adapter, rings, recipe, path, self.framework_options)
        torch.testing.assert_close(resumed, uninterrupted, rtol=0, atol=0)
        assert resumed.step_count == 2, resumed
        assert len(set(resumed.losses)) == 5, resumed.losses
        assert list(resumed.state) == list(uninterrupted.state)
        assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]

    @on_every_rank
    def test_loading_during_a_step_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "it"
        trainer = self.trainer(Recipe(dtype=torch.float32), FOUR)
        trainer.state.save(path)
        saved = trainer.state.full_state_dict()
        ((tokens, labels),) = trainer.micro_batches(0)
        trainer.state.backward(trainer.loss(tokens, labels, None))
        ending(trainer.state.load, path).check(RuntimeError, "load() after 1 backward calls")
        trainer.state.step()
        trainer.state.load(path)
        trainer.check_state(saved)

    @THOROUGH
    @core
    @requires("another ring size")
    def test_a_checkpoint_resumes_with_another_ring_size(self, world: World, pair: World, tmp_path: Path) -> None:
        path, options = str(tmp_path / "checkpoint"), self.framework_options
        uninterrupted, _ = world.run(save_and_load, self.adapter, FOUR, ADAM, path, options)[0]
        elsewhere = replace(ADAM, seed=99)
        for resumed in pair.run(load_and_resume, self.adapter, TWO_OF_TWO, elsewhere, path, options, FOUR):
            assert resumed.step_count == 2
            assert resumed.losses == pytest.approx(uninterrupted.losses, rel=1e-5)

    @pytest.mark.skipif(find_spec("numpy") is None, reason="needs NumPy")
    @pytest.mark.parametrize("kind", ["number of NumPy", "object", "object on one rank"])
    @on_every_rank
    def test_saved_settings_can_be_loaded(self, tmp_path: Path, kind: str) -> None:
        """An optimizer setting of an unusual type, on all ranks or on one rank only."""
        numpy = import_module("numpy")  # mypy also runs in environments without NumPy
        setting = numpy.float64(0.25) if kind == "number of NumPy" else object()
        if kind == "object on one rank" and dist.get_rank() != ODD_RANK:
            setting = 0.25
        path, trainer = tmp_path / "checkpoint", self.trainer(ADAM)
        trainer.step(0)
        name = "lr" if kind == "number of NumPy" else "decay"
        for group in trainer.state.optimizer.param_groups:
            group[name] = setting
        ended = ending(trainer.state.save, path)
        dist.barrier()
        if kind != "number of NumPy":
            ended.check(ValueError, "param_groups[0]['decay'] is a builtins.object")
            assert not path.exists()
            return
        assert ended.error == "no error", ended
        resumed = self.trainer(ADAM)
        resumed.state.load(path)
        loaded = {(group["lr"], type(group["lr"])) for group in resumed.state.optimizer.param_groups}
        assert loaded == {(0.25, float)}, loaded

    @on_every_rank
    def test_another_version_is_refused(self, tmp_path: Path) -> None:
        path, state = tmp_path / "checkpoint", self.parallelize()
        state.save(path)
        dist.barrier()
        if dist.get_rank() == 0:
            manifest = json.loads((path / MANIFEST).read_text())
            manifest["contents"]["version"] = 2
            (path / MANIFEST).write_text(json.dumps(manifest))
        dist.barrier()
        text = "it has version 2 of the format, but this version of ring_backends reads version 3"
        ending(state.load, path).check(ValueError, f"path = '{path}'", text)

    @on_every_rank
    def test_loading_replaces_the_states_of_an_optimizer(self, tmp_path: Path) -> None:
        """Load a checkpoint from before the first step after a step."""
        first, second = (self.parallelize(TwoLayers(), partial(torch.optim.Adam, lr=0.02)) for _ in range(2))
        first.save(tmp_path / "checkpoint")
        steps_of(second, 1)
        second.load(tmp_path / "checkpoint")
        torch.testing.assert_close(steps_of(second, 2), steps_of(first, 2), rtol=1e-5, atol=1e-6)

    @on_every_rank
    def test_settings_that_keep_other_states(self, tmp_path: Path) -> None:
        """An optimizer without momentum loads the state and the settings of one with momentum."""
        first, second = (
            self.parallelize(TwoLayers(), partial(torch.optim.SGD, lr=0.02, momentum=momentum)) for momentum in (0.9, 0)
        )
        steps_of(first, 2)
        first.save(tmp_path / "checkpoint")
        ended = ending(second.load, tmp_path / "checkpoint")
        assert ended.error == "no error", ended
        torch.testing.assert_close(steps_of(second, 2), steps_of(first, 2), rtol=1e-5, atol=1e-6)

    @on_every_rank
    def test_the_state_of_another_optimizer_is_refused(self, tmp_path: Path) -> None:
        path, trainer = str(tmp_path / "checkpoint"), self.trainer(ADAM)
        trainer.step(0)
        trainer.state.save(path)
        other = self.trainer(replace(ADAM, optimizer="momentum"))
        ending(other.state.load, path).check(ValueError, f"path = '{path}'", "state of optimizer Adam", "returned SGD")


@core
@requires("training", "save and load")
class CheckpointErrorTests(TrainingSuite):
    @pytest.mark.parametrize("what", matrix_but("damaged", of=("spoiled", "damaged")))
    @on_every_rank
    def test_changed_checkpoints_are_refused_and_run_no_code(self, tmp_path: Path, what: str) -> None:
        """Load changed copies of a checkpoint, then the checkpoint, in a run with other parameters."""
        trainer = self.trainer(ADAM)
        trainer.step(0)
        whole, copy, saved = tmp_path / "whole", tmp_path / "copy", trainer.state.full_state_dict()
        trainer.state.save(whole)
        fresh = self.trainer(replace(ADAM, seed=7))
        files = [file.relative_to(whole) for file in files_of(whole)]
        for name, change in changes_of(files, what, str(tmp_path)).items():
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.copytree(whole, copy)
                change(copy)
            dist.barrier()
            ended = ending(fresh.state.load, copy)
            text = f"path = '{copy}'" if what == "spoiled" else str(copy)
            assert ended.is_a(ValueError), (name, ended)
            assert text in ended.message, (name, ended)
            assert fresh.state.step_count == 0, name
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(copy)
        fresh.state.load(whole)
        fresh.check_state(saved)
        assert not [*tmp_path.glob("made*")], "code of a checkpoint was run"

    @pytest.mark.parametrize(
        "what",
        [
            "pipe",
            pytest.param("device", marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root makes device nodes")),
            "folder with a thesis",
        ],
    )
    @on_every_rank
    def test_a_path_that_is_no_checkpoint_is_not_replaced(self, tmp_path: Path, what: str) -> None:
        path = tmp_path / what
        if dist.get_rank() == 0:
            if what == "pipe":
                os.mkfifo(path)
            elif what == "device":
                os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
            else:
                path.mkdir()
                (path / "thesis").touch()
        dist.barrier()
        kind = stat.S_IFMT(path.stat().st_mode)
        ended = ending(self.trainer(ADAM).state.save, path)
        dist.barrier()
        assert ended.error in ("ValueError", "RuntimeError"), ended
        assert f"path = '{path}'" in ended.message, ended
        assert stat.S_IFMT(path.stat().st_mode) == kind
        assert kind != stat.S_IFDIR or (path / "thesis").is_file()

    @on_every_rank
    def test_ranks_that_see_different_checkpoints_are_reported(self, tmp_path: Path) -> None:
        """One rank loads another path than the other ranks, and then the same relative path in another folder."""
        trainer = self.trainer(ADAM)
        for step, name in enumerate(("usual", "odd")):
            trainer.step(step)
            (tmp_path / name).mkdir(exist_ok=True)
            trainer.state.save(tmp_path / name / "checkpoint")
        fresh = self.trainer(replace(ADAM, seed=7))
        here = tmp_path / ("odd" if dist.get_rank() == ODD_RANK else "usual")
        ending(fresh.state.load, here / "checkpoint").check(RingMismatchError, "odd/checkpoint")
        with pytest.MonkeyPatch.context() as process:
            process.chdir(here)
            ending(fresh.state.load, "checkpoint").check(ValueError, "the ranks see different checkpoints there")
        assert fresh.state.step_count == 0

    @on_every_rank
    def test_ranks_that_save_to_different_places_are_reported(self, tmp_path: Path) -> None:
        """If only rank 0 writes, saving succeeds. Otherwise it fails, and the earlier checkpoint survives."""
        trainer, there = self.trainer(Recipe(dtype=torch.float32)), tmp_path / str(min(1, dist.get_rank()))
        (tmp_path / "0").mkdir(exist_ok=True)
        trainer.state.save(tmp_path / "0" / "checkpoint")
        trainer.step(0)
        there.mkdir(exist_ok=True)
        with pytest.MonkeyPatch.context() as process:
            process.chdir(there)
            process.setattr(checkpoint_files, "_SEEN_WITHIN", 1.0)
            saved = ending(trainer.state.save, "checkpoint")
        trainer.state.load(tmp_path / "0" / "checkpoint")
        if saved.error != "no error":
            saved.check(ValueError, "does not see the folder")
            assert trainer.state.step_count == 0

    @on_every_rank
    def test_other_types_of_paths_are_refused(self) -> None:
        state = self.parallelize()
        for path in (None, b"checkpoint"):
            for call in (state.save, state.load, state.has_checkpoint):
                ending(call, path).check(TypeError, f"path = {path!r}: expected a str or an os.PathLike")

    @on_every_rank
    def test_what_is_no_checkpoint_is_refused_by_name(self, tmp_path: Path) -> None:
        state, file = self.trainer(ADAM).state, tmp_path / "file"
        file.touch()
        for path, text in (
            (tmp_path / "none", "there is no checkpoint"),
            (file, f"expected a checkpoint, which is a folder with a {MANIFEST}; found a file"),
            (tmp_path, f"expected a checkpoint, which is a folder with a {MANIFEST}; found a folder without it"),
        ):
            ended = ending(state.load, path)
            ended.check(ValueError)
            ended.check(FileNotFoundError, f"path = '{path}'", text)
