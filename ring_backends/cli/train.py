"""The options of ``train``. This module imports no torch. :mod:`ring_backends.cli.training_run` trains."""

# ruff: noqa: RUF009 (the functions that declare options call dataclasses.field)

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ring_backends.cli import options
from ring_backends.cli.options import PatternOptions, check_positive, files, option, parse_ulysses_size, ranks
from ring_backends.cli.text import Document, standard_library_sources

_LONGEST_TIMEOUT = 365 * 24 * 3600

_model, _training = (partial(option, panel=panel) for panel in ("Model", "Text and training"))


def options_path(checkpoint: Path) -> Path:
    """The file beside a checkpoint that holds the options of the run. It is written after each checkpoint."""
    return checkpoint.with_name(checkpoint.name + ".options.json")


def saved_since(checkpoint: Path, started: float) -> bool:
    """Whether a run has saved the checkpoint since ``started``, in seconds since the epoch."""
    with contextlib.suppress(OSError):
        return options_path(checkpoint).stat().st_mtime >= started
    return False


@dataclass(frozen=True, kw_only=True)
class TrainOptions(PatternOptions):
    """Train a small byte-level LongNet language model on a real document.

    Each sequence is sharded over the ring. Step k trains on window k of the
    document. The last window is held out for the evaluation loss. The same seed
    gives the same losses on any number of ring ranks, up to rounding.
    """

    backend: str = ranks("native", metavar="NAME", help="Adapter: native, fsdp, deepspeed, fairscale.")
    nproc_per_node: int = options.started_ranks()
    ring_size: int | None = ranks(None, min=1, help="Ranks that share one sequence. Default: all ranks.")
    timeout: float = ranks(300.0, metavar="SECONDS", help="Longest time that a rank waits for a hop.")
    buffer_bytes: int | None = options.buffer_bytes()
    ulysses_size: str = options.ulysses_size()
    seq_len: int = options.seq_len(131072)
    num_heads: int = options.num_heads(4)
    num_kv_heads: int | None = options.num_kv_heads()
    dtype: options.Dtype = options.dtype()
    kernel: str = _model("auto", metavar="NAME", help="A kernel that `ring-backends info` lists, or auto.")
    embed_dim: int = _model(128, min=1, help="Width of the model.")
    num_layers: int = _model(2, min=1, max=10_000, help="Transformer blocks.")
    tied: bool = _model(False, help="Share the weight of the embedding with the output layer.")
    activation_checkpointing: bool = _model(
        False, help="Keep only the input of each block, and recompute the block in the backward."
    )
    text: tuple[Path, ...] = _training(
        (),
        metavar="PATH",
        help="File to read as bytes. Repeat the option for more files. Default: the *.py files of the running "
        "Python's standard library, without its tests.",
    )
    batch_size: int = _training(1, min=1, max=65_536, help="Sequences per step and ring.")
    steps: int = _training(20, min=1, help="Optimizer steps in total, including the steps of the resumed run.")
    lr: float = _training(3e-3, help="Learning rate of AdamW, reached in 4 warm-up steps.")
    max_grad_norm: float | None = _training(None, help="Clip the norm of the gradient to this value.")
    seed: int = _training(0, min=0, max=2**63 - 1, help="Random seed of the initial weights.")
    save: Path | None = files(None, metavar="PATH", help="Write a checkpoint here at the end.")
    save_every: int | None = files(None, min=1, metavar="N", help="Also save every N steps.")
    resume: bool = files(False, help="Continue from the checkpoint at --save if there is one.")

    @classmethod
    def of(cls, given: dict[str, Any]) -> TrainOptions:
        return super().of({**given, "text": tuple(map(Path, given["text"] or ()))})

    def check(self) -> None:
        self.pattern().check(seq_len=self.seq_len, num_heads=self.num_heads)
        parse_ulysses_size(self.ulysses_size, self.ring_size, self.num_heads)
        self.document()
        super().check()
        for name in ("lr", "timeout", "max_grad_norm"):
            check_positive(name, getattr(self, name))
        if self.timeout > _LONGEST_TIMEOUT:
            raise ValueError(f"timeout = {self.timeout}: must be at most {_LONGEST_TIMEOUT:,} s (one year); give less.")
        if self.save is None and (self.resume or self.save_every is not None):
            name = "resume" if self.resume else "save_every"
            raise ValueError(f"{name}: there is no checkpoint without --save; add --save PATH.")

    def after_interrupt(self, started: float) -> str:
        if self.save is None:
            return ""
        if self.save.exists() and (self.resume or saved_since(self.save, started)):
            return f"To go on from {self.save}, run the same command with --resume."
        return f"{self.save} had not been saved yet; with --save-every N, it is saved every N steps."

    def document(self) -> Document:
        return Document(self.text or standard_library_sources(), self.seq_len)
