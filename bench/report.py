"""Commands, tables and files of measurements.

A measurement is a function that yields rows. Its command shows each row as it comes, then all as a table, and writes
them as JSON together with a description of the machine.
"""

from __future__ import annotations

import inspect
import json as json_module
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ring_backends.releases import versions

Row = dict[str, Any]


Repeats = Annotated[int, typer.Option(min=1, help="Timed calls of each contestant, after warm-up calls.")]
Shrink = Annotated[int, typer.Option(min=1, help="Divide all lengths by this, for a quick run.")]
Dtype = Annotated[str, typer.Option(metavar="fp32|bf16|fp16|fp64", help="Dtype of the inputs.")]
Integers = Annotated[str, typer.Option(metavar="N,N,…")]
Json = Annotated[Path | None, typer.Option(metavar="FILE", help="Write all results to this file.")]


def integers(text: str) -> list[int]:
    return [int(part.replace("_", "")) for part in text.split(",")]


def new_app(help: str | None) -> typer.Typer:
    return typer.Typer(add_completion=False, no_args_is_help=True, help=help, pretty_exceptions_enable=False)


def add_command(
    app: typer.Typer,
    measure: Callable[..., Iterable[Row]],
    *,
    prefix: str = "",
    worlds: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """Add a command that reports the rows of a function. It has the function's name, docstring and options.

    A function with a parameter ``worlds`` gets what the argument makes, which ends with the command.
    """
    parameters = dict(inspect.signature(measure, eval_str=True).parameters)
    needs_ranks = parameters.pop("worlds", None) is not None
    name = measure.__name__.replace("_", "-")

    def command(json: Path | None, **options: Any) -> None:
        with worlds() as ranks:
            rows = measure(ranks, **options) if needs_ranks else measure(**options)
            report(f"{prefix} {name.replace('-', ' ')}".strip(), options, rows, json)

    file = inspect.Parameter("json", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Json)
    command.__signature__ = inspect.Signature([*parameters.values(), file])  # type: ignore[attr-defined]
    command.__doc__ = measure.__doc__
    app.command(name)(command)


def report(claim: str, options: dict[str, Any], rows: Iterable[Row], json: Path | None) -> None:
    """Show rows as they come, and write those so far to a file, so that they remain if the rest does not end."""
    found: list[Row] = []

    def write() -> None:
        if json is not None:
            written = {"claim": claim, "command": sys.argv, "options": options, "machine": machine(), "rows": found}
            json.write_text(json_module.dumps(written, indent=1, default=str) + "\n")

    write()  # before minutes of measurements, as the file may be in no directory
    for row in rows:
        found.append(row)
        print(line(row), flush=True)
        write()
    Console(width=None if Console().is_terminal else 140, highlight=False).print(table(found))


def read_rows(file: Path) -> list[Row]:
    """The rows of a file that :func:`report` has written.

    Raises:
        ValueError: the file has none.
    """
    rows: list[Row] = json_module.loads(file.read_text()).get("rows", [])
    if not rows:
        raise ValueError(f"{file} has no rows; write it with --json of a command of bench/claims.py or bench/gpu.py.")
    return rows


@cache
def machine() -> Row:
    """A description of this machine."""
    info = Path("/proc/cpuinfo")
    models = [text for text in info.read_text().splitlines() if text.startswith("model name")] if info.exists() else []
    cpu = models[0].partition(": ")[2] if models else platform.processor()
    found: Row = {"cpu": cpu, "kernel": platform.release(), "versions": versions()}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found["gpu"] = {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cudnn": torch.backends.cudnn.version(),
        }
    return found


def compared(**times: Sequence[float]) -> Row:
    """The times of two contestants, which took turns: medians, their ratio, the median of the ratios, and all times.

    A median has the name of the argument.
    """
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    ours, others = medians.values()
    both = statistics.median(a / b for a, b in zip(*times.values(), strict=True))
    return {**medians, "ratio_of_medians": ours / others, "median_of_ratios": both, "calls": times}


def table(rows: Sequence[Row], markup: bool = False) -> Table:
    """The rows as a table, without lists and dicts. A row may lack columns of others."""
    columns = dict(max(rows, key=len))  # by name, with a value of some row
    for row in rows:
        columns |= {name: value for name, value in row.items() if value is not None}
    shown = [name for name, value in columns.items() if not isinstance(value, (list, dict))]
    drawn = Table(box=box.MARKDOWN if markup else box.SIMPLE, pad_edge=markup)
    for name in shown:
        numeric = isinstance(columns[name], (int, float))
        drawn.add_column(name.replace("_", " "), justify="right" if numeric else "left")
    for row in rows:
        drawn.add_row(*(_text(name, row.get(name)) for name in shown))
    return drawn


def line(row: Row) -> str:
    """A row as one line of text, without lists and dicts."""
    shown = {name: value for name, value in row.items() if not isinstance(value, (list, dict))}
    return ", ".join(f"{name.replace('_', ' ')} {_text(name, value)}" for name, value in shown.items())


def _text(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name.endswith("_bytes"):
        return f"{value / 2**20:,.1f} MiB"
    if name.endswith("_share"):
        return f"{value:.1%}"
    if isinstance(value, float):
        return f"{value:.3g}" if value < 0.1 else f"{value:,.3f}"
    return f"{value:,}" if isinstance(value, int) else escape(str(value))
