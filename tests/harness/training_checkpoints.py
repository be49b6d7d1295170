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

from ring_backends.errors import RingMismatchError
from ring_backends.testing.capabilities import core, requires
from ring_backends.testing.failing_calls import ODD_RANK, ending
from ring_backends.testing.marks import THOROUGH, matrix_but
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
    files = [checkpoint] if checkpoint.is_file() else [file for file in checkpoint.rglob("*") if file.is_file()]
    return sorted(files)


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
    if path.is_file():
        content = path.read_bytes().removesuffix(b"\0\0")
        comment = b"sha256=" + hashlib.sha256(content).hexdigest().encode()
        path.write_bytes(content + len(comment).to_bytes(2, "little") + comment)
    elif (path / MANIFEST).is_file():
        manifest = json.loads((path / MANIFEST).read_text())
        for name in manifest["sha256"]:
            manifest["sha256"][name] = hashlib.sha256((path / name).read_bytes()).hexdigest()
        (path / MANIFEST).write_text(json.dumps(manifest))


def changes_of(files: Sequence[Path], what: str, folder: str) -> dict[str, Callable[[Path], None]]:
    """Functions that change a copy of a checkpoint, by what they do. ``files`` are relative to the checkpoint."""
    if what == "spoiled":
        return {how: partial(spoil, how=how, made=str(Path(folder, f"made by {how}"))) for how in SPOILED}
    ways = ("damaged",) if files == [Path(".")] else ("damaged", "missing")
    return {f"{file} {how}": partial(damage, file=file, how=how) for file in files for how in ways}


def damage(path: Path, file: Path, how: str) -> None:
    """Flip one bit of a file of a checkpoint, or remove the file."""
    if how == "missing":
        (path / file).unlink()
        return
    content = bytearray((path / file).read_bytes())
    content[len(content) // 2] ^= 1
    (path / file).write_bytes(content)


@requires("training", "save and load")
class TrainingCheckpointTests(TrainingSuite):
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
                (shutil.copytree if whole.is_dir() else shutil.copy)(whole, copy)
                change(copy)
            dist.barrier()
            ended = ending(fresh.state.load, copy)
            text = f"path = '{copy}'" if what == "spoiled" else str(copy)
            assert ended.is_a(ValueError), (name, ended)
            assert text in ended.message, (name, ended)
            assert fresh.state.step_count == 0, name
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(copy) if copy.is_dir() else copy.unlink()
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
    def test_a_missing_checkpoint_is_an_error(self, tmp_path: Path) -> None:
        ended = ending(self.trainer(ADAM).state.load, tmp_path / "none")
        ended.check(ValueError)
        ended.check(FileNotFoundError, str(tmp_path / "none"))
