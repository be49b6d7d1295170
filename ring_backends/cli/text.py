"""The document that ``train`` reads: the bytes of files, cut into windows.

All ranks agree on the windows without communication. A rank reads from disk only the windows that it needs. The last
window is held out for the evaluation loss.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path

SKIPPED_DIRECTORIES = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


def standard_library_sources() -> list[Path]:
    """The ``*.py`` files of the running Python's standard library, sorted by POSIX path.

    Installed packages and the tests of the library are left out.

    Raises:
        ValueError: the standard library has no ``*.py`` files on disk.
    """
    root = Path(sysconfig.get_path("stdlib"))
    kept: list[Path] = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in SKIPPED_DIRECTORIES]
        paths = (Path(directory, name) for name in names if name.endswith(".py"))
        kept += [path for path in paths if path.is_file()]
    if not kept:
        raise ValueError(f"text: there are no *.py files of the standard library under {root}; give --text PATH.")
    return sorted(kept, key=lambda path: path.relative_to(root).as_posix())


class Document:
    """The bytes of files, as windows of ``seq_len`` + 1 bytes.

    The first ``seq_len`` bytes of a window are the tokens. The last ``seq_len`` bytes are their labels.

    Args:
        paths: the files, read as bytes, in this order.
        seq_len: tokens per window.

    Training windows start every ``seq_len`` bytes, so a byte is a label at most once per pass. The last ``seq_len`` + 1
    bytes are the evaluation window. No training window overlaps with it.

    Raises:
        ValueError: a path is not a file, or the files together have fewer than 2 (seq_len + 1) bytes.
    """

    def __init__(self, paths: Sequence[Path], seq_len: int) -> None:
        for path in paths:
            if not path.is_file():
                raise ValueError(f"text = {str(path)!r}: not a file; give the path of a file.")
        self._paths = list(paths)
        self._starts = [0, *itertools.accumulate(path.stat().st_size for path in paths)]
        self.seq_len = seq_len
        self.num_bytes = self._starts[-1]
        shortest = 2 * (seq_len + 1)
        if self.num_bytes < shortest:
            raise ValueError(
                f"text: {self.num_bytes:,} bytes in {len(self._paths)} file(s) with seq_len = {seq_len:,}: at least "
                f"{shortest:,} are needed, for one training window and one evaluation window; give more text, or a "
                "smaller --seq-len."
            )
        self.num_windows = (self.num_bytes - (seq_len + 1) - 1) // seq_len

    def window(self, index: int) -> bytes:
        """Return training window ``index``. The windows repeat after the last one."""
        start = index % self.num_windows * self.seq_len
        return self._read(start, start + self.seq_len + 1)

    def evaluation_window(self) -> bytes:
        return self._read(self.num_bytes - self.seq_len - 1, self.num_bytes)

    def fingerprint(self) -> int:
        """Return a 48-bit hash of the file sizes, the first window and the evaluation window."""
        digest = hashlib.sha256(repr(self._starts).encode() + self.window(0) + self.evaluation_window())
        return int.from_bytes(digest.digest()[:6], "big")

    def _read(self, start: int, stop: int) -> bytes:
        parts = []
        for path, (begin, end) in zip(self._paths, itertools.pairwise(self._starts), strict=True):
            first, size = max(start, begin), min(stop, end) - max(start, begin)
            if size > 0:
                with path.open("rb") as file:
                    file.seek(first - begin)
                    parts.append(file.read(size))
                if len(parts[-1]) != size:
                    raise ValueError(f"text = {str(path)!r}: the file became shorter during the run; do not change it.")
        return b"".join(parts)
