"""Measures the constants of the cost model (:class:`~ring_backends.cost.hardware.Hardware`) on the ranks of a world.

All ranks measure together. Tiles are timed while every rank computes. Hops are timed while every rank sends to the next
rank and receives from the previous rank, as in a ring. So ranks that share cores or a link measure the speed of their
share.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ring_backends.cost.hardware import Hardware
from ring_backends.cost.machine import median_seconds, synchronize, synchronize_ranks
from ring_backends.kernels import KernelInputs, TileInputs, select_kernel
from ring_backends.kernels.merge import statistics_dtype
from ring_backends.kernels.rows import gather, merge_rows
from ring_backends.ring.transfer import Transfer, post_batch, post_works
from ring_backends.schedule.rows import DilatedRows, head_runs

LATENCY_BYTES = 1024
BANDWIDTH_BYTES = 16 * 2**20
TILE_ROWS = 2048

_LAUNCHES = 20  # few enough that the device's queue does not fill up, which would stop the host

_DILATION_RATE = 4  # of the rows that _copies gathers
_HOP_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class RankProbe:
    """Measures the constants on one rank. All ranks of the world make the same calls in the same order.

    Args:
        device: where tiles are computed, and where the buffers of hops lie.
        dtype, head_dim: dtype and head dimension of the tiles.
        seconds: time to spend on each kind of tile.
        order: the global ranks in ring order, at least two. Each rank sends its hops to the next rank.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    seconds: float
    order: Sequence[int]

    def measure(self, *, alone_threads: int | None = None) -> Hardware:
        """Measure every constant except ``memory_bytes``.

        Args:
            alone_threads: number of threads of a rank that runs alone, to measure ``speed_alone``. None: every rank
                has its own device, and ``speed_alone`` is 1.
        """
        # The measurements are interleaved, so background load affects all of them equally.
        tiles: dict[object, Callable[[], object]] = {
            (rows, backward, is_causal): self._tile(rows, backward=backward, is_causal=is_causal)
            for rows in (TILE_ROWS, TILE_ROWS // 8)
            for backward in (False, True)
            for is_causal in (False, True)
        }
        seconds = self._seconds_of({**tiles, "copies": self._copies()})
        forward, backward, row_keys = self._tile_rate(seconds, is_causal=False)
        causal_forward, causal_backward, causal_row_keys = self._tile_rate(seconds, is_causal=True)
        hop = self.hop_seconds(BANDWIDTH_BYTES, 7)
        return Hardware(
            latency_seconds=self.hop_seconds(LATENCY_BYTES, 41),
            bytes_per_second=BANDWIDTH_BYTES / hop,
            forward_flops_per_second=forward,
            backward_flops_per_second=backward,
            causal_forward_flops_per_second=causal_forward,
            causal_backward_flops_per_second=causal_backward,
            row_keys=row_keys,
            causal_row_keys=causal_row_keys,
            tile_seconds=0.0 if self.device.type == "cpu" else self.launch_seconds(),
            post_seconds=0.0 if self.device.type == "cpu" else self.post_seconds(),
            copy_bytes_per_second=self._copied_bytes() / seconds["copies"],
            overlap=self.overlap(hop),
            speed_alone=1.0 if alone_threads is None else self.speed_alone(alone_threads),
        )

    @property
    def _num_heads(self) -> int:
        return 32 if self.device.type == "cuda" else 2

    def _tile_rate(self, seconds: Mapping[object, float], *, is_causal: bool) -> tuple[float, float, float]:
        """Compute the FLOP/s in forward and backward, and ``row_keys``, from the seconds of long and short tiles.

        The key of a kind of tile is (rows, backward, is_causal).

        The model of a tile is seconds = rows × (keys that a row sees + row_keys) × seconds per pair. Both kinds of tile
        have the same number of rows in all.
        """
        (long_keys, long), (short_keys, short) = (
            ((rows + 1) / 2 if is_causal else rows, [seconds[rows, backward, is_causal] for backward in (False, True)])
            for rows in (TILE_ROWS, TILE_ROWS // 8)
        )
        per_key = (sum(long) - sum(short)) / (long_keys - short_keys)
        # row_keys is 0 if short tiles are not slower per pair, or if the clock is too coarse to tell.
        row_keys = max(0.0, sum(long) / per_key - long_keys) if per_key > 0 else 0.0
        pairs = (long_keys + row_keys) * TILE_ROWS * self._num_heads * self.head_dim
        return 4 * pairs / long[0], 10 * pairs / long[1], row_keys

    def _tile(self, rows: int, *, backward: bool, is_causal: bool) -> Callable[[], object]:
        """Make a function that calls the kernel on ``TILE_ROWS`` query rows per head, in segments of ``rows`` rows."""
        kernel = select_kernel("auto", KernelInputs(self.device, self.dtype, self.head_dim))
        shape = (TILE_ROWS // rows, self._num_heads, rows, self.head_dim)
        query, key, value, grad_out = (self._randn(*shape) for _ in range(4))
        tile = TileInputs(query, key, value, self.head_dim**-0.5, is_causal)
        if not backward:
            return partial(kernel.forward, tile)
        return partial(kernel.backward, tile, grad_out, *kernel.forward(tile))

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def _copies(self) -> Callable[[], None]:
        """Make a function that gathers dilated rows, and merges the same number of rows into an output."""
        heads, rows = self._num_heads * _DILATION_RATE, TILE_ROWS
        tensor = self._randn(1, rows * _DILATION_RATE, heads, self.head_dim)
        tile = self._randn(1, heads, rows, self.head_dim)
        statistics_of = statistics_dtype(self.dtype)
        (out, lse), (tile_out, tile_lse) = (
            (x.to(statistics_of), x[..., 0].to(statistics_of, copy=True)) for x in (tensor, tile)
        )
        runs = head_runs(range(heads), [head % _DILATION_RATE for head in range(heads)])
        lattice = DilatedRows(0, 1, 0, _DILATION_RATE, rows, runs)

        def gather_and_merge() -> None:
            gather(tensor, lattice)
            merge_rows(out, lse, lattice, tile_out, tile_lse)

        return gather_and_merge

    def launch_seconds(self) -> float:
        """Measure the time in which the host launches a short tile with its copies and its merge."""
        tile, copies = self._tile(TILE_ROWS // 8, backward=False, is_causal=False), self._copies()
        for call in (tile, copies):
            call()
        synchronize(self.device)
        begun = time.perf_counter()
        for _ in range(_LAUNCHES):
            tile()
            copies()
        seconds = (time.perf_counter() - begun) / _LAUNCHES  # the device may still be computing
        synchronize(self.device)
        return seconds

    def post_seconds(self) -> float:
        """Measure the time in which the host posts a small hop and waits for it."""
        buffers = self._hop_buffers(LATENCY_BYTES)
        synchronize_ranks(self.device)
        begun = time.perf_counter()
        for _ in range(_LAUNCHES):
            self._post(*buffers).wait(_HOP_TIMEOUT)
        seconds = (time.perf_counter() - begun) / _LAUNCHES  # on a GPU, only its stream waits
        synchronize(self.device)
        return seconds

    def _copied_bytes(self) -> int:
        """Bytes that :meth:`_copies` reads and writes.

        Gathering reads one row and writes one. Merging reads two rows and writes one.
        """
        numbers = self._num_heads * _DILATION_RATE * TILE_ROWS * self.head_dim
        return numbers * (2 * self.dtype.itemsize + 3 * statistics_dtype(self.dtype).itemsize)

    def hop_seconds(self, size: int, repeats: int) -> float:
        """Median seconds of a hop of ``size`` bytes, from every rank to the next rank."""
        return statistics.median(self._exchange(size, lambda: None) for _ in range(repeats))

    def overlap(self, hop: float) -> float:
        """Measure the share of a hop that overlaps with tiles.

        Args:
            hop: seconds of a hop of ``BANDWIDTH_BYTES`` without tiles.
        """
        tile = self._tile(TILE_ROWS, backward=False, is_causal=False)
        one = self._seconds_of({"tile": tile})["tile"]
        calls = self._broadcast(max(1, round(hop / one)))
        compute = calls * one
        together = statistics.median(
            self._exchange(BANDWIDTH_BYTES, lambda: [tile() for _ in range(calls)]) for _ in range(5)
        )
        return min(1.0, max(0.0, (hop + compute - together) / min(hop, compute)))

    def _broadcast(self, number: int) -> int:
        """Return on all ranks the number that the first rank in ring order passes."""
        on_gpu = "nccl" in dist.get_backend_config() and self.device.type == "cuda"
        shared = torch.tensor([number], device=self.device if on_gpu else "cpu")
        dist.broadcast(shared, self.order[0])
        return int(shared)

    def speed_alone(self, threads: int) -> float:
        """Measure the speed of the first rank while the other ranks wait, divided by its speed while they compute.

        Args:
            threads: number of threads of the rank while the others wait.
        """
        tile = self._tile(TILE_ROWS, backward=False, is_causal=False)
        shared = alone = self._seconds_of({"tile": tile})["tile"]
        synchronize_ranks(self.device)
        if dist.get_rank() == self.order[0]:
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            alone = self._seconds_per_call({"tile": tile})["tile"]
            torch.set_num_threads(before)
        synchronize_ranks(self.device)
        return shared / alone

    def _exchange(self, size: int, meanwhile: Callable[[], object]) -> float:
        """Measure the seconds of one hop that all ranks begin together. ``meanwhile`` is called after it is posted."""
        buffers = self._hop_buffers(size)
        synchronize_ranks(self.device)
        started = time.perf_counter()
        transfer = self._post(*buffers)
        meanwhile()
        transfer.wait(_HOP_TIMEOUT)
        synchronize(self.device)
        return time.perf_counter() - started

    def _hop_buffers(self, size: int) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Buffers of ``size`` bytes, by peer: to the next rank, and from the rank before."""
        place = self.order.index(dist.get_rank())
        to, source = self.order[(place + 1) % len(self.order)], self.order[place - 1]
        outgoing = {to: torch.zeros(size, dtype=torch.uint8, device=self.device)}
        return outgoing, {source: torch.empty(size, dtype=torch.uint8, device=self.device)}

    def _post(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> Transfer:
        group = dist.group.WORLD
        assert group is not None
        return post_works(group, lambda out, into: post_batch(group, out, into, tag=0), outgoing, incoming)

    def _seconds_of(self, calls: Mapping[object, Callable[[], object]]) -> dict[object, float]:
        """Call :meth:`_seconds_per_call` on all ranks at the same time."""
        synchronize_ranks(self.device)
        return self._seconds_per_call(calls)

    def _seconds_per_call(self, calls: Mapping[object, Callable[[], object]]) -> dict[object, float]:
        return median_seconds(calls, self.device, rounds=3, seconds=self.seconds, calls_on_gpu=16)


def slowest(found: Sequence[Hardware]) -> Hardware:
    """Combine the constants of all ranks into the constants of a ring.

    The constants of tiles are those of the slowest rank: its rates and ``row_keys`` were fitted together. Every other
    constant is the worst value over all ranks, except that ``speed_alone`` is the largest.
    """

    def tiles(hardware: Hardware) -> float:
        kinds = [hardware.tile_rate(backward=b, causal=c) for b in (False, True) for c in (False, True)]
        return sum((TILE_ROWS / 2 + row_keys) / flops_per_second for flops_per_second, row_keys in kinds)

    def least(name: str) -> Any:
        values = [getattr(hardware, name) for hardware in found]
        return None if None in values else min(values)

    minima = ("bytes_per_second", "copy_bytes_per_second", "overlap", "memory_bytes")
    return dataclasses.replace(
        max(found, key=tiles),
        latency_seconds=max(hardware.latency_seconds for hardware in found),
        tile_seconds=max(hardware.tile_seconds for hardware in found),
        post_seconds=max(hardware.post_seconds for hardware in found),
        speed_alone=max(hardware.speed_alone for hardware in found),
        **{name: least(name) for name in minima},
    )


def with_host_links(found: Sequence[Hardware], hosts: Sequence[str]) -> Hardware:
    """The constants of the slowest rank (:func:`slowest`), with those of links within a host where there are others.

    Args:
        found: the constants of the ranks in ring order. Each rank has measured hops to and from its neighbours.
        hosts: the host of each rank.
    """
    hardware, number = slowest(found), len(found)
    places = [{hosts[rank - 1], hosts[rank], hosts[(rank + 1) % number]} for rank in range(number)]
    within = [of_rank for of_rank, neighbours in zip(found, places, strict=True) if len(neighbours) == 1]
    if not within or len(within) == number:
        return hardware
    return dataclasses.replace(
        hardware,
        host_latency_seconds=max(of_rank.latency_seconds for of_rank in within),
        host_bytes_per_second=min(of_rank.bytes_per_second for of_rank in within),
    )
