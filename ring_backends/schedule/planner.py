"""Plans one rank's part of a schedule, step by step.

The heads are cut into blocks, and where that is not fine enough the travelling rows into shares. So the buffers of a
hop stay small compared with the tensors.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from ring_backends.schedule.block_builder import BlockBuilder
from ring_backends.schedule.rank_plan import HeadBlock, RankPlan, Step
from ring_backends.schedule.ring_schedule import RingSchedule

COMMUNICATION_SHARE = 0.05
"""The most that all communication buffers may take, as a share of q, k, v, out and their gradients."""

MIN_HOP_BYTES = 256 * 1024
"""Hops are not cut finer than this: below it, latency costs more than the memory is worth."""

MIN_BLOCK_BYTES = 4 * 1024 * 1024
"""Heads are not cut into blocks whose query is smaller than this, where no hop asks for it.

In bf16 and fp16 the sums of a backward take more bytes than the gradients. Blocks keep them small. A forward needs no
such limit: its sums exist while no gradients do.
"""


@lru_cache(maxsize=256)
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
        batch, head_dim, itemsize: of the inputs. They decide how finely heads and hops are cut, and every rank has the
            same.
        tile_bytes: the most that the query of one tile may take; ranks may differ. None leaves tiles whole.
    """
    if batch == 0:
        return RankPlan(rank, ())
    max_tile_rows = None if tile_bytes is None else max(1, tile_bytes // (batch * head_dim * itemsize))
    num_blocks, shares = _cuts(schedule, batch * head_dim * itemsize, itemsize, backward=backward)
    bounds = [schedule.kv_heads * block // num_blocks for block in range(num_blocks + 1)]
    builders = (BlockBuilder(schedule, rank, first, last, shares) for first, last in pairwise(bounds))
    *blocks, last_block = (builder.block(max_tile_rows) for builder in builders)
    if backward and schedule.num_steps:
        last_block = _hide_last_hop(last_block)
    return RankPlan(rank, (*blocks, last_block))


def _hide_last_hop(block: HeadBlock) -> HeadBlock:
    """Keep half of the tiles of local keys for the end, to be computed while the last dK and dV travel home.

    The other half hides the first hop. Tiles that open rows have to stay ahead of those that add to them.
    """
    first, *others = block.steps
    movable = [tile for tile in first.tiles if not (tile.opens_queries or tile.opens_keys)]
    kept_for_the_end = movable[len(movable) // 2 :]
    stay = tuple(tile for tile in first.tiles if not any(tile is moved for moved in kept_for_the_end))
    steps = (replace(first, tiles=stay), *others, Step(tiles=tuple(kept_for_the_end)))
    return replace(block, steps=steps)


def _cuts(schedule: RingSchedule, row_bytes: int, itemsize: int, *, backward: bool) -> tuple[int, int]:
    """How many blocks of heads, and how many shares of every hop, keep the communication buffers small.

    The buffers alive together are at most three of K and V (packed or being forwarded, in use, in flight), and in
    backward three of dK and dV in the statistics dtype (being computed, leaving, arriving).
    """
    longest = max(map(schedule.layout.local_len, {0, schedule.layout.ring_size - 1}))
    tensors = 4 * longest * (schedule.num_heads + schedule.kv_heads) * row_bytes
    hop = 2 * schedule.max_rows_in_flight * row_bytes
    buffers = 3 * hop
    if backward:
        buffers += 3 * hop * max(itemsize, 4) // itemsize
    cuts = -(-buffers // max(1, int(COMMUNICATION_SHARE * tensors)))
    cuts = max(1, min(cuts, hop // MIN_HOP_BYTES))
    sums = longest * schedule.num_heads * row_bytes if backward and itemsize < 4 else 0
    blocks = min(schedule.kv_heads, max(cuts, sums // MIN_BLOCK_BYTES, 1))
    return blocks, -(-cuts // blocks)


def num_cuts(schedule: RingSchedule, *, batch: int, head_dim: int, itemsize: int, backward: bool) -> tuple[int, int]:
    """How many blocks of heads a plan has, one after the other, and into how many shares it cuts every hop."""
    return _cuts(schedule, batch * head_dim * itemsize, itemsize, backward=backward)
