"""Memory, bytes, FLOPs and seconds of one attention call per rank, computed from a schedule without a process group.

Memory, bytes and FLOPs are counted. Seconds are estimated by this model. Its constants are those of
:class:`~ring_backends.cost.hardware.Hardware`.

- The time of a tile is the FLOPs of its matrix products, divided by the kernel's FLOP/s. Each query row counts
  ``row_keys`` keys more than it sees.
- The time to gather rows and to merge results is the number of bytes read and written, divided by
  ``copy_bytes_per_second``.
- A rank takes at least ``tile_seconds`` per tile and ``post_seconds`` per hop, which is the host's time to launch the
  one and to post the other.
- The time of a rank's hops is the number of hops times the latency, plus the bytes sent or received, whichever are
  more, divided by the bandwidth. Each further message of a hop adds ``MESSAGE_COST`` of a latency, and of
  ``post_seconds``.
- A hop is posted before the tiles of the previous step. The share ``overlap`` of the hop overlaps with these tiles. No
  hop overlaps with the tiles of the last step, or of a lot after which the next one is sent. The last hop of dK and dV
  overlaps with no tile.
- Within a group of ranks that exchange rows for heads, messages have the latency and bandwidth of links within a host,
  and overlap with nothing.
- A call takes as long as its slowest rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ring_backends.cost.hardware import Hardware
from ring_backends.cost.work import RankWork, work_of
from ring_backends.schedule.checks import check_integer
from ring_backends.schedule.layout import SequenceLayout
from ring_backends.schedule.limits import Limits, limits_of
from ring_backends.schedule.ring_schedule import RingSchedule, statistics_itemsize
from ring_backends.schedule.tiling import BACKWARD_TILE_SHARE
from ring_backends.schedule.travel import Travel
from ring_backends.schedule.trees import MESSAGE_COST

# How often a row of head_dim elements is read or written outside of the kernel. Gathering a row is one read and one
# write. Adding a row to a sum, or merging it into an output, is two reads and one write.
_COPY, _ADD = 2, 3
# forward: gather q, merge out; backward: gather q, out and dO, add dq
_QUERY_MOVES = {False: _COPY + _ADD, True: 3 * _COPY + _ADD}
# forward: gather k and v; backward: gather k and v, add dk and dv
_LOCAL_KEY_MOVES = {False: 2 * _COPY, True: 2 * _COPY + 2 * _ADD}
# forward: none, since the kernel reads k and v in the wire buffer; backward: add dk and dv
_REMOTE_KEY_MOVES = {False: 0, True: 2 * _ADD}


MAX_RING_SIZE = 65_536
"""The largest ring size that a search tries."""

_MAX_STREAMS = 65_536  # pairs of a head and an offset in a branch, which are counted one by one
_MAX_BYTES = 2**58  # of the tensors of all ranks; the numbers of bytes are int64


@dataclass(frozen=True, eq=False)
class RingCost:
    """The cost of one attention call, forward and backward. The memory includes the inputs, outputs and gradients.

    Args:
        schedule: the branches, layout, heads and mask.
        batch, head_dim: batch size and head dimension of the inputs.
        itemsize: bytes per element of the inputs. The LSE, and dK and dV in hops, have at least 4 bytes per element;
            the model does not know ``grad_wire_dtype``.
        device_type: type of the ranks' devices. It decides how finely hops, heads and tiles are cut.
        buffer_bytes: as in ``initialize``.
        ulysses_size: on another ring, ranks form the largest groups whose size divides this number, the ring size and
            the query heads (:meth:`on_ring`). None is that of the schedule.

    With groups of ranks (``schedule.ulysses_size``), hops are those of the member of each group with the most work.

    Raises:
        ValueError, TypeError: ``batch``, ``head_dim`` or ``itemsize`` is not an int of at least 1, or the call is too
            large to be counted: 2⁵⁸ bytes of tensors, or more than 65,536 pairs of a head and an offset in a branch.
    """

    schedule: RingSchedule
    batch: int
    head_dim: int
    itemsize: int
    device_type: str = "cpu"
    buffer_bytes: int | None = None
    ulysses_size: int | None = None

    def __post_init__(self) -> None:
        if self.ulysses_size is None:
            object.__setattr__(self, "ulysses_size", self.schedule.ulysses_size)
        for name in ("batch", "head_dim", "itemsize"):
            check_integer(name, getattr(self, name), 1)
        given, pattern = self.schedule, self.schedule.pattern
        rate = max(pattern.dilation_rates) if pattern.offset == "every" else 1
        if given.num_heads * rate > _MAX_STREAMS:
            offsets = f" and dilation_rates = {[*pattern.dilation_rates]} at every offset" if rate > 1 else ""
            raise ValueError(
                f"num_heads = {given.num_heads}{offsets}: at most {_MAX_STREAMS:,} heads × offsets are counted; give "
                "fewer."
            )
        heads = 4 * (given.num_heads + len(given.kv_heads))
        total = given.layout.seq_len * heads * self.batch * self.head_dim * self.itemsize
        if total >= _MAX_BYTES:
            raise ValueError(
                f"seq_len = {given.layout.seq_len}, num_heads = {given.num_heads}, batch = {self.batch} and head_dim = "
                f"{self.head_dim}: query, key, value, out and their gradients have {total:.1e} bytes; give less than "
                f"{_MAX_BYTES:.1e}."
            )

    @property
    def ring_size(self) -> int:
        return self.schedule.layout.ring_size

    def on_ring(self, ring_size: int) -> RingCost:
        """The cost of the same call on a ring of ``ring_size`` ranks."""
        given = self.schedule
        layout = SequenceLayout(given.layout.seq_len, ring_size, given.layout.kind)
        assert self.ulysses_size is not None
        group_size = math.gcd(self.ulysses_size, ring_size, given.num_heads)
        call = given.num_heads, given.num_kv_heads, given.is_causal
        return replace(self, schedule=RingSchedule(given.pattern, layout, *call, group_size))

    @cached_property
    def _hops(self) -> RingCost:
        """The cost of the hops between groups. Its ranks are the groups. Without groups, it is this cost itself."""
        members = self.schedule.of_members
        if len(members) == 1:
            return self
        if self.schedule.pattern.head_mode != "grouped":  # all have as many heads in each branch
            return replace(self, schedule=members[0])
        return replace(self, schedule=max(members, key=lambda member: float(member.pairs.sum())))

    @property
    def _statistics_itemsize(self) -> int:
        return statistics_itemsize(self.itemsize)

    @property
    def _limits(self) -> Limits:
        return limits_of(self.device_type)

    # Memory

    @cached_property
    def tokens(self) -> Tensor:
        """Number of tokens on each rank: int64 [ring size]."""
        layout = self.schedule.layout
        total = torch.zeros(self.ring_size, dtype=torch.int64, device="cpu")
        return total.index_add_(0, layout.chunk_ranks(), layout.chunk_starts().diff())

    @property
    def tensor_bytes(self) -> Tensor:
        """Bytes of query, key, value, out and their gradients: int64 [ring size]."""
        heads = 4 * (len(self.schedule.heads) + len(self.schedule.kv_heads))
        return self.tokens * (heads * self.batch * self.head_dim * self.itemsize)

    @property
    def lse_bytes(self) -> Tensor:
        """Bytes of the LSE: int64 [ring size]."""
        return self.tokens * (self.schedule.num_heads * self.batch * self._statistics_itemsize)

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes of the call, as arguments of the schedule's methods."""
        names = "batch", "head_dim", "itemsize", "device_type", "buffer_bytes"
        return {name: getattr(self, name) for name in names}

    def _travel(self, *, backward: bool) -> Travel:
        return self._hops.schedule.travel(**self.sizes, backward=backward)

    @cached_property
    def communication_bytes(self) -> int:
        """The most bytes of the buffers from which one rank sends and into which it receives, in forward or backward.

        Large hops are cut (:mod:`ring_backends.schedule.limits`). Key masks, document numbers, and the gaps between
        buffers in the block of a GPU (:mod:`ring_backends.ring.wire_memory`) are not counted.
        """
        return max(self._travel(backward=backward).buffer_bytes for backward in (False, True))

    @cached_property
    def tile_bytes(self) -> Tensor:
        """Bytes of the gathered rows of the largest backward tile, and of gradient sums: int64 [ring size].

        The planner cuts tiles to a share of the query. At most, a tile has all rows of a block of heads. For fp16 and
        bf16, gradients are summed in fp32. The sums of at most two blocks of heads are in memory. Copies in fp32, which
        ``aten_cpu_flash`` makes of such a tile on some CPUs, are not counted.
        """
        blocks, _ = self._travel(backward=True).cuts
        row_bytes = self.batch * self.head_dim * self.itemsize
        query_bytes = self.tokens * (self.schedule.num_heads * row_bytes)
        cut = (query_bytes * BACKWARD_TILE_SHARE).long().clamp(min=self._limits.min_tile_bytes)
        gathered = torch.minimum(self.tensor_bytes // blocks, 8 * cut)
        if self.itemsize >= 4:
            return gathered
        heads = self.schedule.num_heads + 2 * len(self.schedule.kv_heads)
        alive = min(2, blocks)
        return gathered + self.tokens * (alive * heads * self.batch * self.head_dim * 4) // blocks

    @property
    def memory_bytes(self) -> Tensor:
        """The bytes of tensors, LSE, wire buffers, the largest tile and exchanges together: int64 [ring size]."""
        return self.tensor_bytes + self.lse_bytes + self.communication_bytes + self.tile_bytes + self.exchange_bytes

    @property
    def exchange_bytes(self) -> Tensor:
        """Bytes of the group's rows of own heads, and of the messages that exchange them, at most twice the tensors."""
        if self._hops is self:
            return torch.zeros_like(self.tokens)
        return 2 * self._hops.tensor_bytes.repeat_interleave(self.schedule.ulysses_size)

    # Bytes and FLOPs

    def sent_bytes(self, *, backward: bool = False) -> Tensor:
        """Bytes that each rank sends, as ``RingSchedule.wire_bytes`` counts them: int64 [ring size]."""
        if self._hops is not self:
            exchanged = self.schedule.exchanged_bytes(**self._widths, backward=backward)
            return exchanged + self.schedule.of_ranks(
                lambda schedule: replace(self, schedule=schedule).sent_bytes(backward=backward)
            )
        keys, grads = self._row_bytes
        sent = self._travel(backward=backward).key_rows_sent * keys
        return sent + self.schedule.rows_received * grads if backward else sent

    @property
    def _widths(self) -> dict[str, int]:
        return {"batch": self.batch, "head_dim": self.head_dim, "itemsize": self.itemsize}

    @property
    def _row_bytes(self) -> tuple[int, int]:
        row = 2 * self.batch * self.head_dim
        return row * self.itemsize, row * self._statistics_itemsize

    def _moved_bytes(self, *, backward: bool) -> Tensor:
        """Bytes that each rank sends or receives, whichever are more: int64 [ring size].

        A rank sends dK and dV of the K and V rows that it received. It receives dK and dV of the K and V rows that it
        sent.
        """
        keys, grads = self._row_bytes
        sent, received = self._travel(backward=backward).key_rows_sent, self.schedule.rows_received
        if not backward:
            return torch.maximum(sent, received) * keys
        return torch.maximum(sent * keys + received * grads, received * keys + sent * grads)

    def flops(self, *, backward: bool = False) -> Tensor:
        """FLOPs of the matrix products, two in forward and five in backward: float64 [ring size].

        Only visible pairs of query and key count.
        """
        return self.schedule.pairs * self._pair_flops(backward=backward)

    def _pair_flops(self, *, backward: bool) -> int:
        return (10 if backward else 4) * self.head_dim * self.batch

    # Seconds

    @cached_property
    def busiest(self) -> list[int]:
        """The ranks that may be the slowest, with the most visible pairs, or the most rows sent or received."""
        counts = self.schedule.pairs, self._travel(backward=True).key_rows_sent, self.schedule.rows_received
        return sorted({int(count.argmax()) for count in counts})

    @cached_property
    def _work(self) -> Callable[[bool], list[RankWork]]:
        """The tiles of the busiest ranks in a forward, or in a backward."""
        return cache(
            lambda backward: [work_of(self.schedule, self._travel(backward=backward), rank) for rank in self.busiest]
        )

    def seconds(self, hardware: Hardware, *, backward: bool = False) -> Tensor:
        """Estimated seconds of the busiest ranks: float64 [ranks]."""
        if self._hops is not self:
            return self._hops.seconds(hardware, backward=backward) + self._exchange_seconds(hardware, backward=backward)
        compute, last, host = self._compute_seconds(hardware, backward=backward)
        travel = self._travel(backward=backward)
        blocks, shares = travel.cuts
        directions = 2 if backward else 1
        hops = (blocks * shares * travel.num_steps + travel.num_tree_hops) * directions
        if not hops:
            return compute
        latencies = hops + MESSAGE_COST * (travel.num_tree_messages - travel.num_tree_hops) * directions
        moved = self._moved_bytes(backward=backward)[self.busiest].double() / hardware.bytes_per_second
        communication = (moved + latencies * hardware.latency_seconds) * (moved > 0)
        last_hop = torch.zeros_like(communication)
        if backward:  # of K, V, dK and dV, the last hop carries only dK and dV, taken as half of the bytes
            share = 2 / hops if travel.num_steps else travel.last_hop_share
            last_hop = (moved / 2 * share + latencies / hops * hardware.latency_seconds) * (moved > 0)
        hidden = hardware.overlap * torch.minimum(communication - last_hop, compute - last)
        return torch.maximum(compute + communication - hidden, host + latencies * hardware.post_seconds * (moved > 0))

    def _exchange_seconds(self, hardware: Hardware, *, backward: bool) -> float:
        """Seconds of the exchanges of rows for heads. Only those of queries overlap with hops, which is not counted.

        A forward has three exchanges, and a backward has four.
        """
        latency, bandwidth = hardware.latency_seconds, hardware.bytes_per_second
        if hardware.host_latency_seconds is not None:
            latency = hardware.host_latency_seconds
        if hardware.host_bytes_per_second is not None:
            bandwidth = hardware.host_bytes_per_second
        sent = float(self.schedule.exchanged_bytes(**self._widths, backward=backward).max())
        posts = (4 if backward else 3) * (1 + MESSAGE_COST * (self.schedule.ulysses_size - 2))
        return sent / bandwidth + posts * max(latency, hardware.post_seconds)

    def call_seconds(self, hardware: Hardware, *, backward: bool = False) -> float:
        """Estimated seconds of the slowest rank."""
        return float(self.seconds(hardware, backward=backward).max())

    def step_seconds(self, hardware: Hardware) -> float:
        """Estimated seconds of forward and backward."""
        return self.call_seconds(hardware) + self.call_seconds(hardware, backward=True)

    def _compute_seconds(self, hardware: Hardware, *, backward: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Seconds of all tiles, of those that hide no hop, and of the host to launch all: float64 [ranks] each."""
        work = self._work(backward)
        own_pairs, own_rows, other_rows, own_tiles, other_tiles, chained_tiles = (
            torch.tensor([getattr(of_rank, name) for of_rank in work], dtype=torch.float64, device="cpu")
            for name in ("own_pairs", "own_rows", "other_rows", "own_tiles", "other_tiles", "chained_tiles")
        )
        other_pairs = (self.schedule.pairs[self.busiest] - own_pairs).clamp(min=0)
        kinds = ((self.schedule.is_causal, own_pairs, own_rows), (False, other_pairs, other_rows))
        seconds = []
        for causal, pairs, query_rows in kinds:
            flops_per_second, row_keys = hardware.tile_rate(backward=backward, causal=causal)
            seconds.append((pairs + query_rows * row_keys) * (self._pair_flops(backward=backward) / flops_per_second))
        own, other = seconds
        copied = torch.zeros_like(own)
        if hardware.copy_bytes_per_second is not None:
            copied = self._copied_bytes(backward=backward) / hardware.copy_bytes_per_second
        travel = self._travel(backward=backward)
        blocks, shares = travel.cuts
        steps = max(1, travel.num_steps * blocks * shares + len(travel.lots))
        hiding = sum(after.step - after.num_hops <= before.step for before, after in pairwise(travel.lots))
        exposed = max(1, len(travel.lots) - hiding) / steps
        layout = self.schedule.layout
        speed = hardware.speed_alone if layout.ring_size * layout.group_size == 1 else 1.0
        per_tile = blocks * hardware.tile_seconds
        others = (chained_tiles * shares + other_tiles) * per_tile
        host = own_tiles * per_tile + others
        return torch.maximum((own + other + copied) / speed, host), exposed * torch.maximum(other / speed, others), host

    def _copied_bytes(self, *, backward: bool) -> Tensor:
        """Bytes read and written to gather rows and to merge results: float64 [ranks]."""
        moves = [
            (work.own_rows + work.other_rows) * _QUERY_MOVES[backward]
            + work.own_key_rows * _LOCAL_KEY_MOVES[backward]
            + int(self.schedule.rows_received[rank]) * _REMOTE_KEY_MOVES[backward]
            for rank, work in zip(self.busiest, self._work(backward), strict=True)
        ]
        row_bytes = self.batch * self.head_dim * (self._statistics_itemsize + self.itemsize) / 2
        return torch.tensor(moves, dtype=torch.float64, device="cpu") * row_bytes


@dataclass(frozen=True)
class RingChoice:
    """The result of a search over ring sizes. A value is None if the search finds no such ring.

    Attributes:
        fits: the smallest ring that fits into the memory of its ranks.
        fits_and_pays: the smallest ring of several ranks that fits and takes less time than one device.
    """

    fits: int | None
    fits_and_pays: int | None


def smallest_rings(
    cost: RingCost, memory_bytes: float, hardware: Hardware | None, *, sizes: list[int] | None = None
) -> RingChoice:
    """Find the smallest ring that fits into ``memory_bytes`` per rank, and the smallest that fits and pays.

    A ring *pays* if forward and backward take less time than on one device.

    Args:
        cost: the attention call, on a ring of any size.
        memory_bytes: memory of one rank.
        hardware: constants for the seconds. None: search only for a ring that fits.
        sizes: ring sizes to choose from, in ascending order. None: all multiples of ``cost.ulysses_size`` up to
            ``MAX_RING_SIZE``. The search is then a bisection. It assumes that memory per rank falls as the ring grows,
            and that all rings from the smallest that pays to the fastest pay.
    """
    unit = cost.ulysses_size or 1
    largest = min(MAX_RING_SIZE, cost.schedule.layout.seq_len) // unit

    def smallest(holds: Callable[[RingCost], bool], first: int) -> int | None:
        if sizes is None:
            found = _smallest(lambda number: holds(cost.on_ring(unit * number)), -(-first // unit), largest)
            return None if found is None else unit * found
        return next((size for size in sizes if size >= first and holds(cost.on_ring(size))), None)

    def fits(ring: RingCost) -> bool:
        without_schedule = ring.tensor_bytes + ring.lse_bytes  # known at once, even of a ring of 65,536 ranks
        return int(without_schedule.max()) <= memory_bytes and int(ring.memory_bytes.max()) <= memory_bytes

    found = smallest(fits, 1)
    if found is None or hardware is None:
        return RingChoice(found, None)
    alone = cost.on_ring(1).step_seconds(hardware)
    return RingChoice(found, smallest(lambda ring: fits(ring) and ring.step_seconds(hardware) < alone, max(found, 2)))


def _smallest(holds: Callable[[int], bool], first: int, largest: int) -> int | None:
    """Find the smallest number from ``first`` to ``largest`` that ``holds`` accepts, by doubling and bisection."""
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
