"""The options of ``compare``, and the names of what it compares. This module imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ring_backends.cli.branches import Branches
from ring_backends.cli.launch import under_launcher
from ring_backends.cli.options import check_choices, check_files
from ring_backends.plotting import check_plot
from ring_backends.schedule.pattern import DilatedPattern

ALL_GATHER = "all-gather"
ONE_RANK = "one rank"
TENSORS = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class CompareOptions:
    """What the user asked for, by the options' names; plain values, so that it travels to the ranks."""

    seq_len: int
    nproc_per_node: int
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    num_heads: int
    num_kv_heads: int | None
    head_dim: int
    dtype: str
    layout: Any
    causal: bool
    repeats: int
    device: str
    json: Path | None
    plot: Path | None

    def check(self) -> None:
        """Refuse what cannot work, as far as that can be known without torch.

        Raises:
            ValueError: naming the option.
        """
        self.pattern().check(seq_len=self.seq_len, num_heads=self.num_heads)
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_kv_heads = {self.kv_heads}: must divide the {self.num_heads} query heads; use a number that does."
            )
        check_choices(self)
        check_files(json=self.json, plot=self.plot)
        if self.plot is not None:
            check_plot(self.plot)
        if under_launcher():
            raise ValueError(
                "nproc_per_node: a launcher has set WORLD_SIZE, but every contestant needs processes of its own, which "
                "compare starts itself; run it without torchrun."
            )

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def branches(self) -> Branches:
        return self.segment_lengths, self.dilation_rates

    def pattern(self) -> DilatedPattern:
        return DilatedPattern(self.segment_lengths, self.dilation_rates)
