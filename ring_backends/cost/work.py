"""The tiles of one rank, read off its plan before any cut: how many, with how many rows and visible pairs.

Tiles with local keys are those that the planner builds. Those with keys of other ranks are counted, since a long ring
has very many: the queries of each piece of a segment have a tile for each other piece that they see. If the keys travel
along a tree, they have one tile for all of them instead, or one for each lot that has some of the keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ring_backends.schedule.block_builder import BlockBuilder
from ring_backends.schedule.ring_schedule import RingSchedule, visible_pairs
from ring_backends.schedule.travel import Travel


@dataclass
class RankWork:
    """Rows and pairs are summed over heads.

    Attributes:
        own_tiles, own_rows, own_key_rows: number of tiles whose queries and keys are the same part of a segment, their
            query rows, and their key rows.
        own_pairs: the visible pairs in these tiles.
        other_tiles, other_rows: number of the other tiles with local keys or with keys that travel along trees, and of
            the query rows of all other tiles. A row counts once for each tile.
        chained_tiles: number of tiles with keys that travel along chains.
    """

    own_tiles: int = 0
    own_rows: int = 0
    own_key_rows: int = 0
    own_pairs: float = 0.0
    other_tiles: int = 0
    other_rows: int = 0
    chained_tiles: int = 0


def work_of(schedule: RingSchedule, travel: Travel, rank: int) -> RankWork:
    """Count the tiles of ``rank``. Cuts multiply their number. Heads with different numbers of rows need separate ones.

    Args:
        travel: along which trees the rows of other ranks travel.
    """
    work, builder = RankWork(), BlockBuilder(schedule, travel, rank)
    for branch in schedule.branches:
        own, others = builder.local_tiles(branch)
        for tile in own:
            num_rows = torch.tensor(tile.queries.rows, dtype=torch.float64, device="cpu")
            pairs = visible_pairs(num_rows, num_rows, branch.band, is_causal=schedule.is_causal)
            work.own_tiles += 1
            work.own_rows += tile.queries.size
            work.own_key_rows += tile.keys.rows * tile.queries.segments * tile.keys.num_heads
            work.own_pairs += float(pairs) * (tile.queries.size // tile.queries.rows)
        work.other_tiles += len(others)
        work.other_rows += sum(tile.queries.size for tile in others)
        num_lots = travel.num_lots(branch.index)
        for index, num_seen in builder.pieces_seen(branch):
            rows = branch.rows_of_pieces[index]
            if num_lots and branch.band is None:
                num_seen = min(num_seen, 1)
            query_rows = num_seen * rows
            if num_seen and branch.band is not None:  # few queries see the farthest piece
                query_rows += rows.clamp(max=branch.band) - rows
            num_tiles = num_seen * len({*rows[rows > 0].tolist()})
            work.other_rows += int((query_rows * branch.heads_at).sum()) * max(1, num_lots)
            if num_lots:
                work.other_tiles += num_tiles * num_lots
            else:
                work.chained_tiles += num_tiles
    return work
