"""Plans one rank's part of a schedule, step by step.

The heads are cut into blocks. If the blocks are still too large, the rows of each hop are cut into shares. So the
buffers of a hop stay small compared with the tensors.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from ring_backends.schedule.block_builder import BlockBuilder
from ring_backends.schedule.limits import limits_of
from ring_backends.schedule.rank_plan import HeadBlock, RankPlan, Step
from ring_backends.schedule.ring_schedule import RingSchedule, statistics_itemsize
from ring_backends.schedule.tiling import TileSize
from ring_backends.torch_internals import untraced


@lru_cache(maxsize=256)
@untraced
def rank_plan(
    schedule: RingSchedule,
    rank: int,
    *,
    batch: int,
    head_dim: int,
    itemsize: int,
    backward: bool = False,
    device_type: str = "cpu",
    tile_bytes: int | None = None,
    threads: int = 1,
    uncut: frozenset[int] = frozenset(),
) -> RankPlan:
    """The steps of ``rank`` in a forward, or in a backward.

    Args:
        batch, head_dim, itemsize, device_type: sizes and device type of the inputs, the same on every rank. They decide
            into how many parts heads and hops are cut.
        tile_bytes: maximum size of the query of one tile. It may differ between ranks. None does not cut tiles.
        threads: number of threads that share the computation of a tile. It may differ between ranks.
        uncut: branches whose tiles are not cut.
    """
    if batch == 0:
        return RankPlan(rank, ())
    size = None
    if tile_bytes is not None:
        max_rows = max(1, tile_bytes // (batch * head_dim * itemsize))
        size = TileSize(max_rows, parts=-(-threads // batch), few_heads=backward and device_type == "cpu")
    sizes = {"batch": batch, "head_dim": head_dim, "itemsize": itemsize}
    num_blocks, shares = num_cuts(schedule, **sizes, backward=backward, device_type=device_type)
    bounds = [schedule.kv_heads * block // num_blocks for block in range(num_blocks + 1)]
    builders = (BlockBuilder(schedule, rank, first, last, shares) for first, last in pairwise(bounds))
    cuts_base, rounds_sums = limits_of(device_type).cuts_base, itemsize < statistics_itemsize(itemsize)
    *blocks, last_block = (
        builder.block(size, cuts_base=cuts_base, uncut=uncut, rounds_sums=rounds_sums) for builder in builders
    )
    if backward and schedule.num_steps:
        last_block = _hide_last_hop(last_block)
    return RankPlan(rank, (*blocks, last_block))


def _hide_last_hop(block: HeadBlock) -> HeadBlock:
    """Move half of the tiles with local keys to the end, so that they hide the last hop of dK and dV.

    The other half hides the first hop. Tiles that open rows are not moved, since they come before the tiles that add to
    these rows.
    """
    first, *others = block.steps
    movable = [tile for tile in first.tiles if not (tile.opens_queries or tile.opens_keys)]
    kept_for_the_end = movable[len(movable) // 2 :]
    stay = tuple(tile for tile in first.tiles if not any(tile is moved for moved in kept_for_the_end))
    steps = (replace(first, tiles=stay), *others, Step(tiles=tuple(kept_for_the_end)))
    return replace(block, steps=steps)


def num_cuts(
    schedule: RingSchedule, *, batch: int, head_dim: int, itemsize: int, backward: bool, device_type: str
) -> tuple[int, int]:
    """Return the number of blocks of heads, and of shares of every hop, that keep the communication buffers small.

    At most three buffers of K and V exist at a time: one to send, one in use, one to receive. In a backward, there are
    at most three more of dK and dV, in the statistics dtype: one being computed, one to send, one to receive.
    """
    limits, row_bytes = limits_of(device_type), batch * head_dim * itemsize
    longest = max(map(schedule.layout.local_len, {0, schedule.layout.ring_size - 1}))
    tensors = 4 * longest * (schedule.num_heads + schedule.kv_heads) * row_bytes
    hop = 2 * schedule.max_rows_in_flight * row_bytes
    buffers = 3 * hop
    if backward:
        buffers += 3 * hop * statistics_itemsize(itemsize) // itemsize
    cuts = -(-buffers // max(1, int(limits.communication_share * tensors)))
    cuts = max(1, min(cuts, hop // limits.min_hop_bytes))
    sums = longest * schedule.num_heads * row_bytes if backward and itemsize < 4 else 0
    of_sums = 1 if limits.min_block_bytes is None else sums // limits.min_block_bytes
    blocks = min(schedule.kv_heads, max(cuts, of_sums, 1))
    return blocks, -(-cuts // blocks)
