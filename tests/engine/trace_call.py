"""Shows what a warm call runs on a ring of two: files of the package, calls of its functions, changes between files."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from types import FrameType

import torch

import ring_backends
from ring_backends.adapters import native
from ring_backends.ring.launch import launch

ROOT = Path(ring_backends.__file__).resolve().parent.parent
ROOMS = (f"{ROOT}/ring_backends/", f"{ROOT}/adapters/")


def traced_calls() -> list[list[tuple[str, str]]]:
    """(file, function) of each Python call of the package, in a warm causal forward and then in its backward."""
    torch.set_num_threads(1)
    ring = native.initialize(layout="zigzag", timeout=timedelta(seconds=60))
    attention = native.RingDilatedAttention([16, 64], [1, 4], ring=ring)
    query, key, value = (torch.randn(1, 32, 4, 8, requires_grad=True) for _ in range(3))
    found: list[list[tuple[str, str]]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        path = str(Path(frame.f_code.co_filename).resolve())
        if event == "call" and path.startswith(ROOMS):
            found[-1].append((path.removeprefix(f"{ROOT}/"), frame.f_code.co_name))

    for _ in range(3):  # the last round is warm
        found[:] = [[]]
        sys.setprofile(note)
        out = attention(query, key, value, is_causal=True)
        found.append([])
        out.sum().backward()
        sys.setprofile(None)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", action="store_true", help="list the files with their numbers of calls")
    parser.add_argument("--calls", action="store_true", help="list the calls in order")
    options = parser.parse_args()
    forward, backward = launch(traced_calls, (), 2)[0]
    for name, calls in {"forward": forward, "forward and backward": forward + backward}.items():
        files = [file for file, _ in calls]
        changes = sum(before != after for before, after in pairwise(files))
        print(f"{name}: {len({*files})} files, {len(files)} calls, {changes} changes from file to file")
        if options.files:
            print(*(f"{count:5} {file}" for file, count in Counter(files).most_common()), sep="\n")
    if options.calls:
        print(*(f"{file}: {function}" for file, function in forward + backward), sep="\n")
