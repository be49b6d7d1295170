"""``ring.pool`` equals pooling of the whole sequence on one device, with its gradient."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from native_ranks import assert_near, native_ring, on_ring
from torch import Tensor

from ring_backends import Ring, RingMismatchError
from ring_backends.testing.failing_calls import ending
from ring_backends.testing.marks import matrix_but
from ring_backends.testing.rings import FOUR
from ring_backends.testing.world import World, on_every_rank

BATCH, FEATURES = 4, (3, 2)
HOWS = ("mean", "max", "first", "last")
LENGTHS = (1, 3, 8, 21)


def make_rows(seq_len: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, a mask and the gradient of the result. All rows of the first batch entry count, and none of the last.

    Several rows have the largest value, 0.5.
    """
    generator = torch.Generator().manual_seed(seq_len)
    rows = torch.randn(BATCH, seq_len, *FEATURES, generator=generator, dtype=torch.float64).clamp(max=0.5).to(dtype)
    mask = torch.rand(BATCH, seq_len, generator=generator) < 0.4
    mask[0], mask[-1] = True, False
    return rows, mask, torch.randn(BATCH, *FEATURES, generator=generator, dtype=torch.float64).to(dtype)


def expected(seq_len: int, how: str, masked: bool) -> tuple[Tensor, Tensor]:
    """The definition, entry by entry: the pooled rows and the gradient of the rows."""
    rows, mask, grad = make_rows(seq_len)
    rows.requires_grad_()
    pooled = []
    for entry, counts in zip(rows, mask if masked else torch.ones_like(mask), strict=True):
        chosen = entry[counts]
        if not len(chosen):
            pooled.append(entry.sum(0) * 0)
        else:
            pooled.append({"mean": chosen.mean(0), "max": chosen.amax(0), "first": chosen[0], "last": chosen[-1]}[how])
    return torch.stack(pooled).detach(), torch.autograd.grad(torch.stack(pooled), rows, grad)[0]


def pooled_on(ring: Ring, seq_len: int, how: Any, masked: bool) -> tuple[Tensor, Tensor]:
    whole, mask, grad = make_rows(seq_len)
    rows = ring.shard(whole).requires_grad_()
    out = ring.pool(rows, ring.shard(mask) if masked else None, how, seq_len=seq_len)
    got = torch.autograd.grad(out, rows, grad / ring.size)[0]
    return out.detach(), ring.unshard(got, seq_len=seq_len)


CASES = [*itertools.product(LENGTHS, HOWS, (False, True))]


def pooled_in_all_cases(ring: Ring) -> list[tuple[Tensor, Tensor]]:
    return [pooled_on(ring, *case) for case in CASES]


@pytest.mark.parametrize("layout", matrix_but("zigzag", of=("contiguous", "zigzag")))
def test_four_ranks_equal_the_definition(world: World, layout: str) -> None:
    wanted = [expected(*case) for case in CASES]
    for of_rank in world.run(on_ring, pooled_in_all_cases, rings=FOUR, layout=layout):
        assert_near(of_rank, wanted, 1e-12)


@pytest.mark.parametrize("how", HOWS)
def test_one_rank_equals_the_definition(how: Any) -> None:
    """NaN in rows that do not count reaches nothing."""
    for masked in (False, True):
        assert_near(pooled_on(Ring(), 8, how, masked), expected(8, how, masked), 1e-12)
    rows, mask, _ = make_rows(8)
    rows[~mask] = torch.nan
    assert_near(Ring().pool(rows, mask.long(), how), expected(8, how, True)[0], 1e-12)


def test_a_mean_of_bf16_is_summed_in_fp32() -> None:
    rows = torch.full((1, 4096, 1), 1.0, dtype=torch.bfloat16)
    rows[0, :100] = 1.5
    assert Ring().pool(rows).item() == pytest.approx(1 + 50 / 4096, abs=2**-8)


@on_every_rank
def test_different_calls_are_reported() -> None:
    ring = native_ring(rings=FOUR)
    ended = ending(ring.pool, torch.zeros(2, 2, 3), how="first" if ring.rank else "last")
    ended.check(RingMismatchError, "by 'first'")
    rows = torch.zeros(2, 2 if ring.rank < 3 else 1, 3)
    ended = ending(ring.with_layout("contiguous").pool, rows, how="last")  # 7 rows, without seq_len
    ended.check(RingMismatchError, "pool of 8 rows")


@on_every_rank
def test_bad_arguments_are_refused_by_name() -> None:
    ring = native_ring(rings=FOUR)
    rows = ring.shard(torch.zeros(2, 8, 3))
    ending(ring.pool, rows, how="sum").check(ValueError, "how = 'sum': expected one of 'mean', 'max'")
    ending(ring.pool, rows, torch.ones(2, 8)).check(ValueError, "mask is [2, 8]: expected [2, 2]")
    ending(ring.pool, rows, seq_len=9).check(Exception, "rows has 2 rows along dim 1")
    ring.pool(rows)
