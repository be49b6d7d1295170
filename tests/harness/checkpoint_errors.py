"""Checkpoint errors: every rank reports a damaged or missing checkpoint, and a path that must not be replaced."""

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
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ring_backends.errors import RingMismatchError
from ring_backends.testing.capabilities import AdapterSuite, core, requires
from ring_backends.testing.failing_calls import ODD_RANK, Ended, ending
from ring_backends.testing.rings import TWO
from ring_backends.testing.training_checkpoints import ADAM
from ring_backends.testing.training_runs import Recipe, Trainer
from ring_backends.testing.world import World
from ring_backends.training import checkpoint_files
from ring_backends.training.checkpoint_files import MANIFEST


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


def load_changed(
    adapter: str, folder: str, what: str, options: Mapping[str, Any]
) -> tuple[dict[str, Ended], set[int], bool]:
    """Load changed copies of a checkpoint, then the checkpoint, in a run with other parameters.

    Returns:
        The errors; the step counts after them; and whether the intact checkpoint restores the state.
    """
    trainer = Trainer(adapter, TWO, "contiguous", ADAM, options)
    trainer.step(0)
    whole, copy, saved = Path(folder, "whole"), Path(folder, "copy"), trainer.state.full_state_dict()
    trainer.state.save(whole)
    fresh = Trainer(adapter, TWO, "contiguous", replace(ADAM, seed=7), options)
    endings, counts = {}, set()
    for name, change in changes_of([file.relative_to(whole) for file in files_of(whole)], what, folder).items():
        dist.barrier()
        if dist.get_rank() == 0:
            (shutil.copytree if whole.is_dir() else shutil.copy)(whole, copy)
            change(copy)
        dist.barrier()
        endings[name] = ending(partial(fresh.state.load, copy))
        counts.add(fresh.state.step_count)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(copy) if copy.is_dir() else copy.unlink()
    fresh.state.load(whole)
    return endings, counts, fresh.has_state(saved)


def damage(path: Path, file: Path, how: str) -> None:
    """Flip one bit of a file of a checkpoint, or remove the file."""
    if how == "missing":
        (path / file).unlink()
        return
    content = bytearray((path / file).read_bytes())
    content[len(content) // 2] ^= 1
    (path / file).write_bytes(content)


PLACES = ("pipe", "device", "folder with a thesis")


def save_over(adapter: str, folder: str, what: str, options: Mapping[str, Any]) -> tuple[Ended, bool]:
    """Save over another file. Returns the error, and whether that file still exists."""
    path = Path(folder, what)
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
    trainer = Trainer(adapter, TWO, "contiguous", ADAM, options)
    ended = ending(lambda: trainer.state.save(path))
    dist.barrier()
    return ended, stat.S_IFMT(path.stat().st_mode) == kind and (kind != stat.S_IFDIR or (path / "thesis").is_file())


def load_from_own_folders(adapter: str, folder: str, options: Mapping[str, Any]) -> tuple[Ended, Ended, int]:
    """One rank loads another path than the other ranks, and then the same relative path in another folder."""
    trainer = Trainer(adapter, TWO, "contiguous", ADAM, options)
    for step, name in enumerate(("usual", "odd")):
        trainer.step(step)
        trainer.state.save(Path(folder, name, "checkpoint"))
    fresh = Trainer(adapter, TWO, "contiguous", replace(ADAM, seed=7), options)
    here = Path(folder, "odd" if dist.get_rank() == ODD_RANK else "usual")
    by_name = ending(lambda: fresh.state.load(here / "checkpoint"))
    before = Path.cwd()
    os.chdir(here)
    try:
        return by_name, ending(lambda: fresh.state.load("checkpoint")), fresh.state.step_count
    finally:
        os.chdir(before)


def load_nothing(adapter: str, path: str, options: Mapping[str, Any]) -> Ended:
    trainer = Trainer(adapter, TWO, "contiguous", ADAM, options)
    return ending(lambda: trainer.state.load(path))


def save_elsewhere(adapter: str, folder: str, options: Mapping[str, Any]) -> tuple[Ended, Ended, int]:
    """Save to a relative path from different working directories, then load rank 0's checkpoint."""
    trainer = Trainer(adapter, TWO, "contiguous", Recipe(dtype=torch.float32), options)
    before, there = Path.cwd(), Path(folder, str(min(1, dist.get_rank())))
    trainer.state.save(Path(folder, "0", "checkpoint"))
    trainer.step(0)
    there.mkdir(exist_ok=True)
    os.chdir(there)
    try:
        with mock.patch.object(checkpoint_files, "_SEEN_WITHIN", 1.0):
            saved = ending(lambda: trainer.state.save("checkpoint"))
    finally:
        os.chdir(before)
    return saved, ending(lambda: trainer.state.load(Path(folder, "0", "checkpoint"))), trainer.state.step_count


@core
@requires("training", "save and load")
class CheckpointErrorTests(AdapterSuite):
    @pytest.mark.parametrize("what", ["spoiled", "damaged"])
    def test_changed_checkpoints_are_refused_and_run_no_code(self, world: World, tmp_path: Path, what: str) -> None:
        options = self.framework_options
        for endings, counts, restored in world.run(
            load_changed, self.adapter, str(tmp_path), what, options, timeout=240
        ):
            for how, ended in endings.items():
                assert ended.is_a(ValueError), (how, ended)
                assert str(tmp_path / "copy") in ended.message, (how, ended)
                assert what == "damaged" or f"path = '{tmp_path / 'copy'}'" in ended.message, (how, ended)
            assert counts == {0}
            assert restored
        assert not [entry.name for entry in tmp_path.iterdir() if entry.name.startswith("made")]

    @pytest.mark.parametrize("what", PLACES)
    def test_a_path_that_is_no_checkpoint_is_not_replaced(self, world: World, tmp_path: Path, what: str) -> None:
        if what == "device" and os.geteuid() != 0:
            pytest.skip("only root makes device nodes")
        for ended, is_there in world.run(save_over, self.adapter, str(tmp_path), what, self.framework_options):
            assert ended.error in ("ValueError", "RuntimeError"), ended
            assert f"path = '{tmp_path / what}'" in ended.message, ended
            assert is_there

    def test_ranks_that_see_different_checkpoints_are_reported(self, world: World, tmp_path: Path) -> None:
        for name in ("usual", "odd"):
            (tmp_path / name).mkdir()
        outcomes = world.run(load_from_own_folders, self.adapter, str(tmp_path), self.framework_options)
        for by_name, by_content, step_count in outcomes:
            by_name.check(RingMismatchError, "odd/checkpoint")
            by_content.check(ValueError, "the ranks see different checkpoints there")
            assert step_count == 0

    def test_ranks_that_save_to_different_places_are_reported(self, world: World, tmp_path: Path) -> None:
        """If only rank 0 writes, saving succeeds. Otherwise it fails, and the earlier checkpoint survives."""
        (tmp_path / "0").mkdir()
        for saved, loaded, step_count in world.run(save_elsewhere, self.adapter, str(tmp_path), self.framework_options):
            assert loaded.error == "no error", loaded
            if saved.error != "no error":
                saved.check(ValueError, "does not see the folder")
                assert step_count == 0

    def test_a_missing_checkpoint_is_an_error(self, world: World, tmp_path: Path) -> None:
        for ended in world.run(load_nothing, self.adapter, str(tmp_path / "none"), self.framework_options):
            ended.check(ValueError)
            ended.check(FileNotFoundError, str(tmp_path / "none"))
