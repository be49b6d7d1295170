"""Draws the result files: `python bench/plot.py` draws those in bench/results/.

pytest-benchmark writes table.json. From it come two pictures: time and memory against the sequence length, and against
the ring size. `claims.py timeline` writes timeline.json. From it comes one timeline for each recorded call.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import typer
from matplotlib.ticker import LogLocator
from records import ORDER, Record, by_contestant, is_on_one_rank, read_records

from ring_backends.plotting import draw_timeline, new_figure

_RESULTS = Path(__file__).parent / "results"
_MARKERS = "osD^vXP*"


def main(
    folder: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="Folder with the result files.")
    ] = _RESULTS,
    dtype: Annotated[
        str, typer.Option(metavar="fp32|bf16|fp16|fp64", help="Dtype of the calls to draw from table.json.")
    ] = "fp32",
    suffix: Annotated[str, typer.Option(metavar="svg|png|pdf", help="Format of the pictures.")] = "svg",
) -> None:
    """Draw the result files of a folder into that folder."""
    drawn: list[Path] = []
    if (table := folder / "table.json").exists():
        records = [record for record in read_records(table) if record.dtype == dtype]
        drawn += [
            _save(by_length(records), folder / f"by-length-{dtype}.{suffix}"),
            _save(by_ring_size(records), folder / f"by-ring-size-{dtype}.{suffix}"),
        ]
    if (timeline := folder / "timeline.json").exists():
        for number, call in enumerate(json.loads(timeline.read_text())):
            drawn.append(_save(timeline_figure(call), folder / f"timeline-{number}.{suffix}"))
    if not drawn:
        print(f"{folder} has no table.json and no timeline.json; see bench/README.md to make them.", file=sys.stderr)
        raise typer.Exit(1)
    print(*drawn, sep="\n")


def by_length(records: Sequence[Record]) -> Any:
    """Draw time and memory against the sequence length, with one column per ring size.

    Contestants on one rank are dashed lines in every column.
    """
    sizes = sorted({record.ring_size for record in records})
    figure, axes = _grid(len(sizes))
    for column, size in enumerate(sizes):
        lines = by_contestant(records, lambda record, size=size: record.ring_size == size or is_on_one_rank(record))
        _draw_lines(axes[:, column], lines, lambda record: record.seq_len)
        axes[0, column].set_title(f"{size} rank{'s' if size > 1 else ''}")
        axes[1, column].set_xlabel("tokens")
        for row in axes[:, column]:
            _label_log(row, sorted({record.seq_len for record in records}))
    return _with_legend(figure, axes)


def by_ring_size(records: Sequence[Record], most: int = 3) -> Any:
    """Draw time and memory against the ring size, with one column for each of the ``most`` longest sequences.

    Contestants on one rank are dashed horizontal lines.
    """
    lengths = sorted({record.seq_len for record in records})[-most:]
    sizes = sorted({record.ring_size for record in records})
    figure, axes = _grid(len(lengths))
    for column, length in enumerate(lengths):
        lines = by_contestant(records, lambda record, length=length: record.seq_len == length)
        _draw_lines(axes[:, column], lines, lambda record: record.ring_size, levels_over=sizes)
        axes[0, column].set_title(f"{length:,} tokens")
        axes[1, column].set_xlabel("ranks")
        for row in axes[:, column]:
            _label_log(row, sizes)
    return _with_legend(figure, axes)


def timeline_figure(call: dict[str, Any]) -> Any:
    """Draw one call of ``claims.py timeline``: forward above backward, with one lane per rank."""
    ranks = call["ranks"]
    figure = new_figure((10, 2.2 + 0.9 * len(ranks)))
    for axes, part in zip(figure.subplots(2, 1), ("forward", "backward"), strict=True):
        draw_timeline(axes, ranks, part)
        axes.set_title(part, loc="left")
    figure.suptitle(f"{call['name']}: {call['case']['seq_len']:,} tokens, {call['case']['dtype']}")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
    return figure


def _grid(columns: int) -> tuple[Any, Any]:
    figure = new_figure((2 + 3.2 * columns, 6.4))
    axes = figure.subplots(2, columns, squeeze=False, sharex="col", sharey="row")
    axes[0, 0].set_ylabel("seconds, forward + backward")
    axes[1, 0].set_ylabel("peak per rank, MiB, inputs included")
    return figure, axes


def _draw_lines(
    axes: Sequence[Any],
    lines: dict[str, list[Record]],
    x_of: Callable[[Record], int],
    levels_over: Sequence[int] | None = None,
) -> None:
    """Draw seconds on the first of ``axes``, and MiB on the second.

    Args:
        levels_over: x values over which contestants on one rank are horizontal lines. None: draw them as the others.
    """
    values: tuple[Callable[[Record], float | None], ...] = (
        lambda record: record.total_seconds,
        lambda record: None if record.peak_bytes is None else record.peak_bytes / 2**20,
    )
    for where, value_of in zip(axes, values, strict=True):
        where.set_yscale("log")
        where.grid(True, which="major", alpha=0.3)
        for contestant, records in lines.items():
            points = [(x_of(record), value) for record in records if (value := value_of(record)) is not None]
            alone = is_on_one_rank(records[0])
            if alone and levels_over and points:
                points = [(x, points[0][1]) for x in levels_over]
            at = ORDER.index(contestant) if contestant in ORDER else len(ORDER)
            style: dict[str, Any] = {"linestyle": "--"} if alone else {"marker": _MARKERS[at % len(_MARKERS)]}
            if points:
                where.plot(*zip(*points, strict=True), label=contestant, color=f"C{at}", **style)


def _label_log(axes: Any, values: Sequence[int]) -> None:
    """Make the x axis logarithmic with ticks at ``values``, and label the y axis with plain numbers."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [f"{value:,}" for value in values])
    axes.tick_params(axis="x", rotation=30 if max(values) >= 1000 else 0)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_minor_formatter("")


def _with_legend(figure: Any, axes: Any) -> Any:
    named = {name: line for row in axes.flat for line, name in zip(*row.get_legend_handles_labels(), strict=True)}
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=min(4, len(named)))
    return figure


def _save(figure: Any, path: Path) -> Path:
    vector = path.suffix == ".svg"
    with matplotlib.rc_context({"svg.hashsalt": path.stem}):  # makes the file reproducible
        figure.savefig(path, dpi=150, metadata={"Date": None} if vector else None)
    return path


if __name__ == "__main__":
    typer.run(main)
