"""Describes the attention call of one contestant by plain values, which can be sent to ranks and written as JSON."""

from __future__ import annotations

from dataclasses import dataclass

from ring_backends.schedule.pattern import DilatedPattern

ONE_DEVICE, BARE_KERNELS, SDPA = "one device", "bare kernels", "SDPA"
MASKED_SDPA, FLEX = "SDPA with a mask", "flex_attention"
DENSE_RING, ALL_GATHER, SYNCHRONOUS = "dense ring", "all-gather", "native, synchronous hops"
ON_ONE_RANK = (ONE_DEVICE, BARE_KERNELS, SDPA)
ADAPTERS = ("native", "fsdp", "deepspeed", "fairscale")

Branches = tuple[tuple[int | None, int], ...]
"""(segment length, dilation rate) of each branch; None for the whole sequence."""

STANDARD: Branches = ((2048, 1), (4096, 2), (8192, 4))


@dataclass(frozen=True)
class Case:
    """One attention call with batch 1.

    Attributes:
        contestant: the name of an adapter, or a constant of this module.
        seq_len: length of the global sequence.
        window: the window of every branch, in tokens. None: there is none.
        score_mod: a function of :mod:`ring_backends.score_mods`: "softcap", "alibi" or "distance". None: there is none.
        ring_size: number of ranks. Each rank is a process with one thread.
        dtype: ``"fp32"``, ``"bf16"``, ``"fp16"`` or ``"fp64"``.
        device: ``"cpu"`` or ``"cuda"``. With fewer GPUs than ranks, ranks share a GPU.
    """

    contestant: str
    seq_len: int
    ring_size: int = 1
    branches: Branches = STANDARD
    dtype: str = "fp32"
    layout: str = "contiguous"
    causal: bool = True
    num_heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    device: str = "cpu"
    window: int | None = None
    score_mod: str | None = None

    @property
    def adapter(self) -> str:
        """The adapter whose ring is used."""
        return self.contestant if self.contestant in ADAPTERS else "native"

    @property
    def pattern(self) -> DilatedPattern:
        lengths, rates = zip(*self.branches, strict=True)
        windows = None if self.window is None else (self.window,) * len(lengths)
        return DilatedPattern(lengths, rates, window_lengths=windows)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of q, k, v, out and their gradients, summed over all ranks."""
        itemsize = {"fp64": 8, "fp32": 4}.get(self.dtype, 2)
        return 4 * (self.num_heads + self.kv_heads) * self.seq_len * self.head_dim * itemsize
