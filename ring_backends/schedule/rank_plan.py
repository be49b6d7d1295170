"""The plan of one rank: its part of a :class:`~ring_backends.RingSchedule`, step by step, as data.

A plan has blocks of heads, which have steps. A step computes tiles with local keys, and with keys that have arrived
before it. The rows of other ranks arrive in *deliveries*: along chains, for one block of heads and one step at a time,
and in lots along trees of few hops (:mod:`ring_backends.schedule.travel`), for all heads at once. All ranks number the
steps in the same way. In some steps a rank may do nothing. :mod:`ring_backends.schedule.planner` makes plans.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

from ring_backends.schedule.bands import ANTICAUSAL, CAUSAL, Band
from ring_backends.schedule.rows import DilatedRows
from ring_backends.schedule.sums import BranchRows, Roles


@dataclass(frozen=True, eq=False)
class Parcel:
    """Rows of K and V that travel along one route together: those of some streams in one piece of a segment.

    A stream is a distinct (key/value head, offset) pair. Every query head with this pair attends to its rows.

    Attributes:
        start: global position where the piece begins.
        streams: the (key/value head, offset) pairs.
        first_row, rows: index of the first row in the piece, and count of the rows; the same for each stream.
        reach: number of hops.
        direction: +1 if the route goes to higher ranks, −1 if it goes to lower ranks.
        source: the rows on the rank that holds them.
        first_positions: per stream, the global position of its first row. Rows are ``source.rate`` positions apart.
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
        """Identifies the parcel on every rank."""
        return (self.direction, self.branch, self.start, self.streams, self.first_row, self.rows)

    @property
    def num_streams(self) -> int:
        return len(self.streams)


@dataclass(frozen=True)
class Message:
    """What one rank sends to one peer in one hop: parcels in the order of the wire buffer."""

    peer: int
    parcels: tuple[Parcel, ...]


@dataclass(frozen=True)
class ParcelPart:
    """Some rows of a parcel: the rows ``row_range`` of each stream in ``streams``. Both hold indices in the parcel."""

    parcel: Parcel
    streams: tuple[int, ...]
    row_range: range

    @cached_property
    def is_stretch(self) -> bool:
        """Whether the streams are neighbours in the parcel."""
        return self.streams == tuple(range(self.streams[0], self.streams[-1] + 1))


@dataclass(frozen=True)
class ParcelRows:
    """The keys of a tile from other ranks: for each stream, the rows of all parts one after the other."""

    parts: tuple[ParcelPart, ...]

    @property
    def num_heads(self) -> int:
        return len(self.parts[0].streams)

    @cached_property
    def rows(self) -> int:
        return sum(len(part.row_range) for part in self.parts)

    def part_of_segments(self, segments: range) -> ParcelRows:
        assert segments == range(1), "a parcel is a piece of one segment"
        return self

    def part_of_heads(self, heads: range) -> ParcelRows:
        return ParcelRows(tuple(replace(part, streams=part.streams[heads.start : heads.stop]) for part in self.parts))

    def part_of_rows(self, rows: range) -> ParcelRows:
        parts, first = [], 0
        for part in self.parts:
            row_range = part.row_range[max(0, rows.start - first) : max(0, rows.stop - first)]
            if row_range:
                parts.append(replace(part, row_range=row_range))
            first += len(part.row_range)
        return ParcelRows(tuple(parts))


