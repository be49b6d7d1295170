"""Builds the steps of one block of heads on one rank: which tiles it computes, and which parcels pass through it.

It also builds the hops along trees, whose parcels travel for all blocks at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, groupby

from torch import Tensor

from ring_backends.schedule.bands import Band, trimmed
from ring_backends.schedule.bands import Part as VisiblePart
from ring_backends.schedule.branch import BranchSchedule
from ring_backends.schedule.crossing import CrossingPieces
from ring_backends.schedule.pattern import num_covered
from ring_backends.schedule.rank_plan import (
    HeadBlock,
    Hop,
    Message,
    Parcel,
    ParcelPart,
    ParcelRows,
    Phantom,
    Step,
    Tile,
)
from ring_backends.schedule.ring_schedule import RingSchedule
from ring_backends.schedule.rows import DilatedRows, head_runs
from ring_backends.schedule.sums import BranchRows, Roles, assign_roles
from ring_backends.schedule.tiling import TileSize, cut
from ring_backends.schedule.travel import Lot, Part, Travel
from ring_backends.schedule.trees import CHAIN


@dataclass(frozen=True)
class _Span:
    """A piece of a segment on one rank, or equally spaced segments: whole ones, or two pieces that lie alike.

    ``phase`` is the start of the first relative to its segment.
    """

    local_start: int
    phase: int
    length: int
    segments: int = 1
    stride: int = 0

    def num_rows(self, offset: int, rate: int) -> int:
        return num_covered(self.length, (offset - self.phase) % rate, rate)

    def first_row(self, offset: int, rate: int) -> int:
        """How many rows of the segment lie before the span."""
        return num_covered(self.phase, offset, rate)

    def joined(self, other: _Span, rate: int) -> _Span | None:
        """Both spans as equally spaced segments, if their rows lie alike; else None."""
        step = other.local_start - self.local_start
        if self.length != other.length or (self.phase - other.phase) % rate:
            return None
        if self.segments == other.segments == 1 or step == self.segments * self.stride:
            stride = step if self.segments == 1 else self.stride
            return replace(self, segments=self.segments + other.segments, stride=stride)
        return None

    def continued(self, other: _Span, rate: int) -> _Span | None:
        """Both spans of one segment as one, if the rows of the other follow at the same distance; else None."""
        if self.length % rate or (self.phase - other.phase) % rate:
            return None
        return replace(self, length=self.length + other.length)

    def rows(
        self, heads: Sequence[int], offsets: Sequence[int], rate: int, num_rows: int, first_row: int = 0
    ) -> DilatedRows:
        phases = [(offset - self.phase) % rate for offset in offsets]
        start = self.local_start + first_row * rate
        return DilatedRows(start, self.segments, self.stride, rate, num_rows, head_runs(heads, phases))


@dataclass(frozen=True)
class _Piece:
    """A piece of a segment that lies on several chunks, or a part of a piece.

    Attributes:
        index: index of the piece in the arrays of :class:`~ring_backends.schedule.crossing.CrossingPieces`.
        span: the piece on the rank that holds it.
    """

    index: int
    rank: int
    chunk: int
    segment_start: int
    span: _Span


_Heads = Sequence[tuple[int, int, int]]  # (query head, key/value head, offset), relative to the block

KeptParcels = Mapping[tuple[int, int], Sequence[Parcel]]
"""The parcels of a lot, by branch and piece."""


class BlockBuilder:
    """Builds the steps of one block of heads on one rank.

    Args:
        kv_heads: the key/value heads of the block, counted from the first one of the schedule; None means all.
        shares: into how many parts the rows of each hop along chains are cut.
    """

    def __init__(
        self, schedule: RingSchedule, travel: Travel, rank: int, kv_heads: range | None = None, shares: int = 1
    ) -> None:
        self.schedule, self.travel = schedule, travel
        self.layout = schedule.layout
        self.rank = rank
        self.shares = shares
        self.kv_heads = range(len(schedule.kv_heads)) if kv_heads is None else kv_heads
        self.query_heads = schedule.queries_of(self.kv_heads)
        self.heads: list[_Heads] = [
            [
                (head - self.query_heads.start, kv_head - self.kv_heads.start, offset)
                for head, kv_head, offset in schedule.head_streams(branch)
                if kv_head in self.kv_heads
            ]
            for branch in range(schedule.pattern.num_branches)
        ]

    def lot_step(self, lot: Lot) -> int:
        """The step of the block that uses the rows of a lot. The first block waits until they have arrived."""
        return lot.step if self.kv_heads.start == 0 else 0

    @cached_property
    def drafts(self) -> list[_Draft]:
        last = max(map(self.lot_step, self.travel.lots), default=0)
        num_deliveries = 1 + len(self.travel.lots)
        return [_Draft.of(num_deliveries) for _ in range(1 + max(self.travel.num_steps * self.shares, last))]

    @cached_property
    def key_hops(self) -> list[_HopDraft]:
        return [_HopDraft() for _ in self.drafts]

    @cached_property
    def grad_hops(self) -> list[_HopDraft]:
        return [_HopDraft() for _ in self.drafts]

    def hops(self, num_steps: int) -> tuple[Iterator[Hop], Iterator[Hop]]:
        """The hops of K and V, and those of dK and dV, along the chains of this block, which has that many steps."""
        missing = [_HopDraft()] * (num_steps - len(self.drafts))
        keys, grads = ((hop.finish() for hop in (*hops, *missing)) for hops in (self.key_hops, self.grad_hops))
        return keys, grads

    def kept(self, lot: Lot) -> tuple[tuple[Hop, ...], KeptParcels]:
        """The hops of a lot, and their parcels. The block must have all heads."""
        hops = [_HopDraft() for _ in range(1 + lot.num_hops)]
        parcels: defaultdict[tuple[int, int], list[Parcel]] = defaultdict(list)
        for part in lot.parts:
            for piece, _, _, parcel in self._deliver(part, hops):
                parcels[part.branch, piece.index].append(parcel)
        return tuple(hop.finish() for hop in hops[1:]), parcels

    def _deliver(self, part: Part, hops: Sequence[_HopDraft]) -> Iterator[tuple[_Piece, _Route, int, Parcel]]:
        """Add the parcels of a share of a branch that pass through this rank to the hops, and yield them.

        Args:
            hops: hop h of the tree is ``hops[h]``.

        Yields:
            The piece, its route, how far this rank is from the source, and the parcel.
        """
        branch = self.schedule.branches[part.branch]
        for piece, route, distance in self._passing(branch):
            for parcel in self._parcels(part, piece, route.direction):
                if distance > parcel.reach:
                    continue
                if distance:
                    hop, sender = part.tree.arrival(distance)
                    hops[hop].receives[route.rank(sender)].append(parcel)
                for hop, receiver in part.tree.sends(distance, parcel.reach):
                    hops[hop].sends[route.rank(receiver)].append(parcel)
                yield piece, route, distance, parcel

    def block(
        self, sizes: Sequence[TileSize], base_size: TileSize, kept: Sequence[KeptParcels], *, is_rounded: bool
    ) -> HeadBlock:
        """Build the block.

        Args:
            sizes: how large the tiles of each branch are.
            base_size: how large those of the base branch are instead (:mod:`ring_backends.schedule.sums`).
            kept: the parcels of each lot.
            is_rounded: whether results have a lower precision than sums.
        """
        num_heads, sizes = len(self.query_heads), [*sizes]
        branches = [branch for branch in self.schedule.branches if self.heads[branch.index]]
        opening = next((b for b in branches if b.rate == 1 and len(self.heads[b.index]) == num_heads), None)

        def is_single(branch: BranchSchedule) -> bool:
            return self._is_single(branch, base_size if branch is opening else sizes[branch.index])

        roles = assign_roles(branches, opening, is_single, is_rounded=is_rounded)
        if roles.base is not None:
            sizes[roles.base] = base_size
        rows = {}
        for index in roles.order:
            branch = self.schedule.branches[index]
            rows[index] = self._local(branch, opens=roles.opens(index))
            if index not in self.travel.trees:
                self._follow_chains(branch)
                continue
            for number, (lot, parcels) in enumerate(zip(self.travel.lots, kept, strict=True), 1):
                self.drafts[self.lot_step(lot)].tiles[number].extend(self._kept_tiles(branch, parcels))
        return HeadBlock(
            slice(self.query_heads.start, self.query_heads.stop),
            slice(self.kv_heads.start, self.kv_heads.stop),
            _alternate_queries(draft.finish(sizes, roles) for draft in self.drafts),
            roles,
            others=tuple(rows[index] for index in roles.others),
            has_all_heads=len(self.kv_heads) == len(self.schedule.kv_heads),
        )

    def _is_single(self, branch: BranchSchedule, size: TileSize) -> bool:
        """Whether each row of a branch is in one tile only, after a cut to tiles of this size."""
        if self._own_pieces(branch) or self.schedule.pattern.padding == "zeros":
            return False
        if branch.band is not None and not size.takes_bands:
            return False
        return -(-branch.segment_length // branch.rate) <= size.rows_of_part

    def local_tiles(self, branch: BranchSchedule) -> tuple[list[Tile], list[Tile]]:
        """The tiles with local keys, before cuts.

        Returns:
            Tiles whose queries and keys are the same whole segments or the same pieces; and those of two pieces of one
            segment.
        """
        crossing = self._own_pieces(branch)
        pieces, are_one = self._spans_of_pieces(branch, crossing)
        spans = [*self._whole_segments(branch), *pieces]
        own = [tile for span in spans for tile in self._tiles(branch, span, span)]
        if are_one:
            return own, []
        pairs = ((x, y) for x in crossing for y in crossing if x.chunk != y.chunk and self._sees(x, y))
        return own, [tile for query, key in pairs for tile in self._tiles(branch, query.span, key.span)]

    def pieces_seen(self, branch: BranchSchedule) -> Iterator[tuple[int, int]]:
        """For each piece of a crossing segment that this rank holds, its index and how many of other ranks it sees."""
        parts = branch.crossing
        passing = (parts.lo <= self.rank) & (self.rank <= parts.hi) & (parts.rank != self.rank)
        for piece in self._own_pieces(branch):
            seen = passing & (parts.segment_start == piece.segment_start)
            if self.schedule.is_causal:
                seen &= parts.chunk < piece.chunk
            yield piece.index, int(seen.sum())

    def _local(self, branch: BranchSchedule, *, opens: bool) -> BranchRows:
        """Add the tiles with local keys, and return the branch's rows.

        Args:
            opens: whether the tiles whose queries and keys are the same segments or piece are the first of their rows.
        """
        draft = self.drafts[0]
        own, others = self.local_tiles(branch)
        own = [replace(tile, opens_queries=opens, opens_keys=opens) for tile in own]
        draft.tiles[0].extend((*own, *others))
        if self.schedule.pattern.padding == "zeros" and not self.schedule.is_causal:
            draft.phantoms += self._phantoms(branch, self._own_pieces(branch))
        keys = tuple(tile.keys for tile in own if isinstance(tile.keys, DilatedRows))
        return BranchRows(tuple(tile.queries for tile in own), keys)

    def _spans_of_pieces(self, branch: BranchSchedule, pieces: Sequence[_Piece]) -> tuple[list[_Span], bool]:
        """The spans of this rank's pieces, and whether two pieces of one segment are one span.

        Two pieces that fill both chunks become one span if possible. In local order, the second follows the first.
        """
        spans = [piece.span for piece in pieces]
        if len(pieces) != 2 or any(piece.span.length != self.layout.chunk_len(piece.chunk) for piece in pieces):
            return spans, False
        is_same = pieces[0].segment_start == pieces[1].segment_start
        if is_same and branch.band is not None:
            return spans, False
        found = (spans[0].continued if is_same else spans[0].joined)(spans[1], branch.rate)
        return (spans, False) if found is None else ([found], is_same)

    def _whole_segments(self, branch: BranchSchedule) -> Iterator[_Span]:
        """Yield the segments within one chunk: full segments, and the sequence's short last segment.

        The full segments of a chunk are one span, and if possible those of both chunks.
        """
        w, n = branch.segment_length, self.layout.seq_len
        base, full = 0, None
        for piece in self.layout.pieces(self.rank):
            first, last = -(-piece.start // w), piece.stop // w
            if last > first:
                span = _Span(base + first * w - piece.start, 0, w, last - first, w)
                joined = None if full is None else full.joined(span, branch.rate)
                if full is not None and joined is None:
                    yield full
                full = span if joined is None else joined
            if piece and piece.stop == n and n % w and n // w * w >= piece.start:
                yield _Span(base + n // w * w - piece.start, 0, n % w)
            base += len(piece)
        if full is not None:
            yield full

    def _phantoms(self, branch: BranchSchedule, crossing: Iterable[_Piece]) -> Iterator[Phantom]:
        """Local query rows of the last segment, with the number of zero keys that they see."""
        n = self.layout.seq_len
        last_segment = self.schedule.pattern.segment(branch.index, n - 1, n) * branch.segment_length
        spans = [piece.span for piece in crossing if piece.segment_start == last_segment]
        base = 0
        for piece in self.layout.pieces(self.rank):
            if piece and piece.stop == n and piece.start <= last_segment:
                spans = [_Span(base + last_segment - piece.start, 0, n - last_segment)]
            base += len(piece)
        for span in spans:
            groups = defaultdict(list)
            for head, _, offset in self.heads[branch.index]:
                count = self.schedule.pattern.phantom_keys(branch.index, offset, n)
                if count and span.num_rows(offset, branch.rate):
                    groups[span.num_rows(offset, branch.rate), count].append((head, offset))
            for (num_rows, count), members in groups.items():
                heads, offsets = zip(*members, strict=True)
                yield Phantom(span.rows(heads, offsets, branch.rate, num_rows), count)

    def _tiles(self, branch: BranchSchedule, query: _Span, key: _Span) -> Iterator[Tile]:
        """Tiles of one local span against another, one for each combination of row counts."""
        groups = defaultdict(list)
        for head, kv_head, offset in self.heads[branch.index]:
            num_queries, num_keys = query.num_rows(offset, branch.rate), key.num_rows(offset, branch.rate)
            part = self._visible(branch, query, num_queries, key.first_row(offset, branch.rate), num_keys, offset)
            if part is not None:
                groups[num_queries, num_keys, part].append((head, kv_head, offset))
        for (num_queries, num_keys, part), members in groups.items():
            streams = {stream: index for index, stream in enumerate(dict.fromkeys(member[1:] for member in members))}
            kv_heads, kv_offsets = zip(*streams, strict=True)
            heads, _, offsets = zip(*members, strict=True)
            yield Tile(
                branch=branch.index,
                queries=query.rows(heads, offsets, branch.rate, num_queries).part_of_rows(part.queries),
                keys=key.rows(kv_heads, kv_offsets, branch.rate, num_keys).part_of_rows(part.keys),
                stream_of_head=tuple(streams[member[1:]] for member in members),
                band=part.band,
            )

    def _remote_tiles(
        self, branch: BranchSchedule, query: _Span, parcels: Sequence[Parcel], first_kv_head: int = 0
    ) -> Iterator[Tile]:
        """Tiles of a local span against parcels that its queries see.

        Heads for which the same parcels have rows share a tile. With a window, each parcel has tiles of its own.

        Args:
            first_kv_head: the number in the parcels' streams of the first key/value head of the block.
        """
        if branch.band is not None and len(parcels) > 1:
            for parcel in parcels:
                yield from self._remote_tiles(branch, query, [parcel], first_kv_head)
            return
        places = {parcel: {stream: index for index, stream in enumerate(parcel.streams)} for parcel in parcels}
        groups = defaultdict(list)
        for head, kv_head, offset in self.heads[branch.index]:
            stream = kv_head + first_kv_head, offset
            used = tuple(parcel for parcel in parcels if stream in places[parcel])
            if used:
                num_queries, num_keys = query.num_rows(offset, branch.rate), sum(parcel.rows for parcel in used)
                part = trimmed(range(num_queries), range(num_keys), None)
                if branch.band is not None:
                    before = num_covered(used[0].start % branch.segment_length, offset, branch.rate)
                    part = self._visible(branch, query, num_queries, before + used[0].first_row, num_keys, offset)
                if part is not None:
                    groups[num_queries, used, part].append((head, stream))
        for (num_queries, used, part), members in groups.items():
            streams = {stream: index for index, stream in enumerate(dict.fromkeys(stream for _, stream in members))}
            heads, offsets = [head for head, _ in members], [offset for _, (_, offset) in members]
            parts = (
                ParcelPart(parcel, tuple(places[parcel][stream] for stream in streams), range(parcel.rows))
                for parcel in used
            )
            yield Tile(
                branch=branch.index,
                queries=query.rows(heads, offsets, branch.rate, num_queries).part_of_rows(part.queries),
                keys=ParcelRows(tuple(parts)).part_of_rows(part.keys),
                stream_of_head=tuple(streams[stream] for _, stream in members),
                band=part.band,
            )

    def _visible(
        self, branch: BranchSchedule, query: _Span, num_queries: int, first_key: int, num_keys: int, offset: int
    ) -> VisiblePart | None:
        """The rows of a span and of some keys at one offset that see each other; None if there are none.

        Args:
            first_key: how many rows of the segment lie before the keys.
        """
        distance = query.first_row(offset, branch.rate) - first_key
        band = Band(branch.band, 0 if self.schedule.is_causal else branch.band).shifted(distance, 0)
        return trimmed(range(num_queries), range(num_keys), band.limits(num_queries, num_keys))

    def _passing(self, branch: BranchSchedule) -> Iterator[tuple[_Piece, _Route, int]]:
        """Yield the parts of pieces whose route passes through this rank, the route, and how far the source is."""
        parts = branch.crossing
        for part in self._pieces(parts, (parts.lo <= self.rank) & (self.rank <= parts.hi)):
            lo, hi, direction = (int(column[part.index]) for column in (parts.lo, parts.hi, parts.direction))
            route = _Route(lo, hi - lo + 1, part.rank, direction)
            yield part, route, (self.rank - part.rank) * direction % route.ring_size

    def _sees(self, query: _Piece, piece: _Piece) -> bool:
        """Whether the queries of one piece may see the keys of another."""
        same_segment = query.segment_start == piece.segment_start
        return same_segment and not (self.schedule.is_causal and query.chunk < piece.chunk)

    def _kept_tiles(self, branch: BranchSchedule, kept: KeptParcels) -> Iterator[Tile]:
        """Tiles of a local piece against all rows of other ranks that its queries see."""
        others = [part for part, _, distance in self._passing(branch) if distance]
        for query in self._own_pieces(branch):
            seen = [
                parcel
                for part in others
                if self._sees(query, part)
                for parcel in kept.get((branch.index, part.index), ())
            ]
            yield from self._remote_tiles(branch, query.span, seen, self.kv_heads.start)

    def _follow_chains(self, branch: BranchSchedule) -> None:
        """Add the hops of every parcel that passes through this rank, and its tiles, to the steps."""
        own, num_steps = self._own_pieces(branch), self.travel.num_steps
        for share in range(self.shares):
            steps = slice(share * num_steps, None)
            keys, grads, drafts = self.key_hops[steps], self.grad_hops[steps], self.drafts[steps]
            part = Part(branch.index, CHAIN, share, self.shares)
            for piece, route, distance, parcel in self._deliver(part, keys):
                if not distance:
                    grads[parcel.reach].receives[route.rank(parcel.reach)].append(parcel)
                    continue
                for query in own:
                    if self._sees(query, piece):
                        drafts[distance].tiles[0].extend(self._remote_tiles(branch, query.span, [parcel]))
                next_rank = route.rank(distance + 1) if distance < parcel.reach else route.source
                grads[distance].sends[next_rank].append(parcel)
                if distance > 1:
                    grads[distance - 1].receives[route.rank(distance - 1)].append(parcel)

    def _parcels(self, part: Part, piece: _Piece, direction: int) -> Iterator[Parcel]:
        """Yield the parcels of one share of a piece: one parcel for each combination of row count and reach."""
        branch = self.schedule.branches[part.branch]
        index_of = {offset: index for index, offset in enumerate(branch.offsets.tolist())}
        num_rows, reach = branch.num_rows[piece.index].tolist(), branch.reach[piece.index].tolist()
        groups = defaultdict(list)
        for stream in dict.fromkeys((kv_head, offset) for _, kv_head, offset in self.heads[branch.index]):
            index = index_of[stream[1]]
            groups[num_rows[index], reach[index]].append(stream)
        for (rows, hops), streams in groups.items():
            first, last = (rows * share // part.shares for share in (part.share, part.share + 1))
            if hops and last > first:
                kv_heads, offsets = zip(*streams, strict=True)
                start = int(branch.crossing.start[piece.index])
                yield Parcel(
                    branch=branch.index,
                    start=start,
                    streams=tuple(streams),
                    first_row=first,
                    rows=last - first,
                    reach=hops,
                    direction=direction,
                    source=piece.span.rows(kv_heads, offsets, branch.rate, last - first, first),
                    first_positions=tuple(
                        start + (offset - piece.span.phase) % branch.rate + first * branch.rate for offset in offsets
                    ),
                )

    def _own_pieces(self, branch: BranchSchedule) -> list[_Piece]:
        """The pieces of crossing segments that this rank holds."""
        return self._pieces(branch.pieces, branch.pieces.rank == self.rank)

    def _pieces(self, pieces: CrossingPieces, chosen: Tensor) -> list[_Piece]:
        """The chosen pieces, or parts of pieces. ``chosen`` is bool [pieces]."""
        indices = chosen.nonzero().squeeze(1)
        columns = (pieces.rank, pieces.chunk, pieces.segment_start, pieces.start, pieces.stop)
        found = []
        for index, *row in zip(indices.tolist(), *(column[indices].tolist() for column in columns), strict=True):
            owner, chunk, segment_start, start, stop = row
            first, *_ = self.layout.pieces(owner)
            base = 0 if start in first else len(first)
            span = _Span(base + start - self.layout.chunk_start(chunk), start - segment_start, stop - start)
            found.append(_Piece(index, owner, chunk, segment_start, span))
        return found


@dataclass(frozen=True)
class _Route:
    """The ranks that a parcel visits, numbered by hops from its source."""

    lo: int
    ring_size: int
    source: int
    direction: int

    def rank(self, hop: int) -> int:
        return self.lo + (self.source - self.lo + self.direction * hop) % self.ring_size


@dataclass
class _HopDraft:
    """A hop under construction: parcels by peer."""

    sends: defaultdict[int, list[Parcel]] = field(default_factory=lambda: defaultdict(list))
    receives: defaultdict[int, list[Parcel]] = field(default_factory=lambda: defaultdict(list))

    def finish(self) -> Hop:
        return Hop(_messages(self.sends), _messages(self.receives))


@dataclass
class _Draft:
    """A step under construction."""

    tiles: tuple[list[Tile], ...]
    phantoms: list[Phantom] = field(default_factory=list)

    @classmethod
    def of(cls, num_deliveries: int) -> _Draft:
        return cls(tuple([] for _ in range(num_deliveries)))

    def finish(self, sizes: Sequence[TileSize], roles: Roles) -> Step:
        """The step, with its tiles cut.

        Tiles of merged branches keep all heads of a stream together, so that a key's gradient is rounded once.
        """

        def parts(tile: Tile) -> Iterable[Tile]:
            return cut(tile, sizes[tile.branch], keeps_streams=tile.opens_keys or tile.branch in roles.merged)

        return Step(tuple(tuple(chain.from_iterable(map(parts, tiles))) for tiles in self.tiles), tuple(self.phantoms))


def _alternate_queries(steps: Iterable[Step]) -> tuple[Step, ...]:
    """Reverse the tiles of a parcel if they end, and do not begin, with the queries of the tile before them.

    These queries need not be gathered again.
    """
    found, before = [], None
    for step in steps:
        by_parcel = [[*tiles] for _, tiles in groupby(step.tiles[0], key=lambda tile: tile.parcels)]
        for tiles in by_parcel:
            if tiles[0].parcels and tiles[0].queries != before == tiles[-1].queries:
                tiles.reverse()
            before = tiles[-1].queries
        found.append(replace(step, tiles=(tuple(chain.from_iterable(by_parcel)), *step.tiles[1:])))
    return tuple(found)


def _messages(by_peer: dict[int, list[Parcel]]) -> tuple[Message, ...]:
    """One message per peer, with its parcels sorted, in the same order on both ranks of the hop.

    First those that travel upwards, shortest reach first, then those that travel downwards, longest reach first. So
    those that reach a rank further on are adjacent in the buffer, if segments are nested. They are sent without a copy.
    """
    ordered = {peer: tuple(sorted(parcels, key=_order)) for peer, parcels in by_peer.items()}
    return tuple(
        Message(peer, parcels) for peer, parcels in sorted(ordered.items(), key=lambda item: _order(item[1][0]))
    )


def _order(parcel: Parcel) -> tuple[object, ...]:
    return (-parcel.direction, parcel.direction * parcel.reach, *parcel.key)
