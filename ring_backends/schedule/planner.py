"""Plans one rank's part of a schedule, step by step.

The heads are cut into blocks. If the blocks are still too large, the rows of each hop along chains are cut into shares.
So the buffers of a hop stay small compared with the tensors. The hops along other trees are not cut: they carry all
heads.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import chain, pairwise

from ring_backends.schedule.block_builder import BlockBuilder
from ring_backends.schedule.limits import limits_of
from ring_backends.schedule.rank_plan import Delivery, HeadBlock, Hop, RankPlan, Step
from ring_backends.schedule.ring_schedule import RingSchedule, key_value_dim, statistics_itemsize
from ring_backends.schedule.tiling import UNCUT, UNLIMITED, TileSize
from ring_backends.schedule.travel import Travel
from ring_backends.torch_internals import untraced


@lru_cache(maxsize=256)
@untraced
def rank_plan(
    schedule: RingSchedule,
    rank: int,
    *,
    batch: int,
    head_dim: int,
    value_dim: int | None = None,
    itemsize: int,
    backward: bool = False,
    device_type: str = "cpu",
    tile_bytes: int | None = None,
    threads: int = 1,
    takes_bands: bool = False,
    uncut: frozenset[int] = frozenset(),
    few_hops: bool = True,
) -> RankPlan:
    """The steps of ``rank`` in a forward, or in a backward.

    Args:
        batch, head_dim, value_dim, itemsize, device_type: sizes and device type of the inputs, the same on every rank.
            They decide into how many parts heads and hops are cut. None means a ``value_dim`` of ``head_dim``.
        tile_bytes: maximum size of the query of one tile. It may differ between ranks. None cuts no tiles.
        threads: number of threads that share the computation of a tile. It may differ between ranks.
        takes_bands: whether the kernel takes tiles with any band (:mod:`ring_backends.schedule.bands`).
        uncut: branches whose tiles are not cut.
        few_hops: whether the rows of sparse branches travel along trees of few hops, and not along chains.
    """
    if batch == 0:
        return RankPlan(rank)
    size = UNCUT
    if tile_bytes is not None:
        max_rows = max(1, tile_bytes // (batch * head_dim * itemsize))
        few_heads = backward and device_type == "cpu"
        size = TileSize(max_rows, parts=-(-threads // batch), few_heads=few_heads, takes_bands=takes_bands)
    sizes = {"batch": batch, "head_dim": head_dim, "itemsize": itemsize}
    travel = schedule.travel(itemsize=itemsize, backward=backward, few_hops=few_hops)
    num_blocks, shares = num_cuts(
        schedule, travel, **sizes, value_dim=value_dim, backward=backward, device_type=device_type
    )
    kept, parcels = BlockBuilder(schedule, travel, rank, 0, schedule.kv_heads).kept()
    bounds = [schedule.kv_heads * block // num_blocks for block in range(num_blocks + 1)]
    builders = [BlockBuilder(schedule, travel, rank, first, last, shares) for first, last in pairwise(bounds)]
    tile_sizes = [UNCUT if branch in uncut else size for branch in range(schedule.pattern.num_branches)]
    base_size = size if limits_of(device_type).cuts_base else replace(size, max_rows=UNLIMITED)
    is_rounded = itemsize < statistics_itemsize(itemsize)
    blocks = [builder.block(tile_sizes, base_size, parcels, is_rounded=is_rounded) for builder in builders]
    num_hops = len(kept) - 1
    if num_hops > 1:
        blocks[0] = _hide_hops(blocks[0], range(1, num_hops))
    if backward and (travel.num_steps or num_hops):
        last = len(blocks[-1].steps)
        blocks[-1] = _hide_hops(blocks[-1], range(last, last + max(1, num_hops)))
    hops = [builder.hops(len(block.steps)) for builder, block in zip(builders, blocks, strict=True)]
    keys, grads = (tuple(chain.from_iterable(of_blocks)) for of_blocks in zip(*hops, strict=True))
    chained = Delivery(keys, grads if backward else ())
    last_step = sum(len(block.steps) for block in blocks[:-1]) or num_hops
    going_home = [hop.reversed for hop in reversed(kept[1:])] if backward else []
    received = {parcel for hop in kept for message in hop.receives for parcel in message.parcels}
    sent = dict.fromkeys(parcel for hop in kept for message in hop.sends for parcel in message.parcels)
    along_trees = Delivery(
        keys=kept,
        grads=(*[Hop()] * last_step, *going_home),
        is_kept=True,
        own=tuple(parcel for parcel in sent if parcel not in received),
        last_step=last_step,
    )
    return RankPlan(rank, tuple(blocks), (chained, along_trees))


def _hide_hops(block: HeadBlock, steps: range) -> HeadBlock:
    """Move some tiles with local keys to later ``steps``, where they hide hops that no other tile would hide.

    The others hide the first hop. Tiles that open rows are not moved, since they come before the tiles that add to
    these rows.
    """
    first, *others = block.steps
    local, *remote = first.tiles
    movable = [index for index, tile in enumerate(local) if not (tile.opens_queries or tile.opens_keys)]
    parts = len(steps) + 1
    step_of = {index: number * parts // len(movable) for number, index in enumerate(movable)}
    stay = tuple(tile for index, tile in enumerate(local) if not step_of.get(index))
    found = [replace(first, tiles=(stay, *remote)), *others]
    for number, step in enumerate(steps, 1):
        found += [Step()] * (step + 1 - len(found))
        moved = tuple(local[index] for index, part in step_of.items() if part == number)
        chained, kept = found[step].tiles
        found[step] = replace(found[step], tiles=((*moved, *chained), kept))
    return replace(block, steps=tuple(found))


def num_cuts(
    schedule: RingSchedule,
    travel: Travel,
    *,
    batch: int,
    head_dim: int,
    value_dim: int | None = None,
    itemsize: int,
    backward: bool,
    device_type: str,
) -> tuple[int, int]:
    """Return the number of blocks of heads, and of shares of every hop, that keep the communication buffers small.

    Only the rows on chains are cut. At most three buffers of their K and V exist at a time: one to send, one in
    use, one to receive. In a backward, there are at most three more of dK and dV, in the statistics dtype: one being
    computed, one to send, one to receive.
    """
    limits, row_bytes = limits_of(device_type), batch * key_value_dim(head_dim, value_dim) * itemsize  # of K and V
    tensors = 2 * schedule.longest * (schedule.num_heads + schedule.kv_heads) * row_bytes
    hop = travel.max_rows_in_flight * row_bytes
    buffers = 3 * hop
    if backward:
        buffers += 3 * hop * statistics_itemsize(itemsize) // itemsize
    # The buffers of rows on trees leave less for the others, but never less than a quarter.
    share = limits.communication_share
    left = max(share / 4, share - travel.tree_rows * row_bytes / 2 / max(1, tensors))
    cuts = -(-buffers // max(1, int(left * tensors)))
    cuts = max(1, min(cuts, hop // limits.min_hop_bytes))
    sums = schedule.longest * schedule.num_heads * row_bytes // 2 if backward and itemsize < 4 else 0
    of_sums = 1 if limits.min_block_bytes is None else sums // limits.min_block_bytes
    blocks = min(schedule.kv_heads, max(cuts, of_sums, 1))
    return blocks, -(-cuts // blocks)
