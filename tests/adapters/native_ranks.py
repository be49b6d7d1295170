"""Worlds of ranks, their native rings, and comparisons of results. For tests that need no other adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from ring_backends import Ring
from ring_backends.testing.rings import TWO, RingSpec, ring_here, ring_of
from ring_backends.testing.world import World

ADAPTER = "ring_backends.adapters.native"


def world_of(size: int) -> Any:
    """A fixture: the session's world of ``size`` ranks, by the name that a test module gives it."""

    @pytest.fixture(scope="session")
    def ranks(worlds: Callable[[int], World]) -> World:
        return worlds(size)

    return ranks


def native_ring(layout: Any = "contiguous", rings: RingSpec = TWO, adapter: str = ADAPTER) -> Ring:
    """The ring of this rank. All ranks of the world make this call."""
    return ring_of(adapter, rings, layout)


def on_ring(
    function: Any, *args: Any, layout: Any = "contiguous", rings: RingSpec = TWO, adapter: str = ADAPTER, **kwargs: Any
) -> Any:
    """Call ``function(ring, *args, **kwargs)`` on a rank. Worlds run it: ``pair.run(on_ring, function, *args)``.

    A rank without a ring returns None.
    """
    ring = ring_here(adapter, rings)
    return None if ring is None else function(ring.with_layout(layout), *args, **kwargs)


def assert_near(got: Any, right: Any, atol: float = 1e-10) -> None:
    """Compare tensors, or lists of tensors, element by element."""
    torch.testing.assert_close(got, right, rtol=0, atol=atol)


def assert_sums(of_ranks: Iterable[Iterable[Tensor]], wanted: Iterable[Tensor], atol: float) -> None:
    """Compare the sums of the ranks' gradients with those of one process."""
    for right, *parts in zip(wanted, *of_ranks, strict=True):
        assert_near(torch.stack(parts).sum(0), right, atol)
