"""``plan``: prints the memory, bytes, FLOPs and estimated seconds of a ring, next to those of one device.

This module imports torch only when the command runs. The numbers come from :mod:`ring_backends.cost.estimate`.
"""

from __future__ import annotations

import dataclasses
import json as json_module
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ring_backends.cli.options import (
    ATTENTION,
    FILES,
    RANKS,
    Causal,
    Device,
    DilationRates,
    Dtype,
    HeadDim,
    HeadMode,
    Json,
    Layout,
    NumHeads,
    NumKvHeads,
    Offset,
    Padding,
    SegmentLengths,
    SeqLen,
    check_choices,
    check_files,
    check_kv_heads,
    wide_console,
)
from ring_backends.cli.parsing import parse_branches, parse_bytes, parse_hosts
from ring_backends.cli.report import reported_errors
from ring_backends.cost import local_probe
from ring_backends.cost.default_branches import default_branches
from ring_backends.cost.hardware import Hardware
from ring_backends.plotting import check_plot, draw_ring_sizes
from ring_backends.ring.launch import num_cores
from ring_backends.schedule.pattern import DilatedPattern

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.table import Table

    from ring_backends.cost.estimate import Estimate
    from ring_backends.cost.model import RingCost

_CONSTANTS = "Constants of the estimate"


@dataclass(frozen=True)
class PlanOptions:
    """The options of the command, as plain values. Each field has the name of its option."""

    seq_len: int
    ring_size: int
    heads: int
    kv_heads: int | None
    head_dim: int
    batch: int
    dtype: str
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    head_mode: Any
    offset: Any
    padding: Any
    layout: Any
    causal: bool
    memory: int | None
    probe: Path | None
    nproc_per_node: int | None
    latency: float | None
    bandwidth: float | None
    flops: float | None
    hosts: tuple[str, ...] | None
    device: str
    json: Path | None
    plot: Path | None

    def check(self) -> None:
        """Check the options, as far as that needs no torch.

        Raises:
            ValueError: an option is invalid. The message names it.
        """
        self.pattern().check(seq_len=self.seq_len, num_heads=self.heads)
        check_kv_heads("kv_heads", self.kv_heads, self.heads)
        check_choices(self)
        for name in ("latency", "bandwidth", "flops"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} = {value}: must be above 0; give a positive number.")
        if self.probe is not None and not self.probe.is_file():
            raise ValueError(
                f"probe = {str(self.probe)!r}: the file does not exist; write one with `ring-backends info --probe "
                "--json FILE`."
            )
        if self.probe is not None and self.nproc_per_node is not None:
            raise ValueError(
                "nproc_per_node: has no effect with --probe, which replaces the measurement; leave one of the two out."
            )
        check_files(json=self.json, plot=self.plot)
        if self.plot is not None:
            check_plot(self.plot)

    def pattern(self) -> DilatedPattern:
        return DilatedPattern(self.segment_lengths, self.dilation_rates, self.head_mode, self.offset, self.padding)


