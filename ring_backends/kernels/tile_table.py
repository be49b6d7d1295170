"""The tiles of one step and branch as tables of integers, from which the programs of one launch find their rows.

The rows of one head (or of one stream of keys) in all segments of a tile are one entry of a table. Each program owns
one block of rows of an entry in one segment, and reads all entries that it is linked to. So no two programs write the
same row, and a result does not depend on the order of the programs. With windows, two tiles may have some of their rows
in common. These are then entries of their own, so that two entries have the same rows or none in common.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby, pairwise

import torch
from torch import Tensor

from ring_backends.kernels.launch_records import Record
from ring_backends.schedule.bands import CAUSAL, Band, trimmed
from ring_backends.schedule.rank_plan import Parcel, ParcelRows, Tile
from ring_backends.schedule.rows import DilatedRows
from ring_backends.torch_internals import untraced

ROW_COLUMNS = 6
"""Columns of local rows: head, position of the first row, segment stride, dilation rate, rows, segments."""

QUERY_COLUMNS = ROW_COLUMNS + 1
"""Columns of queries: those of local rows, then the number of the first row, if all rows of a table are numbered.

The rows of one segment have consecutive numbers. A backward stores the statistics of rows by their number.
"""

NUMBER_ALIGNMENT = 32
"""The numbers of a segment begin at a multiple of this, and are as many as a multiple of it.

So a block of rows has numbers if its size divides this, also where it reaches beyond the last row.
"""

KEY_COLUMNS = 13
"""Columns of keys: those of local rows, then the rows per batch entry of a parcel, and the offsets of its slices.