@dataclass(frozen=True)
class Tile:
    """One kernel call: local query rows against local key rows, or against rows of a parcel.

    Attributes:
        stream_of_head: ``stream_of_head[i]`` is the stream of ``keys`` that query head i attends to.
        band: which keys each query sees; None for all.
        opens_queries: whether this is the first tile for its query rows (:mod:`ring_backends.schedule.sums`).
        opens_keys: the same for its key rows.
    """

    branch: int
    queries: DilatedRows
    keys: DilatedRows | ParcelRows
    stream_of_head: tuple[int, ...]
    band: Band | None = None
    opens_queries: bool = False
    opens_keys: bool = False

    @cached_property
    def groups(self) -> dict[int, Any]:
        """By a number of tiles of a step of which this is the first: how kernels group these tiles."""
        return {}

    @cached_property
    def is_causal(self) -> bool:
        """Whether query row i sees the keys 0 … i, and there are as many queries as keys."""
        return self.band == CAUSAL and self.queries.rows == self.keys.rows

    @cached_property
    def is_anticausal(self) -> bool:
        """Whether query row i sees the keys from i on."""
        return self.band == ANTICAUSAL

    @property
    def parcels(self) -> tuple[Parcel, ...]:
        """The parcels that hold the keys; empty for local keys."""
        return tuple(part.parcel for part in self.keys.parts) if isinstance(self.keys, ParcelRows) else ()

    @cached_property
    def streams_are_grouped(self) -> bool:
        """Whether every stream serves equally many consecutive heads, as in grouped-query attention."""
        group, rest = divmod(len(self.stream_of_head), self.keys.num_heads)
        return rest == 0 and self.stream_of_head == tuple(
            stream for stream in range(self.keys.num_heads) for _ in range(group)
        )

    @cached_property
    def lattices(self) -> tuple[Tile, ...]:
        """The tile cut by heads, so that the query rows of each part differ by the same step from head to head.

        A part's rows are then a strided view [segments, heads, rows, D] of the tensor. The tile is not cut if parts
        would share a stream, whose gradients both would store.
        """
        parts = []
        first = 0
        for run in self.queries.runs:
            for _ in range(run.outer):
                parts.append(range(first, first + run.inner))
                first += run.inner
        size, streams = self.heads_per_group, self.stream_of_head
        used = [set(streams[part.start : part.stop]) for part in parts]
        shares_streams = sum(map(len, used)) > len(set(streams))
        if shares_streams or any(part.start % size or part.stop % size for part in parts):
            return (self,)
        segments = range(self.queries.segments)
        return tuple(self.part(segments, range(part.start // size, part.stop // size)) for part in parts)

    @property
    def heads_per_group(self) -> int:
        """How many consecutive heads share a stream, and are not separated by a cut; 1 if streams are not grouped."""
        return len(self.stream_of_head) // self.keys.num_heads if self.streams_are_grouped else 1

    def part(self, segments: range, groups: range) -> Tile:
        """A part of the tile: some of its segments, and some groups of its heads with their streams."""
        heads = range(groups.start * self.heads_per_group, groups.stop * self.heads_per_group)
        streams = self.stream_of_head[heads.start : heads.stop]
        first = min(streams)
        return replace(
            self,
            queries=self.queries.part_of_heads(heads).part_of_segments(segments),
            keys=self.keys.part_of_heads(range(first, max(streams) + 1)).part_of_segments(segments),
            stream_of_head=tuple(stream - first for stream in streams),
        )


@dataclass(frozen=True)
class Phantom:
    """Query rows that see ``count`` zero keys beyond the sequence, with ``padding="zeros"``."""

    queries: DilatedRows
    count: int


@dataclass(frozen=True)
class Hop:
    """What a rank sends and receives at a time: at most one message to each peer, and at most one from each."""

    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.sends or self.receives)

    @property
    def reversed(self) -> Hop:
        """The hop in which dK and dV go back."""
        return Hop(self.receives, self.sends)


@dataclass(frozen=True)
class Delivery:
    """How parcels reach a rank, and how their dK and dV go home.

    On a chain, dK and dV follow their parcel: each rank adds its share, and the last one sends them to the rank that
    holds the keys. On other trees they go back as the parcels came, and each rank adds up what comes from further on.

    Attributes:
        keys: hop i of K and V has arrived before the tiles of step i. The first is empty.
        grads: hop i of dK and dV is posted after the tiles of step i. There may be more hops than steps. A forward has
            none.
        is_kept: whether a rank keeps the parcels of all hops, until the last step has used them. On chains, it keeps
            those of one hop.
        own: if they are kept, the parcels that this rank holds.
        first_step, last_step: the first and the last step that use parcels that are kept, the same on every rank.
        number: place of the delivery in the plan.
    """

    keys: tuple[Hop, ...] = ()
    grads: tuple[Hop, ...] = ()
    is_kept: bool = False
    own: tuple[Parcel, ...] = ()
    first_step: int = 0
    last_step: int = 0
    number: int = 0

    @cached_property
    def received(self) -> tuple[Parcel, ...]:
        """The parcels of all hops."""
        return tuple(parcel for hop in self.keys for message in hop.receives for parcel in message.parcels)


@dataclass(frozen=True)
class Step:
    """One step of a plan.

    Attributes:
        tiles: for each delivery, the tiles with keys that it has brought. The first has the tiles with local keys too.
        phantoms: the zero keys that are merged after the tiles.
    """

    tiles: tuple[tuple[Tile, ...], ...]
    phantoms: tuple[Phantom, ...] = ()

    @property
    def all_tiles(self) -> tuple[Tile, ...]:
        return tuple(chain.from_iterable(self.tiles))


@dataclass(frozen=True)
class HeadBlock:
    """A range of query heads, their key/value heads, and the steps that compute them.

    Attributes:
        roles: where the results of each branch are added up.
        others: the rows of each branch in ``roles.others``.
        has_all_heads: whether the block has all heads of the call.
    """

    heads: slice
    kv_heads: slice
    steps: tuple[Step, ...]
    roles: Roles
    others: tuple[BranchRows, ...] = ()
    has_all_heads: bool = False


@dataclass(frozen=True)
class RankPlan:
    """Everything one rank does in one forward, or in one backward.

    Attributes:
        deliveries: along chains, and one for each lot along trees.
    """

    rank: int
    blocks: tuple[HeadBlock, ...] = ()
    deliveries: tuple[Delivery, ...] = (Delivery(),)

    @cached_property
    def steps(self) -> tuple[tuple[HeadBlock, Step], ...]:
        """All steps in order, each with its block."""
        return tuple((block, step) for block in self.blocks for step in block.steps)

    @cached_property
    def hops(self) -> tuple[Hop, ...]:
        """The hops that this rank takes part in."""
        return tuple(hop for delivery in self.deliveries for hop in (*delivery.keys, *delivery.grads) if hop)

    @cached_property
    def pairs(self) -> frozenset[tuple[int, int]]:
        """(source, destination) of every message that this rank sends or receives."""
        sends = ((self.rank, message.peer) for hop in self.hops for message in hop.sends)
        receives = ((message.peer, self.rank) for hop in self.hops for message in hop.receives)
        return frozenset((*sends, *receives))