def plan_command(
    seq_len: SeqLen,
    ring_size: Annotated[int, typer.Option(min=1, help="Ranks of the ring.", rich_help_panel=RANKS)],
    heads: NumHeads = 8,
    kv_heads: NumKvHeads = None,
    head_dim: HeadDim = 64,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per call.", rich_help_panel=ATTENTION)] = 1,
    dtype: Dtype = "auto",
    segment_lengths: SegmentLengths = None,
    dilation_rates: DilationRates = None,
    head_mode: HeadMode = "all",
    offset: Offset = None,
    padding: Padding = "masked",
    causal: Causal = True,
    layout: Layout = "contiguous",
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory per rank, for example 80GB. The command prints the smallest ring size that fits into it. "
            "Default: the memory that the measurement found.",
            rich_help_panel=RANKS,
        ),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME,…",
            help="The host of each rank. The command prints the bytes between hosts, with the ranks in rank order and "
            "in topology order.",
            rich_help_panel=RANKS,
        ),
    ] = None,
    ranks_per_host: Annotated[
        int | None, typer.Option(min=1, help="Ranks per host, as an alternative to --hosts.", rich_help_panel=RANKS)
    ] = None,
    probe: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File with constants, from `ring-backends info --probe --json FILE`. Default: measure them now, "
            "unless --latency, --bandwidth and --flops are given.",
            rich_help_panel=_CONSTANTS,
        ),
    ] = None,
    latency: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="Latency of a hop. Replaces the measured latency.", rich_help_panel=_CONSTANTS
        ),
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option(
            metavar="BYTES/S",
            help="Bandwidth in each direction. Replaces the measured bandwidth.",
            rich_help_panel=_CONSTANTS,
        ),
    ] = None,
    flops: Annotated[
        float | None,
        typer.Option(
            metavar="FLOP/S",
            help="Rate of the attention kernel on one rank, in forward and in backward. Replaces the measured rates. "
            "The estimate then ignores the time to gather and merge rows.",
            rich_help_panel=_CONSTANTS,
        ),
    ] = None,
    nproc_per_node: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Local ranks that measure. Default: the ring size, or 2 if the ring size is 1 or is more than the "
            "machine's GPUs or cores.",
            rich_help_panel=_CONSTANTS,
        ),
    ] = None,
    device: Device = "auto",
    json: Json = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw time and memory per rank against the ring size into this file (needs matplotlib).",
            rich_help_panel=FILES,
        ),
    ] = None,
) -> None:
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
    given = dict(locals())
    names = [field.name for field in fields(PlanOptions)]
    with reported_errors("plan", [*names, "ranks_per_host"]):
        lengths, rates = parse_branches(segment_lengths, dilation_rates) or default_branches(seq_len)
        given.update(
            segment_lengths=lengths,
            dilation_rates=rates,
            memory=parse_bytes("memory", memory),
            hosts=parse_hosts(hosts, ranks_per_host, ring_size),
        )
        options = PlanOptions(**{name: given[name] for name in names})
        options.check()
        _plan(options)


def _plan(options: PlanOptions) -> None:
    """Compute the estimate, print it, and write the files."""
    import torch

    from ring_backends.cost.estimate import Estimate
    from ring_backends.cost.ring_sizes import Workload
    from ring_backends.kernels import resolve_dtype
    from ring_backends.schedule.layout import SequenceLayout
    from ring_backends.schedule.ring_schedule import RingSchedule

    console = wide_console()
    on_gpu = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
    dtype = resolve_dtype(options.dtype, torch.device("cuda" if on_gpu else "cpu"))
    layout = SequenceLayout(options.seq_len, options.ring_size, options.layout)
    schedule = RingSchedule(options.pattern(), layout, options.heads, options.kv_heads, options.causal)
    hardware, probe, source = _hardware(options, dtype, console)
    device_type = probe["device_type"] if probe else "cuda" if on_gpu else "cpu"
    workload = Workload(schedule, options.batch, options.head_dim, dtype.itemsize, device_type)
    estimate = Estimate(workload, hardware, options.memory)
    between_hosts = None if options.hosts is None else estimate.bytes_between_hosts(options.hosts)

    described = schedule.describe(batch=options.batch, head_dim=options.head_dim, itemsize=dtype.itemsize)
    console.print(described, end="", soft_wrap=True, markup=False)
    console.print(_table(estimate))
    console.print(source, soft_wrap=True)
    if between_hosts is not None and options.hosts is not None:
        console.print(_hosts_sentence(between_hosts, len(set(options.hosts))), soft_wrap=True)
    console.print(estimate.verdict(), soft_wrap=True)
    if options.json is not None:
        result = {
            "options": {**dataclasses.asdict(options), "dtype": _name(dtype)},
            "probe": probe,
            "bytes_between_hosts": between_hosts,
            **estimate.as_dict(),
        }
        options.json.write_text(json_module.dumps(result, indent=2, default=str) + "\n")
    if options.plot is not None:
        title = f"{options.seq_len:,} tokens, {options.heads} heads of {options.head_dim}, {_name(dtype)}"
        draw_ring_sizes(options.plot, title, estimate.over_ring_sizes, estimate.memory_bytes)


