"""Consoles, tables, texts and files of the commands. This module imports no torch."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ring_backends.schedule.pattern import DilatedPattern

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH = 120  # columns of output that does not go to a terminal


def wide_console() -> Console:
    """Make a console. Without a terminal, its tables are 120 columns wide instead of 80."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDTH
    return console


@contextlib.contextmanager
def progress_bar(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar on a terminal, and nothing elsewhere.

    Yields:
        A function that takes what is being done, the number of steps that are done, and that of all steps.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (MofNCompleteColumn(), BarColumn(bar_width=16), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("")

        def show(what: str, done: int, steps: int) -> None:
            progress.update(task, description=what, completed=done, total=steps)

        yield show


def print_lines(lines: Iterable[tuple[str, str]]) -> None:
    """Print lines with headings on their left. Lines that are too long are wrapped beside the headings."""
    from rich.markup import escape
    from rich.table import Table

    table = Table.grid(padding=(0, 2, 0, 0))
    for heading, text in lines:
        table.add_row(f"[bold]{heading}[/bold]" if heading else "", escape(text))
    wide_console().print(table)


def print_table(title: str, columns: tuple[str, ...], rows: Iterable[Iterable[object]]) -> None:
    """Print a table with a title. The cells are plain text."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(*columns, title=escape(title), title_justify="left")
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    wide_console().print(table)


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Write results to a file. Values that JSON does not have become text."""
    path.write_text(json.dumps(result, indent=2, default=str) + "\n")


def dtype_name(dtype: object) -> str:
    """``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def describe_branches(pattern: DilatedPattern) -> str:
    windows = pattern.window_lengths or (None,) * pattern.num_branches
    return ", ".join(
        f"({w or 'whole sequence'}, {r}{f', window {window}' if window else ''})"
        for w, r, window in zip(pattern.segment_lengths, pattern.dilation_rates, windows, strict=True)
    )
