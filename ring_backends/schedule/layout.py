"""The layout of a sequence over a ring: which global positions each rank holds, and in which order.

Index arithmetic runs on the CPU, whatever torch's default device is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from ring_backends.schedule.checks import check_integer

LayoutKind = Literal["contiguous", "zigzag"]


@dataclass(frozen=True)
class SequenceLayout:
    """Cuts the positions 0 … seq_len − 1 into chunks, and deals them to the ranks of a ring.

    Args:
        seq_len: length of the global sequence, in tokens, at least 1.
        ring_size: number of ranks, at least 1. It need not divide seq_len; a rank may hold no position.
        kind: ``"contiguous"`` cuts the sequence into p = ring_size chunks, as ``torch.tensor_split`` does. Rank i holds
            chunk i. ``"zigzag"`` cuts it into 2p chunks. Rank i holds chunks i and 2p − 1 − i. This balances causal
            attention.
        group_size: g, at least 1. With g > 1, each rank stands for a group of g neighbours of a ring of p · g ranks,
            and holds what these hold. So a chunk is g chunks of that ring.

    Raises:
        ValueError, TypeError: an argument is invalid.

    >>> [SequenceLayout(8, 2, kind).positions(0).tolist() for kind in ("contiguous", "zigzag")]
    [[0, 1, 2, 3], [0, 1, 6, 7]]
    """

    seq_len: int
    ring_size: int
    kind: LayoutKind = "contiguous"
    group_size: int = 1

    def __post_init__(self) -> None:
        for name in ("seq_len", "ring_size", "group_size"):
            value = getattr(self, name)
            check_integer(name, value, 1)
            if value >= 2**62:
                raise ValueError(f"{name} = {value}: must be below 2**62, since positions are int64; give less.")
        if self.kind not in get_args(LayoutKind):
            raise ValueError(f"layout = {self.kind!r}: unknown option; choose 'contiguous' or 'zigzag'.")

    @property
    def num_chunks(self) -> int:
        return self.ring_size * (2 if self.kind == "zigzag" else 1)

    def chunk_start(self, chunk: int) -> int:
        """First global position of ``chunk``. For ``chunk = num_chunks`` it is seq_len."""
        number = self.num_chunks * self.group_size
        size, extra = self.seq_len // number, self.seq_len % number  # torch.compile lacks divmod
        first = chunk * self.group_size
        return first * size + min(first, extra)

    def chunk_len(self, chunk: int) -> int:
        return self.chunk_start(chunk + 1) - self.chunk_start(chunk)

    def chunk_starts(self) -> Tensor:
        """First global position of every chunk, then seq_len: int64 [num_chunks + 1]."""
        size, extra = divmod(self.seq_len, self.num_chunks * self.group_size)
        first = torch.arange(self.num_chunks + 1, device="cpu") * self.group_size
        return first * size + first.clamp(max=extra)

    def chunk_ranks(self) -> Tensor:
        """The rank that holds each chunk: int64 [num_chunks]."""
        chunk = torch.arange(self.num_chunks, device="cpu")
        return torch.minimum(chunk, self.num_chunks - 1 - chunk) if self.kind == "zigzag" else chunk

    def chunks(self, rank: int) -> tuple[int, ...]:
        """The chunks that ``rank`` holds, in the order of its local tensors."""
        if not 0 <= rank < self.ring_size:
            raise ValueError(f"rank = {rank}: a ring of {self.ring_size} has ranks 0 … {self.ring_size - 1}.")
        return (rank, self.num_chunks - 1 - rank) if self.kind == "zigzag" else (rank,)

    def pieces(self, rank: int) -> tuple[range, ...]:
        """The global positions that ``rank`` holds, one range per chunk."""
        return tuple(range(self.chunk_start(chunk), self.chunk_start(chunk + 1)) for chunk in self.chunks(rank))

    def local_len(self, rank: int) -> int:
        """How many positions ``rank`` holds."""
        return sum(self.chunk_len(chunk) for chunk in self.chunks(rank))

    def positions(self, rank: int, device: torch.device | str = "cpu") -> Tensor:
        """The global position of each local row of ``rank``: int64 [local seq]."""
        bounds = [(self.chunk_start(chunk), self.chunk_start(chunk + 1)) for chunk in self.chunks(rank)]
        return torch.cat([torch.arange(start, stop, device=device) for start, stop in bounds])
