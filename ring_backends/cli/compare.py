"""``compare``: the same attention by every adapter, by the all-gather method and on one rank, in one table.

Each contestant runs in processes of its own (contestant.py). This module imports no torch.
"""

from __future__ import annotations

import dataclasses
import json as json_module
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ring_backends.cli.branches import describe_branches, parse_branches
from ring_backends.cli.compare_options import ALL_GATHER, ONE_RANK, TENSORS, CompareOptions
from ring_backends.cli.launch import launch
from ring_backends.cli.report import Failure, RankFailedError, reported_errors
from ring_backends.cli.train_options import default_branches
from ring_backends.plotting import draw_comparison

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_WIDTH = 120  # off a terminal


_ATTENTION, _RANKS, _FILES = "Attention", "Ranks and measuring", "Files"


def compare_command(
    seq_len: Annotated[
        int, typer.Option(min=1, help="Tokens of the sequence, over the whole ring.", rich_help_panel=_ATTENTION)
    ] = 65536,
    segment_lengths: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N,N,…",
            help="Segment length of each branch, in tokens. If not given, those of `train`.",
            rich_help_panel=_ATTENTION,
        ),
    ] = None,
    dilation_rates: Annotated[
        list[str] | None,
        typer.Option(metavar="N,N,…", help="Dilation rate of each branch.", rich_help_panel=_ATTENTION),
    ] = None,
    num_heads: Annotated[int, typer.Option(min=1, help="Query heads.", rich_help_panel=_ATTENTION)] = 8,
    num_kv_heads: Annotated[
        int | None,
        typer.Option(
            min=1, help="Key and value heads; as many as query heads if not given.", rich_help_panel=_ATTENTION
        ),
    ] = None,
    head_dim: Annotated[int, typer.Option(min=1, help="Width of a head.", rich_help_panel=_ATTENTION)] = 64,
    dtype: Annotated[
        str, typer.Option(metavar="auto|fp32|bf16|fp16|fp64", help="Of the inputs.", rich_help_panel=_ATTENTION)
    ] = "fp32",
    causal: Annotated[
        bool, typer.Option("--causal/--no-causal", help="Hide later keys or not.", rich_help_panel=_ATTENTION)
    ] = True,
    nproc_per_node: Annotated[
        int, typer.Option(min=1, help="Ranks of the ring, all on this machine.", rich_help_panel=_RANKS)
    ] = 2,
    layout: Annotated[
        str,
        typer.Option(metavar="contiguous|zigzag", help="How the sequence lies over the ring.", rich_help_panel=_RANKS),
    ] = "contiguous",
    device: Annotated[
        str,
        typer.Option(
            metavar="auto|cpu|cuda",
            help="auto: a GPU per rank where there are enough, else the CPU.",
            rich_help_panel=_RANKS,
        ),
    ] = "auto",
    repeats: Annotated[
        int, typer.Option(min=1, help="Timed calls, after a first that warms up.", rich_help_panel=_RANKS)
    ] = 3,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write everything to this file.", rich_help_panel=_FILES)
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Also draw time, memory and a timeline (needs matplotlib).", rich_help_panel=_FILES
        ),
    ] = None,
) -> None:
    """Measure one attention call by every adapter, by the all-gather method and on one rank.

    Every contestant runs in processes of its own, on the same inputs.

    Time: forward and backward, the median of the timed calls; a call takes
    as long as its slowest rank.

    Memory: what the first call needs at its peak beyond its inputs, on the
    rank that needs most: the increase of the resident set, on a GPU of the
    allocated memory.

    Bytes: what the busiest rank sends in forward and backward. Adapters
    count their hops. For all-gather the number is computed: a gathering
    sends each rank's rows, padded to the longest, to all others, and the
    gradients come home by a reduce-scatter, which in gloo is an all-reduce
    and twice as dear.

    Error: the largest difference of out and of the gradients dq, dk, dv
    from their fp64 values, over the largest of these. They are computed
    once, from the definition and by no code that is compared; while the
    command runs they lie in temporary files, 8 bytes per number.

    The all-gather method collects the dilated rows of K and V of the
    branches that cross shards, and nothing else, in one collective, and
    then computes the same tiles as the ring.

    Plot: besides time and memory it shows when each rank of the first
    adapter computed and when it waited for hops, in one more call.
    """
    given = dict(locals())
    names = [field.name for field in fields(CompareOptions)]
    with reported_errors("compare", names):
        lengths, rates = parse_branches(segment_lengths, dilation_rates) or default_branches(seq_len)
        options = CompareOptions(**{**given, "segment_lengths": lengths, "dilation_rates": rates})
        options.check()
        _compare(options)


