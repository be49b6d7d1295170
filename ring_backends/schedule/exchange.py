"""Which rows and heads the ranks of a group exchange in a call (Ulysses, arXiv 2309.14509).

The ring is cut into groups of neighbouring ranks. At the beginning of a call, a rank sends its rows of some heads to
each rank of its group, so that each has all rows of the group for its share of the heads. Hops then go between ranks of
different groups that have the same heads. At the end, each rank sends back the results of its heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from ring_backends.schedule.checks import check_group_heads, check_group_size
from ring_backends.schedule.layout import SequenceLayout
from ring_backends.schedule.rows import DilatedRows, head_runs

Kind = Literal["queries", "keys", "marks"]
"""Which heads a tensor has: query heads, key/value heads, or one that all members need."""


@dataclass(frozen=True)
class HeadExchange:
    """What one rank of a ring exchanges with the other members of its group.

    Args:
        layout: the layout of the sequence over the ring.
        group_size: u, the number of ranks of a group. It divides the ring size.
        rank: the ring rank.
        num_heads: H, query heads; u divides H. Member m of a group computes the heads m · H/u … (m + 1) · H/u − 1.
        num_kv_heads: key/value heads; divides H.

    Raises:
        ValueError: ``group_size`` does not divide the ring size or ``num_heads``.

    >>> exchange = HeadExchange(SequenceLayout(16, 4, "zigzag"), 2, 1, num_heads=4, num_kv_heads=1)
    >>> exchange.heads_of("queries", 1), exchange.heads_of("keys", 1), exchange.pieces[1]
    (range(2, 4), range(0, 1), ((0, 2, 2), (2, 4, 2)))
    """

    layout: SequenceLayout
    group_size: int
    rank: int
    num_heads: int
    num_kv_heads: int

    def __post_init__(self) -> None:
        check_group_size(self.group_size, self.layout.ring_size)
        check_group_heads(self.group_size, self.num_heads)

    @property
    def member(self) -> int:
        """The number of this rank in its group."""
        return self.rank % self.group_size

    @property
    def group(self) -> int:
        """The number of this rank's group."""
        return self.rank // self.group_size

    @cached_property
    def members(self) -> range:
        """The ring ranks of the group."""
        return range(self.rank - self.member, self.rank - self.member + self.group_size)

    @cached_property
    def hop_ranks(self) -> range:
        """The ring rank with this rank's heads in each group."""
        return range(self.member, self.layout.ring_size, self.group_size)

    @cached_property
    def hop_layout(self) -> SequenceLayout:
        """The layout of the sequence over the groups."""
        num_groups = self.layout.ring_size // self.group_size
        return SequenceLayout(self.layout.seq_len, num_groups, self.layout.kind, self.group_size)

    def heads_of(self, kind: Kind, member: int) -> range:
        """The heads of a member. Several members may have the same key/value head, since it serves several queries."""
        if kind == "marks":
            return range(1)
        count = self.num_heads // self.group_size
        heads, group = range(member * count, (member + 1) * count), self.num_heads // self.num_kv_heads
        return heads if kind == "queries" else range(heads.start // group, -(-heads.stop // group))

    @cached_property
    def shares_kv_heads(self) -> bool:
        """Whether several members have the same key/value head."""
        counts = [len(self.heads_of("keys", member)) for member in range(self.group_size)]
        return sum(counts) > self.num_kv_heads

    @property
    def local_len(self) -> int:
        """How many rows this rank holds."""
        return self.layout.local_len(self.rank)

    @property
    def group_len(self) -> int:
        """How many rows the group holds."""
        return self.hop_layout.local_len(self.group)

    @cached_property
    def pieces(self) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """The pieces of each member's rows: where each begins in its tensors, and in those of the group; its length.

        The rows of the group are in order of position.
        """
        of_members = [self.layout.pieces(rank) for rank in self.members]
        starts, first = {}, 0
        for piece in sorted((piece for pieces in of_members for piece in pieces if piece), key=lambda x: x.start):
            starts[piece], first = first, first + len(piece)
        found = []
        for pieces in of_members:
            of_member, local = [], 0
            for piece in pieces:
                if piece:
                    of_member.append((local, starts[piece], len(piece)))
                local += len(piece)
            found.append(tuple(of_member))
        return tuple(found)

    @cached_property
    def pairs(self) -> frozenset[tuple[int, int]]:
        """(source, destination) of every message that this rank sends to its group or receives from it."""
        peers = [rank for rank in self.members if rank != self.rank]
        return frozenset([(self.rank, peer) for peer in peers] + [(peer, self.rank) for peer in peers])


@lru_cache(maxsize=4096)
def moves(
    exchange: HeadExchange, source: int, destination: int, kind: Kind, *, to_heads: bool
) -> tuple[tuple[DilatedRows, DilatedRows], ...]:
    """The rows that one member sends to another: for each piece, in the tensors of the source and the destination.

    Args:
        to_heads: True if the destination gets the source's rows of its own heads, as at the beginning of a call; False
            if it gets its own rows of the source's heads, as at the end.
    """
    heads = exchange.heads_of(kind, destination if to_heads else source)
    found = []
    for local, of_group, length in exchange.pieces[source if to_heads else destination]:
        ends = _rows(local, length, heads), _rows(of_group, length, range(len(heads)))
        found.append(ends if to_heads else ends[::-1])
    return tuple(found)


def _rows(start: int, length: int, heads: range) -> DilatedRows:
    return DilatedRows(start, 1, 0, 1, length, head_runs(heads, [0] * len(heads)))
