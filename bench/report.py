"""Prints rows as a table, and writes them as JSON together with a description of the machine."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from pytest_benchmark.plugin import pytest_benchmark_generate_machine_info
from rich import box
from rich.console import Console
from rich.table import Table

from ring_backends.releases import versions

Row = dict[str, Any]


def report(name: str, options: dict[str, Any], rows: Sequence[Row], json_file: Path | None) -> None:
    """Print ``rows`` as a table, and write them to ``json_file`` if it is given. The table omits lists and dicts."""
    if json_file is not None:
        write(name, options, rows, json_file)
    Console(width=None if Console().is_terminal else 140, highlight=False).print(table(rows))


def write(name: str, options: dict[str, Any], rows: Sequence[Row], json_file: Path) -> None:
    """Write ``rows`` to ``json_file``, together with the command and a description of the machine."""
    found = {"claim": name, "command": sys.argv, "options": options, "machine": _machine(), "rows": rows}
    json_file.write_text(json.dumps(found, indent=1, default=str) + "\n")


@cache
def _machine() -> dict[str, Any]:
    """A description of this machine. Finding it takes a second."""
    known = pytest_benchmark_generate_machine_info()
    machine = {"cpu": known["cpu"].get("brand_raw"), "kernel": known["release"], "versions": versions()}
    if torch.cuda.is_available():
        machine["gpu"] = describe_gpu()
    return machine


def describe_gpu() -> dict[str, Any]:
    """The name, memory and compute capability of the current GPU, and the versions of CUDA and cuDNN."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


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
    return f"{value:,}" if isinstance(value, int) else str(value)
