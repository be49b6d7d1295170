"""The picture that ``plan --plot`` draws. Imports no torch, and matplotlib only when asked for a picture."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def check_plot(path: Path) -> None:
    """Refuse a picture that cannot be drawn.

    Raises:
        ValueError: matplotlib is missing, or does not write such files.
    """
    if find_spec("matplotlib") is None:
        raise ValueError(
            f"plot = {str(path)!r}: matplotlib is not installed; pip install 'ring-backends[plot]', or leave it out."
        )
    formats = import_module("matplotlib.figure").Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in formats:
        raise ValueError(f"plot = {str(path)!r}: end the name in one of {', '.join(f'.{name}' for name in formats)}.")


def draw(path: Path, title: str, sizes: Sequence[dict[str, Any]], memory_bytes: int | None) -> None:
    """Time and memory per rank over ring sizes, both axes logarithmic.

    Args:
        sizes: per ring size ``ring_size``, ``seconds`` with ``forward`` and ``backward``, ``memory_bytes``.
        memory_bytes: what a rank has, for a line.
    """
    figure = import_module("matplotlib.figure").Figure(figsize=(10, 4), layout="constrained")
    figure.suptitle(title)
    time, memory = figure.subplots(1, 2)
    ring_sizes = [size["ring_size"] for size in sizes]
    for direction in ("forward", "backward"):
        time.plot(ring_sizes, [size["seconds"][direction] for size in sizes], marker="o", label=direction)
    time.set_ylabel("seconds, slowest rank (estimated)")
    time.legend()
    memory.plot(ring_sizes, [size["memory_bytes"] / 2**30 for size in sizes], marker="o", label="needed")
    if memory_bytes is not None:
        memory.axhline(memory_bytes / 2**30, linestyle="--", color="tab:red", label="there is")
    memory.set_ylabel("memory, GiB per rank")
    memory.legend()
    for axes in (time, memory):
        axes.set_xlabel("ranks of the ring")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
    figure.savefig(path)
