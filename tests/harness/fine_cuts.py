"""Split the heads, hops and tiles of small tensors like those of large ones, and put branches on trees."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from unittest import mock

from ring_backends.engine.call import forget_calls
from ring_backends.kernels import documents
from ring_backends.schedule import limits, tiling, travel, trees


@contextlib.contextmanager
def fine_cuts(min_bytes: int = 16) -> Iterator[None]:
    """Remove the lower limits of splitting within this context.

    Hops and blocks of heads are split down to ``min_bytes``, tiles down to two rows. With documents, tiles are split
    at document boundaries if documents have two rows on average, and into blocks of three rows otherwise.
    """
    fine = replace(limits.ON_CPU, min_hop_bytes=min_bytes, min_block_bytes=min_bytes, min_tile_bytes=3 * min_bytes)
    with (
        mock.patch.object(limits, "ON_CPU", fine),
        mock.patch.multiple(tiling, MIN_TILE_ROWS=2, MIN_ROWS_OF_PART=2),
        mock.patch.multiple(tiling, FORWARD_TILE_SHARE=0, BACKWARD_TILE_SHARE=0),
        mock.patch.multiple(documents, BLOCK=3, MIN_MEAN_RUN=2),
    ):
        forget_calls()
        yield
    forget_calls()


@contextlib.contextmanager
def every_branch_on_trees(message_cost: float = trees.MESSAGE_COST, *, share: float = 1e9) -> Iterator[None]:
    """Let the rows of all branches travel along trees within this context, as far as the buffers allow.

    Args:
        message_cost: the larger it is, the more hops with fewer messages are made.
        share: how large the buffers may be, as a share of the tensors. The smaller it is, the more lots are made.
    """

    def chain_cost(way: travel.Travel, chained: Sequence[int], cuts: int) -> float:
        return 1e9 * sum(way.branches[index].longest_reach for index in chained)

    with (
        mock.patch.object(travel, "TREE_SHARE", share),
        mock.patch.multiple(trees, MESSAGE_COST=message_cost),
        mock.patch.multiple(travel, MESSAGE_COST=message_cost),
        mock.patch.object(travel.Travel, "_chain_cost", chain_cost),
    ):
        forget_calls()
        yield
    forget_calls()
