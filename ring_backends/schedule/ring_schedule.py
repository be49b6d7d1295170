"""The schedule of a ring as data: what every rank sends, computes and holds in one call.

Every rank computes the same schedule from (pattern, layout, heads, causal), without a process group or communication.
This module computes its totals for all ranks at once, by arithmetic on arrays. :mod:`ring_backends.schedule.planner`
makes the plan of one rank, step by step, for the engine.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ring_backends.schedule.branch import BranchSchedule
from ring_backends.schedule.checks import check_integer
from ring_backends.schedule.crossing import crossing_pieces
from ring_backends.schedule.exchange import HeadExchange
from ring_backends.schedule.layout import SequenceLayout
from ring_backends.schedule.limits import limits_of
from ring_backends.schedule.links import rows_at, rows_between
from ring_backends.schedule.pattern import DilatedPattern, num_covered
from ring_backends.schedule.travel import Part, Travel, Volume, rows_of_parts


@dataclass(frozen=True)
class RingSchedule:
    """What a ring of ranks sends and computes in one call of ring dilated attention.

    Args:
        pattern: the branches.
        layout: which positions each rank holds.
        num_heads: H, query heads.
        num_kv_heads: Hk, key/value heads; divides H. None means H.
        is_causal: whether a query sees only keys at or before its own position.
        ulysses_size: u, how many neighbouring ranks exchange rows for heads within the call. It divides the ring size
            and H.
        head_range: the query heads that the ring computes; None means all. The numbers of heads, which decide their
            branches and offsets, are always those among all H.

    Raises:
        ValueError, TypeError: an argument is invalid, or the pattern is undefined for this length and number of heads.

    >>> schedule = RingSchedule(DilatedPattern([64, 256], [1, 4]), SequenceLayout(256, 4), num_heads=4)
    >>> [schedule.travel(batch=1, head_dim=8, itemsize=4).num_hops(branch) for branch in (0, 1)]
    [0, 1]
    >>> schedule.wire_bytes(0, batch=1, head_dim=8, itemsize=4)
    12288
    """

    pattern: DilatedPattern
    layout: SequenceLayout
    num_heads: int
    num_kv_heads: int | None = None
    is_causal: bool = False
    ulysses_size: int = 1
    head_range: range | None = None

    def __post_init__(self) -> None:
        for name, kind in (("pattern", DilatedPattern), ("layout", SequenceLayout)):
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"{name} = {getattr(self, name)!r}: expected a {kind.__name__}.")
        num_kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        object.__setattr__(self, "num_kv_heads", num_kv_heads)
        for name in ("num_heads", "num_kv_heads"):
            check_integer(name, getattr(self, name), 1)
        if self.num_heads % num_kv_heads:
            raise ValueError(
                f"num_heads = {self.num_heads} and num_kv_heads = {num_kv_heads}: every key/value head serves the "
                f"same number of query heads; use a number of key/value heads that divides {self.num_heads}."
            )
        self.pattern.check(seq_len=self.layout.seq_len, num_heads=self.num_heads)
        check_integer("ulysses_size", self.ulysses_size, 1, advice="1 exchanges no heads")
        if self.ulysses_size > 1:
            self.exchange(0)  # checks it

    def exchange(self, rank: int) -> HeadExchange:
        """What ``rank`` exchanges with its group."""
        assert self.num_kv_heads is not None
        return HeadExchange(self.layout, self.ulysses_size, rank, self.num_heads, self.num_kv_heads)

    @cached_property
    def of_members(self) -> tuple[RingSchedule, ...]:
        """The schedules of the hops between groups, by number of a rank in its group. Their ranks are the groups."""
        if self.ulysses_size == 1:
            return (self,)
        exchanges = [self.exchange(rank) for rank in range(self.ulysses_size)]
        return tuple(
            replace(
                self,
                layout=exchange.hop_layout,
                ulysses_size=1,
                head_range=exchange.heads_of("queries", exchange.member),
            )
            for exchange in exchanges
        )

    def of_rank(self, rank: int) -> tuple[RingSchedule, int]:
        """The schedule of the hops of ``rank``, and its place in it."""
        group, member = divmod(rank, self.ulysses_size)
        return self.of_members[member], group

    def of_ranks(self, counts: Callable[[RingSchedule], Tensor]) -> Tensor:
        """A count for each rank, [ring size].

        Args:
            counts: the count for each group, [groups], by the schedule of a member of :attr:`of_members`.
        """
        return torch.stack([counts(schedule) for schedule in self.of_members], 1).flatten()

    @property
    def heads(self) -> range:
        """The query heads that the ring computes."""
        return range(self.num_heads) if self.head_range is None else self.head_range

    @property
    def kv_heads(self) -> range:
        """The key/value heads of these query heads."""
        return range(self.heads.start // self._queries_per_key, -(-self.heads.stop // self._queries_per_key))

    @property
    def _queries_per_key(self) -> int:
        assert self.num_kv_heads is not None
        return self.num_heads // self.num_kv_heads

    def queries_of(self, kv_heads: range) -> range:
        """Which of the query heads attend to these key/value heads. Both are counted from the first one here."""
        group, first = self._queries_per_key, self.heads.start
        start, stop = ((self.kv_heads.start + kv_head) * group - first for kv_head in (kv_heads.start, kv_heads.stop))
        return range(max(start, 0), min(stop, len(self.heads)))

    def head_streams(self, branch: int) -> list[tuple[int, int, int]]:
        """(query head, its key/value head, its offset) for every head that runs ``branch``, and each of its offsets.

        Heads are counted from the first one here. Heads with the same key/value head and offset follow each other.
        """
        size = self.num_heads, self.layout.seq_len
        found = (
            (head - self.heads.start, head // self._queries_per_key - self.kv_heads.start, offset)
            for head in self.pattern.heads(branch, self.num_heads)
            if head in self.heads
            for offset in self.pattern.head_offsets(branch, head, *size)
        )
        return sorted(found, key=itemgetter(1, 2)) if self.pattern.offset == "every" else [*found]

    @cached_property
    def branches(self) -> tuple[BranchSchedule, ...]:
        return tuple(self._branch(index) for index in range(self.pattern.num_branches))

    def _branch(self, index: int) -> BranchSchedule:
        heads = self.head_streams(index)
        heads_at = Counter(offset for _, _, offset in heads)
        offsets = sorted(heads_at)
        index_of = {offset: index for index, offset in enumerate(offsets)}
        streams = dict.fromkeys((kv_head, index_of[offset]) for _, kv_head, offset in heads)
        rate = self.pattern.dilation_rates[index]
        segment_length = self.pattern.segment_length(index, self.layout.seq_len)
        band = self.pattern.band(index, self.layout.seq_len)
        at = _integers(offsets), rate
        pieces = crossing = crossing_pieces(self.layout, segment_length, is_causal=self.is_causal)
        if band is not None:
            crossing = pieces.parts(self.layout, band * rate)
        return BranchSchedule(
            index=index,
            ring_size=self.layout.ring_size,
            rate=rate,
            segment_length=segment_length,
            offsets=_integers(offsets),
            heads_at=_integers(heads_at[offset] for offset in offsets),
            streams=_integers(chain.from_iterable(streams)).view(-1, 2),
            band=band,
            pieces=pieces,
            rows_of_pieces=pieces.num_rows(*at),
            crossing=crossing,
            num_rows=crossing.num_rows(*at),
            reach=crossing.reach(pieces, *at, band),
        )

    @cached_property
    def longest(self) -> int:
        """The number of positions of the rank that holds most."""
        return max(map(self.layout.local_len, {0, self.layout.ring_size - 1}))

    def travel(
        self,
        *,
        batch: int,
        head_dim: int,
        itemsize: int,
        value_dim: int | None = None,
        backward: bool = False,
        device_type: str = "cpu",
        buffer_bytes: int | None = None,
        few_hops: bool = True,
    ) -> Travel:
        """How the rows of K and V reach the ranks that need them, in a forward or in a backward.

        Args:
            batch, head_dim, itemsize, value_dim: as in :meth:`wire_bytes`.
            backward: whether dK and dV are sent too.
            device_type, buffer_bytes: as in :meth:`wire_bytes`.
            few_hops: whether rows may travel along trees other than chains, which take one hop or a few. False sends
                all rows along chains.
        """
        limits = limits_of(device_type)
        if self.ulysses_size > 1:
            raise ValueError(
                f"ulysses_size = {self.ulysses_size}: each rank of a group has hops of its own; call travel() of a "
                "schedule in of_members."
            )
        volume = Volume(
            query_rows=self.longest * len(self.heads),
            key_rows=self.longest * len(self.kv_heads),
            kv_heads=len(self.kv_heads),
            pair_bytes=batch * key_value_dim(head_dim, value_dim) * itemsize,
            itemsize=itemsize,
            grad_itemsize=statistics_itemsize(itemsize) if backward else 0,
            limits=limits,
            buffer_bytes=limits.buffer_bytes if buffer_bytes is None else buffer_bytes,
        )
        if (volume, few_hops) not in self._travels:
            self._travels[volume, few_hops] = Travel(self.branches, self._rows_of_parts, volume, few_hops)
        return self._travels[volume, few_hops]

    @cached_property
    def _rows_of_parts(self) -> Callable[[Part], tuple[int, int, int, int]]:
        return rows_of_parts(self.branches)

    @cached_property
    def _travels(self) -> dict[tuple[Volume, bool], Travel]:
        return {}

    @cached_property
    def rows_received(self) -> Tensor:
        """Rows of K and V of all heads that each rank receives, in a forward or backward: int64 [ring size].

        In a backward, each rank sends as many rows of dK and dV.
        """
        if self.ulysses_size > 1:
            return self.of_ranks(lambda schedule: schedule.rows_received)
        return torch.stack([rows_at(branch, first=1) for branch in self.branches]).sum(0)

    @cached_property
    def pairs(self) -> Tensor:
        """Visible (query row, key row) pairs that each rank computes, summed over heads: float64 [ring size]."""
        if self.ulysses_size > 1:
            return self.of_ranks(lambda schedule: schedule.pairs)
        pairs = torch.zeros(self.layout.ring_size, dtype=torch.float64, device="cpu")
        for branch in self.branches:
            per_chunk = self._pairs_before(self.layout.chunk_starts(), branch).diff(dim=0)
            pairs.index_add_(0, self.layout.chunk_ranks(), (per_chunk * branch.heads_at).sum(1))
        return pairs

    def _pairs_before(self, position: Tensor, branch: BranchSchedule) -> Tensor:
        """Number of one head's visible pairs with a query before each position: float64 [positions, offsets]."""
        length, n = branch.segment_length, self.layout.seq_len
        whole = (position // length).unsqueeze(1)
        segment_rows = num_covered(_integers([length]), branch.offsets, branch.rate).double()
        rows = num_covered((position % length).unsqueeze(1), branch.offsets, branch.rate).double()
        length_here = (n - whole * length).clamp(max=length)
        rows_here = num_covered(length_here, branch.offsets, branch.rate).double()
        band, is_causal = branch.band, self.is_causal
        return whole * visible_pairs(segment_rows, segment_rows, band, is_causal=is_causal) + visible_pairs(
            rows, rows_here, band, is_causal=is_causal
        )

    def wire_bytes(
        self,
        rank: int,
        *,
        batch: int,
        head_dim: int,
        itemsize: int,
        value_dim: int | None = None,
        backward: bool = False,
        masked: bool = False,
        document_bytes: int = 0,
        grad_itemsize: int | None = None,
        device_type: str = "cpu",
        buffer_bytes: int | None = None,
    ) -> int:
        """Payload bytes that ``rank`` sends in one forward, or in one backward.

        This is what ``ring.traffic.bytes`` counts, if ``device_type`` is that of the call's tensors and
        ``buffer_bytes`` that of the ring. With other values, the total of all ranks is the same, but the ranks may have
        other shares of it.

        Args:
            batch, head_dim: sizes of the inputs.
            itemsize: bytes per element of K and V.
            value_dim: width of a value, in elements; None if it is ``head_dim``.
            backward: whether to count a backward instead of a forward.
            masked: whether the call has a key padding mask. It takes one byte per key and head.
            document_bytes: bytes of a document number; 0 without documents. Each key of each head travels with its
                document number, which includes the mask. Groups exchange both, once per position.
            grad_itemsize: bytes per element of dK and dV. None: 4, or 8 for fp64.
            device_type: type of the tensors' device. On accelerators the buffers are larger, so more rows reach all
                ranks in few hops. Then a rank sends its own rows to all others, instead of passing on the rows of its
                neighbour.
            buffer_bytes: as in ``initialize``.
        """
        row = key_value_dim(head_dim, value_dim)
        row_bytes = row * itemsize + (document_bytes or masked)
        schedule, place = self.of_rank(rank)
        travel = schedule.travel(
            batch=batch,
            head_dim=head_dim,
            itemsize=itemsize,
            value_dim=value_dim,
            backward=backward,
            device_type=device_type,
            buffer_bytes=buffer_bytes,
        )
        sent = int(travel.key_rows_sent[place]) * row_bytes
        if backward:
            sent += int(schedule.rows_received[place]) * row * (grad_itemsize or statistics_itemsize(itemsize))
        if self.ulysses_size > 1:
            marks = masked + document_bytes
            messages = self._exchanged(head_dim, value_dim or head_dim, itemsize, marks=marks, backward=backward)
            sent += int(messages[divmod(rank, self.ulysses_size)].sum())
        return batch * sent

    def bytes_between_hosts(
        self,
        hosts: Sequence[int],
        *,
        batch: int,
        head_dim: int,
        itemsize: int,
        value_dim: int | None = None,
        device_type: str = "cpu",
        buffer_bytes: int | None = None,
    ) -> int:
        """Payload bytes that cross between hosts in one forward and one backward of the ring.

        Args:
            hosts: for each ring rank, a number that identifies its host.
            batch, head_dim, itemsize, value_dim, device_type, buffer_bytes: as in :meth:`wire_bytes`.
        """
        total = sum(
            schedule._bytes_of_hops_between_hosts(
                _integers(hosts[member :: self.ulysses_size]),
                batch=batch,
                head_dim=head_dim,
                itemsize=itemsize,
                value_dim=value_dim,
                device_type=device_type,
                buffer_bytes=buffer_bytes,
            )
            for member, schedule in enumerate(self.of_members)
        )
        if self.ulysses_size == 1:
            return total
        of_groups = _integers(hosts).view(-1, self.ulysses_size)
        is_crossing = of_groups.unsqueeze(2) != of_groups.unsqueeze(1)
        for backward in (False, True):
            messages = self._exchanged(head_dim, value_dim or head_dim, itemsize, backward=backward)
            total += batch * int((messages * is_crossing).sum())
        return total

    def exchanged_bytes(
        self, *, batch: int, head_dim: int, itemsize: int, value_dim: int | None = None, backward: bool = False
    ) -> Tensor:
        """Payload bytes that each rank sends to the other ranks of its group: int64 [ring size].

        They are part of :meth:`wire_bytes`, whose arguments these are.
        """
        messages = self._exchanged(head_dim, value_dim or head_dim, itemsize, backward=backward)
        return batch * messages.sum(2).flatten()

    def _exchanged(self, key: int, value: int, itemsize: int, *, marks: int = 0, backward: bool) -> Tensor:
        """The bytes from each member of a group to each other one: int64 [groups, members, members].

        At the beginning, a member sends its rows of the other's heads. At the end, it returns the other's rows of its
        own heads.

        Args:
            key, value: the widths of a key and of a value.
            marks: bytes of the marks of a position.
        """
        exchange, members = self.exchange(0), range(self.ulysses_size)
        rows = _integers(map(self.layout.local_len, range(self.layout.ring_size))).view(-1, self.ulysses_size)
        queries = self.num_heads // self.ulysses_size
        keys = _integers(len(exchange.heads_of("keys", member)) for member in members)
        lse = statistics_itemsize(itemsize)
        sent = keys * (key + value) * itemsize + marks
        if backward:
            sent = sent + queries * ((key + 2 * value) * itemsize + lse)
            sums = lse if exchange.shares_kv_heads else itemsize
            returned = queries * key * itemsize + keys * (key + value) * sums
        else:
            sent = sent + queries * key * itemsize
            returned = torch.full_like(keys, queries * (value * itemsize + lse))
        messages = rows.unsqueeze(2) * sent + returned.unsqueeze(1) * rows.unsqueeze(1)
        return messages * ~torch.eye(self.ulysses_size, dtype=torch.bool, device="cpu")

    def _bytes_of_hops_between_hosts(
        self,
        hosts: Tensor,
        *,
        batch: int,
        head_dim: int,
        itemsize: int,
        value_dim: int | None,
        device_type: str,
        buffer_bytes: int | None,
    ) -> int:
        total = 0
        for backward in (False, True):
            travel = self.travel(
                batch=batch,
                head_dim=head_dim,
                itemsize=itemsize,
                value_dim=value_dim,
                backward=backward,
                device_type=device_type,
                buffer_bytes=buffer_bytes,
            )
            for branch in self.branches:
                keys, grads = rows_between(branch, hosts, travel.tree(branch.index))
                total += keys * itemsize + (grads * statistics_itemsize(itemsize) if backward else 0)
        return batch * key_value_dim(head_dim, value_dim) * total

    def tile_flops(self, rank: int, *, batch: int, head_dim: int, value_dim: int | None = None) -> int:
        """Floating-point operations of ``rank`` in a forward, which has two matrix products.

        A backward has five matrix products, so it has 2.5 times as many operations.

        Args:
            batch, head_dim, value_dim: as in :meth:`wire_bytes`.
        """
        return int(self.pairs[rank]) * 2 * key_value_dim(head_dim, value_dim) * batch

    def describe(
        self,
        *,
        batch: int = 1,
        head_dim: int = 64,
        itemsize: int = 2,
        device_type: str = "cpu",
        buffer_bytes: int | None = None,
    ) -> str:
        """Tables of the branches and of the ranks, as text. A long ring shows its first, last and busiest ranks."""
        from rich.console import Console
        from rich.table import Table

        groups = "" if self.ulysses_size == 1 else f" in groups of {self.ulysses_size:,}"
        ring = f"{self.layout.kind}, ring of {self.layout.ring_size:,}{groups}"
        branches = Table(title=f"{self.layout.seq_len:,} tokens, {ring}")
        headings = ["branch", "segment length", "dilation rate", "heads", "crossing pieces", "hops forward", "backward"]
        windows = self.pattern.window_lengths
        if windows is not None:
            headings.insert(2, "window")
        for heading in headings:
            branches.add_column(heading, justify="right")
        sizes: dict[str, Any] = {"batch": batch, "head_dim": head_dim, "itemsize": itemsize}
        sizes |= {"device_type": device_type, "buffer_bytes": buffer_bytes}
        for branch in self.of_members[0].branches:
            num_heads = len(self.pattern.heads(branch.index, self.num_heads))
            forward, backward = (
                max(hops.travel(**sizes, backward=direction).num_hops(branch.index) for hops in self.of_members)
                for direction in (False, True)
            )
            row = [branch.index, branch.segment_length, branch.rate, num_heads, len(branch.crossing)]
            cells = [f"{value:,}" for value in (*row, forward, 2 * backward)]
            if windows is not None:
                window = windows[branch.index]
                cells.insert(2, "-" if window is None else f"{window:,}")
            branches.add_row(*cells)

        ranks = Table(title=f"per rank, for batch {batch}, head dim {head_dim}, {itemsize} bytes per element")
        for heading in ("rank", "tokens", "sent forward", "sent backward", "GFLOP forward"):
            ranks.add_column(heading, justify="right")
        shown = range(self.layout.ring_size)
        if len(shown) > 16:
            sent = self.of_ranks(lambda schedule: schedule.travel(**sizes).key_rows_sent)
            busiest = [int(totals.argmax()) for totals in (sent, self.rows_received, self.pairs)]
            shown = sorted({0, 1, *busiest, len(shown) - 2, len(shown) - 1})  # type: ignore[assignment]
        for rank in shown:
            ranks.add_row(
                f"{rank:,}",
                f"{self.layout.local_len(rank):,}",
                *(format_bytes(self.wire_bytes(rank, **sizes, backward=direction)) for direction in (False, True)),
                f"{self.tile_flops(rank, batch=batch, head_dim=head_dim) / 1e9:,.2f}",
            )
        console = Console(file=io.StringIO(), width=110)
        console.print(branches, ranks)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()


def format_bytes(size: int) -> str:
    """Format a number of bytes with one decimal, in KiB, MiB, GiB, …: ``"635.4 MiB"``."""
    power = min((max(int(size), 1).bit_length() - 1) // 10, 6)
    if power == 0:
        return f"{size} byte{'s' * (size != 1)}"
    return f"{int(size) / 1024**power:,.1f} {'KMGTPE'[power - 1]}iB"


def visible_pairs(rows: Tensor, segment_rows: Tensor, band: int | None, *, is_causal: bool) -> Tensor:
    """The number of keys that the first ``rows`` queries of a segment of ``segment_rows`` rows see, all together."""

    def before(number: Tensor) -> Tensor:
        """The number of earlier keys that the first queries see."""
        within = number if band is None else number.clamp(max=band + 1)
        return within * (within - 1) / 2 + (number - within) * (band or 0)

    if is_causal:
        return rows + before(rows)
    # The keys after a query are those before the query at the same distance from the other end.
    return rows + before(rows) + before(segment_rows) - before(segment_rows - rows)


def key_value_dim(head_dim: int, value_dim: int | None) -> int:
    """The elements of a key and its value together. Without ``value_dim``, both have ``head_dim``."""
    return head_dim + (head_dim if value_dim is None else value_dim)


def statistics_itemsize(itemsize: int) -> int:
    """Bytes per element of statistics and gradients, for inputs of ``itemsize`` bytes: 4, or 8 for fp64."""
    return max(itemsize, 4)


def _integers(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64, device="cpu")
