"""The options of ``train``. This module imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ring_backends.cli.options import check_choices, check_files
from ring_backends.cli.text import Document, standard_library_sources
from ring_backends.schedule.pattern import DilatedPattern

_LONGEST_TIMEOUT = 365 * 24 * 3600


@dataclass(frozen=True)
class TrainOptions:
    """The options of the command, as plain values that can be sent to the ranks."""

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
        """Check the options, as far as that needs neither torch nor the other ranks.

        Raises:
            ValueError: an option is invalid. The message names it.
        """
        self.pattern().check(seq_len=self.seq_len, num_heads=self.num_heads)
        self.document()
        check_choices(self)
        for name in ("lr", "timeout", "max_grad_norm"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} = {value}: must be above 0 and finite; give a positive number.")
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
