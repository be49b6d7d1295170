"""Small tensors cut as finely as huge ones: heads, hops and tiles."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from ring_backends import planner, tiling
from ring_backends.planner import rank_plan


@contextlib.contextmanager
def fine_cuts() -> Iterator[None]:
    """Within this context every block has one key/value head, hops are cut in shares, and tiles have few rows."""
    with (
        mock.patch.object(planner, "MIN_HOP_BYTES", 16),
        mock.patch.object(planner, "MIN_BLOCK_BYTES", 16),
        mock.patch.object(tiling, "MIN_TILE_BYTES", 48),
        mock.patch.object(tiling, "MIN_TILE_ROWS", 2),
        mock.patch.object(tiling, "TILE_SHARE", 0),
    ):
        rank_plan.cache_clear()
        yield
    rank_plan.cache_clear()
