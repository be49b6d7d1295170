"""One rank's part of a :class:`~ring_backends.schedule.RingSchedule`, as data for the attention to walk.

A plan is a list of blocks of heads. A block's first step computes the tiles whose keys are local; each further step
receives some parcels of K and V, computes the tiles they serve, and sends on what others still need. All ranks number
their steps alike, including those in which they have nothing to do. :mod:`ring_backends.planner` makes plans.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ring_backends.gather import DilatedRows


@dataclass(frozen=True, eq=False)
class Parcel:
    """The K and V rows of some streams in one piece of a segment: the unit that travels along one route.

    A stream is a distinct (key/value head, offset) pair; its rows serve every query head that has both.
    """

    branch: int
    start: int
    streams: tuple[tuple[int, int], ...]
    first_row: int
    rows: int
    reach: int
    direction: int
    source: DilatedRows

    @property
    def key(self) -> tuple[object, ...]:
        """What identifies the parcel on every rank."""
        return (self.direction, self.branch, self.start, self.streams, self.first_row, self.rows)

    @property
    def num_streams(self) -> int:
        return len(self.streams)


@dataclass(frozen=True)
class Message:
    """What one rank sends to one peer in one step, packed into one buffer in this order."""

    peer: int
    parcels: tuple[Parcel, ...]


@dataclass(frozen=True)
class Tile:
    """One kernel call: query rows against the rows of a parcel, or against local key rows.

    ``stream_of_head[i]`` is the stream, among those of ``keys`` or of the parcel, that query head i attends to.
    """

    branch: int
    queries: DilatedRows
    keys: DilatedRows | None
    parcel: Parcel | None
    num_streams: int
    stream_of_head: tuple[int, ...]
    is_causal: bool

    @cached_property
    def streams_are_grouped(self) -> bool:
        """Whether every stream serves equally many consecutive heads, as grouped-query attention has it."""
        group, rest = divmod(len(self.stream_of_head), self.num_streams)
        return rest == 0 and self.stream_of_head == tuple(
            stream for stream in range(self.num_streams) for _ in range(group)
        )


@dataclass(frozen=True)
class Phantom:
    """Query rows that see ``count`` zero keys beyond the sequence (``padding="zeros"``)."""

    queries: DilatedRows
    count: int


@dataclass(frozen=True)
class Step:
    """One step of the walk. K and V arrive before its tiles; dK and dV of what arrived leave after them."""

    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    tiles: tuple[Tile, ...] = ()
    phantoms: tuple[Phantom, ...] = ()
    grad_sends: tuple[Message, ...] = ()
    grad_receives: tuple[Message, ...] = ()


@dataclass(frozen=True)
class HeadBlock:
    """A range of query heads with the key/value heads they use, and the steps that compute them."""

    heads: slice
    kv_heads: slice
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class RankPlan:
    """Everything one rank does in one call."""

    rank: int
    blocks: tuple[HeadBlock, ...]

    @cached_property
    def steps(self) -> tuple[tuple[HeadBlock, Step], ...]:
        """All steps in their order, each with the block that it belongs to."""
        return tuple((block, step) for block in self.blocks for step in block.steps)

    def num_hops(self, *, backward: bool) -> int:
        """How many hops this rank takes part in, in a forward or in a backward."""
        steps = [step for _, step in self.steps]
        with_keys = sum(bool(step.sends or step.receives) for step in steps)
        with_grads = sum(bool(step.grad_sends or step.grad_receives) for step in steps)
        return with_keys + with_grads if backward else with_keys
