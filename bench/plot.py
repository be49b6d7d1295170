"""Draws the file of `claims.py methods`: `python bench/plot.py` draws the one in bench/results/.

There are two pictures: time and memory against the sequence length, and against the ring size.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import typer
from claims import METHODS, ON_ONE_RANK
from matplotlib.ticker import LogLocator
from report import Row, read_rows

from ring_backends.plotting import new_figure

_MARKERS = "osD^vXP*"


def main(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False)] = Path(__file__).parent / "results/table.json",
) -> None:
    """Draw the calls of a file into its folder."""
    rows = read_rows(file)
    pictures = {
        "length": draw(rows, x="tokens", column="ranks", columns=_values(rows, "ranks")),
        "ring-size": draw(rows, x="ranks", column="tokens", columns=_values(rows, "tokens")[-3:]),
    }
    for name, figure in pictures.items():
        path = file.parent / f"by-{name}-{rows[0]['dtype']}.svg"
        with matplotlib.rc_context({"svg.hashsalt": path.stem}):  # makes the file reproducible
            figure.savefig(path, dpi=150, metadata={"Date": None})
        print(path)


def _values(rows: Sequence[Row], name: str) -> list[int]:
    return sorted({row[name] for row in rows})


def draw(rows: Sequence[Row], x: str, column: str, columns: Sequence[int]) -> Any:
    """Draw seconds and MiB against ``x``, with a column of axes for each of these values of ``column``.

    Contestants on one rank are dashed lines in every column, horizontal ones if ``x`` is the number of ranks.
    """
    figure = new_figure((2 + 3.2 * len(columns), 6.4))
    grid = figure.subplots(2, len(columns), squeeze=False, sharex="col", sharey="row")
    grid[0, 0].set_ylabel("seconds, forward + backward")
    grid[1, 0].set_ylabel("peak per rank, MiB, inputs included")
    for axes, value in zip(grid.T, columns, strict=True):
        for at, name in enumerate(METHODS):
            alone = name in ON_ONE_RANK
            of_name = [row for row in rows if row["contestant"] == name]
            of_name = [row for row in of_name if row[column] == value or (alone and column == "ranks")]
            levels = _values(rows, "ranks") if alone and x == "ranks" else None
            style: dict[str, Any] = {"linestyle": "--"} if alone else {"marker": _MARKERS[at % len(_MARKERS)]}
            for where, value_of in zip(axes, (_seconds, _mib), strict=True):
                points = [(row[x], y) for row in of_name if (y := value_of(row)) is not None]
                if points and levels is not None:
                    points = [(level, points[0][1]) for level in levels]
                if points:
                    where.plot(*zip(*points, strict=True), label=name, color=f"C{at}", **style)
        axes[0].set_title(f"{value:,} {column if value > 1 else 'rank'}")
        axes[1].set_xlabel(x)
        for where in axes:
            _label(where, _values(rows, x))
    named = {name: line for row in grid.flat for line, name in zip(*row.get_legend_handles_labels(), strict=True)}
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=min(4, len(named)))
    return figure


def _seconds(row: Row) -> float:
    return float(row["forward_seconds"] + row["backward_seconds"])


def _mib(row: Row) -> float | None:
    return row["peak_bytes"] / 2**20 if row.get("peak_bytes") else None


def _label(axes: Any, values: Sequence[int]) -> None:
    """Make both axes logarithmic, with ticks at ``values`` and plain numbers."""
    axes.set_yscale("log")
    axes.grid(True, which="major", alpha=0.3)
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [f"{value:,}" for value in values])
    axes.tick_params(axis="x", rotation=30 if max(values) >= 1000 else 0)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_minor_formatter("")


if __name__ == "__main__":
    typer.run(main)