The offsets, in elements, are those of K, V, the marks, the dropout words, dK and dV.
"""

LINK_COLUMNS = 4
"""Columns of links: an entry of the other table, whether the pair is causal, and its limits ``below`` and ``above``."""

NO_LIMIT = 2**30 - 1
"""Stands for a limit that is None. Twice this number, or this and the number of a row, is a 32-bit integer."""

Entry = tuple[int, ...]
"""The columns of a table that the tiles decide: :data:`ROW_COLUMNS` of queries, or :data:`KEY_COLUMNS` of keys."""

Offsets = tuple[int, ...]
"""The offsets of the slices of one parcel, in the order of :data:`KEY_COLUMNS`."""


@dataclass(frozen=True, eq=False)
class Owners:
    """The entries of one table that own their rows in a launch, and the entries of the other table that each reads.

    Attributes:
        bounds: int32 [entries, 3], the first link of each entry, the end of its links, and whether its results are
            stored instead of added.
        links: int32 [links, LINK_COLUMNS].
        counts: (rows, segments) of each entry.
        reversed_blocks: whether the last block of rows comes first. Causal queries at the end have the most keys.
    """

    bounds: Tensor
    links: Tensor
    counts: tuple[tuple[int, int], ...]
    reversed_blocks: bool
    _work: dict[int, Tensor] = field(default_factory=dict)

    def work(self, block: int) -> Tensor:
        """Which block of ``block`` rows each program owns: int32 [programs, 3], the entry, its segment, the block."""
        if block not in self._work:
            device = self.bounds.device
            self._work[block] = _work(self.counts, block, reversed_blocks=self.reversed_blocks).to(device)
        return self._work[block]


@dataclass(frozen=True, eq=False)
class TileTable:
    """The tables of one launch.

    Attributes:
        queries: int64 [entries, QUERY_COLUMNS].
        keys: int64 [entries, KEY_COLUMNS].
        by_query, by_key: the owners in a launch whose programs own queries, or keys.
        num_numbers: the end of the numbers of query rows.
        is_packed: whether the keys lie in a buffer of parcels.
        is_banded: whether a pair of entries has another band than the causal one.
        records: the launches with these tables.
    """

    queries: Tensor
    keys: Tensor
    by_query: Owners
    by_key: Owners
    num_numbers: int
    is_packed: bool
    is_banded: bool
    records: list[Record] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class TileGroup:
    """Tiles of a step that one launch computes.

    Attributes:
        tiles: which of the tiles of the step.
        is_packed: whether their keys lie in a buffer of parcels.
        tables: what tables were made for, and the tables.
    """

    tiles: slice
    is_packed: bool
    tables: list[tuple[tuple[object, ...], TileTable]] = field(default_factory=list)


def tile_groups(tiles: Sequence[Tile]) -> tuple[TileGroup, ...]:
    """Split the tiles of a step into groups: of one branch, with local keys or with parcels.

    The groups are kept with the first tile, so a plan holds the tables and launches of its steps.
    """
    known: dict[int, tuple[TileGroup, ...]] = tiles[0].groups
    if len(tiles) not in known:
        groups, start = [], 0
        for (_, is_packed), group in groupby(tiles, key=lambda tile: (tile.branch, isinstance(tile.keys, ParcelRows))):
            stop = start + len([*group])
            groups.append(TileGroup(slice(start, stop), is_packed))
            start = stop
        known[len(tiles)] = tuple(groups)
    return known[len(tiles)]


def parcels(tiles: Sequence[Tile]) -> tuple[Parcel, ...]:
    """The parcels that the tiles read, each once."""
    return tuple(dict.fromkeys(parcel for tile in tiles for parcel in tile.parcels))


@untraced
def tile_table(tiles: tuple[Tile, ...], offsets: tuple[Offsets, ...], device: torch.device) -> TileTable:
    """Make the tables of one launch.

    Args:
        tiles: tiles of one launch.
        offsets: of each of the :func:`parcels` of the tiles.
        device: where the tables are stored.
    """
    offsets_of = dict(zip(parcels(tiles), offsets, strict=True))
    entries = [(tile, row_entries(tile.queries), _key_entries(tile, offsets_of)) for tile in tiles]
    ends: defaultdict[Entry, set[int]] = defaultdict(set)
    for _, of_queries, streams in entries:
        for line, rows in map(_line, chain(of_queries, *streams)):
            ends[line] |= {rows.start, rows.stop}
    queries: dict[Entry, int] = {}
    keys: dict[Entry, int] = {}
    links: list[tuple[int, int, bool, int, int]] = []
    query_opens: set[int] = set()
    key_opens: set[int] = set()
    for tile, of_queries, streams in entries:
        for whole_query, stream in zip(of_queries, tile.stream_of_head, strict=True):
            for query, query_rows in _parts([whole_query], ends):
                for key, key_rows in _parts(streams[stream], ends):
                    if trimmed(query_rows, key_rows, tile.band) is None:
                        continue
                    query_index, key_index = queries.setdefault(query, len(queries)), keys.setdefault(key, len(keys))
                    band = (tile.band or Band()).shifted(query_rows.start, key_rows.start)
                    below, above = (NO_LIMIT if limit is None else limit for limit in (band.below, band.above))
                    links.append((query_index, key_index, band == CAUSAL, below, above))
                    if tile.opens_queries:
                        query_opens.add(query_index)
                    if tile.opens_keys:
                        key_opens.add(key_index)
    query_table = torch.tensor(list(queries), dtype=torch.int64, device="cpu")
    key_table = torch.tensor(list(keys), dtype=torch.int64, device="cpu")
    padded = -(-query_table[:, 4] // NUMBER_ALIGNMENT) * NUMBER_ALIGNMENT
    counts = padded * query_table[:, 5]
    query_table = torch.cat([query_table, (counts.cumsum(0) - counts)[:, None]], 1)
    by_key = [(key, query, *limits) for query, key, *limits in links]
    return TileTable(
        queries=query_table.to(device),
        keys=key_table.to(device),
        by_query=_owners(query_table, links, query_opens, device, reversed_blocks=True),
        by_key=_owners(key_table, by_key, key_opens, device, reversed_blocks=False),
        num_numbers=int(counts.sum()),
        is_packed=isinstance(tiles[0].keys, ParcelRows),
        is_banded=any(not is_causal and limits != [NO_LIMIT, NO_LIMIT] for _, _, is_causal, *limits in links),
    )


def row_entries(rows: DilatedRows) -> list[Entry]:
    """The entry of each head: :data:`ROW_COLUMNS`."""
    return [
        (head, rows.start + phase, rows.segment_stride, rows.rate, rows.rows, rows.segments)
        for head, phase in rows.heads_and_phases
    ]


def _key_entries(tile: Tile, offsets: Mapping[Parcel, Offsets]) -> list[list[Entry]]:
    """The entries of the keys of each stream of a tile."""
    keys = tile.keys
    if isinstance(keys, DilatedRows):
        return [[(*entry, *(0,) * (KEY_COLUMNS - ROW_COLUMNS))] for entry in row_entries(keys)]
    entries: list[list[Entry]] = [[] for _ in range(keys.num_heads)]
    for part in keys.parts:
        parcel = part.parcel
        for stream, of_stream in zip(part.streams, entries, strict=True):
            first = stream * parcel.rows + part.row_range.start
            rows_per_entry = parcel.num_streams * parcel.rows
            of_stream.append((0, first, 0, 1, len(part.row_range), 1, rows_per_entry, *offsets[parcel]))
    return entries


def _line(entry: Entry) -> tuple[Entry, range]:
    """The line of rows on which an entry lies, and its rows on this line. No two lines have rows in common."""
    head, first, segment_stride, rate, rows, segments, *others = entry
    first, phase = divmod(first, rate)
    return (head, phase, segment_stride, rate, segments, *others), range(first, first + rows)


def _parts(entries: Sequence[Entry], ends: Mapping[Entry, set[int]]) -> Iterator[tuple[Entry, range]]:
    """Cut entries where another one begins or ends. Yield the parts, and their rows of all rows of the entries."""
    before = 0
    for entry in entries:
        head, first, segment_stride, rate, rows, *others = entry
        line, whole = _line(entry)
        for start, stop in pairwise(sorted(end for end in ends[line] if whole.start <= end <= whole.stop)):
            start, stop = start - whole.start, stop - whole.start
            yield (
                (head, first + start * rate, segment_stride, rate, stop - start, *others),
                range(before + start, before + stop),
            )
        before += rows


def _owners(
    table: Tensor, links: Sequence[Sequence[int]], opens: set[int], device: torch.device, *, reversed_blocks: bool
) -> Owners:
    ordered = sorted(links, key=lambda link: link[0])  # stable, so the order of the tiles is kept
    counts = torch.bincount(torch.tensor([link[0] for link in ordered], device="cpu"), minlength=len(table))
    ends = counts.cumsum(0)
    is_open = torch.tensor([index in opens for index in range(len(table))], device="cpu")
    return Owners(
        bounds=torch.stack([ends - counts, ends, is_open.to(ends.dtype)], 1).to(torch.int32).to(device),
        links=torch.tensor([link[1:] for link in ordered], dtype=torch.int32, device="cpu").to(device),
        counts=tuple((rows, segments) for rows, segments in table[:, 4:6].tolist()),
        reversed_blocks=reversed_blocks,
    )


@untraced
def _work(counts: Sequence[tuple[int, int]], block: int, *, reversed_blocks: bool) -> Tensor:
    rows, segments = torch.tensor(counts, device="cpu").unbind(1)
    blocks = (rows + block - 1) // block
    programs = blocks * segments
    entries = torch.arange(len(counts), device="cpu").repeat_interleave(programs)
    index = torch.arange(len(entries), device="cpu") - (programs.cumsum(0) - programs)[entries]
    segment, number = index // blocks[entries], index % blocks[entries]
    if reversed_blocks:
        number = blocks[entries] - 1 - number
    return torch.stack([entries, segment, number], 1).to(torch.int32)
