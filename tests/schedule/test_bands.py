"""Bands of tiles: what is left after trimming, and the triangles and rectangles into which they are cut."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kernel_cases import outside_of
from torch import Tensor

from ring_backends.schedule.bands import ANTICAUSAL, CAUSAL, Band, Part, cut_band, trimmed

SIZES = st.integers(1, 30)
LIMITS = st.one_of(st.none(), st.just(0), st.integers(-20, 30))
RANDOM = settings(max_examples=200, deadline=None, derandomize=True, database=None)


def shown(num_queries: int, num_keys: int, band: Band | None) -> Tensor:
    """bool [queries, keys]: whether each query sees each key."""
    return ~outside_of(band or Band(), num_queries, num_keys)


def parts_of(num_queries: int, num_keys: int, band: Band, max_rows: int) -> Iterator[Part]:
    """The parts of a cut in order, each as often as it repeats."""
    for parts, repeats, step in cut_band(num_queries, num_keys, band, max_rows):
        for part in parts:
            yield from (part.moved(number * step) for number in range(repeats))


@RANDOM
@given(SIZES, SIZES, LIMITS, LIMITS)
def test_trimming_leaves_the_rows_that_have_a_partner(queries, keys, below, above):
    assume(below is None or above is None or below + above >= 0)
    band = Band(below, above)
    seen = shown(queries, keys, band)
    part = trimmed(range(queries), range(keys), band)
    if part is None:
        assert not seen.any()
        return
    assert [*part.queries] == seen.any(1).nonzero().flatten().tolist()
    assert [*part.keys] == seen.any(0).nonzero().flatten().tolist()
    left = seen[part.queries.start : part.queries.stop, part.keys.start : part.keys.stop]
    assert torch.equal(shown(len(part.queries), len(part.keys), part.band), left)
    assert (part.band is None) == bool(left.all())


@RANDOM
@given(SIZES, SIZES, LIMITS, LIMITS, st.integers(1, 12))
def test_parts_are_kernel_calls_that_cover_the_band_once(queries, keys, below, above, max_rows):
    assume(below is None or above is None or below + above >= 0)
    part = trimmed(range(queries), range(keys), Band(below, above))
    assume(part is not None and part.band is not None)
    size = len(part.queries), len(part.keys)
    times_seen = torch.zeros(size, dtype=torch.int64)
    for some_queries, some_keys, band in parts_of(*size, part.band, max_rows):
        assert 1 <= len(some_queries) <= max_rows
        assert 1 <= len(some_keys) <= max_rows
        assert band in (None, CAUSAL, ANTICAUSAL)
        assert band is None or len(some_queries) == len(some_keys)
        times_seen[some_queries.start : some_queries.stop, some_keys.start : some_keys.stop] += shown(
            len(some_queries), len(some_keys), band
        )
    assert torch.equal(times_seen, shown(*size, part.band).long())


@RANDOM
@given(SIZES, st.integers(0, 12), st.booleans(), st.integers(1, 12))
def test_a_window_meets_its_own_rows_first(rows: int, width: int, is_causal: bool, max_rows: int) -> None:
    """Of the parts of a window, one has the queries and keys of the same rows, before others add to these."""
    band = Band(width, 0 if is_causal else width).limits(rows, rows)
    assume(band is not None and band.below is not None)
    own: list[int] = []
    for queries, keys, _ in parts_of(rows, rows, band, max_rows):
        if queries == keys:
            assert not set(own) & set(queries)
            own += queries
        else:
            assert set(own) >= {*queries, *keys}
    assert sorted(own) == [*range(rows)]


def test_a_causal_window_costs_two_kernel_calls() -> None:
    """Of equal blocks, each has a causal triangle of its own keys, and an anticausal one of the keys before it."""
    first, others = cut_band(64, 64, Band(15, 0), 1024)
    assert first.parts == (Part(range(16), range(16), CAUSAL),)
    before = Part(range(16, 31), range(1, 16), ANTICAUSAL)
    assert others == ((Part(range(16, 32), range(16, 32), CAUSAL), before), 3, 16)
