"""The rings of the suites in a world of four ranks, and the rows of a sequence that each rank should hold.

Expected values are computed here from the definition, not by the package under test.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from importlib import import_module
from typing import Any, Literal, TypeVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ring_backends.ring.ring import Ring
from ring_backends.ring.topology import HOST_VARIABLE, UlyssesSize
from ring_backends.schedule.layout import LayoutKind
from ring_backends.testing.marks import MORE_CASES

T = TypeVar("T")

_CAPABILITIES = {"group": "rings over chosen ranks", "mesh axis": "device mesh axis", "hosts": "rings by topology"}


@dataclass(frozen=True)
class RingSpec:
    """One or several rings in a world of ranks.

    Attributes:
        rings: the global ranks of each ring, in ring order. A rank may be in no ring.
        how: the argument of ``initialize``: a ring size, a process group, an axis of a 2 × 2 DeviceMesh, or a ring
            size with ``ring_order="topology"``.
        hosts: the simulated host of each global rank, for ``ring_order="topology"``.
        ulysses_size: how many neighbouring ranks exchange rows for heads; ``"auto"`` for those of a host.
    """

    name: str
    rings: tuple[tuple[int, ...], ...]
    how: Literal["size", "group", "mesh axis", "hosts"]
    hosts: tuple[str, ...] = ()
    ulysses_size: UlyssesSize = 1

    def __str__(self) -> str:
        return self.name

    @property
    def size(self) -> int:
        return len(self.rings[0])

    @property
    def capability(self) -> str | None:
        """The capability that these rings need, or None."""
        if self.how == "size":
            return "several rings per world" if len(self.rings) > 1 else None
        return _CAPABILITIES[self.how]

    def place(self, global_rank: int) -> tuple[int, int] | None:
        """(index of the ring, ring rank) of a global rank; None for a rank without a ring."""
        for index, ranks in enumerate(self.rings):
            if global_rank in ranks:
                return index, ranks.index(global_rank)
        return None

    def by_ring(self, by_rank: Sequence[T]) -> list[list[T]]:
        """Values of global ranks, indexed by ring and ring rank."""
        return [[by_rank[rank] for rank in ranks] for ranks in self.rings]


ONE = RingSpec("1", ((0,), (1,), (2,), (3,)), "size")
TWO = RingSpec("2", ((0, 1), (2, 3)), "size")
THREE = RingSpec("3-on-1,2,3", ((1, 2, 3),), "group")
FOUR = RingSpec("4", ((0, 1, 2, 3),), "size")
IN_GROUPS = RingSpec("4-in-groups", ((0, 1, 2, 3),), "size", ulysses_size=2)
TWO_APART = RingSpec("2-on-1,3", ((1, 3),), "group")
MESH_ROWS = RingSpec("mesh-rows", ((0, 1), (2, 3)), "mesh axis")
MESH_COLUMNS = RingSpec("mesh-columns", ((0, 2), (1, 3)), "mesh axis")
BY_HOSTS = RingSpec("4-by-hosts", ((0, 3, 1, 2),), "hosts", ("a", "b", "c", "a"))
PAIRS_BY_HOSTS = RingSpec("4-in-pairs-by-hosts", ((0, 2, 1, 3),), "hosts", ("a", "b", "a", "b"), "auto")
TWO_BY_HOSTS = RingSpec("2-by-hosts", ((0, 2), (1, 3)), "hosts", ("b", "a", "b", "a"))
"""Rings ordered by host. Their order differs from the order of ranks."""

ONE_OF_TWO = RingSpec("1-of-2", ((0,), (1,)), "size")
"""Rings for a world of two ranks."""
TWO_OF_TWO = RingSpec("2-of-2", ((0, 1),), "size")
THREE_OF_THREE = RingSpec("3-of-3", ((0, 1, 2),), "size")

ALL_RINGS = (ONE, TWO, THREE, FOUR, TWO_APART, MESH_ROWS, MESH_COLUMNS, BY_HOSTS, PAIRS_BY_HOSTS)
SIZES = (ONE, TWO, THREE, FOUR)
LAYOUTS: tuple[LayoutKind, ...] = ("contiguous", "zigzag")


def in_every_layout(
    name: str, values: Iterable[Any], core: Collection[Any] = (), quick_every: int = 1
) -> pytest.MarkDecorator:
    """Parametrize by value and layout. The quick command takes every ``quick_every``-th value, in alternating layouts.

    The other pairs are for the matrix. The values in ``core`` are marked core.
    """
    pairs = []
    for index, value in enumerate(values):
        for second, layout in enumerate(LAYOUTS):
            is_quick = index % quick_every == 0 and (index // quick_every + second) % 2 == 0
            marks = [] if is_quick else [MORE_CASES]
            marks += [pytest.mark.core] if value in core else []
            pairs.append(pytest.param(value, layout, marks=marks, id=f"{layout}-{value}"))
    return pytest.mark.parametrize((name, "layout"), pairs)


every_ring = pytest.mark.parametrize("rings", ALL_RINGS, ids=str)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
every_size_and_layout = in_every_layout("rings", SIZES, core=(ONE, TWO, THREE), quick_every=2)


def rows_of_ranks(seq_len: int, ring_size: int, layout: LayoutKind) -> list[Tensor]:
    """The global positions that each ring rank holds, in order, by ``torch.tensor_split``."""
    positions = torch.arange(seq_len)
    if layout == "contiguous":
        return list(positions.tensor_split(ring_size))
    chunks = positions.tensor_split(2 * ring_size)
    return [torch.cat([chunks[rank], chunks[2 * ring_size - 1 - rank]]) for rank in range(ring_size)]


def backend(adapter: str) -> Any:
    """The adapter's module."""
    return import_module(adapter)


