"""Prints the JSON of pytest-benchmark as a Markdown table: `python bench/tables.py bench/results/table.json`."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from options import DtypeShown, Table
from records import read_records
from report import table
from rich.console import Console


def main(
    file: Table,
    dtype: DtypeShown = "fp32",
    seq_len: Annotated[int | None, typer.Option(help="Show calls of this length. Default: all lengths.")] = None,
) -> None:
    """Print the time, memory and bytes of every call, ordered by length and ring size."""
    rows: list[dict[str, Any]] = [
        {
            "tokens": record.seq_len,
            "ranks": record.ring_size,
            "contestant": record.contestant,
            "forward, s": record.seconds.get("forward"),
            "backward, s": record.seconds.get("backward"),
            "peak per rank_bytes": record.peak_bytes,
            "sent per rank_bytes": sum(record.bytes.values()),
        }
        for record in read_records(file)
        if record.dtype == dtype and seq_len in (None, record.seq_len)
    ]
    if not rows:
        print(f"{file} has no calls with dtype = {dtype!r}, seq_len = {seq_len}; give other values.", file=sys.stderr)
        raise typer.Exit(2)
    Console(width=160, highlight=False).print(table(rows, markup=True))


if __name__ == "__main__":
    typer.run(main)
