"""``plan``: prints the memory, bytes, FLOPs and estimated seconds of a ring, next to those of one device.

This module imports torch only when the command runs. The numbers come from :mod:`ring_backends.cost.estimate`.
"""

# ruff: noqa: RUF009 (the functions that declare options call dataclasses.field)

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ring_backends.cli import options
from ring_backends.cli.options import (
    PatternOptions,
    attention,
    check_kv_heads,
    check_positive,
    files,
    option,
    parse_ulysses_size,
    ranks,
)
from ring_backends.cli.output import dtype_name, wide_console, write_json
from ring_backends.cost import local_probe
from ring_backends.cost.hardware import DEFAULT_POST_SECONDS, DEFAULT_TILE_SECONDS, Hardware
from ring_backends.plotting import draw_ring_sizes
from ring_backends.ring.launch import num_cores
from ring_backends.ring.topology import ranks_of_one_host

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.table import Table

    from ring_backends.cost.estimate import Estimate

_UNITS = {
    "": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate(("", "k", "m", "g", "t"))},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate(("k", "m", "g", "t"), 1)},
}

_constant = partial(option, panel="Constants of the estimate")


@dataclass(frozen=True, kw_only=True)
class PlanOptions(PatternOptions):
    """Estimate the cost of a ring, and whether it is faster than one device.

    Memory, bytes and FLOPs per rank are counted from the schedule. Counting
    takes seconds, even for a billion tokens on thousands of ranks.

    Memory is the memory of one attention call: query, key, value, out, the
    gradient of each, the LSE, the wire buffers, and the rows of the largest
    tile.

    Seconds are estimated from constants of the hardware: latency, bandwidth
    and FLOP/s. Options give the constants, a file contains them, or the
    command measures them on local ranks in a few seconds.
    """

    ring_size: int = ranks(min=1, max=65_536, help="Ranks of the ring.")
    heads: int = options.num_heads(8, max=65_536)
    kv_heads: int | None = options.num_kv_heads()
    head_dim: int = options.head_dim()
    batch: int = attention(1, min=1, flag="--batch-size", help="Sequences per call.")
    dtype: options.Dtype = options.dtype()
    causal: bool = options.causal()
    memory: str | None = ranks(
        None,
        metavar="SIZE",
        help="Memory per rank, for example 80GiB. The command prints the smallest ring size that fits into it. "
        "Default: the memory that the measurement found.",
    )
    hosts: str | None = ranks(
        None,
        metavar="NAME,NAME,…",
        help="The host of each rank. The command prints the bytes between hosts, with the ranks in rank order and "
        "in topology order.",
    )
    ranks_per_host: int | None = ranks(None, min=1, help="Ranks per host, as an alternative to --hosts.")
    probe: Path | None = _constant(
        None,
        metavar="FILE",
        help="File with constants, from `ring-backends info --probe --json FILE`. Default: measure them now, "
        "unless --latency, --bandwidth and --flops are given.",
    )
    latency: float | None = _constant(None, metavar="SECONDS", help="Latency of a hop. Replaces the measured latency.")
    bandwidth: float | None = _constant(
        None, metavar="BYTES/S", help="Bandwidth in each direction. Replaces the measured bandwidth."
    )
    host_latency: float | None = _constant(
        None,
        metavar="SECONDS",
        help="Latency between two ranks of one host that exchange rows for heads. Replaces the measured latency. "
        "Default if nothing is measured: --latency.",
    )
    host_bandwidth: float | None = _constant(
        None,
        metavar="BYTES/S",
        help="Bandwidth between two such ranks. Replaces the measured bandwidth. Default if nothing is measured: "
        "--bandwidth.",
    )
    flops: float | None = _constant(
        None,
        metavar="FLOP/S",
        help="Rate of the attention kernel on one rank, in forward and in backward. Replaces the measured rates. "
        "The estimate then ignores the time to gather and merge rows.",
    )
    tile_seconds: float | None = _constant(
        None,
        metavar="SECONDS",
        help="Time that the host needs to launch a tile. Replaces the measured time. Default if nothing is measured: "
        "120 µs on a GPU, else 0.",
    )
    post_seconds: float | None = _constant(
        None,
        metavar="SECONDS",
        help="Time that the host needs to post a hop and to wait for it. Replaces the measured time. Default if "
        "nothing is measured: 200 µs on a GPU, else 0.",
    )
    device: options.Device = options.device(
        help="The devices to plan for. auto: those of the measurement; without one a GPU per rank if there are enough, "
        "else the CPU. With all constants given, this machine needs no GPU."
    )
    buffer_bytes: int | None = options.buffer_bytes()
    ulysses_size: str = options.ulysses_size()
    nproc_per_node: int | None = _constant(
        None,
        min=2,
        help="Local ranks that measure. Default: the ring size, or 2 if the ring size is 1 or is more than the "
        "machine's GPUs or cores.",
    )
    plot: Path | None = files(
        None,
        metavar="FILE",
        help="Draw time and memory per rank against the ring size into this file (needs matplotlib).",
    )

    def check(self) -> None:
        parse_bytes("memory", self.memory)
        parse_hosts(self.hosts, self.ranks_per_host, self.ring_size)
        self.pattern().check(seq_len=self.seq_len, num_heads=self.heads)
        check_kv_heads("kv_heads", self.kv_heads, self.heads)
        self.group_size()
        super().check()
        for name in ("latency", "bandwidth", "flops", "host_latency", "host_bandwidth"):
            check_positive(name, getattr(self, name))
        for name in ("tile_seconds", "post_seconds"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 <= seconds < float("inf"):
                raise ValueError(f"{name} = {seconds}: must be finite and not negative; give another number.")
        if self.probe is not None and not self.probe.is_file():
            raise ValueError(
                f"probe = {str(self.probe)!r}: the file does not exist; write one with `ring-backends info --probe "
                "--json FILE`."
            )
        if self.probe is not None and self.nproc_per_node is not None:
            raise ValueError(
                "nproc_per_node: has no effect with --probe, which replaces the measurement; leave one of the two out."
            )

    def group_size(self) -> int:
        """How many neighbouring ranks exchange rows for heads.

        Raises:
            ValueError: ``ulysses_size`` is invalid, or "auto" without the hosts of the ranks.
        """
        given = parse_ulysses_size(self.ulysses_size, self.ring_size, self.heads)
        if given != "auto":
            return given
        hosts = parse_hosts(self.hosts, self.ranks_per_host, self.ring_size)
        if hosts is None:
            raise ValueError(
                "ulysses_size = 'auto': the hosts of the ranks are unknown; add --ranks-per-host or --hosts, or give a "
                "number."
            )
        return math.gcd(ranks_of_one_host(hosts), self.ring_size, self.heads)


def run(chosen: PlanOptions) -> None:
    """Compute the estimate, print it, and write the files."""
    import torch

    from ring_backends.cost.estimate import Estimate
    from ring_backends.cost.model import RingCost
    from ring_backends.kernels import resolve_dtype
    from ring_backends.schedule.layout import SequenceLayout
    from ring_backends.schedule.ring_schedule import RingSchedule, format_bytes

    console = wide_console()
    on_gpu = chosen.device == "cuda" or (chosen.device == "auto" and torch.cuda.is_available())
    dtype = resolve_dtype(chosen.dtype, torch.device("cuda" if on_gpu else "cpu"))
    layout = SequenceLayout(chosen.seq_len, chosen.ring_size, chosen.layout)
    call = chosen.heads, chosen.kv_heads, chosen.causal
    schedule = RingSchedule(chosen.pattern(), layout, *call, chosen.group_size())
    cost = RingCost(schedule, chosen.batch, chosen.head_dim, dtype.itemsize, buffer_bytes=chosen.buffer_bytes)
    hardware, probe, source = _hardware(chosen, dtype, console, on_gpu=on_gpu)
    device_type = probe["device_type"] if probe else "cuda" if on_gpu else "cpu"
    if chosen.device not in ("auto", device_type):
        raise ValueError(f"device = {chosen.device!r}: the probe is of {device_type!r}; leave one of the two out.")
    cost = dataclasses.replace(cost, device_type=device_type)
    memory = parse_bytes("memory", chosen.memory)
    hosts = parse_hosts(chosen.hosts, chosen.ranks_per_host, chosen.ring_size)
    if hosts is not None and ranks_of_one_host(hosts) % schedule.ulysses_size:
        hardware = dataclasses.replace(hardware, host_latency_seconds=None, host_bytes_per_second=None)
    estimate = Estimate(cost, hardware, memory)
    between_hosts = None if hosts is None else estimate.bytes_between_hosts(hosts)

    described = schedule.describe(**cost.sizes)
    console.print(described, end="", soft_wrap=True, markup=False)
    console.print(_table(estimate))
    console.print(source, soft_wrap=True)
    if between_hosts is not None and hosts is not None:
        by_order = [format_bytes(between_hosts[order]) for order in ("rank", "topology")]
        console.print(
            f"Forward and backward send {by_order[0]} between the {len(set(hosts)):,} hosts with "
            f'ring_order="rank", and {by_order[1]} with ring_order="topology".',
            soft_wrap=True,
        )
    console.print(estimate.verdict(), soft_wrap=True)
    if chosen.json is not None:
        result = {
            "options": {**dataclasses.asdict(chosen), "dtype": dtype_name(dtype), "memory": memory, "hosts": hosts},
            "probe": probe,
            "bytes_between_hosts": between_hosts,
            **estimate.as_dict(),
        }
        write_json(chosen.json, result)
    if chosen.plot is not None:
        title = f"{chosen.seq_len:,} tokens, {chosen.heads} heads of {chosen.head_dim}, {dtype_name(dtype)}"
        draw_ring_sizes(chosen.plot, title, estimate.over_ring_sizes, estimate.memory_bytes)


def _hardware(
    chosen: PlanOptions, dtype: torch.dtype, console: Console, *, on_gpu: bool
) -> tuple[Hardware, dict[str, Any] | None, str]:
    """Return the constants, their measurement (None if options give all constants), and a sentence on their source."""
    import torch

    latency, bandwidth, flops = chosen.latency, chosen.bandwidth, chosen.flops
    of_host = {"tile_seconds": chosen.tile_seconds, "post_seconds": chosen.post_seconds}
    links = {"latency_seconds": latency, "bytes_per_second": bandwidth, **of_host}
    links |= {"host_latency_seconds": chosen.host_latency, "host_bytes_per_second": chosen.host_bandwidth}
    changes: dict[str, Any] = {name: value for name, value in links.items() if value is not None}
    if flops is not None:
        changes |= {"forward_flops_per_second": flops, "backward_flops_per_second": flops}
    if chosen.probe is not None:
        probe = local_probe.read(chosen.probe, dtype_name(dtype))
        source = f"Constants from {chosen.probe}"
    elif None not in (latency, bandwidth, flops):
        by_default = {"tile_seconds": DEFAULT_TILE_SECONDS, "post_seconds": DEFAULT_POST_SECONDS} if on_gpu else {}
        assumed = {name: seconds for name, seconds in by_default.items() if name not in changes}
        shown = " and ".join(f"{name} = {seconds * 1e6:.0f} µs" for name, seconds in assumed.items())
        changes |= assumed
        return Hardware(**changes), None, f"Constants as given{f', {shown} by default' if shown else ''}."
    else:
        gpus = torch.cuda.device_count() if chosen.device != "cpu" else 0
        fits = 2 <= chosen.ring_size <= (gpus or num_cores())
        num_ranks = chosen.nproc_per_node or (chosen.ring_size if fits else 2)
        with console.status(f"measuring on {num_ranks} local ranks"):
            probe = local_probe.measure(num_ranks, dtype_name(dtype), chosen.device, chosen.head_dim)
        source = "Constants measured just now"
    if flops is not None:
        changes |= {"causal_forward_flops_per_second": None, "causal_backward_flops_per_second": None}
        changes |= {"row_keys": 0.0, "causal_row_keys": 0.0, "copy_bytes_per_second": None}
    options_given = ("latency", "bandwidth", "host_latency", "host_bandwidth", "flops", *of_host)
    given = [name for name in options_given if getattr(chosen, name) is not None]
    source += (
        f": {probe['ranks']} ranks at once, {probe['transport']}, {probe['device']}, {probe['dtype']}, head dim "
        f"{probe['head_dim']}, kernel {probe['kernel']}" + (f", {' and '.join(given)} as given." if given else ".")
    )
    return dataclasses.replace(Hardware.of(probe["hardware"]), **changes), probe, source


def _table(estimate: Estimate) -> Table:
    """Make a table of the largest value over all ranks of the ring, and of the value on one device."""
    from rich.table import Table

    table = Table(title="largest value over all ranks", title_justify="left")
    table.add_column("")
    table.add_column(f"ring of {estimate.ring.ring_size:,}", justify="right")
    table.add_column("one device", justify="right")
    ring, alone = map(_column, estimate.largest.values())
    for label in ring:
        table.add_row(label, ring[label], alone[label])
    return table


def _column(cost: dict[str, Any]) -> dict[str, str]:
    from ring_backends.cost.estimate import format_seconds
    from ring_backends.schedule.ring_schedule import format_bytes

    sizes = {
        "query, key, value, out and their gradients": cost["tensor_bytes"],
        "LSE": cost["lse_bytes"],
        "wire buffers, at most": cost["communication_bytes"],
        "rows and sums of the largest tiles": cost["tile_bytes"],
        "exchanges of rows for heads": cost["exchange_bytes"],
        "total memory": cost["memory_bytes"],
        **{f"sent {direction}": size for direction, size in cost["bytes_sent"].items()},
    }
    return {
        **{label: format_bytes(size) for label, size in sizes.items()},
        **{f"GFLOP {direction}": f"{flops / 1e9:,.2f}" for direction, flops in cost["flops"].items()},
        **{f"{direction}, estimated": format_seconds(seconds) for direction, seconds in cost["seconds"].items()},
    }


def parse_bytes(name: str, text: str | None) -> int | None:
    """Parse ``"80GB"``, ``"40 GiB"`` or ``"1000000"`` into a number of bytes.

    Raises:
        ValueError: the text is not a size of at least one byte, or of at least 1,000,000 without a unit. The message
            names the option.
    """
    if text is None:
        return None
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2].lower() not in _UNITS:
        raise ValueError(
            f"{name} = {text!r}: not a size in bytes; write a number and a unit, for example 80GiB or 80GB."
        )
    size = int(Fraction(found[1]) * _UNITS[found[2].lower()])
    if not found[2] and size < 10**6:
        raise ValueError(
            f"{name} = {text!r}: {text.strip()} bytes, as there is no unit; {text.strip()}GiB? Add a unit."
        )
    if size < 1:
        raise ValueError(f"{name} = {text!r}: must be at least one byte; give a larger size.")
    if size >= 2**62:
        raise ValueError(f"{name} = {text!r}: must be below 2**62 bytes; give a smaller size.")
    return size


def parse_hosts(hosts: str | None, ranks_per_host: int | None, ring_size: int) -> tuple[str, ...] | None:
    """Return the host of every rank, or None if neither option is given.

    ``hosts`` may name the hosts of several rings. ``ranks_per_host`` describes one ring.

    Raises:
        ValueError: both options are given, or the number of hosts is not a multiple of the ring size.
    """
    if hosts is not None and ranks_per_host is not None:
        raise ValueError("hosts: ranks_per_host is given too; give only one of the two options.")
    if hosts is None:
        if ranks_per_host is None:
            return None
        return tuple(str(rank // ranks_per_host) for rank in range(ring_size))
    names = tuple(name for name in re.split(r"[,\s]+", hosts.strip()) if name)
    if not names or len(names) % ring_size:
        raise ValueError(
            f"hosts = {hosts!r}: has {len(names)} names, and a ring has {ring_size} ranks; name one host per rank, for "
            "one ring or for several whole rings."
        )
    return names
