"""The keys and values of a sequence that grows, distributed over the ranks of a ring.

A rank keeps its rows of the prompt, as the layout of the ring distributes them. Of the tokens that follow, the token at
position t is kept by rank t mod ring size. So the positions of a rank's rows are a few runs with equal distances, and
the rows that a branch shows to a query are slices of the memory: finding them takes no time that grows with the cache.

Rows that no later query sees are forgotten. A rank's rows lie in the order of their positions, so the forgotten ones
come first. When the memory is full, the others move to its front, or to larger memory if fewer than an eighth of their
number are forgotten. So a token costs a constant number of copied rows on average.
"""

from __future__ import annotations

import copy
import zlib
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd

import torch
from torch import Tensor

from ring_backends.ring.ring import Ring
from ring_backends.schedule.checks import check_integer
from ring_backends.schedule.pattern import DilatedPattern

ENDLESS = 2**62
"""The length of a sequence that still grows, for methods of a pattern. Positions are below it."""


def horizon(pattern: DilatedPattern, position: int) -> int:
    """The first position that a causal query at ``position``, or at any later one, may see."""
    return min(
        max(position - position % pattern.segment_length(branch, ENDLESS), position - pattern.reach(branch, ENDLESS))
        for branch in range(pattern.num_branches)
    )


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

    def since(self, position: int) -> Run:
        """The rows at a position and after it."""
        gone = self.before(position)
        return Run(self.start + gone * self.stride, self.stride, self.count - gone, self.first + gone)

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
    same calls. A rank keeps its own rows of the prompt, and 1 / ring size of the later tokens.

    A prefill keeps only the rows that later queries see. If segments or windows are short, these lie at the end of the
    prompt, so the ranks that have it hold most of them. ``decode`` also keeps those that its own queries see, so that
    :meth:`truncate` can remove its tokens again. Without ``max_len``, the memory is for at most twice the largest
    number of rows that were kept.

    Attributes:
        ring: the ring that holds the sequence.
        pattern: the pattern of the module. It decides which rows are kept.
        max_len: the largest length of the sequence; None if it may grow without limit.
        seq_len: length of the sequence so far, over all ranks.
        begin: the position from which on all tokens are kept.
        key, value: [batch, key/value heads, capacity, …], this rank's rows; None before the first call.
        ignored: bool [batch, 1, capacity], True where a key is ignored; None without a key padding mask.
        owner: the module whose keys these are; None before the first call.
        edits: a checksum of the calls of ``truncate`` and ``select_batch``, which must be the same on all ranks.
    """

    def __init__(self, ring: Ring, pattern: DilatedPattern, max_len: int | None = None) -> None:
        if max_len is not None:
            check_integer("max_len", max_len, 1)
        self.ring, self.pattern, self.max_len = ring, pattern, max_len
        self._reach = max(pattern.reach(branch, ENDLESS) for branch in range(pattern.num_branches))
        self.seq_len = self.begin = 0
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
        """Keep this rank's rows of a prompt, [batch, local seq, key/value heads, …], that later queries see.

        Args:
            ignored: bool [batch, local seq], True for a key to ignore; None for none.
            seq_len: length of the prompt.
        """
        self.begin = horizon(self.pattern, seq_len)
        runs, rows = [], 0
        for piece in self.ring.layout(seq_len).pieces(self.ring.rank):
            if kept := range(max(piece.start, self.begin), piece.stop):
                runs.append(Run(kept.start, 1, len(kept), rows))
                rows += len(kept)
        last = slice(key.shape[1] - rows, None)
        self._store(key[:, last], value[:, last], None if ignored is None else ignored[:, last], seq_len)
        self.runs, self.seq_len = runs, seq_len

    def append(self, key: Tensor, value: Tensor, ignored: Tensor | None) -> None:
        """Keep this rank's share of new tokens, [batch, new tokens, key/value heads, …]."""
        self.begin = horizon(self.pattern, self.seq_len)
        self.runs = [run for run in (run.since(self.begin) for run in self.runs) if run.count]
        size, end = self.ring.size, self.seq_len + key.shape[1]
        skipped = (self.ring.rank - self.seq_len) % size
        own, start = slice(skipped, None, size), self.seq_len + skipped
        first = self._store(key[:, own], value[:, own], None if ignored is None else ignored[:, own], end)
        count = len(range(start, end, size))
        last = self.runs[-1] if self.runs else None
        if last is not None and last.stride == size and last.start + last.count * size == start:
            self.runs[-1] = replace(last, count=last.count + count)
        elif count:
            self.runs.append(Run(start, size, count, first))
        self.seq_len = end

    def rows(self, begin: int, end: int, rate: int) -> Iterator[tuple[slice, range]]:
        """This rank's rows at the positions begin, begin + rate, … below ``end``: slices, and their positions."""
        for run in self.runs:
            found = run.rows(begin, end, rate)
            if found.start < found.stop:
                positions = range(run.start, run.start + run.count * run.stride, run.stride)
                yield found, positions[found.start - run.first : found.stop - run.first : found.step]

    def truncate(self, seq_len: int) -> None:
        """Forget all tokens from position ``seq_len`` on, for example those that a speculative check has refused.

        Raises:
            ValueError: the cache has fewer tokens, or it has forgotten a token that the query at ``seq_len`` may see.
        """
        with self.ring.report_refusals():
            check_integer("seq_len", seq_len, 0)
            if seq_len > self.seq_len:
                raise ValueError(f"seq_len = {seq_len}: the cache has {self.seq_len} tokens; give at most that number.")
            if horizon(self.pattern, seq_len) < min(self.begin, seq_len):
                lowest = bisect_left(range(self.seq_len), self.begin, key=lambda s: horizon(self.pattern, s))
                raise ValueError(
                    f"seq_len = {seq_len}: the next token would see tokens before position {self.begin}, which the "
                    f"cache has forgotten; truncate to at least {lowest}, or to 0 and begin again."
                )
        self.edits = zlib.crc32(f"{self.edits} truncate {seq_len}".encode())
        kept = (replace(run, count=run.before(seq_len)) for run in self.runs)
        self.runs = [run for run in kept if run.count]
        self.seq_len, self.begin = seq_len, min(self.begin, seq_len)

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

    def _store(self, key: Tensor, value: Tensor, ignored: Tensor | None, seq_len: int) -> int:
        """Store rows after those that are held, in the order of their positions.

        Args:
            seq_len: length of the sequence with these rows, over all ranks.

        Returns:
            The index of the first of them in the cache.
        """
        with torch.inference_mode(False), torch.no_grad():
            first = self._reserve(key, value, seq_len, has_mask=ignored is not None)
        assert self.key is not None
        assert self.value is not None
        end = first + key.shape[1]
        if ignored is not None:
            # Not every kernel skips a NaN in an ignored key.
            key, value = (x.masked_fill(ignored[:, :, None, None], 0.0) for x in (key, value))
        if self.ignored is not None:
            self.ignored[:, :, first:end] = False if ignored is None else ignored.unsqueeze(1)
        self.key[:, :, first:end] = key.transpose(1, 2)
        self.value[:, :, first:end] = value.transpose(1, 2)
        return first

    def _reserve(self, key: Tensor, value: Tensor, seq_len: int, *, has_mask: bool) -> int:
        """Make room for new rows, [batch, rows, heads, …], after those that are held; return where it begins."""
        batch, rows, heads, _ = key.shape
        first, count = self.runs[0].first if self.runs else 0, self.num_rows
        total = count + rows
        later = total + -(-self._reach // self.ring.size)  # without longer steps, no more rows are ever held at a time
        wanted = self._capacity(total, later, seq_len)
        if self.key is None or self.value is None:
            self.key, self.value = (x.new_empty(batch, heads, wanted, x.shape[3]) for x in (key, value))
        capacity = self.key.shape[2]
        if first + total > capacity or capacity > 4 * later:
            is_in_place = total <= capacity <= 4 * later and count <= 8 * first
            size = capacity if is_in_place else wanted
            self.key, self.value = (_moved(x, first, count, size) for x in (self.key, self.value))
            self.ignored = None if self.ignored is None else _moved(self.ignored, first, count, size)
            self.runs, first = [replace(run, first=run.first - first) for run in self.runs], 0
        if has_mask and self.ignored is None:
            self.ignored = torch.zeros(batch, 1, self.key.shape[2], dtype=torch.bool, device=key.device)
        return first + count

    def _capacity(self, rows: int, later: int, seq_len: int) -> int:
        """For how many rows to make memory: a quarter more than ``rows``, or up to 64 more.

        Args:
            rows: number of rows to hold now.
            later: the largest number of rows to hold at a time later. With ``max_len``, the memory is made for it.
            seq_len: length of the sequence with these rows, over all ranks.
        """
        if self.max_len is None:
            return rows + max(rows // 4, min(rows, 64))
        missing = -(-(self.max_len - seq_len) // self.ring.size) + 1
        return min(rows + missing, later + max(later // 4, min(later, 64)))


def _moved(memory: Tensor, first: int, count: int, capacity: int) -> Tensor:
    """Memory [batch, heads, capacity, …] that begins with the rows first … first + count − 1 of ``memory``.

    It is ``memory`` itself if that has this capacity.
    """
    if memory.shape[2] != capacity:
        moved = memory.new_empty(*memory.shape[:2], capacity, *memory.shape[3:])
        moved[:, :, :count] = memory[:, :, first : first + count]
        return moved
    for done in range(0, count, first or 1):  # a copy onto rows that it reads would be undefined
        end = min(count, done + first)
        memory[:, :, done:end] = memory[:, :, done + first : end + first]
    return memory
