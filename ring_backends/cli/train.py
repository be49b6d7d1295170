"""``train``: starts the ranks that train. The training loop is in :mod:`ring_backends.cli.trainer`.

This module imports torch only when the ranks start, so ``--help`` and the checks of options are fast.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from ring_backends.cli.options import (
    FILES,
    RANKS,
    Device,
    DilationRates,
    Dtype,
    HeadMode,
    Json,
    Layout,
    NumHeads,
    NumKvHeads,
    Offset,
    Padding,
    SegmentLengths,
    SeqLen,
)
from ring_backends.cli.parsing import parse_branches
from ring_backends.cli.report import reported_errors
from ring_backends.cli.train_options import TrainOptions
from ring_backends.cost.default_branches import default_branches
from ring_backends.ring.launch import launch, under_launcher

_MODEL, _TRAINING = "Model", "Text and training"


def train_command(
    backend: Annotated[
        str, typer.Option(metavar="NAME", help="Adapter: native, fsdp, deepspeed, fairscale.", rich_help_panel=RANKS)
    ] = "native",
    nproc_per_node: Annotated[
        int,
        typer.Option(min=1, help="Ranks to start on this machine. Ignored under torchrun.", rich_help_panel=RANKS),
    ] = 1,
    ring_size: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks that share one sequence. Default: all ranks.", rich_help_panel=RANKS),
    ] = None,
    layout: Layout = "contiguous",
    device: Device = "auto",
    timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="Longest time that a rank waits for a hop.", rich_help_panel=RANKS),
    ] = 300.0,
    seq_len: SeqLen = 131072,
    segment_lengths: SegmentLengths = None,
    dilation_rates: DilationRates = None,
    head_mode: HeadMode = "all",
    offset: Offset = None,
    padding: Padding = "masked",
    num_heads: NumHeads = 4,
    num_kv_heads: NumKvHeads = None,
    dtype: Dtype = "auto",
    kernel: Annotated[
        str,
        typer.Option(metavar="NAME", help="A kernel that `ring-backends info` lists, or auto.", rich_help_panel=_MODEL),
    ] = "auto",
    embed_dim: Annotated[int, typer.Option(min=1, help="Width of the model.", rich_help_panel=_MODEL)] = 128,
    num_layers: Annotated[int, typer.Option(min=1, help="Transformer blocks.", rich_help_panel=_MODEL)] = 2,
    tied: Annotated[
        bool,
        typer.Option("--tied", help="Share the weight of the embedding with the output layer.", rich_help_panel=_MODEL),
    ] = False,
    activation_checkpointing: Annotated[
        bool,
        typer.Option(
            "--activation-checkpointing",
            help="Keep only the input of each block, and recompute the block in the backward.",
            rich_help_panel=_MODEL,
        ),
    ] = False,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            help="File to read as bytes. Repeat the option for more files. Default: the *.py files of the running "
            "Python's standard library, without its tests.",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences per step and ring.", rich_help_panel=_TRAINING)] = 1,
    steps: Annotated[
        int,
        typer.Option(
            min=1, help="Optimizer steps in total, including the steps of the resumed run.", rich_help_panel=_TRAINING
        ),
    ] = 20,
    lr: Annotated[
        float, typer.Option(help="Learning rate of AdamW, reached in 4 warm-up steps.", rich_help_panel=_TRAINING)
    ] = 3e-3,
    max_grad_norm: Annotated[
        float | None, typer.Option(help="Clip the norm of the gradient to this value.", rich_help_panel=_TRAINING)
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Random seed of the initial weights.", rich_help_panel=_TRAINING)
    ] = 0,
    save: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Write a checkpoint here at the end.", rich_help_panel=FILES),
    ] = None,
    save_every: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Also save every N steps.", rich_help_panel=FILES)
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue from the checkpoint at --save if there is one.", rich_help_panel=FILES),
    ] = False,
    json: Json = None,
) -> None:
    """Train a small byte-level LongNet language model on a real document.

    Each sequence is sharded over the ring. Step k trains on window k of the
    document. The last window is held out for the evaluation loss. The same seed
    gives the same losses on any number of ring ranks, up to rounding.
    """
    given = dict(locals())
    names = [field.name for field in fields(TrainOptions)]
    with reported_errors("train", names):
        lengths, rates = parse_branches(segment_lengths, dilation_rates) or default_branches(seq_len)
        given.update(segment_lengths=lengths, dilation_rates=rates, text=tuple(text or ()))
        options = TrainOptions(**given)
        options.check()
        if under_launcher():
            _run(options)
        else:
            launch(_run, (options,), nproc_per_node)


def _run(options: TrainOptions) -> None:
    from ring_backends.cli.trainer import run

    run(options)
