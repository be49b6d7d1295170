"""The tables of the Triton kernels: their links show the pairs of the tiles, and no two entries share a row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain, product

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ring_backends.kernels.tile_table import Owners, TileTable, launches, parcels, tile_table
from ring_backends.schedule.bands import Band
from ring_backends.schedule.planner import rank_plan
from ring_backends.schedule.rank_plan import ParcelRows, Tile
from ring_backends.schedule.rows import DilatedRows
from ring_backends.testing.marks import THOROUGH
from ring_backends.testing.strategies import AttentionCase, attention_cases

Row = tuple[int, int]
"""The head and the position of a local row; or the offset of its parcel in the buffer, and its number in the parcel."""

Entries = list[list[list[Row]]]
"""The rows of each entry and segment."""

OFFSET = 1000
"""How far apart the slices of parcels lie."""


@THOROUGH
@settings(max_examples=150, deadline=None)
@given(
    case=attention_cases(max_n=40, max_heads=3),
    ring_size=st.integers(1, 4),
    layout=st.sampled_from(["contiguous", "zigzag"]),
    backward=st.booleans(),
)
def test_links_show_the_pairs_of_the_tiles(case: AttentionCase, ring_size: int, layout: str, backward: bool) -> None:
    schedule = case.schedule(ring_size, layout)
    for rank in range(ring_size):
        plan = rank_plan(schedule, rank, batch=1, head_dim=4, itemsize=4, backward=backward)
        for _, step in plan.steps:
            for tiles in launches(step.all_tiles):
                check_table(tiles)


def check_table(tiles: tuple[Tile, ...]) -> None:
    offsets = tuple((OFFSET * (1 + number),) * 6 for number in range(len(parcels(tiles))))
    table = tile_table(tiles, offsets, torch.device("cpu"))
    offset_of = {parcel: offset[0] for parcel, offset in zip(parcels(tiles), offsets, strict=True)}
    wanted: Counter[tuple[Row, Row]] = Counter()
    for tile in tiles:
        wanted.update(pairs_of_tile(tile, offset_of))
    queries, keys = entries(table.queries), entries(table.keys)
    for rows in (queries, keys):
        assert max(Counter(row for entry in rows for segment in entry for row in segment).values()) == 1
    assert Counter(linked_pairs(table.by_query, queries, keys)) == wanted
    assert Counter((query, key) for key, query in linked_pairs(table.by_key, keys, queries, is_by_key=True)) == wanted
    check_opening(table, tiles, queries)


def check_opening(table: TileTable, tiles: tuple[Tile, ...], queries: Entries) -> None:
    opening = (entry for tile in tiles if tile.opens_queries for entry in local_rows(tile.queries))
    opens = table.by_query.bounds[:, 2].tolist()
    stored = chain.from_iterable(entry for entry, is_open in zip(queries, opens, strict=True) if is_open)
    assert {*chain.from_iterable(stored)} == {*chain.from_iterable(chain.from_iterable(opening))}


def local_rows(rows: DilatedRows) -> Entries:
    """The rows of each head and segment."""
    return [
        [
            [(head, rows.start + phase + segment * rows.segment_stride + i * rows.rate) for i in range(rows.rows)]
            for segment in range(rows.segments)
        ]
        for run in rows.runs
        for head, phase in run.heads_and_phases()
    ]


def pairs_of_tile(tile: Tile, offset_of: dict[object, int]) -> Iterator[tuple[Row, Row]]:
    if isinstance(tile.keys, ParcelRows):
        streams: Entries = [[[]] for _ in range(tile.keys.num_heads)]
        for part in tile.keys.parts:
            for stream, (rows,) in zip(part.streams, streams, strict=True):
                first = stream * part.parcel.rows
                rows += [(offset_of[part.parcel], first + row) for row in part.row_range]
    else:
        streams = local_rows(tile.keys)
    for of_head, stream in zip(local_rows(tile.queries), tile.stream_of_head, strict=True):
        for queries, keys in zip(of_head, streams[stream], strict=True):
            yield from visible_pairs(queries, keys, tile.band or Band())


def visible_pairs(queries: list[Row], keys: list[Row], band: Band) -> Iterator[tuple[Row, Row]]:
    for (i, query), (j, key) in product(enumerate(queries), enumerate(keys)):
        if (band.below is None or i - j <= band.below) and (band.above is None or j - i <= band.above):
            yield query, key


def entries(table: Tensor) -> Entries:
    """The rows of each entry and segment of a table."""
    found = []
    for head, first, stride, rate, rows, segments, *others in table.tolist():
        name = others[1] if len(others) > 1 and others[1] else head
        starts = (first + segment * stride for segment in range(segments))
        found.append([[(name, start + i * rate) for i in range(rows)] for start in starts])
    return found


def linked_pairs(
    owners: Owners, own: Entries, others: Entries, *, is_by_key: bool = False
) -> Iterator[tuple[Row, Row]]:
    for entry, (first, end, _) in zip(own, owners.bounds.tolist(), strict=True):
        for other, _, below, above in owners.links[first:end].tolist():
            band = Band(above, below) if is_by_key else Band(below, above)
            for rows, other_rows in zip(entry, others[other], strict=True):
                yield from visible_pairs(rows, other_rows, band)
