"""Plans one rank's part of a schedule, step by step.

The heads are cut into blocks. If the blocks are still too large, the rows of each hop along chains are cut into shares.
So the buffers of a hop stay small compared with the tensors. Hops along other trees carry all heads. Their rows may
travel in several lots instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, pairwise

from ring_backends.schedule.block_builder import BlockBuilder
from ring_backends.schedule.limits import limits_of
from ring_backends.schedule.rank_plan import Delivery, HeadBlock, Hop, RankPlan, Step
from ring_backends.schedule.ring_schedule import RingSchedule, statistics_itemsize
from ring_backends.schedule.tiling import UNCUT, UNLIMITED, TileSize
from ring_backends.schedule.travel import Lot
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
    buffer_bytes: int | None = None,
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
        buffer_bytes, few_hops: as in :meth:`~ring_backends.RingSchedule.travel`; the same on every rank.
    """
    if batch == 0:
        return RankPlan(rank)
    size = UNCUT
    if tile_bytes is not None:
        max_rows = max(1, tile_bytes // (batch * head_dim * itemsize))
        few_heads = backward and device_type == "cpu"
        size = TileSize(max_rows, parts=-(-threads // batch), few_heads=few_heads, takes_bands=takes_bands)
    travel = schedule.travel(
        batch=batch,
        head_dim=head_dim,
        itemsize=itemsize,
        value_dim=value_dim,
        backward=backward,
        device_type=device_type,
        buffer_bytes=buffer_bytes,
        few_hops=few_hops,
    )
    num_blocks, shares = travel.cuts
    whole, num_kv_heads = BlockBuilder(schedule, travel, rank), len(schedule.kv_heads)
    lots = [(lot, *whole.kept(lot)) for lot in travel.lots]
    bounds = [num_kv_heads * block // num_blocks for block in range(num_blocks + 1)]
    builders = [BlockBuilder(schedule, travel, rank, range(*ends), shares) for ends in pairwise(bounds)]
    tile_sizes = [UNCUT if branch in uncut else size for branch in range(schedule.pattern.num_branches)]
    base_size = size if limits_of(device_type).cuts_base else replace(size, max_rows=UNLIMITED)
    is_rounded = itemsize < statistics_itemsize(itemsize)
    parcels = [of_lot for _, _, of_lot in lots]
    blocks = [builder.block(tile_sizes, base_size, parcels, is_rounded=is_rounded) for builder in builders]
    in_use = {*range(1 + travel.num_steps * shares), *(lot.step for lot in travel.lots)}
    blocks[0] = _hide_hops(blocks[0], [step for step in range(max(in_use)) if step not in in_use])
    if backward and max(in_use):
        last = len(blocks[-1].steps)
        num_hops = travel.lots[-1].num_hops if travel.lots else 1
        blocks[-1] = _hide_hops(blocks[-1], range(last, last + num_hops))
    hops = [builder.hops(len(block.steps)) for builder, block in zip(builders, blocks, strict=True)]
    keys, grads = (tuple(chain.from_iterable(of_blocks)) for of_blocks in zip(*hops, strict=True))
    chained = Delivery(keys, grads if backward else ())
    first_of_last_block = sum(len(block.steps) for block in blocks[:-1])
    along_trees = [
        _delivery(number, lot, kept, first_of_last_block or lot.step, backward=backward)
        for number, (lot, kept, _) in enumerate(lots, 1)
    ]
    return RankPlan(rank, tuple(blocks), (chained, *along_trees))


def _delivery(number: int, lot: Lot, hops: Sequence[Hop], last_step: int, *, backward: bool) -> Delivery:
    """The delivery of a lot, whose parcels ``last_step`` is the last to use."""
    received = {parcel for hop in hops for message in hop.receives for parcel in message.parcels}
    sent = dict.fromkeys(parcel for hop in hops for message in hop.sends for parcel in message.parcels)
    return Delivery(
        keys=(*[Hop()] * (lot.step + 1 - len(hops)), *hops),
        grads=(*[Hop()] * last_step, *(hop.reversed for hop in reversed(hops))) if backward else (),
        is_kept=True,
        own=tuple(parcel for parcel in sent if parcel not in received),
        first_step=lot.step,
        last_step=last_step,
        number=number,
    )


def _hide_hops(block: HeadBlock, steps: Sequence[int]) -> HeadBlock:
    """Move some tiles with local keys to later ``steps``, where they hide hops that no other tile would hide.

    The others hide the first hop. Tiles that open rows are not moved, since they come before the tiles that add to
    these rows.
    """
    if not steps:
        return block
    first, *others = block.steps
    local, *remote = first.tiles
    movable = [index for index, tile in enumerate(local) if not (tile.opens_queries or tile.opens_keys)]
    parts = len(steps) + 1
    step_of = {index: number * parts // len(movable) for number, index in enumerate(movable)}
    stay = tuple(tile for index, tile in enumerate(local) if not step_of.get(index))
    found = [replace(first, tiles=(stay, *remote)), *others]
    for number, step in enumerate(steps, 1):
        found += [Step(((),) * len(first.tiles))] * (step + 1 - len(found))
        moved = tuple(local[index] for index, part in step_of.items() if part == number)
        chained, *kept = found[step].tiles
        found[step] = replace(found[step], tiles=((*moved, *chained), *kept))
    return replace(block, steps=tuple(found))
