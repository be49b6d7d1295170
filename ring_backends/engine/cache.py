"""The keys and values of a sequence that grows, distributed over the ranks of a ring.

A rank keeps its rows of the prompt, as the layout of the ring distributes them. Of the tokens that follow, the token at
position t is kept by rank t mod ring size. So the positions of a rank's rows are a few runs with equal distances, and
the rows that a branch shows to a query are slices of the memory: finding them takes no time that grows with the cache.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd

import torch
from torch import Tensor

from ring_backends.ring.ring import Ring
from ring_backends.schedule.checks import check_integer


@dataclass(frozen=True)
class Run:
    """Rows whose positions have equal distances.

    Attributes:
        start: position of the first row.
        stride: distance of the positions of neighbouring rows.
        count: number of rows.
        first: index of the first row in the cache.
    """

    start: int
    stride: int
    count: int
    first: int

    def before(self, position: int) -> int:
        """How many of the rows lie before a position."""
        return min(self.count, max(0, -(-(position - self.start) // self.stride)))

    def rows(self, begin: int, end: int, rate: int) -> slice:
        """The rows at the positions begin, begin + rate, … below ``end``, as a slice of the cache. It may be empty.

        >>> Run(start=1, stride=3, count=5, first=10).rows(0, 100, 2)  # positions 1, 4, 7, 10, 13
        slice(11, 15, 2)
        """
        low, high = self.before(begin), self.before(end)
        common = gcd(self.stride, rate)
        distance = (begin - self.start) % rate
        if distance % common:
            return slice(0, 0)
        # Row k has the position start + k · stride. Solve k · stride = distance modulo rate for the smallest k ≥ low.
        period = rate // common
        solution = distance // common * pow(self.stride // common, -1, period)
        low += (solution - low) % period
        return slice(self.first + low, self.first + high, period) if low < high else slice(0, 0)


class KeyValueCache:
    """This rank's keys and values of one attention module. ``attention.new_cache()`` makes it.

    ``attention.prefill`` fills it with a prompt, and ``attention.decode`` adds tokens. Every rank of the ring makes the
    same calls. A rank holds about 1 / ring size of the rows. After :meth:`truncate` has cut a prompt, the rows that are
    left of it stay on their ranks.

    Attributes:
        ring: the ring that holds the sequence.
        max_len: the largest length of the sequence; None if it may grow without limit.
        seq_len: length of the sequence so far, over all ranks.
        key, value: [batch, key/value heads, capacity, head_dim], this rank's rows; None before the prefill.
        ignored: bool [batch, capacity], True where a key is ignored; None without a key padding mask.
        owner: the module whose keys these are; None before the first call.
        edits: a checksum of the calls of ``truncate`` and ``select_batch``, which must be the same on all ranks.
    """

    def __init__(self, ring: Ring, max_len: int | None = None) -> None:
        if max_len is not None:
            check_integer("max_len", max_len, 1)
        self.ring, self.max_len = ring, max_len
        self.seq_len = 0
        self.owner: str | None = None
        self.edits = 0
        self.key: Tensor | None = None
        self.value: Tensor | None = None
        self.ignored: Tensor | None = None
        self.runs: list[Run] = []

    @property
    def num_rows(self) -> int:
        """Number of rows of this rank."""
        return sum(run.count for run in self.runs)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that this rank has allocated for keys and values."""
        return sum(tensor.nbytes for tensor in (self.key, self.value) if tensor is not None)

    def fill(self, key: Tensor, value: Tensor, ignored: Tensor | None, seq_len: int) -> None:
        """Keep this rank's rows of a prompt, [batch, local seq, key/value heads, head_dim].

        Args:
            ignored: bool [batch, local seq], True for a key to ignore; None for none.
            seq_len: length of the prompt.
        """
        self._store(key, value, ignored, 0, seq_len)
        runs, first = [], 0
        for piece in self.ring.layout(seq_len).pieces(self.ring.rank):
            if len(piece):
                runs.append(Run(piece.start, 1, len(piece), first))
                first += len(piece)
        self.runs, self.seq_len = runs, seq_len

    def append(self, key: Tensor, value: Tensor, ignored: Tensor | None) -> None:
        """Keep this rank's share of new tokens, [batch, new tokens, key/value heads, head_dim]."""
        size, end, first = self.ring.size, self.seq_len + key.shape[1], self.num_rows
        skipped = (self.ring.rank - self.seq_len) % size
        own, start = slice(skipped, None, size), self.seq_len + skipped
        self._store(key[:, own], value[:, own], None if ignored is None else ignored[:, own], first, end)
        count = len(range(start, end, size))
        last = self.runs[-1] if self.runs else None
        if last is not None and last.stride == size and last.start + last.count * size == start:
            self.runs[-1] = replace(last, count=last.count + count)
        elif count:
            self.runs.append(Run(start, size, count, first))
        self.seq_len = end

    def rows(self, begin: int, end: int, rate: int) -> Iterator[slice]:
        """This rank's rows at the positions begin, begin + rate, … below ``end``, as slices of the cache."""
        for run in self.runs:
            found = run.rows(begin, end, rate)
            if found.start < found.stop:
                yield found

    def truncate(self, seq_len: int) -> None:
        """Forget all tokens from position ``seq_len`` on, for example those that a speculative check has refused.

        Raises:
            ValueError: the cache has fewer tokens.
        """
        with self.ring.report_refusals():
            check_integer("seq_len", seq_len, 0)
            if seq_len > self.seq_len:
                raise ValueError(f"seq_len = {seq_len}: the cache has {self.seq_len} tokens; give at most that number.")
        self.edits = zlib.crc32(f"{self.edits} truncate {seq_len}".encode())
        kept = (replace(run, count=run.before(seq_len)) for run in self.runs)
        self.runs = [run for run in kept if run.count]
        self.seq_len = seq_len

    def select_batch(self, indices: Tensor) -> None:
        """Replace batch entry i by entry ``indices[i]``, in beam search, or to remove finished entries.

        Args:
            indices: int32 or int64 [new batch], the same on every rank.

        Raises:
            TypeError: ``indices`` is not a tensor.
            ValueError: ``indices`` has another shape or dtype, or an entry does not exist.
        """
        with self.ring.report_refusals():
            if not isinstance(indices, Tensor):
                raise TypeError(f"indices = {indices!r}: expected a tensor, int32 or int64 [batch].")
            if self.key is None:
                raise ValueError("cache has seq_len = 0: there is no batch yet; call attention.prefill() first.")
            if indices.dtype not in (torch.int32, torch.int64) or indices.dim() != 1:
                raise ValueError(f"indices is {indices.dtype} {[*indices.shape]}: expected int32 or int64 [batch].")
            numbers, batch = indices.tolist(), self.key.shape[0]
            if not numbers or min(numbers) < 0 or max(numbers) >= batch:
                raise ValueError(f"indices = {numbers}: expected at least one number from 0 to {batch - 1}.")
        self.edits = zlib.crc32(f"{self.edits} select {numbers}".encode())
        assert self.value is not None
        # Tensors made under inference_mode could not be changed outside of it.
        with torch.inference_mode(False), torch.no_grad():
            indices = torch.tensor(numbers, device=self.key.device)
            self.key, self.value = self.key[indices], self.value[indices]
            self.ignored = None if self.ignored is None else self.ignored[indices]

    def __copy__(self) -> KeyValueCache:
        return copy.deepcopy(self)

    def _store(self, key: Tensor, value: Tensor, ignored: Tensor | None, first: int, seq_len: int) -> None:
        """Store rows at ``first`` and after it, in the order of their positions.

        Args:
            seq_len: length of the sequence with these rows, over all ranks.
        """
        end = first + key.shape[1]
        with torch.inference_mode(False), torch.no_grad():
            self._reserve(end, key, seq_len, ignored is not None)
        assert self.key is not None
        assert self.value is not None
        if ignored is not None:
            # Not every kernel skips a NaN in an ignored key.
            key, value = (x.masked_fill(ignored[:, :, None, None], 0.0) for x in (key, value))
        if self.ignored is not None:
            self.ignored[:, first:end] = False if ignored is None else ignored
        self.key[:, :, first:end] = key.transpose(1, 2)
        self.value[:, :, first:end] = value.transpose(1, 2)

    def _reserve(self, rows: int, like: Tensor, seq_len: int, has_mask: bool) -> None:
        """Make room for a number of rows. A cache without ``max_len`` grows by a quarter at least."""
        batch, _, heads, head_dim = like.shape
        capacity = 0 if self.key is None else self.key.shape[2]
        if self.key is None or rows > capacity:
            missing = 0 if self.max_len is None else -(-(self.max_len - seq_len) // self.ring.size) + 1
            capacity = max(rows + missing, 0 if self.max_len else capacity + capacity // 4 + 64)
            grown = [
                torch.empty(batch, heads, capacity, head_dim, dtype=like.dtype, device=like.device) for _ in range(2)
            ]
            for new, old in zip(grown, (self.key, self.value), strict=True):
                if old is not None:
                    new[:, :, : old.shape[2]] = old
            self.key, self.value = grown
            if self.ignored is not None:
                self.ignored = torch.nn.functional.pad(self.ignored, (0, capacity - self.ignored.shape[1]))
        if has_mask and self.ignored is None:
            self.ignored = torch.zeros(batch, capacity, dtype=torch.bool, device=like.device)
