"""One rank's part of a :class:`~ring_backends.schedule.ring_schedule.RingSchedule`, as data for the attention to walk.

A plan is a list of blocks of heads. A block's first step computes the tiles whose keys are local; each further step
receives some parcels of K and V, computes the tiles they serve, and sends on what others still need. All ranks number
their steps alike, including those in which they have nothing to do. :mod:`ring_backends.schedule.planner` makes plans.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from ring_backends.schedule.rows import DilatedRows


@dataclass(frozen=True, eq=False)
class Parcel:
    """The K and V rows of some streams in one piece of a segment: the unit that travels along one route.

    A stream is a distinct (key/value head, offset) pair; its rows serve every query head that has both.

    Attributes:
        first_positions: per stream, the global position of the first row; the others follow ``source.rate`` apart.
    """

    branch: int
    start: int
    streams: tuple[tuple[int, int], ...]
    first_row: int
    rows: int
    reach: int
    direction: int
    source: DilatedRows
    first_positions: tuple[int, ...]

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
class ParcelRows:
    """The K and V rows ``rows`` of the streams ``streams`` of a parcel."""

    parcel: Parcel
    streams: range
    row_range: range

    @property
    def num_heads(self) -> int:
        return len(self.streams)

    @property
    def rows(self) -> int:
        return len(self.row_range)

    def part_of_segments(self, segments: range) -> ParcelRows:
        assert segments == range(1), "a parcel is a piece of one segment"
        return self

    def part_of_heads(self, heads: range) -> ParcelRows:
        return replace(self, streams=self.streams[heads.start : heads.stop])

    def part_of_rows(self, rows: range) -> ParcelRows:
        return replace(self, row_range=self.row_range[rows.start : rows.stop])


@dataclass(frozen=True)
class Tile:
    """One kernel call: query rows against rows of a parcel, or against local key rows.

    Attributes:
        stream_of_head: ``[i]`` is the stream, among those of ``keys``, that query head i attends to.
        opens_queries, opens_keys: no earlier tile of the block has these query rows, or these key rows; what it
            computes for them is stored, where that of others is merged or added.
    """

    branch: int
    queries: DilatedRows
    keys: DilatedRows | ParcelRows
    stream_of_head: tuple[int, ...]
    is_causal: bool
    opens_queries: bool = False
    opens_keys: bool = False

    @property
    def parcel(self) -> Parcel | None:
        return self.keys.parcel if isinstance(self.keys, ParcelRows) else None

    @cached_property
    def streams_are_grouped(self) -> bool:
        """Whether every stream serves equally many consecutive heads, as grouped-query attention has it."""
        group, rest = divmod(len(self.stream_of_head), self.keys.num_heads)
        return rest == 0 and self.stream_of_head == tuple(
            stream for stream in range(self.keys.num_heads) for _ in range(group)
        )

    @property
    def heads_per_group(self) -> int:
        """How many consecutive heads stay together when heads are cut: those of one stream, where they are grouped."""
        return len(self.stream_of_head) // self.keys.num_heads if self.streams_are_grouped else 1

    def part(self, segments: range, groups: range) -> Tile:
        """Some segments of the tile, and some groups of its heads with the streams that they need."""
        heads = range(groups.start * self.heads_per_group, groups.stop * self.heads_per_group)
        streams = self.stream_of_head[heads.start : heads.stop]
        first = min(streams)
        return replace(
            self,
            queries=self.queries.part_of_segments(segments).part_of_heads(heads),
            keys=self.keys.part_of_segments(segments).part_of_heads(range(first, max(streams) + 1)),
            stream_of_head=tuple(stream - first for stream in streams),
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
    """A range of query heads with the key/value heads they use, and the steps that compute them.

    Attributes:
        is_opened: tiles that open query and key rows reach all rows of all its heads; no other tile has to find zeros.
    """

    heads: slice
    kv_heads: slice
    steps: tuple[Step, ...]
    is_opened: bool


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
