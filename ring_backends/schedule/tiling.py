"""Cuts tiles so that one kernel call fits into the cache, and takes little memory compared with the tensors.

A tile is cut first by segments, then by heads, and by rows only where one head has too many. A cut by rows divides a
causal tile into squares on its diagonal and rectangles below it. Each rank cuts its own tiles. The hops do not
depend on these cuts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ring_backends.schedule.limits import limits_of
from ring_backends.schedule.rank_plan import Tile

MIN_TILE_ROWS = 1024
"""Minimum number of rows after a cut by rows, since smaller kernel calls are slower."""

MAX_TILE_BYTES = 4 * 1024 * 1024
"""Maximum size of the query of one kernel call on the CPU, for each thread."""

FORWARD_TILE_SHARE, BACKWARD_TILE_SHARE = 1 / 16, 1 / 32
"""Size of the query of one kernel call on the CPU, as a share of the size of this rank's query.

In a backward, a kernel call takes nine tensors of this size, while the gradients exist too.
"""

ACCELERATOR_TILE_SHARE = 1 / 8
"""The same on an accelerator, where more launches would cost more than memory."""


def max_tile_bytes(device: torch.device, query_bytes: int, *, backward: bool) -> int:
    """Maximum size of the query of one kernel call, if this rank's whole query has ``query_bytes`` bytes."""
    if device.type == "cpu":
        share = query_bytes * (BACKWARD_TILE_SHARE if backward else FORWARD_TILE_SHARE)
        share = min(share, MAX_TILE_BYTES * torch.get_num_threads())
    else:
        share = query_bytes * ACCELERATOR_TILE_SHARE
    return max(limits_of(device.type).min_tile_bytes, int(share))


def cut(tile: Tile, max_rows: int, *, keeps_streams: bool) -> Iterator[Tile]:
    """Cut ``tile`` into tiles with at most ``max_rows`` query rows each, summed over heads and segments.

    A tile may have more, since it always has at least ``MIN_TILE_ROWS`` rows (or all rows) of all heads that share a
    key/value head; with ``keeps_streams``, of all heads that share a stream.
    """
    queries, keys = tile.queries, tile.keys
    longest = max(queries.rows, keys.rows)
    rows = min(longest, max(MIN_TILE_ROWS, max_rows))
    groups_at_once = max(1, max_rows // (rows * tile.heads_per_group))
    if keeps_streams and not tile.streams_are_grouped:
        groups_at_once = queries.num_heads
    segments_at_once = max(1, max_rows // (rows * queries.num_heads))
    for segments in _ranges(queries.segments, segments_at_once):
        for groups in _ranges(queries.num_heads // tile.heads_per_group, groups_at_once):
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


def cuts_rows(rows: int, max_rows: int) -> bool:
    """Whether :func:`cut` divides the rows of one head in one segment."""
    return rows > max(MIN_TILE_ROWS, max_rows)


def _ranges(total: int, at_most: int) -> list[range]:
    """Cut 0 … total − 1 into the smallest number of ranges of at most ``at_most``, of nearly equal sizes."""
    parts = -(-total // at_most)
    return [range(total * part // parts, total * (part + 1) // parts) for part in range(parts)]
