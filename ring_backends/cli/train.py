"""The options of ``train``. This module imports no torch. The training loop is in :mod:`ring_backends.cli.trainer`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ring_backends.cli import options
from ring_backends.cli.options import Options, check_files, check_positive, files_option, ranks_option
from ring_backends.cli.text import Document, standard_library_sources
from ring_backends.schedule.pattern import DilatedPattern

_LONGEST_TIMEOUT = 365 * 24 * 3600

_model_option, _training_option = (
    partial(typer.Option, rich_help_panel=panel) for panel in ("Model", "Text and training")
)


@dataclass(frozen=True)
class TrainOptions(Options):
    """Train a small byte-level LongNet language model on a real document.

    Each sequence is sharded over the ring. Step k trains on window k of the
    document. The last window is held out for the evaluation loss. The same seed
    gives the same losses on any number of ring ranks, up to rounding.
    """

    backend: Annotated[str, ranks_option(metavar="NAME", help="Adapter: native, fsdp, deepspeed, fairscale.")] = (
        "native"
    )
    nproc_per_node: options.StartedRanks = 1
    ring_size: Annotated[int | None, ranks_option(min=1, help="Ranks that share one sequence. Default: all ranks.")] = (
        None
    )
    layout: options.Layout = "contiguous"
    device: options.Device = "auto"
    timeout: Annotated[float, ranks_option(metavar="SECONDS", help="Longest time that a rank waits for a hop.")] = 300.0
    seq_len: options.SeqLen = 131072
    segment_lengths: options.SegmentLengths = ()
    dilation_rates: options.DilationRates = ()
    head_mode: options.HeadMode = "all"
    offset: options.Offset = None
    padding: options.Padding = "masked"
    num_heads: options.NumHeads = 4
    num_kv_heads: options.NumKvHeads = None
    dtype: options.Dtype = "auto"
    kernel: Annotated[str, _model_option(metavar="NAME", help="A kernel that `ring-backends info` lists, or auto.")] = (
        "auto"
    )
    embed_dim: Annotated[int, _model_option(min=1, help="Width of the model.")] = 128
    num_layers: Annotated[int, _model_option(min=1, help="Transformer blocks.")] = 2
    tied: Annotated[bool, _model_option("--tied", help="Share the weight of the embedding with the output layer.")] = (
        False
    )
    activation_checkpointing: Annotated[
        bool,
        _model_option(
            "--activation-checkpointing",
            help="Keep only the input of each block, and recompute the block in the backward.",
        ),
    ] = False
    text: Annotated[
        tuple[Path, ...],
        _training_option(
            metavar="PATH",
            help="File to read as bytes. Repeat the option for more files. Default: the *.py files of the running "
            "Python's standard library, without its tests.",
        ),
    ] = ()
    batch_size: Annotated[int, _training_option(min=1, help="Sequences per step and ring.")] = 1
    steps: Annotated[
        int, _training_option(min=1, help="Optimizer steps in total, including the steps of the resumed run.")
    ] = 20
    lr: Annotated[float, _training_option(help="Learning rate of AdamW, reached in 4 warm-up steps.")] = 3e-3
    max_grad_norm: Annotated[float | None, _training_option(help="Clip the norm of the gradient to this value.")] = None
    seed: Annotated[int, _training_option(min=0, max=2**63 - 1, help="Random seed of the initial weights.")] = 0
    save: Annotated[Path | None, files_option(metavar="PATH", help="Write a checkpoint here at the end.")] = None
    save_every: Annotated[int | None, files_option(min=1, metavar="N", help="Also save every N steps.")] = None
    resume: Annotated[
        bool, files_option("--resume", help="Continue from the checkpoint at --save if there is one.")
    ] = False
    json: options.Json = None

    @classmethod
    def of(cls, given: dict[str, Any]) -> TrainOptions:
        return super().of({**given, "text": tuple(map(Path, given["text"] or ()))})

    def check(self) -> None:
        self.pattern().check(seq_len=self.seq_len, num_heads=self.num_heads)
        self.document()
        super().check()
        for name in ("lr", "timeout", "max_grad_norm"):
            check_positive(name, getattr(self, name))
        if self.timeout > _LONGEST_TIMEOUT:
            raise ValueError(f"timeout = {self.timeout}: must be at most {_LONGEST_TIMEOUT:,} s (one year); give less.")
        if self.save is None and (self.resume or self.save_every is not None):
            name = "resume" if self.resume else "save_every"
            raise ValueError(f"{name}: there is no checkpoint without --save; add --save PATH.")
        check_files(save=self.save, json=self.json)

    def pattern(self) -> DilatedPattern:
        return DilatedPattern(self.segment_lengths, self.dilation_rates, self.head_mode, self.offset, self.padding)

    def document(self) -> Document:
        return Document(self.text or standard_library_sources(), self.seq_len)
