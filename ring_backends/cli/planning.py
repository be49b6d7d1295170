"""The numbers of ``plan``, the tables they are shown in, and the sentence that they come to."""

from __future__ import annotations

import dataclasses
import json as json_module
import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from ring_backends.cli import constants
from ring_backends.cli.plan_options import PlanOptions
from ring_backends.cost.hardware import Hardware
from ring_backends.cost.model import RingChoice, RingCost, Workload
from ring_backends.kernels import resolve_dtype
from ring_backends.plotting import draw_ring_sizes
from ring_backends.ring.topology import topology_order
from ring_backends.schedule.layout import SequenceLayout
from ring_backends.schedule.ring_schedule import RingSchedule

_WIDTH = 120  # off a terminal
_PLOTTED_SIZES = 17  # powers of two: up to 65,536


def plan(options: PlanOptions) -> None:
    """Work everything out, print it, and write the files asked for.

    Raises:
        ValueError: an option, by its name, breaks a rule.
    """
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDTH
    made = Plan.of(options, console)
    console.print(made.schedule.describe(**made.sizes), end="", soft_wrap=True, markup=False)
    console.print(made.table())
    console.print(made.source, soft_wrap=True)
    if made.between_hosts is not None:
        console.print(made.hosts_sentence(), soft_wrap=True)
    console.print(made.sentence(), soft_wrap=True)
    if options.json is not None:
        options.json.write_text(json_module.dumps(made.as_json(), indent=2, default=str) + "\n")
    if options.plot is not None:
        title = f"{options.seq_len:,} tokens, {options.heads} heads of {options.head_dim}, {made.dtype}"
        draw_ring_sizes(options.plot, title, made.over_ring_sizes, made.memory_bytes)


