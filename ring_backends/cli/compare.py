"""``compare``: measures one attention call with every adapter, with the all-gather method and on one rank.

This module imports no torch. The measurement is in :mod:`ring_backends.comparison.compare`.
"""

# ruff: noqa: RUF009 (the functions that declare options call dataclasses.field)

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ring_backends.cli import options
from ring_backends.cli.options import BranchOptions, check_kv_heads, files, parse_ulysses_size, ranks
from ring_backends.cli.output import describe_branches, progress_bar, wide_console, write_json
from ring_backends.comparison.compare import Comparison, compare
from ring_backends.comparison.setup import TENSORS, Setup
from ring_backends.plotting import draw_comparison

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, kw_only=True)
class CompareOptions(BranchOptions):
    """Measure one attention call with every adapter, with all-gather and on one rank.

    Each method runs in its own processes. All methods get the same inputs.

    Time: seconds of forward and of backward. Each is the median of the
    timed calls, with the least and the most below it. A call takes as long
    as its slowest rank. The methods take turns, so background load affects
    all of them. Methods whose times overlap are not ranked. The processes
    of all methods run until the end, but hold inputs in their turns only.

    Memory: the peak memory of the first call, without its inputs, on the
    rank that needs most. On the CPU this is the increase of the resident
    set. On a GPU it is the increase of the allocated memory.

    Bytes: the bytes that the busiest rank sends in forward and backward.
    Adapters count the bytes of their hops. The bytes of all-gather are
    computed: each rank sends its rows to all other ranks, padded to the
    largest contribution. A reduce-scatter sums the gradients. gloo
    implements it as an all-reduce, which sends twice as much.

    Error: the largest difference of out, dq, dk and dv from their fp64
    values, divided by the largest fp64 value. The fp64 values are computed
    once, by code that follows the definition and that no method shares.
    They take 8 bytes per number in temporary files.

    The all-gather method gathers only the dilated K and V rows of branches
    that cross shards, in one collective. Then it computes the same tiles as
    the ring.

    Plot: time, memory and a timeline. The timeline shows when each rank of
    the first adapter computed, and when it waited for hops. It is recorded
    in one more call.
    """

    seq_len: int = options.seq_len(65536)
    num_heads: int = options.num_heads(8)
    num_kv_heads: int | None = options.num_kv_heads()
    head_dim: int = options.head_dim()
    dtype: options.Dtype = options.dtype()
    causal: bool = options.causal()
    nproc_per_node: int = ranks(2, min=1, help="Ranks of the ring, all on this machine.")
    buffer_bytes: int | None = options.buffer_bytes()
    ulysses_size: str = options.ulysses_size()
    repeats: int = ranks(5, min=1, help="Timed calls of each method, after one warm-up call.")
    plot: Path | None = files(
        None, metavar="FILE", help="Draw time, memory and a timeline into this file (needs matplotlib)."
    )

    def check(self) -> None:
        self.pattern().check(seq_len=self.seq_len, num_heads=self.num_heads)
        check_kv_heads("num_kv_heads", self.num_kv_heads, self.num_heads)
        parse_ulysses_size(self.ulysses_size, self.nproc_per_node, self.num_heads)
        super().check()

    def setup(self) -> Setup:
        return Setup(
            seq_len=self.seq_len,
            ring_size=self.nproc_per_node,
            pattern=self.pattern(),
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads if self.num_kv_heads is None else self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            layout=self.layout,
            buffer_bytes=self.buffer_bytes,
            ulysses_size=parse_ulysses_size(self.ulysses_size, self.nproc_per_node, self.num_heads),
            is_causal=self.causal,
            repeats=self.repeats,
            device=self.device,
            timeline=self.plot is not None,
        )


def run(chosen: CompareOptions) -> None:
    console = wide_console()
    with progress_bar(console) as show:
        found = compare(chosen.setup(), show)
    console.print(_heading(found.setup), soft_wrap=True)
    console.print(_table(found.rows))
    console.print(_verdict(found), soft_wrap=True)
    if chosen.json is not None:
        used = {**dataclasses.asdict(chosen), "device": found.setup.device, "dtype": found.setup.dtype}
        result = {
            "rows": found.rows,
            "fastest": found.fastest,
            "versions": found.versions,
            "device": found.device,
            "options": used,
        }
        write_json(chosen.json, result)
    if chosen.plot is not None and found.measured:
        draw_comparison(chosen.plot, found.measured)
    if found.failures:
        raise found.failures[0]


def _heading(setup: Setup) -> str:
    grouped = f" ({setup.num_kv_heads} for keys and values)" if setup.num_kv_heads != setup.num_heads else ""
    return (
        f"{setup.seq_len:,} tokens, {setup.layout}, {'causal' if setup.is_causal else 'not causal'}, "
        f"{setup.num_heads} heads{grouped} of {setup.head_dim}, {setup.dtype}; "
        f"branches {describe_branches(setup.pattern)}; ring of {setup.ring_size}; errors against fp64."
    )


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from ring_backends.schedule.ring_schedule import format_bytes

    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("", no_wrap=True)
    headings = ("forward", "backward", "memory\nper rank", "sent\nper rank", *(f"error\n{name}" for name in TENSORS))
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("note", overflow="fold")
    for row in rows:
        reason = row["unusable"] or row["failed"]
        if reason:
            note = f"unusable: {reason}" if row["unusable"] else f"failed: {reason.splitlines()[-1]}"
            table.add_row(row["name"], *["-"] * len(headings), escape(note))
            continue
        table.add_row(
            row["name"],
            *(f"{row[f'{part}_seconds']:,.3f} s\n{_range(row[f'{part}_range'])}" for part in ("forward", "backward")),
            f"{max(row['peak_memory_bytes']) / 2**20:,.0f} MiB",
            format_bytes(max(map(sum, zip(*row["bytes_sent"].values(), strict=True)))),
            *(f"{error:.0e}" for error in row["errors"].values()),
            escape(row["device"] + (", bytes computed" if row["bytes_are_computed"] else "")),
        )
    return table


def _range(seconds: Sequence[float]) -> str:
    return "–".join(f"{value:,.3f}" for value in seconds)


def _verdict(found: Comparison) -> str:
    """Say which methods are slower than the fastest one, and which the spread does not allow to rank."""
    if not found.measured:
        return "No method could be measured."
    if found.setup.repeats == 1:
        return "With one call per method, the spread is unknown, so they are not ranked; pass --repeats 5."
    rows = {row["name"]: row for row in found.measured}
    first, *others = found.fastest
    verdict = f"{first} is the fastest: each of its {found.setup.repeats} calls took less time than any other."
    if others:
        names = f"{', '.join([first, *others[:-1]])} and {others[-1]}"
        verdict = f"{names} are not ranked, because the times of their {found.setup.repeats} calls overlap."
    slower = [
        f"{name} {row['both_seconds'] / rows[first]['both_seconds'] - 1:,.0%}"
        for name, row in rows.items()
        if name not in found.fastest
    ]
    more = f" More time than {first}: {', '.join(slower)}." if slower else ""
    return f"Forward and backward together: {verdict}{more}"
