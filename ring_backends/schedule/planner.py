"""Plans one rank's part of a schedule, step by step.

The heads are cut into blocks. If the blocks are still too large, the rows of each hop are cut into shares. So the
buffers of a hop stay small compared with the tensors.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from ring_backends.schedule.block_builder import BlockBuilder
from ring_backends.schedule.rank_plan import HeadBlock, RankPlan, Step
from ring_backends.schedule.ring_schedule import RingSchedule, statistics_itemsize
from ring_backends.torch_internals import untraced

COMMUNICATION_SHARE = 0.05
"""Maximum size of all communication buffers, as a share of q, k, v, out and their gradients."""

MIN_HOP_BYTES = 256 * 1024
"""Minimum size of a hop after cutting. Smaller hops would save little memory, and their latency would dominate."""

MIN_BLOCK_BYTES = 4 * 1024 * 1024
"""Minimum size of the query of a block of heads, unless the hops require smaller blocks.

In bf16 and fp16, the sums of a backward take more bytes than the gradients. Cutting the heads into blocks keeps the
sums small. The sums of a forward need no such cut, since no gradients take memory at that time.
"""


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
    tile_bytes: int | None = None,
) -> RankPlan:
    """The steps of ``rank`` in a forward, or in a backward.

    Args:
        batch, head_dim, itemsize: sizes of the inputs, the same on every rank. They decide into how many parts heads
            and hops are cut.
        tile_bytes: maximum size of the query of one tile. It may differ between ranks. None does not cut tiles.
    """
    if batch == 0:
        return RankPlan(rank, ())
    max_tile_rows = None if tile_bytes is None else max(1, tile_bytes // (batch * head_dim * itemsize))
    num_blocks, shares = num_cuts(schedule, batch=batch, head_dim=head_dim, itemsize=itemsize, backward=backward)
    bounds = [schedule.kv_heads * block // num_blocks for block in range(num_blocks + 1)]
    builders = (BlockBuilder(schedule, rank, first, last, shares) for first, last in pairwise(bounds))
    *blocks, last_block = (builder.block(max_tile_rows) for builder in builders)
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


def num_cuts(schedule: RingSchedule, *, batch: int, head_dim: int, itemsize: int, backward: bool) -> tuple[int, int]:
    """Return the number of blocks of heads, and of shares of every hop, that keep the communication buffers small.

    At most three buffers of K and V exist at a time: one to send, one in use, one to receive. In a backward, there are
    at most three more of dK and dV, in the statistics dtype: one being computed, one to send, one to receive.
    """
    row_bytes = batch * head_dim * itemsize
    longest = max(map(schedule.layout.local_len, {0, schedule.layout.ring_size - 1}))
    tensors = 4 * longest * (schedule.num_heads + schedule.kv_heads) * row_bytes
    hop = 2 * schedule.max_rows_in_flight * row_bytes
    buffers = 3 * hop
    if backward:
        buffers += 3 * hop * statistics_itemsize(itemsize) // itemsize
    cuts = -(-buffers // max(1, int(COMMUNICATION_SHARE * tensors)))
    cuts = max(1, min(cuts, hop // MIN_HOP_BYTES))
    sums = longest * schedule.num_heads * row_bytes if backward and itemsize < 4 else 0
    blocks = min(schedule.kv_heads, max(cuts, sums // MIN_BLOCK_BYTES, 1))
    return blocks, -(-cuts // blocks)
