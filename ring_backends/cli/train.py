"""``train``: its options, checked before a rank is started; the training itself is in trainer.py.

This module imports no torch: ``--help`` and a mistyped option answer at once.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from ring_backends.cli.branches import parse_branches
from ring_backends.cli.launch import interrupt_deadline, launch, under_launcher
from ring_backends.cli.report import reported_errors
from ring_backends.cli.train_options import TrainOptions, default_branches

_MODEL, _TEXT, _TRAINING, _RANKS, _FILES = "Attention and model", "Text", "Training", "Ranks", "Files"


def train_command(
    backend: Annotated[
        str,
        typer.Option(metavar="NAME", help="Adapter: native, fsdp, deepspeed, fairscale.", rich_help_panel=_RANKS),
    ] = "native",
    nproc_per_node: Annotated[
        int,
        typer.Option(
            min=1,
            help="Ranks to start on this machine; under torchrun its own count holds.",
            rich_help_panel=_RANKS,
        ),
    ] = 1,
    ring_size: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks that share one sequence; all of them if not given.", rich_help_panel=_RANKS),
    ] = None,
    layout: Annotated[
        str,
        typer.Option(metavar="contiguous|zigzag", help="How a sequence lies over the ring.", rich_help_panel=_RANKS),
    ] = "contiguous",
    device: Annotated[
        str,
        typer.Option(
            metavar="auto|cpu|cuda",
            help="auto: a GPU per rank where there are enough, else the CPU.",
            rich_help_panel=_RANKS,
        ),
    ] = "auto",
    timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="How long a rank waits for a neighbour's hop.", rich_help_panel=_RANKS),
    ] = 300.0,
    segment_lengths: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N,N,…",
            help="Segment length of each branch, in tokens. If not given, three branches of nearly linear cost, "
            "the last over the whole sequence: 256,4096,131072 with rates 1,8,64 for 131,072 tokens.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    dilation_rates: Annotated[
        list[str] | None,
        typer.Option(metavar="N,N,…", help="Dilation rate of each branch.", rich_help_panel=_MODEL),
    ] = None,
    head_mode: Annotated[
        str,
        typer.Option(
            metavar="all|grouped",
            help="Every head in every branch, or one group each.",
            rich_help_panel=_MODEL,
        ),
    ] = "all",
    offset: Annotated[
        str | None,
        typer.Option(
            metavar="mod|block|branch",
            help="Offset of head j in branch i: j % r, j // ceil(H / r), i % r. If not given: mod, or branch "
            "when grouped.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    padding: Annotated[
        str,
        typer.Option(
            metavar="masked|zeros",
            help="zeros: the last segment as torchscale fills it.",
            rich_help_panel=_MODEL,
        ),
    ] = "masked",
    kernel: Annotated[
        str,
        typer.Option(metavar="NAME", help="auto, or a kernel that `ring-backends info` lists.", rich_help_panel=_MODEL),
    ] = "auto",
    embed_dim: Annotated[int, typer.Option(min=1, help="Width of the model.", rich_help_panel=_MODEL)] = 128,
    num_heads: Annotated[int, typer.Option(min=1, help="Query heads.", rich_help_panel=_MODEL)] = 4,
    num_kv_heads: Annotated[
        int | None,
        typer.Option(min=1, help="Key and value heads; as many as query heads if not given.", rich_help_panel=_MODEL),
    ] = None,
    num_layers: Annotated[int, typer.Option(min=1, help="Transformer blocks.", rich_help_panel=_MODEL)] = 2,
    tied: Annotated[
        bool,
        typer.Option("--tied", help="The output layer shares the embedding's matrix.", rich_help_panel=_MODEL),
    ] = False,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="auto|fp32|bf16|fp16|fp64",
            help="Of parameters and activations; auto: what `ring-backends info` advises for the device.",
            rich_help_panel=_MODEL,
        ),
    ] = "auto",
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            help="A file to read as bytes; repeat it for more, in order. If not given: the sources of the "
            "running Python's standard library (*.py, sorted by path, without its tests and without installed "
            "packages).",
            rich_help_panel=_TEXT,
        ),
    ] = None,
    seq_len: Annotated[
        int,
        typer.Option(min=1, help="Tokens (bytes) per sequence, over the whole ring.", rich_help_panel=_TEXT),
    ] = 131072,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Sequences per step and data rank.", rich_help_panel=_TEXT)
    ] = 1,
    steps: Annotated[
        int,
        typer.Option(min=1, help="Optimizer steps, those before a resume included.", rich_help_panel=_TRAINING),
    ] = 20,
    lr: Annotated[
        float, typer.Option(help="Learning rate of AdamW, reached in 4 steps.", rich_help_panel=_TRAINING)
    ] = 3e-3,
    max_grad_norm: Annotated[
        float | None, typer.Option(help="Clip the gradient's norm to this.", rich_help_panel=_TRAINING)
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            min=0, max=2**63 - 1, help="Of the initial weights, and of nothing else.", rich_help_panel=_TRAINING
        ),
    ] = 0,
    activation_checkpointing: Annotated[
        bool,
        typer.Option(
            "--activation-checkpointing",
            help="Keep only each block's input and compute it again in the backward.",
            rich_help_panel=_TRAINING,
        ),
    ] = False,
    save: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Write a checkpoint here at the end.", rich_help_panel=_FILES),
    ] = None,
    save_every: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="And every N steps.", rich_help_panel=_FILES)
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on from the checkpoint at --save, if it is there.", rich_help_panel=_FILES),
    ] = False,
    json: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write losses, bytes, memory, tokens/s, versions, options.",
            rich_help_panel=_FILES,
        ),
    ] = None,
) -> None:
    """Train a small byte-level LongNet language model on a real document, sharded over the ring.

    Step k trains on the k-th window of the document; its last window is never trained on and gives the evaluation
    loss. The same seed gives the same losses on any number of ring ranks, up to rounding.
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
        elif nproc_per_node == 1:
            with interrupt_deadline():
                _run(options)
        else:
            launch(_run, (options,), nproc_per_node)


def _run(options: TrainOptions) -> None:
    from ring_backends.cli.trainer import run

    run(options)
