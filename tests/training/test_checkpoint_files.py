"""Atomic replacement of files and folders, also through symlinks and after a kill."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ring_backends.ring.ring import Ring
from ring_backends.training import checkpoint_files as files
from ring_backends.training.checkpoint_files import check_folder, check_place, find_checkpoint

ALONE = Ring()


def save(path: Path, text: str) -> None:
    files.replace_folder(ALONE, path, lambda folder: (folder / "numbers").write_text(text), {"step": 3})


def test_a_folder_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    assert find_checkpoint(ALONE, path) is None
    for text in ("one", "two"):
        save(path, text)
        assert (path / "numbers").read_text() == text
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]
    assert find_checkpoint(ALONE, path) == path


def test_a_symlink_stays_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "large disk").mkdir()
    for name, write in (("folder", lambda path: save(path, "one")),
                        ("file", lambda path: files.replace_file(path, lambda file: file.write(b"one")))):  # fmt: skip
        link, target = tmp_path / name, tmp_path / "large disk" / name
        link.symlink_to(target)
        for _ in range(2):
            write(link)
        assert link.is_symlink()
        assert target.exists()
        assert find_checkpoint(ALONE, link) == target


def save_killed(monkeypatch: pytest.MonkeyPatch, path: Path, owner: Any, name: str, number: int, *files: str) -> None:
    """Save, and be killed before a function is called for this time; if ``files`` are given, with one of them."""
    original, calls = getattr(owner, name), itertools.count(1)

    def killed(first: Path, *others: Any, **options: Any) -> None:
        if (not files or first.name in files) and next(calls) == number:
            raise KeyboardInterrupt
        original(first, *others, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, killed)
        with pytest.raises(KeyboardInterrupt):
            save(path, "two")


def test_a_kill_while_the_old_checkpoint_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next save removes the rest of the old checkpoint."""
    path = tmp_path / "checkpoint"
    save(path, "one")
    for name in ("a", "z"):
        (path / name).mkdir()
        (path / name / "more").touch()
    save_killed(monkeypatch, path, Path, "unlink", 3, "more", "numbers")
    assert (path / "numbers").read_text() == "two"
    check_place(path)
    save(path, "three")
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]


def test_a_kill_between_the_two_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint"
    save(path, "one")
    save_killed(monkeypatch, path, os, "replace", 2)
    assert not path.exists()
    left = find_checkpoint(ALONE, path)
    assert left is not None
    assert (left / "numbers").read_text() == "one"
    save(path, "three")
    assert (path / "numbers").read_text() == "three"
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]


def test_other_files_are_not_replaced(tmp_path: Path) -> None:
    pipe, documents, link, empty = (tmp_path / name for name in ("pipe", "documents", "link to documents", "empty"))
    os.mkfifo(pipe)
    documents.mkdir()
    (documents / "thesis").touch()
    link.symlink_to(documents)
    empty.mkdir()
    for path in (pipe, documents, link, Path("/dev/null"), Path("/dev/zero")):
        with pytest.raises(ValueError, match=f"path = '{path}'"):
            check_place(path)
    check_place(empty)


def test_files_at_the_temporary_path_are_not_removed(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.unfinished" / "my files").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"checkpoint\.unfinished"):
        check_place(tmp_path / "checkpoint")


def test_places_that_may_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("nothing", "file"):
        check_place(tmp_path / name)
    save(tmp_path / "folder", "one")
    check_place(tmp_path / "folder")


def test_a_damaged_or_incomplete_folder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    save(path, "one two three")
    whole = check_folder(ALONE, path)
    assert files.read_manifest(path)["step"] == 3
    (path / "numbers").write_text("one two four")
    with pytest.raises(ValueError, match="numbers is damaged"):
        check_folder(ALONE, path)
    (path / "numbers").unlink()
    with pytest.raises(ValueError, match="numbers is missing"):
        check_folder(ALONE, path)
    save(path, "four")
    assert check_folder(ALONE, path) != whole
    (path / files.MANIFEST).unlink()
    with pytest.raises(FileNotFoundError, match=files.MANIFEST):
        check_folder(ALONE, path)


class OwnNumber:
    pass


def test_numpy_numbers_are_converted_and_other_objects_are_refused() -> None:
    numpy = pytest.importorskip("numpy")
    state = {"lr": numpy.float64(0.1), "betas": (numpy.float32(0.5), 1), "names": ["a"], "on": True, "x": torch.ones(1)}
    plain = files.as_loadable(state, "state")
    assert plain == state
    assert [type(value) for value in (plain["lr"], *plain["betas"], plain["on"])] == [float, float, int, bool]
    with pytest.raises(ValueError, match=r"state\['lr'\]\[1\] is a .*OwnNumber"):
        files.as_loadable({"lr": [0.1, OwnNumber()]}, "state")