def _hardware(
    options: PlanOptions, dtype: torch.dtype, console: Console
) -> tuple[Hardware, dict[str, Any] | None, str]:
    """Return the constants, their measurement (None if options give all constants), and a sentence on their source."""
    latency, bandwidth, flops = options.latency, options.bandwidth, options.flops
    if options.probe is not None:
        probe = local_probe.read(options.probe, _name(dtype))
        source = f"Constants from {options.probe}"
    elif latency is not None and bandwidth is not None and flops is not None:
        return Hardware(latency, bandwidth, flops, flops), None, "Constants as given."
    else:
        num_ranks = options.nproc_per_node or _num_local_ranks(options)
        with console.status(f"measuring on {num_ranks} local ranks"):
            probe = local_probe.measure(num_ranks, _name(dtype), options.device, options.head_dim)
        source = "Constants measured just now"
    changes: dict[str, Any] = {}
    if latency is not None:
        changes["latency_seconds"] = latency
    if bandwidth is not None:
        changes["bytes_per_second"] = bandwidth
    if flops is not None:
        changes |= {"forward_flops_per_second": flops, "backward_flops_per_second": flops}
        changes |= {"causal_forward_flops_per_second": None, "causal_backward_flops_per_second": None}
        changes |= {"row_keys": 0.0, "causal_row_keys": 0.0, "copy_bytes_per_second": None}
    given = [name for name in ("latency", "bandwidth", "flops") if getattr(options, name) is not None]
    source += (
        f": {probe['ranks']} ranks at once, {probe['transport']}, {probe['device']}, {probe['dtype']}, head dim "
        f"{probe['head_dim']}, kernel {probe['kernel']}" + (f", {' and '.join(given)} as given." if given else ".")
    )
    return dataclasses.replace(Hardware.of(probe["hardware"]), **changes), probe, source


def _num_local_ranks(options: PlanOptions) -> int:
    import torch

    gpus = torch.cuda.device_count() if options.device != "cpu" else 0
    return options.ring_size if 2 <= options.ring_size <= (gpus or num_cores()) else 2


def _table(estimate: Estimate) -> Table:
    """Make a table of the largest value over all ranks of the ring, and of the value on one device."""
    from rich.filesize import decimal
    from rich.table import Table

    from ring_backends.cost.estimate import format_seconds

    table = Table(title="largest value over all ranks", title_justify="left")
    table.add_column("")
    table.add_column(f"ring of {estimate.ring.ring_size:,}", justify="right")
    table.add_column("one device", justify="right")
    costs = (estimate.ring, estimate.alone)
    sizes: tuple[tuple[str, Callable[[RingCost], Any]], ...] = (
        ("query, key, value, out and their gradients", lambda cost: cost.tensor_bytes.max()),
        ("LSE", lambda cost: cost.lse_bytes.max()),
        ("wire buffers, at most", lambda cost: cost.communication_bytes),
        ("rows and sums of the largest tiles", lambda cost: cost.tile_bytes.max()),
        ("total memory", lambda cost: cost.memory_bytes.max()),
        ("sent forward", lambda cost: cost.sent_bytes().max()),
        ("sent backward", lambda cost: cost.sent_bytes(backward=True).max()),
    )
    for label, size in sizes:
        table.add_row(label, *(decimal(int(size(cost))) for cost in costs))
    for backward, direction in ((False, "forward"), (True, "backward")):
        flops = (f"{float(cost.flops(backward=backward).max()) / 1e9:,.2f}" for cost in costs)
        table.add_row(f"GFLOP {direction}", *flops)
    for direction in ("forward", "backward"):
        seconds = (format_seconds(estimate.seconds[name][direction]) for name in ("ring", "alone"))
        table.add_row(f"{direction}, estimated", *seconds)
    return table


def _hosts_sentence(between_hosts: dict[str, int], num_hosts: int) -> str:
    from rich.filesize import decimal

    by_rank, by_topology = decimal(between_hosts["rank"]), decimal(between_hosts["topology"])
    return (
        f"Forward and backward send {by_rank} between the {num_hosts:,} hosts with "
        f'ring_order="rank", and {by_topology} with ring_order="topology".'
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
