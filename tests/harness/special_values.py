"""Special values: NaN and infinity reach only the results that depend on them, and large scores are exact.

The reference determines the keys of each query, and thereby the results that depend on an input.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ring_backends.schedule.layout import LayoutKind
from ring_backends.testing.calls import FP64_TOLERANCE, Results, check_results, difference, expected, join, run_cases
from ring_backends.testing.capabilities import AdapterSuite, core
from ring_backends.testing.marks import matrix_but
from ring_backends.testing.reference import reference_counts
from ring_backends.testing.rings import FOUR, LAYOUTS, every_layout
from ring_backends.testing.strategies import AttentionCase
from ring_backends.testing.world import World

_CASE = AttentionCase(45, (9, 45), (1, 2), batch=2, num_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float64)
_POSITION = 20  # inside a segment and a shard; in a causal call, some queries see it and others do not

SPOILED = {
    "all": _CASE,
    "causal": replace(_CASE, is_causal=True),
    "documents": replace(_CASE, batch=1, documents="some"),
    "documents in no order, causal": replace(_CASE, batch=1, documents="shuffled", is_causal=True),
    "groups": replace(_CASE, num_kv_heads=1, is_causal=True, ulysses_size=2),
}

LARGE = {
    "scores of 1e4, causal": replace(_CASE, scale=1e3, is_causal=True),
    "one key above all": replace(_CASE, spoiled=(("key", _POSITION, 100.0), ("query", 31, 1.0))),
}


def sees(case: AttentionCase) -> Tensor:
    """bool [heads, n, n]: whether query t sees key u."""
    options = case.options()
    del options["scale"], options["padding"]
    seen = reference_counts(case.seq_len, case.num_heads, **options) > 0
    ids = case.document_ids()
    if ids is None:
        return seen
    assert case.batch == 1
    return seen & (ids[0, :, None] == ids[0]) & (ids[0] >= 0)


def dependent_rows(name: str, position: int, case: AttentionCase) -> Results:
    """The rows of each result that depend on row ``position`` of tensor ``name``, as bool [heads, n].

    out, LSE and dq of a query depend on the keys that the query sees. dk and dv of a key depend on all inputs of the
    queries that see the key.
    """
    seen = sees(case)
    position_alone = torch.zeros(case.seq_len, dtype=torch.bool)
    position_alone[position] = True
    queries = seen[:, :, position] if name in ("key", "value") else seen.any(2) & position_alone  # [heads, n]
    keys = (queries.unsqueeze(2) & seen).any(1).unflatten(0, (case.num_kv_heads, -1)).any(1)  # [key/value heads, n]
    nothing = torch.zeros_like(queries)
    return Results(
        out=nothing if name == "grad_out" else queries,
        lse=nothing if name in ("grad_out", "value") else queries,
        grad_query=queries,
        grad_key=keys,
        grad_value=torch.zeros_like(keys) if name == "value" else keys,
    )


@core
class SpecialValueTests(AdapterSuite):
    def whole_of(self, world: World, layout: LayoutKind, case: AttentionCase) -> Results:
        return join(run_cases(world, self.adapter, FOUR, layout, [case])[0][0], case.seq_len, layout)

    @pytest.mark.parametrize("number", matrix_but(math.nan, of=(math.nan, math.inf, -math.inf)), ids=str)
    @pytest.mark.parametrize("name", ["query", "key", "value", "grad_out"])
    @pytest.mark.parametrize("what", matrix_but(*[*SPOILED][1:3], of=SPOILED))
    @pytest.mark.parametrize("layout", matrix_but("zigzag", of=LAYOUTS))
    def test_nan_and_infinity_reach_only_dependent_results(
        self, world: World, layout: LayoutKind, what: str, name: str, number: float
    ) -> None:
        case = SPOILED[what]
        spoiled = replace(case, spoiled=((name, _POSITION, number),))
        got = self.whole_of(world, layout, spoiled)
        wanted, part = expected(case), dependent_rows(name, _POSITION, case)
        assert not all(rows is not None and rows.all() for rows in part)
        for field in got.computed():
            # Transpose to [batch, heads, n, …], the order of LSE.
            numbers, right = (
                x if field == "lse" else x.transpose(1, 2) for x in (getattr(got, field), getattr(wanted, field))
            )
            rows = getattr(part, field)
            assert difference(numbers[:, ~rows], right[:, ~rows]) <= FP64_TOLERANCE, field
            if math.isnan(number):
                assert numbers[:, rows].isnan().all(), field

    @pytest.mark.parametrize("number", [math.nan, math.inf], ids=str)
    @every_layout
    def test_contents_of_an_ignored_key_do_not_matter(self, world: World, layout: LayoutKind, number: float) -> None:
        case = replace(_CASE, masked="random")
        mask = case.tensors()[-1]
        assert mask is not None
        both = int(mask.all(0).nonzero()[0])  # ignored in both sequences of the batch
        spoiled = replace(case, spoiled=(("key", both, number), ("value", both, number)))
        got = self.whole_of(world, layout, spoiled)
        check_results(got, expected(case), FP64_TOLERANCE)

    @pytest.mark.parametrize("name", LARGE)
    @every_layout
    def test_large_scores(self, world: World, layout: LayoutKind, name: str) -> None:
        got, wanted = self.whole_of(world, layout, LARGE[name]), expected(LARGE[name])
        for field, right in wanted.computed().items():
            finite = right.masked_fill(right.isinf(), 0.0).abs().max()
            assert difference(getattr(got, field), right) <= FP64_TOLERANCE * max(1.0, float(finite)), field
