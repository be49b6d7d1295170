"""Draws measurements with matplotlib, which is imported on first use. This module imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

COLOURS = {"tile": "tab:blue", "wait": "tab:red", "call": "0.85"}
_LABELS = {"tile": "computing a tile", "wait": "waiting for a hop", "call": "the rest: copying, allocating"}
_POSTED = "hop posted"

Spans = Sequence[tuple[str, str, float, float]]
"""The spans of one rank, as :func:`ring_backends.comparison.rank.record_spans` records them."""


def check_plot(path: Path, argument: str = "plot") -> None:
    """Check that a picture can be written to ``path``.

    Args:
        argument: what the caller names ``path``, for the error.

    Raises:
        ValueError: matplotlib is not installed, or does not support the suffix.
    """
    if find_spec("matplotlib") is None:
        raise ValueError(
            f"{argument} = {str(path)!r}: matplotlib is not installed; pip install 'ring-backends[plot]', or leave "
            f"{argument} out."
        )
    formats = new_figure((1, 1)).canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in formats:
        suffixes = ", ".join(f".{name}" for name in formats)
        raise ValueError(f"{argument} = {str(path)!r}: unknown suffix; use one of {suffixes}.")


def new_figure(size: tuple[float, float]) -> Any:
    """A matplotlib figure of ``size`` inches, without a window."""
    return import_module("matplotlib.figure").Figure(figsize=size, layout="constrained")


def draw_comparison(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw time with its spread, and memory, of every row of a comparison, and the timeline of the first that has one.

    Args:
        rows: the measured rows of :class:`ring_backends.comparison.compare.Comparison`.
    """
    names = [row["name"] for row in rows]
    timed = next((row for row in rows if row["spans"]), None)
    parts = [] if timed is None else [["forward", "backward"]]
    figure = new_figure((11, 4 + (1.5 + 0.4 * len(timed["spans"]) if timed else 0)))
    axes = figure.subplot_mosaic([["time", "memory"], *parts], height_ratios=[4, 2][: 1 + len(parts)])

    forward, backward = ([row[f"{name}_seconds"] for row in rows] for name in ("forward", "backward"))
    axes["time"].bar(names, forward, label="forward")
    axes["time"].bar(names, backward, bottom=forward, label="backward")
    least, most = zip(*(row["both_range"] for row in rows), strict=True)
    axes["time"].vlines(names, least, most, color="black", label="both, least to most")
    axes["time"].set_ylabel("seconds, slowest rank")
    axes["time"].legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False)
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
    """Draw time and memory per rank over ring sizes, on logarithmic axes.

    Args:
        sizes: ``over_ring_sizes`` of :class:`ring_backends.cost.estimate.Estimate`.
        memory_bytes: memory that a rank has, drawn as a horizontal line. None draws no line.
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
        memory.axhline(memory_bytes / 2**30, linestyle="--", color="tab:red", label="available")
    memory.set_ylabel("memory, GiB per rank")
    memory.legend()
    for axes in (time, memory):
        axes.set_xlabel("ranks of the ring")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
    figure.savefig(path)


def draw_timeline(axes: Any, ranks: Sequence[Spans], part: str) -> None:
    """Draw one lane per rank: when it computed, posted hops, and waited for hops.

    Args:
        axes: matplotlib axes to draw on.
        ranks: the spans of every rank, on one clock.
        part: part of the call, ``"forward"`` or ``"backward"``.
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
