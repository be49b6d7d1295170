"""Which keys the queries of a tile see: a band around a diagonal, and how it is cut for kernels.

A band limits the distance between query row i and key row j of a tile. A causal mask and a window are bands. Of the
bands, every kernel can compute the two triangles: ``CAUSAL``, where query i sees the keys 0 … i, and ``ANTICAUSAL``,
where it sees the keys i and later, which is the causal triangle of the rows in reverse order. Other bands are cut into
triangles and rectangles of blocks of queries (:func:`cut_band`). With a causal window of 4 rows:

             keys 0 1 2 3  4 5 6 7
    query 0       c
          1       c c                    c  causal triangle of the block's own keys
          2       c c c
          3       c c c c
          4         a a a  c             a  anticausal triangle of the keys before
          5           a a  c c
          6             a  c c c
          7                c c c c

So a window costs what it shows, and blocks of equal shape are segments of one tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Band:
    """Query row i of a tile sees key row j if and only if i − j ≤ below and j − i ≤ above. None does not limit."""

    below: int | None = None
    above: int | None = None

    def shifted(self, queries: int, keys: int) -> Band:
        """The band of the rows that begin with query row ``queries`` and key row ``keys``."""
        return Band(
            None if self.below is None else self.below + keys - queries,
            None if self.above is None else self.above + queries - keys,
        )

    def limits(self, queries: int, keys: int) -> Band | None:
        """The same band without limits that hide no pair of a tile of this size; None if it has no other limits."""
        below = None if self.below is None or self.below >= queries - 1 else self.below
        above = None if self.above is None or self.above >= keys - 1 else self.above
        return None if below is None and above is None else Band(below, above)


CAUSAL = Band(above=0)
ANTICAUSAL = Band(below=0)


class Part(NamedTuple):
    """Some query rows and some key rows of a tile, and their band; None if every query sees every key."""

    queries: range
    keys: range
    band: Band | None

    def moved(self, rows: int) -> Part:
        """The part with all rows ``rows`` further on."""
        queries, keys = (range(x.start + rows, x.stop + rows) for x in (self.queries, self.keys))
        return Part(queries, keys, self.band)


class Blocks(NamedTuple):
    """The parts of one block of queries. They repeat: the tile has ``repeats`` such blocks, ``step`` rows apart."""

    parts: tuple[Part, ...]
    repeats: int = 1
    step: int = 0


def trimmed(queries: range, keys: range, band: Band | None) -> Part | None:
    """The queries and keys that have a partner; None if no pair is visible.

    Args:
        band: the band of the rows of the tile, of which ``queries`` and ``keys`` are a part.
    """
    if band is not None:
        if band.below is not None:
            first = queries.start - band.below
            stop = keys.stop + band.below
            keys, queries = range(max(keys.start, first), keys.stop), range(queries.start, min(queries.stop, stop))
        if band.above is not None:
            first = keys.start - band.above
            stop = queries.stop + band.above
            queries, keys = range(max(queries.start, first), queries.stop), range(keys.start, min(keys.stop, stop))
    if not queries or not keys:
        return None
    return Part(queries, keys, band and band.shifted(queries.start, keys.start).limits(len(queries), len(keys)))


def cut_band(num_queries: int, num_keys: int, band: Band, max_rows: int) -> Iterator[Blocks]:
    """Cut a tile into triangles and rectangles of at most ``max_rows`` rows.

    In a window around the diagonal, each row lies in exactly one part both as a query and as a key. This part comes
    before the others that have the row.
    """
    below, above = band.below, band.above
    size, first, last = max_rows, 0, 0  # the blocks first … last − 1 have equal parts
    if below is not None and above is not None:
        size = min(size, below + 1 if above == 0 else (below + above + 2) // 2)
        first = -(-max(0, below) // size)
        last = max(first, min(num_queries, num_keys - above) // size)
    blocks = []
    for number in (*range(first), *range(first, last)[:1], *range(last, -(-num_queries // size))):
        queries = range(number * size, min(num_queries, (number + 1) * size))
        parts = tuple(_block(queries, num_keys, band, max_rows))
        repeats = (last - first, size) if first <= number < last else ()
        blocks.append(Blocks(parts, *repeats))
    if above == 0:  # no part adds to keys of a later block
        yield from blocks
        return
    yield from (block._replace(parts=block.parts[:1]) for block in blocks)
    yield from (block._replace(parts=block.parts[1:]) for block in blocks if len(block.parts) > 1)


def _block(queries: range, num_keys: int, band: Band, max_rows: int) -> Iterator[Part]:
    """The parts of one block of queries, that with its own keys first.

    It has the keys before ``left``, which only ``band.below`` limits; those from ``right`` on, which only
    ``band.above`` limits; and those in between, which every query sees.
    """
    below, above = band.below, band.above
    if below is None or above is None:
        left = right = 0 if below is None else num_keys
    elif above == 0:
        left = right = min(queries.start, num_keys)
    else:
        left, right = max(0, queries.stop - 1 - below), queries.start + above + 1
        if left <= queries.start and queries.stop <= right:
            left, right = queries.start, queries.stop
        left, right = min(left, num_keys), min(right, num_keys)
    between = Part(queries, range(left, right), None)
    after = trimmed(queries, range(right, num_keys), Band(above=above))
    before = trimmed(queries, range(left), Band(below=below))
    for part in (between, *_triangle(after), *_triangle(before)):
        if part.queries and part.keys:
            yield from (part._replace(keys=keys) for keys in ranges(part.keys, max_rows))


def _triangle(part: Part | None) -> tuple[Part, ...]:
    """Cut a part with one limit at most into a triangle and two rectangles, any of which may be empty."""
    if part is None or part.band is None:
        return () if part is None else (part,)
    queries, keys, (below, above) = part.queries, part.keys, (part.band.below, part.band.above)
    if above is not None:
        size = len(keys) - above
        own, others, rest = keys[above:], keys[:above], queries[size:]
        return (Part(queries[:size], own, CAUSAL), Part(rest, own, None), Part(queries, others, None))
    assert below is not None
    size = len(queries) - below
    own, others, rest = keys[:size], keys[size:], queries[:below]
    return (Part(queries[below:], own, ANTICAUSAL), Part(rest, own, None), Part(queries, others, None))


def as_slice(rows: range) -> slice:
    """The slice of a tensor's rows with these numbers."""
    return slice(rows.start, rows.stop, rows.step)


def ranges(whole: range, at_most: int) -> list[range]:
    """Cut a range into the smallest number of ranges of at most ``at_most``, of nearly equal sizes."""
    total = len(whole)
    parts = -(-total // at_most)
    return [whole[total * part // parts : total * (part + 1) // parts] for part in range(parts)]
