"""The attention calls that gpu.py models and measures, with the targets of the modelled numbers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from case import Case


@dataclass(frozen=True)
class Target:
    """What the modelled numbers of one call are held against. None: no target.

    Attributes:
        share: least share of the GPU's time in attention kernels, in forward and in backward.
        launches, tiles: most launches and most tiles, in forward and in backward.
    """

    share: float | None = None
    launches: tuple[int, int] | None = None
    tiles: tuple[int, int] | None = None


@dataclass(frozen=True)
class GpuCase:
    """One call, by the name under which its rows appear."""

    name: str
    case: Case
    target: Target


_ONE_GPU = Target(share=0.90, launches=(40, 80))
_GROUPED = Case("", 131_072, num_heads=32, kv_heads=8, head_dim=128, dtype="bf16")
_RING = Case("", 131_072, ring_size=8, num_heads=32, kv_heads=32, head_dim=128, dtype="bf16", layout="zigzag")

ONE_GPU = (
    GpuCase(
        "131k, 16 heads of 64",
        Case(
            "",
            131_072,
            branches=((2048, 1), (16384, 8), (131072, 64)),
            num_heads=16,
            kv_heads=16,
            head_dim=64,
            dtype="bf16",
        ),
        _ONE_GPU,
    ),
    GpuCase(
        "131k, 32 heads of 128, 8 K/V heads",
        dataclasses.replace(_GROUPED, branches=((2048, 1), (8192, 4), (32768, 16), (131072, 64))),
        _ONE_GPU,
    ),
    GpuCase(
        "1M, 32 heads of 128, 8 K/V heads",
        dataclasses.replace(
            _GROUPED, seq_len=1_048_576, branches=((2048, 1), (16384, 8), (131072, 64), (1048576, 512))
        ),
        _ONE_GPU,
    ),
)

WINDOWS = (
    GpuCase("131k, window of 4,096", dataclasses.replace(_GROUPED, branches=((131_072, 1),), window=4096), _ONE_GPU),
)
"""Calls that are modelled, and not measured: what they would be compared with has no windows."""

RINGS = (
    GpuCase(
        "131k, one rank of 8",
        dataclasses.replace(_RING, branches=((2048, 1), (8192, 2), (32768, 4), (65536, 8), (131072, 16))),
        Target(),
    ),
    GpuCase(
        "1M, one rank of 8",
        dataclasses.replace(
            _RING, seq_len=1_048_576, branches=((2048, 1), (8192, 2), (32768, 4), (131072, 8), (1048576, 64))
        ),
        Target(share=0.85, tiles=(200, 300)),
    ),
)
