"""Pictures of measurements, by matplotlib, which is imported only when one is drawn. This module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

COLOURS = {"tile": "tab:blue", "wait": "tab:red", "call": "0.85"}
_LABELS = {"tile": "computing a tile", "wait": "waiting for a hop", "call": "the rest: packing, allocating"}
_POSTED = "hop posted"

Spans = Sequence[tuple[str, str, float, float]]
"""One rank's, as :mod:`ring_backends.comparison.timeline` records them."""


def check_plot(path: Path) -> None:
    """Refuse a file that could not be drawn.

    Raises:
        ValueError: matplotlib is not installed, or knows no such kind of file.
    """
    if find_spec("matplotlib") is None:
        raise ValueError(
            f"plot = {str(path)!r}: matplotlib is not installed; pip install 'ring-backends[plot]', or leave it out."
        )
    formats = new_figure((1, 1)).canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in formats:
        raise ValueError(f"plot = {str(path)!r}: end the name in one of {', '.join(f'.{name}' for name in formats)}.")


def new_figure(size: tuple[float, float]) -> Any:
    """A matplotlib figure of ``size`` inches that no window shows."""
    return import_module("matplotlib.figure").Figure(figsize=size, layout="constrained")


def draw_comparison(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Time and memory of every row of `compare` as bars, and the timeline of the first row that has one.

    Args:
        rows: of `compare`'s result, those that were measured.
    """
    names = [row["name"] for row in rows]
    timed = next((row for row in rows if row["spans"]), None)
    parts = [] if timed is None else [["forward", "backward"]]
    figure = new_figure((11, 4 + (1.5 + 0.4 * len(timed["spans"]) if timed else 0)))
    axes = figure.subplot_mosaic([["time", "memory"], *parts], height_ratios=[4, 2][: 1 + len(parts)])

    forward, backward = ([row[f"{name}_seconds"] for row in rows] for name in ("forward", "backward"))
    axes["time"].bar(names, forward, label="forward")
    axes["time"].bar(names, backward, bottom=forward, label="backward")
    axes["time"].set_ylabel("seconds, slowest rank")
    axes["time"].legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
    axes["memory"].bar(names, [max(row["peak_memory_bytes"]) / 2**20 for row in rows])
    axes["memory"].set_ylabel("memory beyond the inputs, MiB per rank")
    for name in ("time", "memory"):
        axes[name].tick_params(axis="x", rotation=30)
    if timed is not None:
        for part in parts[0]:
            draw_timeline(axes[part], timed["spans"], part)
            axes[part].set_title(f"{timed['name']}, {part}")
        figure.legend(*axes["backward"].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path)


def draw_ring_sizes(path: Path, title: str, sizes: Sequence[dict[str, Any]], memory_bytes: int | None) -> None:
    """Time and memory per rank of `plan` over ring sizes, both axes logarithmic.

    Args:
        sizes: per ring size ``ring_size``, ``seconds`` with ``forward`` and ``backward``, ``memory_bytes``.
        memory_bytes: what a rank has, for a line.
    """
    figure = new_figure((10, 4))
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


def draw_timeline(axes: Any, ranks: Sequence[Spans], part: str) -> None:
    """One lane per rank: when it computed, when it posted a hop and when it waited for one.

    Args:
        axes: matplotlib's, to draw on.
        ranks: every rank's spans, on one clock.
        part: of the call, ``"forward"`` or ``"backward"``.
    """
    begin = min(start for spans in ranks for name, _, start, _ in spans if name == part)
    for rank, spans in enumerate(ranks):
        for what in ("call", "tile", "wait"):
            bars = [
                (1e3 * (start - begin), 1e3 * (end - start))
                for name, kind, start, end in spans
                if (name, kind) == (part, what)
            ]
            label = _LABELS[what] if rank == 0 else None
            axes.broken_barh(bars, (rank - 0.35, 0.7), color=COLOURS[what], linewidth=0, label=label)
        posted = [1e3 * (start - begin) for name, kind, start, _ in spans if (name, kind) == (part, "post")]
        label = _POSTED if rank == 0 else None
        axes.vlines(posted, rank - 0.45, rank + 0.45, color="black", linewidth=0.8, label=label)
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
