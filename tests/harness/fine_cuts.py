"""Split the heads, hops and tiles of small tensors like those of large ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

from ring_backends.kernels import pairwise
from ring_backends.schedule import limits, tiling
from ring_backends.schedule.planner import rank_plan


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
        mock.patch.multiple(pairwise, BLOCK=3, MIN_MEAN_RUN=2),
    ):
        rank_plan.cache_clear()
        yield
    rank_plan.cache_clear()
