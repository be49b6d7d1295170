"""What a ring costs: memory, bytes, FLOPs and seconds of one call of attention, rank by rank, before any rank exists.

All of it follows from a :class:`~ring_backends.RingSchedule` by arithmetic on arrays with one entry per rank, with no
process group. Memory, bytes and FLOPs are counted; seconds are estimated from the few constants of
:class:`~ring_backends.cost.hardware.Hardware`. The model:

- A tile takes its matrix products' FLOPs over the kernel's rate, and a little for each query row, as if that saw some
  keys more; and the bytes that gathering rows and merging results read and write, over the rate of such copies.
- A rank's hops take a latency each, and the bytes it sends or receives, whichever are more, over the bandwidth.
- A hop is posted before the tiles of the step before it, so that the two take the longer one's time, as far as
  ``Hardware.overlap`` says. Nothing hides behind the tiles of the last step, whose K and V the last hop has brought;
  and nothing hides the last hop of dK and dV, on its way home from those tiles.
- A call takes as long as its slowest rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ring_backends.cost.hardware import Hardware
from ring_backends.schedule.branch import BranchSchedule
from ring_backends.schedule.checks import check_integer
from ring_backends.schedule.layout import SequenceLayout
from ring_backends.schedule.pattern import num_covered
from ring_backends.schedule.planner import COMMUNICATION_SHARE, MIN_HOP_BYTES, num_cuts
from ring_backends.schedule.ring_schedule import RingSchedule
from ring_backends.schedule.tiling import BACKWARD_TILE_SHARE, MIN_TILE_BYTES

MAX_RING_SIZE = 65_536
"""The largest ring that the searches for a ring size look at."""

# How often a row of head_dim elements is read or written besides the kernel's own work. Gathering a row reads and
# writes it; adding one to a sum reads both and writes one, and so does merging one into an output.
_COPY, _ADD = 2, 3
_QUERY_MOVES = {False: _COPY + _ADD, True: 3 * _COPY + _ADD}  # q; out merged · q, out and dO; dq
_LOCAL_KEY_MOVES = {False: 2 * _COPY, True: 2 * _COPY + 2 * _ADD}  # k and v · k and v; dk and dv
_REMOTE_KEY_MOVES = {False: 0, True: 2 * _ADD}  # read where they arrived


@dataclass(frozen=True, eq=False)
class RingCost:
    """One call of ring dilated attention, forward and backward, with the tensors that a training step holds for it.

    Args:
        schedule: the branches, layout, heads and mask.
        batch, head_dim: as of the inputs.
        itemsize: bytes per element of the inputs. Statistics and travelling dK and dV have 4, or 8 beside fp64.
    """

    schedule: RingSchedule
    batch: int
    head_dim: int
    itemsize: int

    def __post_init__(self) -> None:
        for name in ("batch", "head_dim", "itemsize"):
            check_integer(name, getattr(self, name), 1)

    @property
    def ring_size(self) -> int:
        return self.schedule.layout.ring_size

    @property
    def _statistics_itemsize(self) -> int:
        return max(self.itemsize, 4)

    # Memory

    @cached_property
    def tokens(self) -> Tensor:
        """Positions that each rank holds: int64 [ring size]."""
        layout = self.schedule.layout
        return _sum_by_rank(layout.chunk_ranks(), layout.chunk_starts().diff(), self.ring_size)

    @property
    def tensor_bytes(self) -> Tensor:
        """Query, key, value and out with a gradient each: int64 [ring size]."""
        heads = 4 * (self.schedule.num_heads + self.schedule.kv_heads)
        return self.tokens * (heads * self.batch * self.head_dim * self.itemsize)

    @property
    def lse_bytes(self) -> Tensor:
        """int64 [ring size]."""
        return self.tokens * (self.schedule.num_heads * self.batch * self._statistics_itemsize)

    @cached_property
    def _hop_bytes(self) -> tuple[int, int]:
        """K and V, and dK and dV, of all heads on the rank that sends most of them in one step."""
        rows = 2 * self.schedule.max_rows_in_flight * self.batch * self.head_dim
        return rows * self.itemsize, rows * self._statistics_itemsize

    @cached_property
    def communication_bytes(self) -> int:
        """The most that one rank's communication buffers take.

        Three hops of K and V and three of dK and dV, or what the planner allows: its share of the tensors, or six of
        the smallest hops that it cuts.
        """
        keys, grads = self._hop_bytes
        share = COMMUNICATION_SHARE * float(self.tensor_bytes.max())
        smallest = 3 * MIN_HOP_BYTES * (1 + self._statistics_itemsize / self.itemsize)
        return min(3 * (keys + grads), math.ceil(max(share, smallest)))

    def _cuts(self, *, backward: bool) -> tuple[int, int]:
        sizes = {"batch": self.batch, "head_dim": self.head_dim, "itemsize": self.itemsize}
        return num_cuts(self.schedule, **sizes, backward=backward)

    @cached_property
    def tile_bytes(self) -> Tensor:
        """What the largest tile's backward works on, gathered, and what its gradients are summed in: int64 [ring size].

        Tiles are cut to a share of the query. Sums of fp16 and bf16 are kept in fp32 for the block of heads being
        computed and the one before it.
        """
        largest = torch.zeros(self.ring_size, dtype=torch.int64, device="cpu")
        for branch in self.schedule.branches:
            whole, piece = self._whole_rows(branch), self._largest_piece(branch)
            rows = torch.maximum(whole, piece)
            query_rows, key_rows = (rows * branch.heads_at).sum(1), (rows * branch.streams_at).sum(1)
            largest = torch.maximum(largest, 4 * (query_rows + key_rows))
        blocks, _ = self._cuts(backward=True)
        row_bytes = self.batch * self.head_dim * self.itemsize
        query_bytes = self.tokens * (self.schedule.num_heads * row_bytes)
        cut = (query_bytes * BACKWARD_TILE_SHARE).long().clamp(min=MIN_TILE_BYTES)
        gathered = torch.minimum(largest * row_bytes // blocks, 8 * cut)
        if self.itemsize >= 4:
            return gathered
        heads = self.schedule.num_heads + 2 * self.schedule.kv_heads
        alive = min(2, blocks)
        return gathered + self.tokens * (alive * heads * self.batch * self.head_dim * 4) // blocks

    @property
    def memory_bytes(self) -> Tensor:
        """All of the above: int64 [ring size]."""
        return self.tensor_bytes + self.lse_bytes + self.communication_bytes + self.tile_bytes

    # Bytes and FLOPs

    def sent_bytes(self, *, backward: bool = False) -> Tensor:
        """Payload that each rank sends, as ``RingSchedule.wire_bytes`` has it: int64 [ring size]."""
        keys, grads = self._row_bytes
        sent = self.schedule.rows_sent * keys
        return sent + self.schedule.grad_rows_sent * grads if backward else sent

    @property
    def _row_bytes(self) -> tuple[int, int]:
        row = 2 * self.batch * self.head_dim
        return row * self.itemsize, row * self._statistics_itemsize

    def _moved_bytes(self, *, backward: bool) -> Tensor:
        """Sent or received, whichever are more: int64 [ring size].

        A rank receives the K and V whose dK and dV it sends on; dK and dV come back over the routes of K and V.
        """
        keys, grads = self._row_bytes
        there, back = self.schedule.rows_sent, self.schedule.grad_rows_sent
        if not backward:
            return torch.maximum(there, back) * keys
        return torch.maximum(there * keys + back * grads, back * keys + there * grads)

    def flops(self, *, backward: bool = False) -> Tensor:
        """Of two matrix products per visible pair in forward, of five in backward: float64 [ring size]."""
        return self.schedule.pairs * self._pair_flops(backward=backward)

    def _pair_flops(self, *, backward: bool) -> int:
        return (10 if backward else 4) * self.head_dim * self.batch

    # Seconds

    def seconds(self, hardware: Hardware, *, backward: bool = False) -> Tensor:
        """Estimated time of each rank: float64 [ring size]. The call takes the longest."""
        compute, last = self._compute_seconds(hardware, backward=backward)
        if self.schedule.num_steps == 0:
            return compute
        blocks, shares = self._cuts(backward=backward)
        hops = blocks * shares * self.schedule.num_steps * (2 if backward else 1)
        moved = self._moved_bytes(backward=backward).double() / hardware.bytes_per_second
        communication = (moved + hops * hardware.latency_seconds) * (moved > 0)
        homecoming = communication / hops if backward else torch.zeros_like(communication)
        hidden = hardware.overlap * torch.minimum(communication - homecoming, compute - last)
        return compute + communication - hidden

    def call_seconds(self, hardware: Hardware, *, backward: bool = False) -> float:
        """Estimated time of the slowest rank."""
        return float(self.seconds(hardware, backward=backward).max())

    def _compute_seconds(self, hardware: Hardware, *, backward: bool) -> tuple[Tensor, Tensor]:
        """Of each rank's tiles: all of them, and those of the last step of the last block of heads."""
        rows = self._tile_rows
        own_pairs = self._own_pairs
        other_pairs = (self.schedule.pairs - own_pairs).clamp(min=0)
        kinds = ((self.schedule.is_causal, own_pairs, rows.own), (False, other_pairs, rows.other))
        seconds = []
        for causal, pairs, query_rows in kinds:
            flops_per_second, row_keys = hardware.tile_rate(backward=backward, causal=causal)
            seconds.append((pairs + query_rows * row_keys) * (self._pair_flops(backward=backward) / flops_per_second))
        own, other = seconds
        copied = torch.zeros_like(own)
        if hardware.copy_bytes_per_second is not None:
            copied = self._copied_bytes(backward=backward) / hardware.copy_bytes_per_second
        blocks, shares = self._cuts(backward=backward)
        last = other / (max(1, self.schedule.num_steps) * blocks * shares)
        speed = hardware.speed_alone if self.ring_size == 1 else 1.0
        return (own + other + copied) / speed, last / speed

    def _copied_bytes(self, *, backward: bool) -> Tensor:
        """Bytes read and written to gather the tiles' rows and to merge their results: float64 [ring size]."""
        rows = self._tile_rows
        moves = (rows.own + rows.other) * _QUERY_MOVES[backward] + rows.own_keys * _LOCAL_KEY_MOVES[backward]
        moves = moves + self.schedule.grad_rows_sent * _REMOTE_KEY_MOVES[backward]
        return moves.double() * (self.batch * self.head_dim * (self._statistics_itemsize + self.itemsize) / 2)

    # What lies on one rank

    @cached_property
    def _tile_rows(self) -> _TileRows:
        own, other, keys = (torch.zeros(self.ring_size, dtype=torch.int64, device="cpu") for _ in range(3))
        for branch in self.schedule.branches:
            pieces = branch.crossing
            whole, of_pieces = self._whole_rows(branch), (branch.num_rows * branch.heads_at).sum(1)
            others = _tiles_of_pieces(pieces.segment_start, is_causal=self.schedule.is_causal) - 1
            own += (whole * branch.heads_at).sum(1) + _sum_by_rank(pieces.rank, of_pieces, self.ring_size)
            other += _sum_by_rank(pieces.rank, of_pieces * others, self.ring_size)
            of_pieces = (branch.num_rows * branch.streams_at).sum(1)
            keys += (whole * branch.streams_at).sum(1) + _sum_by_rank(pieces.rank, of_pieces, self.ring_size)
        return _TileRows(own, other, keys)

    @cached_property
    def _own_pairs(self) -> Tensor:
        """Visible pairs of spans against themselves, whose tiles are causal if the call is: float64 [ring size]."""

        def pairs(rows: Tensor) -> Tensor:
            rows = rows.double()
            return rows * (rows + 1) / 2 if self.schedule.is_causal else rows**2

        total = torch.zeros(self.ring_size, dtype=torch.float64, device="cpu")
        for branch in self.schedule.branches:
            full, tail = self._segments_within(branch)
            segment_rows = num_covered(torch.tensor([branch.segment_length], device="cpu"), branch.offsets, branch.rate)
            tail_rows = num_covered(tail.unsqueeze(1), branch.offsets, branch.rate)
            own = full.unsqueeze(1) * pairs(segment_rows) + pairs(tail_rows)
            total += _sum_by_rank(self.schedule.layout.chunk_ranks(), (own * branch.heads_at).sum(1), self.ring_size)
            of_pieces = (pairs(branch.num_rows) * branch.heads_at).sum(1)
            total += _sum_by_rank(branch.crossing.rank, of_pieces, self.ring_size)
        return total

    def _segments_within(self, branch: BranchSchedule) -> tuple[Tensor, Tensor]:
        """Per chunk, the full segments that lie whole on it, and the length of a short last one: int64 [chunks]."""
        length, n = branch.segment_length, self.schedule.layout.seq_len
        starts = self.schedule.layout.chunk_starts()
        begin, end = starts[:-1], starts[1:]
        full = (end // length - -(-begin // length)).clamp(min=0)
        has_tail = (end == n) & (begin < end) & (begin <= n // length * length)
        return full, has_tail * (n % length)

    def _whole_rows(self, branch: BranchSchedule) -> Tensor:
        """One head's rows in segments that lie whole on a rank, at each offset: int64 [ring size, offsets]."""
        full, tail = self._segments_within(branch)
        segment_rows = num_covered(torch.tensor([branch.segment_length], device="cpu"), branch.offsets, branch.rate)
        rows = full.unsqueeze(1) * segment_rows + num_covered(tail.unsqueeze(1), branch.offsets, branch.rate)
        return _sum_by_rank(self.schedule.layout.chunk_ranks(), rows, self.ring_size)

    def _largest_piece(self, branch: BranchSchedule) -> Tensor:
        """One head's rows in the longest piece of a crossing segment, at each offset: int64 [ring size, offsets]."""
        largest = torch.zeros((self.ring_size, branch.num_rows.shape[1]), dtype=torch.int64, device="cpu")
        rank = branch.crossing.rank.unsqueeze(1).expand_as(branch.num_rows)
        return largest.scatter_reduce_(0, rank, branch.num_rows, "amax")


@dataclass(frozen=True, eq=False)
class _TileRows:
    """Rows that each rank's tiles have in all, summed over heads: int64 [ring size] each.

    Attributes:
        own, own_keys: query and key rows of spans against themselves.
        other: query rows against other pieces of their segment, once for each.
    """

    own: Tensor
    other: Tensor
    own_keys: Tensor


def _sum_by_rank(rank: Tensor, values: Tensor, ring_size: int) -> Tensor:
    total = torch.zeros((ring_size, *values.shape[1:]), dtype=values.dtype, device="cpu")
    return total.index_add_(0, rank, values)


def _tiles_of_pieces(segment_start: Tensor, *, is_causal: bool) -> Tensor:
    """Against how many pieces of its segment each piece's queries are computed; pieces are in order of position."""
    _, segment, count = segment_start.unique_consecutive(return_inverse=True, return_counts=True)
    first: Tensor = count.cumsum(0) - count
    number: Tensor = torch.arange(len(segment_start), device="cpu") - first[segment]
    pieces: Tensor = number + 1 if is_causal else count[segment]
    return pieces


@dataclass(frozen=True)
class RingChoice:
    """What a search over ring sizes found; None where no ring of up to its limit is one.

    Attributes:
        fits: the smallest ring whose ranks have the memory.
        fits_and_pays: the smallest ring of several ranks that fits and takes less time than one device.
    """

    fits: int | None
    fits_and_pays: int | None


@dataclass(frozen=True, eq=False)
class Workload:
    """One call of attention, to be laid over rings of different sizes.

    Args:
        schedule: of any ring size; its pattern, sequence, layout, heads and mask count.
        batch, head_dim, itemsize: as in :class:`RingCost`.
    """

    schedule: RingSchedule
    batch: int
    head_dim: int
    itemsize: int

    def on_ring(self, ring_size: int) -> RingCost:
        """The cost of the call on a ring of ``ring_size``."""
        given = self.schedule
        layout = SequenceLayout(given.layout.seq_len, ring_size, given.layout.kind)
        schedule = RingSchedule(given.pattern, layout, given.num_heads, given.kv_heads, given.is_causal)
        return RingCost(schedule, self.batch, self.head_dim, self.itemsize)

    def seconds(self, ring_size: int, hardware: Hardware) -> float:
        """Forward and backward of the slowest rank."""
        cost = self.on_ring(ring_size)
        return cost.call_seconds(hardware) + cost.call_seconds(hardware, backward=True)

    def speedup(self, ring_size: int, hardware: Hardware) -> float:
        """How many times as fast a ring is as one device, forward and backward together. It pays above 1."""
        return self.seconds(1, hardware) / self.seconds(ring_size, hardware)

    def memory_bytes(self, ring_size: int) -> int:
        """Of the rank that needs most."""
        return int(self.on_ring(ring_size).memory_bytes.max())

    def smallest_rings(
        self, memory_bytes: float, hardware: Hardware | None, *, sizes: list[int] | None = None
    ) -> RingChoice:
        """The smallest ring that fits into ``memory_bytes`` per rank, and the smallest that fits and pays.

        Args:
            hardware: None leaves the second unanswered.
            sizes: the ring sizes to choose from, ascending. None: every size up to ``MAX_RING_SIZE``, taking for
                granted that memory falls as the ring grows, and that a ring that pays goes on to until its best size.
        """
        largest = min(MAX_RING_SIZE, self.schedule.layout.seq_len)

        def smallest(holds: Callable[[int], bool], first: int) -> int | None:
            if sizes is None:
                return _smallest(holds, first, largest)
            return next((size for size in sizes if size >= first and holds(size)), None)

        fits = smallest(lambda size: self.memory_bytes(size) <= memory_bytes, 1)
        if fits is None or hardware is None:
            return RingChoice(fits, None)
        alone = self.seconds(1, hardware)

        def fits_and_pays(size: int) -> bool:
            return self.memory_bytes(size) <= memory_bytes and self.seconds(size, hardware) < alone

        return RingChoice(fits, smallest(fits_and_pays, max(fits, 2)))


def _smallest(holds: Callable[[int], bool], first: int, largest: int) -> int | None:
    """The smallest number from ``first`` on for which ``holds``, found by doubling and then halving."""
    fails, size = first - 1, first
    while size <= largest:
        if holds(size):
            while size - fails > 1:
                middle = (fails + size) // 2
                fails, size = (fails, middle) if holds(middle) else (middle, size)
            return size
        if size == largest:
            return None
        fails, size = size, min(2 * size, largest)
    return None
