"""The tables of docs/ulysses.md: the modelled ones are computed anew, and the measured one is that of the JSON file."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from command_line import ROOT

from ring_backends import DilatedPattern, RingSchedule, SequenceLayout
from ring_backends.schedule.planner import rank_plan

PAGE = ROOT / "docs" / "ulysses.md"
RING_SIZE, RANKS_PER_HOST, SEQ_LEN = 64, 8, 1048576
SIZES: dict[str, Any] = {"batch": 1, "head_dim": 128, "itemsize": 2}

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="this tree has no docs/")


def tables(first_column: str) -> list[list[list[str]]]:
    """The cells of the tables whose heading begins with this column, without the heading."""
    table = rf"^\| {first_column} \|.*\n\|[-:|]+\|\n((?:\|.*\n)+)"
    found = re.findall(table, PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return [[[cell.strip() for cell in row.strip("|").split("|")] for row in rows.splitlines()] for rows in found]


@pytest.mark.parametrize(
    ("number", "decimals", "pattern"),
    [
        (0, 0, DilatedPattern([SEQ_LEN], [1])),
        (1, 1, DilatedPattern([2048, 16384, 131072, SEQ_LEN], [1, 8, 64, 512])),
    ],
    ids=["dense", "dilated"],
)
def test_the_modelled_tables_are_those_of_the_schedule(number: int, decimals: int, pattern: DilatedPattern) -> None:
    """``decimals`` are those of the bytes between hosts."""
    expected = []
    for ulysses_size in (1, 2, 4, 8):
        layout = SequenceLayout(SEQ_LEN, RING_SIZE, "zigzag")
        schedule = RingSchedule(pattern, layout, 32, 8, is_causal=True, ulysses_size=ulysses_size)
        hops = schedule.of_members[0]
        sent, exchanged = [0] * RING_SIZE, 0
        row = [str(ulysses_size)]
        for backward in (False, True):
            options = {**SIZES, "backward": backward}
            row.append(str(len(rank_plan(hops, 0, **options, device_type="cuda").hops)))
            for rank in range(RING_SIZE):
                sent[rank] += schedule.wire_bytes(rank, **options, device_type="cuda")
            exchanged += int(schedule.exchanged_bytes(**options).max())
        hosts = [rank // RANKS_PER_HOST for rank in range(RING_SIZE)]
        between = schedule.bytes_between_hosts(hosts, **SIZES, device_type="cuda")
        of_group = f"{exchanged / 2**30:.1f}" if exchanged else "0"
        expected.append([*row, f"{max(sent) / 2**30:.1f}", of_group, f"{between / 2**30:.{decimals}f}"])
    assert tables("`ulysses_size`")[number] == expected


def test_the_measured_table_is_that_of_the_file() -> None:
    rows = json.loads((ROOT / "bench" / "results" / "groups.json").read_text())["rows"]
    first: dict[str, Any] = {}
    expected = []
    for row in rows:
        if row["ulysses_size"] == 1:
            first = row
        call, size = row["setup"].partition(",")[0], str(row["ulysses_size"])
        hops = f"{row['hops_forward']}, {row['hops_backward']}"
        cells = [call, size, hops, f"{row['between_hosts_bytes'] / 2**20:.1f}"]
        for name in ("forward_seconds", "both_seconds"):
            cells += [f"{row[name]:.2f}", f"{row[name] / first[name]:.2f}"]
        expected.append(cells)
    assert tables("call") == [expected]
    assert max(row["error"] for row in rows) < 1e-6
