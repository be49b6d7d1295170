"""What a comparison measures. This module imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ring_backends.schedule.pattern import DilatedPattern

if TYPE_CHECKING:
    from ring_backends.ring.topology import UlyssesSize
    from ring_backends.schedule.layout import LayoutKind

ALL_GATHER = "all-gather"
ONE_RANK = "one rank"
TENSORS = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Setup:
    """One attention call with batch 1, and how to measure it.

    Attributes:
        seq_len: length of the global sequence.
        ring_size: ranks of the ring, all on this machine.
        pattern: the dilated pattern, with head mode "all", offset "mod" and masked padding.
        num_heads, num_kv_heads, head_dim: sizes of the inputs.
        dtype: ``"auto"``, ``"fp32"``, ``"bf16"``, ``"fp16"`` or ``"fp64"``.
        layout: ``"contiguous"`` or ``"zigzag"``.
        buffer_bytes, ulysses_size: as in ``initialize``.
        is_causal: whether a query sees only keys up to its position.
        repeats: number of timed calls of each method. The first call, which measures the memory, is not timed.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        timeline: whether to record when each rank computes and waits, in one more call.
    """

    seq_len: int
    ring_size: int
    pattern: DilatedPattern
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    layout: LayoutKind
    buffer_bytes: int | None
    ulysses_size: UlyssesSize
    is_causal: bool
    repeats: int
    device: str
    timeline: bool = False
