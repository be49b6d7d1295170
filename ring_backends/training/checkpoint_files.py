"""Training checkpoints on disk. They are written atomically, and are checked before a load.

A checkpoint is a folder. It has a manifest with the checksum of each of its files. A save replaces a file, an empty
folder or the folder of a checkpoint, but no other folder.

A folder is replaced by renaming, so that the frameworks' own tools find its files at the path that the user gave.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ring_backends.ring.collectives import FILE_TIMEOUT, agree, do_on_all, do_on_rank0, gather_texts
from ring_backends.ring.ring import Ring

MANIFEST = "ring_backends.json"
"""The manifest of a folder: the properties of the checkpoint, and its files with their checksums."""

_UNFINISHED, _REPLACED, _DISCARDED = ".unfinished", ".replaced", ".discarded"
"""The suffixes of a checkpoint that is being written, of the one that it replaces, and of one that is being removed."""

_SEEN_WITHIN = 90.0
"""Seconds after which all hosts must see a new folder. NFS caches directories for up to a minute."""

StrPath = str | os.PathLike[str]


class CheckpointNotFoundError(FileNotFoundError, ValueError):
    """There is no checkpoint at the path."""


def check_place(path: StrPath, *, name: str = "path") -> None:
    """Refuse a path at which a checkpoint would replace another folder or a special file.

    Args:
        name: name of the argument, for the error.

    Raises:
        ValueError: ``path`` is a folder that is not a checkpoint, or a special file.
    """
    path, given = Path(path).resolve(), os.fspath(path)  # replace a link's target, not the link
    for place in _places(path):
        if not place.exists() or place.is_file():
            continue
        if not place.is_dir():
            raise ValueError(f"{name} = {given!r}: {place} is a pipe, a socket or a device; give another path.")
        if any(place.iterdir()) and not (place / MANIFEST).is_file():
            raise ValueError(
                f"{name} = {given!r}: {place} is a folder but not a checkpoint, and its files would be lost; give a "
                "path inside of it, or another path."
            )


def _places(path: Path) -> list[Path]:
    return [path.with_name(path.name + ending) for ending in ("", _UNFINISHED, _REPLACED, _DISCARDED)]


def replace_file(path: StrPath, write: Callable[[IO[bytes]], object]) -> None:
    """Let ``write`` fill a file, flush it to disk, and move it to ``path``."""
    path, unfinished, *_ = _places(Path(path).resolve())
    with unfinished.open("wb+") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def replace_folder(ring: Ring, path: StrPath, write: Callable[[Path], object], holds: Mapping[str, object]) -> None:
    """Let ``write`` fill a folder on all ranks, and move the complete folder to ``path``.

    A folder cannot replace another one in a single operation. If the run is killed between the two renames, the old
    checkpoint lies beside ``path``, where :func:`~ring_backends.training.checkpoint_files.find_checkpoint` finds it.

    Args:
        holds: properties of the checkpoint for the manifest, as JSON-serializable values.
    """
    given = path
    path, unfinished, replaced, discarded = _places(Path(path).resolve())

    def prepare() -> str:
        if replaced.exists():
            os.replace(replaced, discarded if path.exists() else path)
        for leftover in (unfinished, discarded):
            _remove(leftover)
        unfinished.mkdir()
        token = secrets.token_hex(16)
        (unfinished / MANIFEST).write_text(token)  # marks the folder as one that a later save may remove
        return token

    def replace(files: Mapping[str, str]) -> None:
        with (unfinished / MANIFEST).open("w") as file:
            json.dump({**holds, "sha256": files}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            os.replace(path, replaced)
        os.replace(unfinished, path)
        if replaced.exists():
            os.replace(replaced, discarded)  # renamed first, since a folder named .replaced must be whole
        _remove(discarded)

    token = do_on_all(ring, "preparing a checkpoint", prepare if ring.rank == 0 else str)
    token, *_ = gather_texts(ring, "the token of a checkpoint", token)
    do_on_all(
        ring,
        "finding the checkpoint's folder",
        lambda: _wait_for_token(given, unfinished / MANIFEST, token),
        ValueError,
    )
    write(unfinished)
    seen = gather_texts(ring, "files of a checkpoint", json.dumps(_files_in(unfinished)), FILE_TIMEOUT, limit=None)
    names = sorted({name for text in seen for name in json.loads(text)})
    mine = do_on_all(
        ring,
        "reading a checkpoint again",
        lambda: {name: _digest_of_file(unfinished / name, to_disk=True) for name in names[ring.rank :: ring.size]},
    )
    files: dict[str, str] = {}
    for text in gather_texts(ring, "checksums of a checkpoint", json.dumps(mine), FILE_TIMEOUT, limit=None):
        files |= json.loads(text)
    do_on_rank0(ring, "saving a checkpoint", lambda: replace(files))


def _wait_for_token(given: StrPath, manifest: Path, token: str) -> None:
    """Wait until this rank sees the folder that rank 0 has made, which a network file system may delay."""
    end = time.monotonic() + _SEEN_WITHIN
    while not (manifest.is_file() and manifest.read_text() == token):
        if time.monotonic() > end:
            raise ValueError(
                f"path = {os.fspath(given)!r}: this rank does not see the folder {manifest.parent} that rank 0 has "
                "made; give an absolute path on a file system that all hosts share."
            )
        time.sleep(0.05)


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a folder.

    Raises:
        CheckpointNotFoundError: the folder is not a checkpoint.
        ValueError: the manifest is damaged.
    """
    if not (path / MANIFEST).is_file():
        found = "a folder without it" if path.is_dir() else "a file"
        raise CheckpointNotFoundError(
            f"path = {os.fspath(path)!r}: expected a checkpoint, which is a folder with a {MANIFEST}; found {found}; "
            "give a path that save() wrote."
        )
    manifest = json.loads((path / MANIFEST).read_text())
    if not isinstance(manifest, dict) or not isinstance(manifest.get("sha256"), dict):
        raise ValueError(f"{MANIFEST} is not the manifest of a checkpoint")
    return manifest


