"""``plan``: what a ring would need and take, from its schedule and a few constants, and whether it pays.

This module imports no torch: ``--help`` and a mistyped option answer at once. The numbers are in planning.py.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from ring_backends.cli.branches import parse_branches
from ring_backends.cli.plan_options import PlanOptions, parse_bytes, parse_hosts
from ring_backends.cli.report import reported_errors
from ring_backends.cli.train_options import default_branches

_ATTENTION, _RING, _CONSTANTS, _FILES = "Attention", "Ring", "Constants of the estimate", "Files"


def plan_command(
    seq_len: Annotated[
        int, typer.Option(min=1, help="Tokens of the sequence, over the whole ring.", rich_help_panel=_ATTENTION)
    ],
    ring_size: Annotated[int, typer.Option(min=1, help="Ranks of the ring.", rich_help_panel=_RING)],
    heads: Annotated[int, typer.Option(min=1, help="Query heads.", rich_help_panel=_ATTENTION)] = 8,
    kv_heads: Annotated[
        int | None,
        typer.Option(
            min=1, help="Key and value heads; as many as query heads if not given.", rich_help_panel=_ATTENTION
        ),
    ] = None,
    head_dim: Annotated[int, typer.Option(min=1, help="Width of a head.", rich_help_panel=_ATTENTION)] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.", rich_help_panel=_ATTENTION)] = 1,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="auto|fp32|bf16|fp16|fp64",
            help="Of the inputs; auto: what `ring-backends info` advises for the device.",
            rich_help_panel=_ATTENTION,
        ),
    ] = "auto",
    segment_lengths: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N,N,…",
            help="Segment length of each branch, in tokens. If not given, those of `train`.",
            rich_help_panel=_ATTENTION,
        ),
    ] = None,
    dilation_rates: Annotated[
        list[str] | None,
        typer.Option(metavar="N,N,…", help="Dilation rate of each branch.", rich_help_panel=_ATTENTION),
    ] = None,
    head_mode: Annotated[
        str,
        typer.Option(
            metavar="all|grouped", help="Every head in every branch, or one group each.", rich_help_panel=_ATTENTION
        ),
    ] = "all",
    offset: Annotated[
        str | None,
        typer.Option(
            metavar="mod|block|branch",
            help="Offset of head j in branch i: j % r, j // ceil(H / r), i % r.",
            rich_help_panel=_ATTENTION,
        ),
    ] = None,
    padding: Annotated[
        str,
        typer.Option(
            metavar="masked|zeros", help="zeros: the last segment as torchscale fills it.", rich_help_panel=_ATTENTION
        ),
    ] = "masked",
    causal: Annotated[
        bool, typer.Option("--causal/--no-causal", help="Hide later keys or not.", rich_help_panel=_ATTENTION)
    ] = True,
    layout: Annotated[
        str,
        typer.Option(metavar="contiguous|zigzag", help="How the sequence lies over the ring.", rich_help_panel=_RING),
    ] = "contiguous",
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory per rank, such as 80GB: also say which ring sizes fit into it. If not given, what a rank has "
            "where the constants were measured.",
            rich_help_panel=_RING,
        ),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME,…",
            help="The host of each rank: also say what crosses hosts, by rank order and by topology.",
            rich_help_panel=_RING,
        ),
    ] = None,
    ranks_per_host: Annotated[
        int | None, typer.Option(min=1, help="The same for hosts of so many ranks each.", rich_help_panel=_RING)
    ] = None,
    probe: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Constants that `ring-backends info --probe --json FILE` measured. If not given, and not all three "
            "of the next are, they are measured now.",
            rich_help_panel=_CONSTANTS,
        ),
    ] = None,
    latency: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Of a hop, in place of the measured one.", rich_help_panel=_CONSTANTS),
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option(metavar="BYTES/S", help="In each direction, likewise.", rich_help_panel=_CONSTANTS)
    ] = None,
    flops: Annotated[
        float | None,
        typer.Option(
            metavar="FLOP/S",
            help="Of the attention kernel on one rank, forward and backward, likewise; rows are then taken to cost "
            "nothing besides.",
            rich_help_panel=_CONSTANTS,
        ),
    ] = None,
    nproc_per_node: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Local ranks to measure on. If not given, as many as the ring has, or 2 where the machine has fewer "
            "GPUs or cores.",
            rich_help_panel=_CONSTANTS,
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            metavar="auto|cpu|cuda",
            help="To measure on; auto: a GPU per rank where there are enough, else the CPU.",
            rich_help_panel=_CONSTANTS,
        ),
    ] = "auto",
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write everything to this file.", rich_help_panel=_FILES)
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also draw time and memory per rank over ring sizes 1, 2, 4, … (needs matplotlib).",
            rich_help_panel=_FILES,
        ),
    ] = None,
) -> None:
    """Say what a ring would need and take, and whether it pays at this length.

    Memory, bytes and FLOPs per rank are counted from the schedule, for a
    billion tokens on thousands of ranks in seconds. Memory is that of one
    call of attention and its gradients: query, key, value and out with a
    gradient each, the LSE, the buffers of hops and the rows of the largest
    tile.

    Seconds are estimated from constants that are measured in a few seconds
    on some ranks of this machine at once, read from a file, or given.
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
        from ring_backends.cli.planning import plan

        plan(options)
