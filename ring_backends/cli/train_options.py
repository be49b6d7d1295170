"""The options of ``train``. This module imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ring_backends.cli.branches import Branches
from ring_backends.cli.data import Document, standard_library_sources
from ring_backends.cli.options import check_choices, check_files
from ring_backends.schedule.pattern import DilatedPattern

_LONGEST_TIMEOUT = 365 * 24 * 3600


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