def get_ready(adapter: str) -> None:
    """Import the adapter before a test measures time. On a busy machine the import takes seconds."""
    backend(adapter)


@cache
def ring_here(adapter: str, rings: RingSpec) -> Ring | None:
    """This rank's ring, cached; None for a rank without a ring. All ranks of the world make this call."""
    return _join(adapter, rings, 60.0, "contiguous")


def ring_of(adapter: str, rings: RingSpec = FOUR, layout: LayoutKind = "contiguous") -> Ring:
    """This rank's cached ring, with a layout. All ranks of the world make this call, or have called ``ring_here``."""
    ring = ring_here(adapter, rings)
    assert ring is not None
    return ring.with_layout(layout)


def new_ring(adapter: str, rings: RingSpec, seconds: float = 60.0, layout: LayoutKind = "contiguous") -> Ring:
    """A new ring with a timeout, for tests that break it. All ranks of the world make this call, and are in a ring."""
    ring = _join(adapter, rings, seconds, layout)
    assert ring is not None
    return ring


def _join(adapter: str, rings: RingSpec, seconds: float, layout: LayoutKind) -> Ring | None:
    timeout = timedelta(seconds=seconds)
    options = {"layout": layout, "timeout": timeout, "buffer_bytes": 0, "ulysses_size": rings.ulysses_size}
    initialize: Callable[..., Ring] = partial(backend(adapter).initialize, **options)
    if rings.how == "size":
        return initialize(rings.size)
    if rings.how == "hosts":
        with mock.patch.dict(os.environ, {HOST_VARIABLE: rings.hosts[dist.get_rank()]}):
            return initialize(rings.size, ring_order="topology")
    if rings.how == "mesh axis":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("column", "row"))
        return initialize(group=mesh["row" if rings.rings[0] == (0, 1) else "column"])
    # torch requires that every rank creates every group.
    groups = [dist.new_group(list(ranks)) for ranks in rings.rings]
    place = rings.place(dist.get_rank())
    return None if place is None else initialize(group=groups[place[0]])