def _compare(options: CompareOptions) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDTH
    with console.status("computing the fp64 numbers") as status, tempfile.TemporaryDirectory() as directory:
        found = launch(_prepare, (options, Path(directory)), 1)[0]
        adapters: dict[str, str | None] = found["adapters"]
        rows = []
        failures = []
        for name in (*adapters, ALL_GATHER, ONE_RANK):
            row: dict[str, Any] = {"name": name, "unusable": adapters.get(name), "failed": None}
            if row["unusable"] is None:
                status.update(f"measuring {name}")
                num_ranks = 1 if name == ONE_RANK else options.nproc_per_node
                try:
                    row |= _summary(launch(_measure, (found["options"], name, Path(directory)), num_ranks))
                except RankFailedError as error:
                    failure = Failure(error.failure.status, f"{name}: {error.failure.text}")
                    failures.append(RankFailedError(error.rank, failure))
                    row["failed"] = error.failure.text
            rows.append(row)
    _show(console, found["options"], rows)
    if options.json is not None:
        result = {
            "rows": rows,
            "versions": found["versions"],
            "device": found["device"],
            "options": dataclasses.asdict(found["options"]),
        }
        options.json.write_text(json_module.dumps(result, indent=2, default=str) + "\n")
    if options.plot is not None:
        draw_comparison(options.plot, [row for row in rows if not row["unusable"] and not row["failed"]])
    if failures:
        raise failures[0]


# Run in new processes, which import torch. Module-level, so that they can be found there.


def _prepare(options: CompareOptions, directory: Path) -> dict[str, Any]:
    from ring_backends.cli.contestant import prepare

    return prepare(options, directory)


def _measure(options: CompareOptions, name: str, directory: Path) -> dict[str, Any]:
    from ring_backends.cli.contestant import measure

    return measure(options, name, directory)


def _summary(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row from what the ranks measured: each call's slowest rank, then the median call; errors of all rows."""

    def seconds(name: str) -> float:
        return float(statistics.median(max(calls) for calls in zip(*(rank[name] for rank in ranks), strict=True)))

    def error(name: str) -> float:
        largest = max(rank["largest"][name] for rank in ranks)
        return float(max(rank["largest_error"][name] for rank in ranks) / largest) if largest else 0.0

    return {
        "ranks": len(ranks),
        "device": ranks[0]["device"],
        "forward_seconds": seconds("forward_seconds"),
        "backward_seconds": seconds("backward_seconds"),
        "peak_memory_bytes": [rank["peak_memory_bytes"] for rank in ranks],
        "bytes_sent": {
            direction: [rank["bytes_sent"][direction] for rank in ranks] for direction in ("forward", "backward")
        },
        "bytes_are_computed": ranks[0]["bytes_are_computed"],
        "errors": {name: error(name) for name in TENSORS},
        "calls": {name: [rank[name] for rank in ranks] for name in ("forward_seconds", "backward_seconds")},
        "spans": [rank["spans"] for rank in ranks if rank["spans"]],
    }


def _sent(row: dict[str, Any]) -> int:
    """What the busiest rank sends in forward and backward together."""
    return max(map(sum, zip(*row["bytes_sent"].values(), strict=True)))


def _show(console: Console, options: CompareOptions, rows: Sequence[dict[str, Any]]) -> None:
    console.print(
        f"{options.seq_len:,} tokens, {options.layout}, {'causal' if options.causal else 'not causal'}, "
        f"{options.num_heads} heads"
        + (f" ({options.kv_heads} for keys and values)" if options.kv_heads != options.num_heads else "")
        + f" of {options.head_dim}, {options.dtype}; branches {describe_branches(options.branches)}; "
        f"ring of {options.nproc_per_node}; errors against fp64.",
        soft_wrap=True,
    )
    console.print(_table(rows))


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    from rich import box
    from rich.filesize import decimal
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in (
        "forward",
        "backward",
        "memory\nper rank",
        "sent\nper rank",
        *(f"error\n{name}" for name in TENSORS),
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("note", overflow="fold")
    for row in rows:
        reason = row["unusable"] or row["failed"]
        if reason:
            note = f"unusable: {reason}" if row["unusable"] else f"failed: {reason.splitlines()[-1]}"
            table.add_row(row["name"], *["-"] * 8, escape(note))
            continue
        table.add_row(
            row["name"],
            f"{row['forward_seconds']:,.3f} s",
            f"{row['backward_seconds']:,.3f} s",
            f"{max(row['peak_memory_bytes']) / 2**20:,.0f} MiB",
            decimal(_sent(row)),
            *(f"{error:.0e}" for error in row["errors"].values()),
            escape(row["device"] + (", bytes computed" if row["bytes_are_computed"] else "")),
        )
    return table
