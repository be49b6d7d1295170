"""``train``: its options, checked before a rank is started; the training itself is in trainer.py.

This module imports no torch: ``--help`` and a mistyped option answer at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from ring_backends.cli.branches import Branches, parse_branches
from ring_backends.cli.data import Document, standard_library_sources
from ring_backends.cli.launch import interrupt_deadline, launch, under_launcher
from ring_backends.cli.options import check_choices, check_files
from ring_backends.cli.report import reported_errors
from ring_backends.schedule.pattern import DilatedPattern


@dataclass(frozen=True)
class TrainOptions:
    """What the user asked for, by the options' names; plain values, so that it travels to the ranks."""

    backend: str
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    head_mode: Any
    offset: Any
    padding: Any
    layout: str
    kernel: str
    text: tuple[Path, ...]
    seq_len: int
    batch_size: int
    steps: int
    lr: float
    max_grad_norm: float | None
    seed: int
    dtype: str
    device: str
    embed_dim: int
    num_heads: int
    num_kv_heads: int | None
    num_layers: int
    tied: bool
    activation_checkpointing: bool
    nproc_per_node: int
    ring_size: int | None
    timeout: float
    save: Path | None
    save_every: int | None
    resume: bool
    json: Path | None

    def check(self) -> None:
        """Refuse what cannot work, as far as that can be known without torch and without the other ranks.

        Raises:
            ValueError: naming the option.
        """
        self.pattern().check(seq_len=self.seq_len, num_heads=self.num_heads)
        self.document()
        check_choices(self)
        for name in ("lr", "timeout", "max_grad_norm"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} = {value}: must be above 0 and finite; give a positive number.")
        if self.timeout > _LONGEST_TIMEOUT:
            raise ValueError(f"timeout = {self.timeout}: must be at most {_LONGEST_TIMEOUT:,} s, a year.")
        if self.save is None and (self.resume or self.save_every is not None):
            name = "resume" if self.resume else "save_every"
            raise ValueError(f"{name}: there is no checkpoint without --save; add --save PATH.")
        check_files(save=self.save, json=self.json)

    def pattern(self) -> DilatedPattern:
        return DilatedPattern(self.segment_lengths, self.dilation_rates, self.head_mode, self.offset, self.padding)

    def document(self) -> Document:
        return Document(self.text or standard_library_sources(), self.seq_len)


def default_branches(seq_len: int) -> Branches:
    """Segment lengths and dilation rates whose cost grows almost linearly; the last segment is everything.

    Three branches: of at most 256 and 4,096 tokens, and of the whole sequence. A dilated branch has the least
    power of two above its predecessor's rate for which w / r² ≤ 64: it then costs at most 64 scores per
    position and head. So 131,072 tokens get (256, 1), (4096, 8), (131072, 64).
    """
    lengths = (min(256, -(-seq_len // 4)), min(4096, -(-seq_len // 2)), seq_len)
    rates = [1]
    for length in lengths[1:]:
        rate = 2 * rates[-1]
        while length > 64 * rate**2:
            rate *= 2
        rates.append(rate)
    return lengths, tuple(rates)


_LONGEST_TIMEOUT = 365 * 24 * 3600
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