@dataclass(frozen=True, eq=False)
class Plan:
    """One call of attention on one ring, with the constants that its seconds are estimated from.

    Attributes:
        dtype: as torch writes it.
        probe: what was measured, or read from a file; None where all constants were given.
        source: a sentence on where the constants come from.
    """

    options: PlanOptions
    dtype: str
    workload: Workload
    hardware: Hardware
    probe: dict[str, Any] | None
    source: str

    @classmethod
    def of(cls, options: PlanOptions, console: Console) -> Plan:
        dtype = resolve_dtype(options.dtype, _device(options.device))
        layout = SequenceLayout(options.seq_len, options.ring_size, options.layout)
        schedule = RingSchedule(options.pattern(), layout, options.heads, options.kv_heads, options.causal)
        workload = Workload(schedule, options.batch, options.head_dim, dtype.itemsize)
        name = str(dtype).removeprefix("torch.")
        return cls(options, name, workload, *_hardware(options, name, console))

    @property
    def schedule(self) -> RingSchedule:
        return self.workload.schedule

    @property
    def sizes(self) -> dict[str, int]:
        workload = self.workload
        return {"batch": workload.batch, "head_dim": workload.head_dim, "itemsize": workload.itemsize}

    @cached_property
    def cost(self) -> RingCost:
        return RingCost(self.schedule, **self.sizes)

    @cached_property
    def alone(self) -> RingCost:
        """The same on one device."""
        return self.workload.on_ring(1)

    @property
    def memory_bytes(self) -> int | None:
        """What one rank has."""
        return self.hardware.memory_bytes if self.options.memory is None else self.options.memory

    @cached_property
    def smallest(self) -> RingChoice | None:
        return None if self.memory_bytes is None else self.workload.smallest_rings(self.memory_bytes, self.hardware)

    @cached_property
    def seconds(self) -> dict[str, dict[str, float]]:
        return {name: _seconds(cost, self.hardware) for name, cost in (("ring", self.cost), ("alone", self.alone))}

    @property
    def speedup(self) -> float:
        """How many times as fast the ring is as one device."""
        return sum(self.seconds["alone"].values()) / sum(self.seconds["ring"].values())

    @cached_property
    def between_hosts(self) -> dict[str, int] | None:
        """Bytes that cross hosts in forward and backward of all rings together, by ``ring_order``."""
        hosts = self.options.hosts
        if hosts is None:
            return None
        orders = {"rank": tuple(range(len(hosts))), "topology": topology_order(hosts)}
        numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
        size = self.options.ring_size
        return {
            name: sum(
                self.schedule.bytes_between_hosts(
                    [numbers[hosts[rank]] for rank in order[first : first + size]], **self.sizes
                )
                for first in range(0, len(order), size)
            )
            for name, order in orders.items()
        }

    @cached_property
    def over_ring_sizes(self) -> list[dict[str, Any]]:
        """Time and memory at ring sizes 1, 2, 4, … up to the ring's or 64, whichever is larger, and the ring's own."""
        largest = min(max(self.options.ring_size, 64), self.options.seq_len)
        powers = {2**power for power in range(_PLOTTED_SIZES) if 2**power <= largest}
        costs = [(size, self.workload.on_ring(size)) for size in sorted({*powers, self.options.ring_size})]
        return [
            {
                "ring_size": size,
                "seconds": _seconds(cost, self.hardware),
                "memory_bytes": int(cost.memory_bytes.max()),
            }
            for size, cost in costs
        ]

    def table(self) -> Table:
        """The rank with most of each, beside one device."""
        table = Table(title="per rank, the one with most of each", title_justify="left")
        table.add_column("")
        table.add_column(f"ring of {self.options.ring_size:,}", justify="right")
        table.add_column("one device", justify="right")
        for label, size in (
            ("query, key, value, out and their gradients", lambda cost: int(cost.tensor_bytes.max())),
            ("LSE", lambda cost: int(cost.lse_bytes.max())),
            ("buffers of hops, at most", lambda cost: cost.communication_bytes),
            ("rows and sums of the largest tiles", lambda cost: int(cost.tile_bytes.max())),
            ("memory in all", lambda cost: int(cost.memory_bytes.max())),
            ("sent forward", lambda cost: int(cost.sent_bytes().max())),
            ("sent backward", lambda cost: int(cost.sent_bytes(backward=True).max())),
        ):
            table.add_row(label, decimal(size(self.cost)), decimal(size(self.alone)))
        for backward, direction in ((False, "forward"), (True, "backward")):
            flops = (f"{float(cost.flops(backward=backward).max()) / 1e9:,.2f}" for cost in (self.cost, self.alone))
            table.add_row(f"GFLOP {direction}", *flops)
        for direction in ("forward", "backward"):
            seconds = (format_seconds(self.seconds[name][direction]) for name in ("ring", "alone"))
            table.add_row(f"{direction}, estimated", *seconds)
        return table

    def hosts_sentence(self) -> str:
        assert self.between_hosts is not None
        assert self.options.hosts is not None
        by_rank, by_topology = self.between_hosts["rank"], self.between_hosts["topology"]
        return (
            f"Between {len(set(self.options.hosts)):,} hosts {decimal(by_rank)} cross in forward and backward with "
            f'ring_order="rank", and {decimal(by_topology)} with ring_order="topology".'
        )

    def sentence(self) -> str:
        """Whether the ring pays, and the smallest rings that fit, for a person to read."""
        here, alone = (format_seconds(sum(self.seconds[name].values())) for name in ("ring", "alone"))
        ring = f"At {self.options.seq_len:,} tokens a ring of {self.options.ring_size:,}"
        if self.options.ring_size == 1:
            said = f"{ring} is one device, which takes {alone} for forward and backward"
        elif self.speedup > 1:
            said = f"{ring} pays: {here} for forward and backward, {self.speedup:.2f} times as fast as one device"
        else:
            said = (
                f"{ring} does not pay: {here} for forward and backward, {1 / self.speedup:.2f} times that of one device"
            )
        said += "" if self.options.ring_size == 1 else f" ({alone})"
        if self.smallest is None or self.memory_bytes is None:
            return f"{said}."
        memory, found = decimal(self.memory_bytes), self.smallest
        if found.fits is None:
            return f"{said}; no ring fits into {memory} per rank."
        said += f"; the smallest ring that fits into {memory} per rank has {_ranks(found.fits)}"
        if found.fits_and_pays is None:
            return f"{said}, and none that fits pays."
        if found.fits_and_pays == found.fits:
            return f"{said}, and pays."
        return f"{said}, the smallest that fits and pays {_ranks(found.fits_and_pays)}."

    def as_json(self) -> dict[str, Any]:
        cost, alone = self.cost, self.alone
        choice = self.smallest
        return {
            "options": {**dataclasses.asdict(self.options), "dtype": self.dtype},
            "hardware": dataclasses.asdict(self.hardware),
            "probe": self.probe,
            "ring": _as_json(cost) | {"seconds": self.seconds["ring"]},
            "one_device": _as_json(alone) | {"seconds": self.seconds["alone"]},
            "per_rank": {
                "tokens": cost.tokens.tolist(),
                "memory_bytes": cost.memory_bytes.tolist(),
                "bytes_sent": _both(lambda backward: cost.sent_bytes(backward=backward).tolist()),
                "flops": _both(lambda backward: cost.flops(backward=backward).tolist()),
                "seconds": _both(lambda backward: cost.seconds(self.hardware, backward=backward).tolist()),
            },
            "pays": self.speedup > 1,
            "speedup": self.speedup,
            "memory_bytes_per_rank": self.memory_bytes,
            "smallest_ring": None if choice is None else dataclasses.asdict(choice),
            "bytes_between_hosts": self.between_hosts,
            "ring_sizes": self.over_ring_sizes,
            "sentence": self.sentence(),
        }


