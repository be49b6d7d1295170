"""Cuts tiles so that one kernel call fits into the cache, and takes little memory compared with the tensors.

A tile is cut by segments and by heads, and by rows only where one head has too many. A cut by rows divides a causal
tile into squares on its diagonal and rectangles below it. Each rank cuts its own tiles. The hops do not depend on
these cuts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ring_backends.schedule.limits import limits_of
from ring_backends.schedule.rank_plan import Tile

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
    """

    max_rows: int
    parts: int = 1
    few_heads: bool = False

    @property
    def rows_of_part(self) -> int:
        """Maximum number of rows of one head in one segment."""
        return max(MIN_TILE_ROWS, min(self.max_rows, MIN_ROWS_OF_PART), self.max_rows // self.parts)


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
    queries, keys = tile.queries, tile.keys
    group, num_groups = tile.heads_per_group, queries.num_heads // tile.heads_per_group
    rows = min(max(queries.rows, keys.rows), size.rows_of_part)
    at_once = max(1, size.max_rows // rows)
    if keeps_streams and not tile.streams_are_grouped:
        groups_at_once, segments_at_once = num_groups, at_once // queries.num_heads
    elif size.few_heads:
        segments_at_once = min(queries.segments, at_once // group)
        groups_at_once = at_once // (max(1, segments_at_once) * group)
    else:
        groups_at_once = min(num_groups, at_once // group)
        segments_at_once = at_once // (max(1, groups_at_once) * group)
    for segments in _ranges(queries.segments, max(1, segments_at_once)):
        for groups in _ranges(num_groups, max(1, groups_at_once)):
            part = tile.part(segments, groups)
            key_rows = [(cut, part.keys.part_of_rows(cut)) for cut in _ranges(keys.rows, rows)]
            for query_cut in _ranges(queries.rows, rows):
                query_rows = part.queries.part_of_rows(query_cut)
                for key_cut, some_keys in key_rows:
                    if tile.is_causal and key_cut.start > query_cut.start:
                        break
                    on_diagonal = tile.is_causal and key_cut == query_cut
                    meets_first_query = on_diagonal if tile.is_causal else query_cut.start == 0
                    yield replace(
                        part,
                        queries=query_rows,
                        keys=some_keys,
                        is_causal=on_diagonal,
                        opens_queries=tile.opens_queries and key_cut.start == 0,
                        opens_keys=tile.opens_keys and meets_first_query,
                    )


def _ranges(total: int, at_most: int) -> list[range]:
    """Cut 0 … total − 1 into the smallest number of ranges of at most ``at_most``, of nearly equal sizes."""
    parts = -(-total // at_most)
    return [range(total * part // parts, total * (part + 1) // parts) for part in range(parts)]
