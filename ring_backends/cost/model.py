"""Memory, bytes, FLOPs and seconds of one attention call per rank, computed from a schedule without a process group.

Memory, bytes and FLOPs are counted. Seconds are estimated from the constants of
:class:`~ring_backends.cost.hardware.Hardware` by this model:

- A tile takes the FLOPs of its matrix products over the kernel's rate. Each query row costs as if it saw some more
  keys. Gathering rows and merging results take the bytes that they read and write over the rate of copies.
- Each hop takes a latency. A rank's hops also take the larger of the bytes sent and received over the bandwidth.
- A hop is posted before the tiles of the previous step, and ``Hardware.overlap`` of it runs beside them. No hop
  overlaps with the tiles of the last step. The last hop of dK and dV overlaps with no tile.
- A call takes as long as its slowest rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ring_backends.cost.hardware import Hardware
from ring_backends.cost.tiles import TileCounts, sum_by_rank
from ring_backends.schedule.checks import check_integer
from ring_backends.schedule.planner import COMMUNICATION_SHARE, MIN_HOP_BYTES, num_cuts
from ring_backends.schedule.ring_schedule import RingSchedule
from ring_backends.schedule.tiling import BACKWARD_TILE_SHARE, MIN_TILE_BYTES

# How often a row of head_dim elements is read or written outside the kernel. Gathering a row reads it and writes it.
# Adding a row to a sum, or merging it into an output, reads both and writes one.
_COPY, _ADD = 2, 3
_QUERY_MOVES = {False: _COPY + _ADD, True: 3 * _COPY + _ADD}  # q; out merged · q, out and dO; dq
_LOCAL_KEY_MOVES = {False: 2 * _COPY, True: 2 * _COPY + 2 * _ADD}  # k and v · k and v; dk and dv
_REMOTE_KEY_MOVES = {False: 0, True: 2 * _ADD}  # the kernel reads K and V from the wire buffer


@dataclass(frozen=True, eq=False)
class RingCost:
    """The cost of one attention call, forward and backward, including the tensors that a training step keeps for it.

    Args:
        schedule: the branches, layout, heads and mask.
        batch, head_dim: of the inputs.
        itemsize: bytes per element of the inputs. Statistics, and dK and dV on the wire, have 4 bytes (8 for fp64).

    Raises:
        ValueError, TypeError: ``batch``, ``head_dim`` or ``itemsize`` is not an int of at least 1.
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

    @cached_property
    def tiles(self) -> TileCounts:
        return TileCounts(self.schedule)

    @property
    def _statistics_itemsize(self) -> int:
        return max(self.itemsize, 4)

    # Memory

    @cached_property
    def tokens(self) -> Tensor:
        """Positions of each rank: int64 [ring size]."""
        layout = self.schedule.layout
        return sum_by_rank(layout.chunk_ranks(), layout.chunk_starts().diff(), self.ring_size)

    @property
    def tensor_bytes(self) -> Tensor:
        """Query, key, value, out and their gradients: int64 [ring size]."""
        heads = 4 * (self.schedule.num_heads + self.schedule.kv_heads)
        return self.tokens * (heads * self.batch * self.head_dim * self.itemsize)

    @property
    def lse_bytes(self) -> Tensor:
        """The LSE: int64 [ring size]."""
        return self.tokens * (self.schedule.num_heads * self.batch * self._statistics_itemsize)

    @cached_property
    def _hop_bytes(self) -> tuple[int, int]:
        """Bytes of K and V, and of dK and dV, of all heads, on the rank that sends most in one step."""
        rows = 2 * self.schedule.max_rows_in_flight * self.batch * self.head_dim
        return rows * self.itemsize, rows * self._statistics_itemsize

    @cached_property
    def communication_bytes(self) -> int:
        """Upper bound of one rank's wire buffers.

        This is the size of three hops of K and V and three of dK and dV, limited by the planner: to its share of the
        tensors, or to six hops of the smallest size that it cuts.
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
        """Gathered rows of the largest backward tile, and the sums of its gradients: int64 [ring size].

        Tiles are cut to a share of the query. For fp16 and bf16, gradients are summed in fp32 for two blocks of heads.
        """
        blocks, _ = self._cuts(backward=True)
        row_bytes = self.batch * self.head_dim * self.itemsize
        query_bytes = self.tokens * (self.schedule.num_heads * row_bytes)
        cut = (query_bytes * BACKWARD_TILE_SHARE).long().clamp(min=MIN_TILE_BYTES)
        gathered = torch.minimum(self.tiles.largest_rows * row_bytes // blocks, 8 * cut)
        if self.itemsize >= 4:
            return gathered
        heads = self.schedule.num_heads + 2 * self.schedule.kv_heads
        alive = min(2, blocks)
        return gathered + self.tokens * (alive * heads * self.batch * self.head_dim * 4) // blocks

    @property
    def memory_bytes(self) -> Tensor:
        """The sum of the above: int64 [ring size]."""
        return self.tensor_bytes + self.lse_bytes + self.communication_bytes + self.tile_bytes

    # Bytes and FLOPs

    def sent_bytes(self, *, backward: bool = False) -> Tensor:
        """Payload that each rank sends, as in ``RingSchedule.wire_bytes``: int64 [ring size]."""
        keys, grads = self._row_bytes
        sent = self.schedule.rows_sent * keys
        return sent + self.schedule.grad_rows_sent * grads if backward else sent

    @property
    def _row_bytes(self) -> tuple[int, int]:
        row = 2 * self.batch * self.head_dim
        return row * self.itemsize, row * self._statistics_itemsize

    def _moved_bytes(self, *, backward: bool) -> Tensor:
        """The larger of the bytes sent and received: int64 [ring size].

        A rank sends dK and dV of the K and V rows that it received. It receives dK and dV of the rows that it sent.
        """
        keys, grads = self._row_bytes
        there, back = self.schedule.rows_sent, self.schedule.grad_rows_sent
        if not backward:
            return torch.maximum(there, back) * keys
        return torch.maximum(there * keys + back * grads, back * keys + there * grads)

    def flops(self, *, backward: bool = False) -> Tensor:
        """FLOPs of two matrix products per visible pair in forward, five in backward: float64 [ring size]."""
        return self.schedule.pairs * self._pair_flops(backward=backward)

    def _pair_flops(self, *, backward: bool) -> int:
        return (10 if backward else 4) * self.head_dim * self.batch

    # Seconds

    def seconds(self, hardware: Hardware, *, backward: bool = False) -> Tensor:
        """Estimated seconds of each rank: float64 [ring size]."""
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
        """Estimated seconds of the slowest rank."""
        return float(self.seconds(hardware, backward=backward).max())

    def _compute_seconds(self, hardware: Hardware, *, backward: bool) -> tuple[Tensor, Tensor]:
        """Seconds of all tiles, and of those of the last step of the last block of heads: float64 [ring size] each."""
        rows = self.tiles.rows
        own_pairs = self.tiles.own_pairs
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
        """Bytes read and written to gather rows and to merge results: float64 [ring size]."""
        rows = self.tiles.rows
        moves = (rows.own + rows.other) * _QUERY_MOVES[backward] + rows.own_keys * _LOCAL_KEY_MOVES[backward]
        moves = moves + self.schedule.grad_rows_sent * _REMOTE_KEY_MOVES[backward]
        return moves.double() * (self.batch * self.head_dim * (self._statistics_itemsize + self.itemsize) / 2)
