"""The plan of one rank: its part of a :class:`~ring_backends.RingSchedule`, step by step, as data.

A plan is a list of blocks of heads. The first step of a block computes the tiles whose keys are local. Each further
step receives parcels of K and V that go around the ring, computes the tiles that need them, and forwards what other
ranks still need. The parcels of spread branches (:mod:`ring_backends.schedule.spread`) travel for all heads at once,
and stay until the tiles of all blocks have used them. All ranks number the steps in the same way. In some steps a rank
may do nothing. :mod:`ring_backends.schedule.planner` makes plans.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

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
    """What one rank sends to one peer in one step: parcels in the order of the wire buffer."""

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
class Step:
    """One step of a plan. K and V arrive before its tiles are computed. Their dK and dV are sent afterwards.

    Attributes:
        spread_tiles: the tiles with keys of spread branches.
    """

    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()
    tiles: tuple[Tile, ...] = ()
    spread_tiles: tuple[Tile, ...] = ()
    phantoms: tuple[Phantom, ...] = ()
    grad_sends: tuple[Message, ...] = ()
    grad_receives: tuple[Message, ...] = ()


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
class SpreadHop:
    """One hop of the parcels of spread branches. dK and dV go back the same way, in the opposite order of hops."""

    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()


@dataclass(frozen=True)
class RankPlan:
    """Everything one rank does in one call.

    Attributes:
        spread: the hops of spread branches. Hop h is posted before the tiles of step h − 1, the first being step 0.
    """

    rank: int
    blocks: tuple[HeadBlock, ...]
    spread: tuple[SpreadHop, ...] = ()

    @cached_property
    def steps(self) -> tuple[tuple[HeadBlock, Step], ...]:
        """All steps in order, each with its block."""
        return tuple((block, step) for block in self.blocks for step in block.steps)

    @cached_property
    def last_spread_step(self) -> int:
        """The index of the step after which dK and dV of spread branches go home, the same on every rank."""
        *before, _ = self.blocks
        return sum(len(block.steps) for block in before) if before else len(self.spread)

    @cached_property
    def own_spread(self) -> tuple[Parcel, ...]:
        """The parcels of spread branches that this rank holds."""
        received = {parcel for hop in self.spread for message in hop.receives for parcel in message.parcels}
        sent = dict.fromkeys(parcel for hop in self.spread for message in hop.sends for parcel in message.parcels)
        return tuple(parcel for parcel in sent if parcel not in received)

    def pairs(self, *, backward: bool) -> frozenset[tuple[int, int]]:
        """(source, destination) of every message that this rank sends or receives, in a forward or in a backward."""
        hops: list[SpreadHop | Step] = [*self.spread, *(step for _, step in self.steps)]
        sends = [message for hop in hops for message in hop.sends]
        receives = [message for hop in hops for message in hop.receives]
        if backward:  # dK and dV of spread branches go back the same way
            sends += [message for _, step in self.steps for message in step.grad_sends]
            sends += [message for hop in self.spread for message in hop.receives]
            receives += [message for _, step in self.steps for message in step.grad_receives]
            receives += [message for hop in self.spread for message in hop.sends]
        return frozenset(
            [*((self.rank, message.peer) for message in sends), *((message.peer, self.rank) for message in receives)]
        )

    def num_hops(self, *, backward: bool) -> int:
        """How many hops this rank takes part in, in a forward or in a backward."""
        steps = [step for _, step in self.steps]
        with_keys = sum(bool(step.sends or step.receives) for step in steps)
        with_keys += sum(bool(hop.sends or hop.receives) for hop in self.spread)
        with_grads = sum(bool(step.grad_sends or step.grad_receives) for step in steps)
        with_grads += sum(bool(hop.sends or hop.receives) for hop in self.spread)
        return with_keys + with_grads if backward else with_keys