def _device(name: str) -> torch.device:
    """What dtype "auto" is for."""
    gpu = name == "cuda" or (name == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if gpu else "cpu")


def _hardware(options: PlanOptions, dtype: str, console: Console) -> tuple[Hardware, dict[str, Any] | None, str]:
    """The constants, what they were measured with if anything, and a sentence on where they come from."""
    given = [options.latency, options.bandwidth, options.flops]
    probe: dict[str, Any] | None = None
    if options.probe is not None:
        probe = constants.read(options.probe, dtype)
        source = f"Constants from {options.probe}"
    elif None in given:
        num_ranks = options.nproc_per_node or _local_ranks(options)
        with console.status(f"measuring on {num_ranks} local ranks"):
            probe = constants.measure("plan", num_ranks, dtype, options.device, options.head_dim)
        source = "Constants measured just now"
    if probe is None:
        assert options.latency is not None
        assert options.bandwidth is not None
        assert options.flops is not None
        hardware = Hardware(options.latency, options.bandwidth, options.flops, options.flops)
        return hardware, None, "Constants as given."
    hardware = Hardware.of(probe["hardware"])
    changes: dict[str, Any] = {"latency_seconds": options.latency, "bytes_per_second": options.bandwidth}
    changes = {name: value for name, value in changes.items() if value is not None}
    if options.flops is not None:
        changes |= {"forward_flops_per_second": options.flops, "backward_flops_per_second": options.flops}
        changes |= {"causal_forward_flops_per_second": None, "causal_backward_flops_per_second": None}
        changes |= {"row_keys": 0.0, "causal_row_keys": 0.0, "copy_bytes_per_second": None}
    given_names = [name for name in ("latency", "bandwidth", "flops") if getattr(options, name) is not None]
    but = f", {' and '.join(given_names)} as given" if given_names else ""
    source += (
        f": {probe['ranks']} ranks at once, {probe['transport']}, {probe['device']}, {probe['dtype']}, head dim "
        f"{probe['head_dim']}, kernel {probe['kernel']}{but}."
    )
    return dataclasses.replace(hardware, **changes), probe, source


def _local_ranks(options: PlanOptions) -> int:
    gpus = torch.cuda.device_count() if options.device != "cpu" else 0
    most = gpus or os.cpu_count() or 1
    return options.ring_size if 2 <= options.ring_size <= most else 2


def _seconds(cost: RingCost, hardware: Hardware) -> dict[str, float]:
    return _both(lambda backward: cost.call_seconds(hardware, backward=backward))


def _both(value: Any) -> dict[str, Any]:
    return {"forward": value(False), "backward": value(True)}


def _as_json(cost: RingCost) -> dict[str, Any]:
    """Of the rank with most of each."""
    return {
        "ring_size": cost.ring_size,
        "tensor_bytes": int(cost.tensor_bytes.max()),
        "lse_bytes": int(cost.lse_bytes.max()),
        "communication_bytes": cost.communication_bytes,
        "tile_bytes": int(cost.tile_bytes.max()),
        "memory_bytes": int(cost.memory_bytes.max()),
        "bytes_sent": _both(lambda backward: int(cost.sent_bytes(backward=backward).max())),
        "flops": _both(lambda backward: float(cost.flops(backward=backward).max())),
    }


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number:,} ranks"


def format_seconds(seconds: float) -> str:
    """With a unit in which there are three digits or so."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:,.3g} {unit}" if seconds < 1000 * size else f"{seconds / size:,.0f} {unit}"
    return f"{seconds / 1e-6:.3g} µs"
