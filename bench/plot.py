"""Draws table.json, which pytest-benchmark wrote: `python bench/plot.py` draws the one in bench/results/.

There are two pictures: time and memory against the sequence length, and against the ring size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import typer
from matplotlib.ticker import LogLocator
from options import DtypeShown, Table
from records import ORDER, Record, by_contestant, is_on_one_rank, read_records

from ring_backends.plotting import new_figure

_MARKERS = "osD^vXP*"


def main(
    file: Table = Path(__file__).parent / "results" / "table.json",
    dtype: DtypeShown = "fp32",
    suffix: Annotated[str, typer.Option(metavar="svg|png|pdf", help="Format of the pictures.")] = "svg",
) -> None:
    """Draw the calls of a file into its folder."""
    records = [record for record in read_records(file) if record.dtype == dtype]
    for name, draw in (("length", by_length), ("ring-size", by_ring_size)):
        path = file.parent / f"by-{name}-{dtype}.{suffix}"
        with matplotlib.rc_context({"svg.hashsalt": path.stem}):  # makes the file reproducible
            draw(records).savefig(path, dpi=150, metadata={"Date": None} if suffix == "svg" else None)
        print(path)


def by_length(records: Sequence[Record]) -> Any:
    """Draw time and memory against the sequence length, with one column per ring size.

    Contestants on one rank are dashed lines in every column.
    """
    sizes, lengths = (sorted({getattr(record, name) for record in records}) for name in ("ring_size", "seq_len"))
    figure, axes = _grid(len(sizes))
    for column, size in zip(axes.T, sizes, strict=True):
        lines = by_contestant(records, lambda record, size=size: record.ring_size == size or is_on_one_rank(record))
        _draw_lines(column, lines, lambda record: record.seq_len)
        _label(column, f"{size} rank{'s' if size > 1 else ''}", "tokens", lengths)
    return _with_legend(figure, axes)


def by_ring_size(records: Sequence[Record], most: int = 3) -> Any:
    """Draw time and memory against the ring size, with one column for each of the ``most`` longest sequences.

    Contestants on one rank are dashed horizontal lines.
    """
    sizes, lengths = (sorted({getattr(record, name) for record in records}) for name in ("ring_size", "seq_len"))
    figure, axes = _grid(len(lengths[-most:]))
    for column, length in zip(axes.T, lengths[-most:], strict=True):
        lines = by_contestant(records, lambda record, length=length: record.seq_len == length)
        _draw_lines(column, lines, lambda record: record.ring_size, levels_over=sizes)
        _label(column, f"{length:,} tokens", "ranks", sizes)
    return _with_legend(figure, axes)


def _grid(columns: int) -> tuple[Any, Any]:
    figure = new_figure((2 + 3.2 * columns, 6.4))
    axes = figure.subplots(2, columns, squeeze=False, sharex="col", sharey="row")
    axes[0, 0].set_ylabel("seconds, forward + backward")
    axes[1, 0].set_ylabel("peak per rank, MiB, inputs included")
    return figure, axes


def _draw_lines(
    axes: Sequence[Any], lines: dict[str, list[Record]], x_of: Callable[[Record], int], levels_over: Sequence[int] = ()
) -> None:
    """Draw seconds on the first of ``axes``, and MiB on the second.

    Args:
        levels_over: x values over which contestants on one rank are horizontal lines. Without, they are drawn as the
            others.
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
            at = ORDER.index(contestant)
            style: dict[str, Any] = {"linestyle": "--"} if alone else {"marker": _MARKERS[at % len(_MARKERS)]}
            if points:
                where.plot(*zip(*points, strict=True), label=contestant, color=f"C{at}", **style)


def _label(column: Sequence[Any], title: str, label: str, values: Sequence[int]) -> None:
    """Make the x axes logarithmic with ticks at ``values``, and label the y axes with plain numbers."""
    column[0].set_title(title)
    column[1].set_xlabel(label)
    for axes in column:
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


if __name__ == "__main__":
    typer.run(main)
