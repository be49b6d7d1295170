"""Files and folders that take another's place: whole or not at all, also through links, and after a kill in between."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ring_backends.training import find_checkpoint, replace_file, replace_folder


def fill(text: str):
    def write(folder: Path) -> None:
        folder.mkdir()
        (folder / "numbers").write_text(text)

    return write


def test_a_folder_takes_the_place_of_another(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    for text in ("one", "two"):
        replace_folder(path, fill(text))
        assert (path / "numbers").read_text() == text
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]
    assert find_checkpoint(path) == path


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "large disk").mkdir()
    for name, save in (("folder", lambda path: replace_folder(path, fill("one"))),
                       ("file", lambda path: replace_file(path, lambda file: file.write(b"one")))):  # fmt: skip
        link, target = tmp_path / name, tmp_path / "large disk" / name
        link.symlink_to(target)
        for _ in range(2):
            save(link)
        assert link.is_symlink()
        assert target.exists()
        assert find_checkpoint(link) == target


def test_a_kill_between_the_two_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint"
    replace_folder(path, fill("one"))
    rename, num_renames = os.replace, 0

    def killed(*names: Path) -> None:
        nonlocal num_renames
        num_renames += 1
        if num_renames == 2:
            raise KeyboardInterrupt
        rename(*names)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        replace_folder(path, fill("two"))
    monkeypatch.undo()
    assert not path.exists()
    left = find_checkpoint(path)
    assert left is not None
    assert (left / "numbers").read_text() == "one"
    replace_folder(path, fill("three"))
    assert (path / "numbers").read_text() == "three"
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]


def test_nothing_is_found_where_nothing_was_saved(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path / "checkpoint") is None