def check_folder(ring: Ring, path: Path) -> str:
    """Check this rank's share of a folder's files against their checksums.

    Returns:
        A digest of the content of all files.

    Raises:
        ValueError: a file is damaged or missing, or the folder is not a checkpoint.
    """
    checksums = read_manifest(path)["sha256"]
    for name in sorted(checksums)[ring.rank :: ring.size]:
        if not (path / name).is_file():
            raise ValueError(f"{name} is missing")
        if _digest_of_file(path / name) != checksums[name]:
            raise ValueError(f"{name} is damaged: its checksum is not the one in {MANIFEST}")
    return hashlib.blake2b(json.dumps(checksums, sort_keys=True).encode(), digest_size=16).hexdigest()


def find_checkpoint(ring: Ring, path: StrPath) -> Path | None:
    """Where rank 0 sees the checkpoint: at ``path``, beside it if a save was killed, or None."""
    place, _, replaced, _ = _places(Path(path).resolve())
    places = [place, replaced]
    found = next((index for index, place in enumerate(places) if place.exists()), len(places))
    by_rank = agree(ring, "finding a checkpoint", None, [found])
    return [*places, None][int(by_rank[0][0])]


def as_loadable(value: object, name: str) -> Any:
    """Convert a value of a checkpoint to one that ``torch.load(weights_only=True)`` accepts.

    NumPy numbers become Python numbers.

    Args:
        value: tensors, numbers, strings, and lists, tuples and dicts of these.
        name: name of the value, for the error.

    Raises:
        ValueError: ``value`` has another type. It could be saved, but not loaded.
    """
    if value is None or isinstance(value, (Tensor, bool, torch.dtype, torch.device, torch.Size)):
        return value
    if isinstance(value, Mapping):
        plain = {as_loadable(key, f"a key of {name}"): as_loadable(x, f"{name}[{key!r}]") for key, x in value.items()}
        return OrderedDict(plain) if isinstance(value, OrderedDict) else plain
    if isinstance(value, (list, tuple)):
        items = [as_loadable(x, f"{name}[{index}]") for index, x in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    number: Any = value
    if type(value).__module__.partition(".")[0] == "numpy" and getattr(value, "ndim", None) == 0:
        number = number.item()
    kinds: tuple[Any, ...] = (bool, int, float, complex, str, bytes)
    for kind in kinds:
        if isinstance(number, kind):
            return kind(number)
    raise ValueError(
        f"{name} is a {type(value).__module__}.{type(value).__qualname__}: it could be saved, but not loaded again; "
        "make it a number, a string, a tensor, or a list, tuple or dict of these."
    )


def is_not_caused_by_content(error: BaseException) -> bool:
    """Whether reading failed for a reason other than the content of the file.

    torch raises an OSError with EINVAL for a file that was cut off.
    """
    if isinstance(error, OSError):
        return error.errno != errno.EINVAL
    return not isinstance(error, Exception) or isinstance(error, (MemoryError, torch.OutOfMemoryError, dist.DistError))


def _files_in(folder: Path) -> list[str]:
    files = (file for file in folder.rglob("*") if file.is_file() and file != folder / MANIFEST)
    return sorted(file.relative_to(folder).as_posix() for file in files)


def _digest_of_file(path: Path, *, to_disk: bool = False) -> str:
    """SHA-256 of a file. With ``to_disk``, flush the file to disk first."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if to_disk:
            os.fsync(file.fileno())
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        # Remove the manifest last: a folder with a manifest can still be removed if the process is killed now.
        for inside in sorted(path.iterdir()):
            if inside.name != MANIFEST:
                _remove(inside)
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
