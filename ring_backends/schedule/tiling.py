"""Cuts tiles so that one kernel call fits into the cache, and takes little memory compared with the tensors.

A tile is cut by segments and by heads, and by rows only where one head has too many. A cut by rows divides a causal
tile into squares on its diagonal and rectangles below it. A tile with a window is cut as in
:mod:`ring_backends.schedule.bands`, unless the kernel takes it whole. Each rank cuts its own tiles. The hops do not
depend on these cuts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from ring_backends.schedule.bands import Blocks, Part, cut_band, ranges, trimmed
from ring_backends.schedule.limits import limits_of
from ring_backends.schedule.rank_plan import Tile
from ring_backends.schedule.rows import DilatedRows

MIN_TILE_ROWS = 1024
"""Minimum number of rows after a cut by rows, since smaller kernel calls are slower."""

MIN_ROWS_OF_PART = 2048
"""Minimum number of rows after a cut by rows that gives all threads work. Usual segments of rate 1 are not longer."""

MAX_TILE_BYTES = 4 * 1024 * 1024
"""Maximum size of the query of one kernel call on the CPU, for each thread."""

FORWARD_TILE_SHARE, BACKWARD_TILE_SHARE = 1 / 16, 1 / 32
"""Size of the query of one kernel call on the CPU, as a share of the size of this rank's query.

In a backward, a kernel call takes nine tensors of this size, while the gradients exist too.
"""

ACCELERATOR_TILE_SHARE = 1 / 8
"""The same on an accelerator, where more launches would cost more than memory."""


UNLIMITED = 2**62
"""More rows than any tile has."""


@dataclass(frozen=True)
class TileSize:
    """How large the tiles of a plan are.

    Attributes:
        max_rows: maximum number of query rows, summed over heads and segments. A tile may have more, since it always
            has at least ``MIN_TILE_ROWS`` rows (or all rows) of one head.
        parts: how many heads and segments a tile should have, since the kernel on the CPU divides only these among its
            threads. For them, long segments are cut by rows, down to ``MIN_ROWS_OF_PART`` rows.
        few_heads: whether a tile has few heads of many segments, and not many heads of few segments. The CPU kernel
            then writes the rows of its gradients contiguously.
        takes_bands: whether the kernel takes tiles with any band.
    """

    max_rows: int
    parts: int = 1
    few_heads: bool = False
    takes_bands: bool = False

    @property
    def rows_of_part(self) -> int:
        """Maximum number of rows of one head in one segment."""
        return max(MIN_TILE_ROWS, min(self.max_rows, MIN_ROWS_OF_PART), self.max_rows // self.parts)


UNCUT = TileSize(UNLIMITED, takes_bands=True)
"""For kernels that take any tile, and need no memory for its rows."""


def max_tile_bytes(device: torch.device, query_bytes: int, *, backward: bool) -> int:
    """Maximum size of the query of one kernel call, if this rank's whole query has ``query_bytes`` bytes."""
    if device.type == "cpu":
        share = query_bytes * (BACKWARD_TILE_SHARE if backward else FORWARD_TILE_SHARE)
        share = min(share, MAX_TILE_BYTES * torch.get_num_threads())
    else:
        share = query_bytes * ACCELERATOR_TILE_SHARE
    return max(limits_of(device.type).min_tile_bytes, int(share))


def cut(tile: Tile, size: TileSize, *, keeps_streams: bool) -> Iterator[Tile]:
    """Cut ``tile`` into tiles of this size.

    If the heads share the streams evenly, all heads of a stream stay in one tile; with ``keeps_streams``, in any case.
    """
    num_queries, num_keys = tile.queries.rows, tile.keys.rows
    rows = min(max(num_queries, num_keys), size.rows_of_part)
    window = None if tile.is_causal else tile.band
    if window is not None and not (size.takes_bands and max(num_queries, num_keys) <= rows):
        cuts: Iterable[Blocks] = cut_band(num_queries, num_keys, window, rows)
    else:
        cells = product(ranges(range(num_queries), rows), ranges(range(num_keys), rows))
        found = (trimmed(*cell, tile.band) for cell in cells)
        cuts = [Blocks(tuple(part for part in found if part is not None))]
    for blocks in cuts:
        for repeated, parts in _repeated(tile, blocks):
            for some_heads in _cut_segments_and_heads(repeated, parts, size, keeps_streams=keeps_streams):
                for queries, keys, band in parts:
                    is_own = queries == keys
                    yield replace(
                        some_heads,
                        queries=some_heads.queries.part_of_rows(queries),
                        keys=some_heads.keys.part_of_rows(keys),
                        band=band,
                        opens_queries=tile.opens_queries and (is_own if window is not None else keys.start == 0),
                        opens_keys=tile.opens_keys and (is_own if tile.band is not None else queries.start == 0),
                    )


def _repeated(tile: Tile, blocks: Blocks) -> Iterator[tuple[Tile, tuple[Part, ...]]]:
    """The tiles that repeated blocks make: one with the blocks as its segments if possible, else one for each block."""
    parts, repeats, step = blocks
    queries, keys = tile.queries, tile.keys
    if repeats == 1:
        yield tile, parts
    elif isinstance(keys, DilatedRows) and queries.segments < repeats:
        for segment in range(queries.segments):
            of_segment = (x.part_of_segments(range(segment, segment + 1)) for x in (queries, keys))
            of_queries, of_keys = (replace(x, segments=repeats, segment_stride=step * x.rate) for x in of_segment)
            yield replace(tile, queries=of_queries, keys=of_keys), parts
    else:
        for number in range(repeats):
            yield tile, tuple(part.moved(number * step) for part in parts)


def _cut_segments_and_heads(
    tile: Tile, parts: Sequence[Part], size: TileSize, *, keeps_streams: bool
) -> Iterator[Tile]:
    queries, group, num_groups = tile.queries, tile.heads_per_group, tile.queries.num_heads // tile.heads_per_group
    at_once = max(1, size.max_rows // max(len(rows) for part in parts for rows in part[:2]))
    if keeps_streams and not tile.streams_are_grouped:
        groups_at_once, segments_at_once = num_groups, at_once // queries.num_heads
    elif size.few_heads:
        segments_at_once = min(queries.segments, at_once // group)
        groups_at_once = at_once // (max(1, segments_at_once) * group)
    else:
        groups_at_once = min(num_groups, at_once // group)
        segments_at_once = at_once // (max(1, groups_at_once) * group)
    for segments in ranges(range(queries.segments), max(1, segments_at_once)):
        for groups in ranges(range(num_groups), max(1, groups_at_once)):
            yield tile.part(segments, groups)
