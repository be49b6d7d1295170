"""Attention dropout whose mask does not depend on how the sequence is sharded.

A hash decides whether the attention weight of a query and a key is dropped. It is a hash of the seed, the data-parallel
replica, the batch row, the head and the two global positions: a counter-based generator (Salmon et al., SC 2011). Each
rank computes its part of the mask without the others, and every ring size gives the same mask. If a query sees a key in
several branches, the key is dropped from all of them or from none.

Each row is mixed in 64 bits by SplitMix64 (Steele, Lea, Flood, OOPSLA 2014). The hash of each pair uses 32-bit words,
since processors multiply several of them at a time.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_SPLITMIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_PAIR_MULTIPLIERS = (0x7FEB352D, 0x846CA68B)


@dataclass(frozen=True)
class Dropout:
    """Dropout of one rank's calls.

    Attributes:
        p: probability that a weight is dropped, 0 < p < 1. The other weights are divided by 1 − p.
        replica: the number of this rank's ring (``Ring.data_rank``). Different rings hold different sequences.
    """

    p: float
    replica: int

    @property
    def threshold(self) -> int:
        """A pair is kept if the upper 31 bits of its word are below this number."""
        return min(round((1 - self.p) * 2**31), 2**31 - 1)

    @property
    def weight(self) -> float:
        """The factor on the weights that are kept."""
        return 1 / (1 - self.p)

    def query_words(self, seed: int, positions: Tensor, batch: int, heads: range) -> Tensor:
        """Compute the two words of each query for the hash: int32 [batch, local seq, heads, 2].

        Args:
            positions: int64 [local seq], the global positions of the queries.
            heads: the numbers of the heads.
        """
        of_rows = torch.arange(batch, dtype=torch.int64, device=positions.device)[:, None, None]
        of_heads = torch.arange(heads.start, heads.stop, dtype=torch.int64, device=positions.device)
        words = _mix(_mix(_mix(of_rows + _start(seed + self.replica * _GOLDEN)) + of_heads) + positions[:, None])
        return words.unsqueeze(3).view(torch.int32)

    def key_words(self, seed: int, positions: Tensor) -> Tensor:
        """Compute the word of the key at each position for the hash: int32, shaped as ``positions``."""
        return _mix(positions + _start(~seed)).to(torch.int32)

    def weights(self, query_words: Tensor, key_words: Tensor, dtype: torch.dtype) -> Tensor:
        """The factor on the weight of every pair, 0 or 1 / (1 − p).

        Args:
            query_words: int32 [..., queries, 2].
            key_words: int32 [..., keys].

        Returns:
            [..., queries, keys], of ``dtype``.
        """
        first, second = (_signed(multiplier, 32) for multiplier in _PAIR_MULTIPLIERS)
        word = query_words[..., :1] ^ key_words.unsqueeze(-2)
        word ^= (word >> 16) & 0xFFFF
        word *= first
        word ^= (word >> 15) & 0x1FFFF
        # Without the second word, two queries would drop related keys if their first words differ by the same bits as
        # the words of two keys.
        word += query_words[..., 1:]
        word *= second
        # A pair is kept if its word is below a threshold. The sign of the difference becomes a bit mask, with which the
        # bits of the weight are combined. This is three times as fast as a comparison and a conversion.
        word = (word >> 1) & 0x7FFFFFFF
        word -= self.threshold
        word >>= 31
        if dtype != torch.float32:
            return (word & 1).to(dtype).mul_(self.weight)
        (bits,) = struct.unpack("i", struct.pack("f", self.weight))
        word &= bits
        return word.view(torch.float32)


def _mix(word: Tensor) -> Tensor:
    """One step of SplitMix64, on int64."""
    word = word + _signed(_GOLDEN, 64)
    for shift, multiplier in _SPLITMIX:
        word = (word ^ _shifted(word, shift)) * _signed(multiplier, 64)
    return word ^ _shifted(word, 31)


def _start(number: int) -> int:
    """One step of SplitMix64, as :func:`_mix`, on a number. A tensor of one number would have to be copied to a GPU."""
    word = (number + _GOLDEN) % 2**64
    for shift, multiplier in _SPLITMIX:
        word = (word ^ (word >> shift)) * multiplier % 2**64
    return _signed(word ^ (word >> 31), 64)


def _shifted(word: Tensor, bits: int) -> Tensor:
    """A logical shift to the right; torch's own shift keeps the sign."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int, bits: int) -> int:
    """The two's complement integer of the lowest ``bits`` bits of ``number``."""
    number %= 1 << bits
    return number - (1 << bits) if number >> (bits - 1) else number
