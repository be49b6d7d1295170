"""The attention calls that gpu.py models and measures, with the targets of the modelled numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from case import Branches, Case


@dataclass(frozen=True)
class GpuCase:
    """One call, by the name under which its rows appear, and what its modelled numbers are held against.

    Attributes:
        share: least share of the GPU's time in attention kernels, in forward and in backward. None: no target.
        launches, tiles: most launches and most tiles, in forward and in backward. None: no target.
    """

    name: str
    case: Case
    share: float | None = None
    launches: tuple[int, int] | None = None
    tiles: tuple[int, int] | None = None


def _on_one_gpu(name: str, seq_len: int, branches: Branches, **options: Any) -> GpuCase:
    """A call of 32 query heads and 8 key/value heads of width 128, or of ``options``."""
    sizes = {"num_heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bf16", **options}
    return GpuCase(name, Case("", seq_len, branches=branches, **sizes), share=0.90, launches=(40, 80))


ONE_GPU = (
    _on_one_gpu(
        "131k, 16 heads of 64",
        131_072,
        ((2048, 1), (16384, 8), (131072, 64)),
        **{"num_heads": 16, "kv_heads": 16, "head_dim": 64},
    ),
    _on_one_gpu("131k, 32 heads of 128, 8 K/V heads", 131_072, ((2048, 1), (8192, 4), (32768, 16), (131072, 64))),
    _on_one_gpu("1M, 32 heads of 128, 8 K/V heads", 1_048_576, ((2048, 1), (16384, 8), (131072, 64), (1048576, 512))),
)

WINDOWS = (_on_one_gpu("131k, window of 4,096", 131_072, ((131_072, 1),), window=4096),)
"""Calls that are modelled, and not measured: what they would be compared with has no windows."""

_RING: dict[str, Any] = {"num_heads": 32, "kv_heads": 32, "head_dim": 128, "dtype": "bf16", "layout": "zigzag"}

RINGS = (
    GpuCase(
        "131k, one rank of 8",
        Case("", 131_072, 8, ((2048, 1), (8192, 2), (32768, 4), (65536, 8), (131072, 16)), **_RING),
    ),
    GpuCase(
        "1M, one rank of 8",
        Case("", 1_048_576, 8, ((2048, 1), (8192, 2), (32768, 4), (131072, 8), (1048576, 64)), **_RING),
        share=0.85,
        tiles=(200, 300),
    ),
)
