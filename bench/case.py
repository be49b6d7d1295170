"""The attention calls that are measured, as plain values, which can be sent to ranks and written as JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from ring_backends import DilatedPattern, LayoutKind

ONE_DEVICE, BARE_KERNELS, SDPA = "one device", "bare kernels", "SDPA"
DENSE_RING, ALL_GATHER = "dense ring", "all-gather"
SYNCHRONOUS = "native, synchronous hops"
ADAPTERS = ("native", "fsdp", "deepspeed", "fairscale")


@dataclass(frozen=True)
class Case:
    """One attention call with batch 1.

    Attributes:
        contestant: the name of an adapter, or a constant of this module.
        seq_len: length of the global sequence.
        ring_size: number of ranks. Each rank is a process with one thread.
        ulysses_size: how many neighbouring ranks exchange rows for heads, as in ``initialize``.
        dtype: ``"fp32"``, ``"bf16"``, ``"fp16"`` or ``"fp64"``.
        branches: (segment length, dilation rate) of each branch.
        window: the window of every branch, in tokens. None: there is none.
        score_mod: a function of :mod:`ring_backends.score_mods`: "softcap", "alibi" or "distance". None: there is none.
        dropout_p: the probability that an attention weight is dropped.
        documents: number of packed documents; 0: the sequence is one text.
    """

    contestant: str
    seq_len: int
    ring_size: int = 1
    branches: tuple[tuple[int, int], ...] = ((2048, 1), (4096, 2), (8192, 4))
    dtype: str = "fp32"
    layout: LayoutKind = "contiguous"
    causal: bool = True
    num_heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    window: int | None = None
    score_mod: str | None = None
    dropout_p: float = 0.0
    documents: int = 0
    kernel: str = "auto"
    ulysses_size: int = 1

    def but(self, **changes: Any) -> Case:
        """The same case with changes."""
        return dataclasses.replace(self, **changes)

    def shortened(self, by: int) -> Case:
        """The case with all lengths divided by ``by``. Segments stay multiples of their dilation rates."""
        branches = tuple((max(rate, length // by // rate * rate), rate) for length, rate in self.branches)
        window = None if self.window is None else max(1, self.window // by)
        return self.but(seq_len=max(1, self.seq_len // by), branches=branches, window=window)

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


DILATED = Case("", 65536, branches=((2048, 1), (8192, 4), (65536, 16)))
PLAIN = Case("", 65536, branches=((65536, 1),), layout="zigzag")
CALLS = {
    "dilated": {
        "dilated": DILATED.but(causal=False),
        "dilated, causal, zigzag": DILATED.but(layout="zigzag"),
        "dilated, causal, contiguous": DILATED,
    },
    "plain": {"plain, causal, zigzag": PLAIN},
    "short": {"short": Case("", 8192, causal=False)},
    "window": {"window": PLAIN.but(window=1024)},
}
"""The calls that `scaling` measures, by set and name."""
