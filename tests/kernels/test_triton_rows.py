"""The Triton kernels that gather, scatter and merge rows: in Triton's interpreter, against plain indexing in fp64.

They need Triton and no GPU. ``tox run -e triton`` runs them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton_interpreter import fixed_examples, interpreted, patch_interpreter

from ring_backends.kernels import rows
from ring_backends.kernels.rows import (
    Rows,
    SumPart,
    Sums,
    add_parts,
    add_rows,
    can_launch,
    fill_rows,
    gather_many,
    merge_rows,
    scatter_many,
)
from ring_backends.schedule.rows import DilatedRows, head_runs

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = interpreted
patch_interpreter()


@pytest.fixture(autouse=True)
def small_blocks_on_the_cpu() -> Iterator[None]:
    """Use the kernels for CPU tensors, with blocks of few rows. A test fails where they are not used."""
    with (
        mock.patch.object(rows, "can_launch", return_value=True),
        mock.patch.object(rows, "BLOCK_ELEMENTS", 32),
        mock.patch.object(rows, "_paired", side_effect=AssertionError("the kernels were not used")),
    ):
        yield


@dataclass(frozen=True)
class RowsCase:
    """Rows of a tensor [batch, seq, heads, …]. ``phases`` holds one number for each of ``heads``.

    The other numbers are those of ``DilatedRows``: start, segments, segment stride, rate, and rows.
    """

    batch: int
    seq_len: int
    num_heads: int
    head_dim: int | None
    heads: tuple[int, ...]
    phases: tuple[int, ...]
    numbers: tuple[int, int, int, int, int]
    layout: str = "contiguous"
    seed: int = 0

    @property
    def dilated(self) -> DilatedRows:
        return DilatedRows(*self.numbers, head_runs(self.heads, self.phases))

    def indices(self) -> tuple[Tensor, Tensor, Tensor]:
        """The batch entry, position and head of each gathered row: they broadcast to [groups, heads, rows]."""
        start, segments, segment_stride, rate, rows = self.numbers
        groups = torch.arange(self.batch * segments)[:, None, None]
        segment_starts = start + groups % segments * segment_stride
        positions = segment_starts + torch.tensor(self.phases)[:, None] + rate * torch.arange(rows)
        return groups // segments, positions, torch.tensor(self.heads)[:, None]

    def tensor(self, dtype: torch.dtype, seed: int = 0) -> Tensor:
        return LAYOUTS[self.layout](self.random((self.batch, self.seq_len, self.num_heads), dtype, seed))

    def values(self, dtype: torch.dtype, seed: int = 0) -> Tensor:
        """Gathered rows, whose rows lie outermost in memory."""
        _, segments, _, _, rows = self.numbers
        return self.random((self.batch * segments, rows, len(self.heads)), dtype, seed).transpose(1, 2)

    def random(self, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + seed)
        shape = shape if self.head_dim is None else (*shape, self.head_dim)
        numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
        return (numbers if dtype.is_floating_point else numbers * 100).to(dtype)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "sequence outermost": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "last dim outermost": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
    "every second element": lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2],
    "odd offset": lambda x: torch.cat([x[:, :1], x], 1)[:, 1:],
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@st.composite
def rows_cases(draw: st.DrawFn, *, head_dims: tuple[int | None, ...] = (4, 1, 3, 20, None)) -> RowsCase:
    num_heads = draw(st.integers(1, 6))
    heads = draw(st.lists(st.integers(0, num_heads - 1), min_size=1, max_size=num_heads, unique=True))
    any_phases = st.lists(st.integers(0, 5), min_size=len(heads), max_size=len(heads))
    by_head = st.builds(lambda rate: [head % rate for head in heads], st.integers(1, 4))
    phases = draw(any_phases | by_head)
    rate, rows, segments = draw(st.integers(1, 5)), draw(st.integers(1, 20)), draw(st.integers(1, 3))
    extent = max(phases) + (rows - 1) * rate + 1
    # Segments of one head do not overlap: they are at least as far apart as their rows reach.
    segment_stride = extent + draw(st.integers(0, 3))
    start = draw(st.integers(0, 4))
    return RowsCase(
        batch=draw(st.integers(1, 2)),
        seq_len=start + (segments - 1) * segment_stride + extent + draw(st.integers(0, 2)),
        num_heads=num_heads,
        head_dim=draw(st.sampled_from(head_dims)),
        heads=tuple(heads),
        phases=tuple(phases),
        numbers=(start, segments, segment_stride, rate, rows),
        layout=draw(st.sampled_from(sorted(LAYOUTS))),
        seed=draw(st.integers(0, 2**16)),
    )


@fixed_examples(40)
@given(case=rows_cases(), other=rows_cases(), dtype=st.sampled_from([*DTYPES, torch.int64, torch.bool]))
def test_gathered_rows_equal_indexing(case: RowsCase, other: RowsCase, dtype: torch.dtype) -> None:
    cases = [(case, dtype), (other, torch.bfloat16), (case, torch.float32)]
    parts = [Rows(c.tensor(t, i), c.dilated, c.values(t, 9)) for i, (c, t) in enumerate(cases)]
    gather_many(parts)
    for (c, _), part in zip(cases, parts, strict=True):
        assert torch.equal(part.values, part.tensor[c.indices()])


@fixed_examples(40)
@given(
    case=rows_cases(),
    other=rows_cases(),
    # Triton's interpreter truncates to bf16, and does not round.
    dtype=st.sampled_from([torch.float32, torch.float16]),
    value_dtype=st.sampled_from(DTYPES),
)
def test_scattered_rows_equal_indexing(case, other, dtype, value_dtype):
    stored, added = case.tensor(dtype), other.tensor(dtype)
    values, terms = case.values(value_dtype, 1), other.values(value_dtype, 1)
    expected_stored, expected_added = stored.clone(), added.clone()
    expected_stored[case.indices()] = values.to(dtype)
    expected_added[other.indices()] = (added.double()[other.indices()] + terms.double()).float().to(dtype)
    scatter_many([Rows(stored, case.dilated, values)], [Rows(added, other.dilated, terms)])
    assert torch.equal(stored, expected_stored)
    assert torch.equal(added, expected_added)


@fixed_examples(40)
@given(
    case=rows_cases(head_dims=(4, 1, 3, 20)),
    value_dtype=st.sampled_from(DTYPES),
    blind=st.sampled_from(["none", "some", "all"]),
)
def test_merged_rows_equal_the_formula(case: RowsCase, value_dtype: torch.dtype, blind: str) -> None:
    out, tile_out = case.tensor(torch.float32), case.values(value_dtype, 1)
    lse, tile_lse = out[..., 0] * 3, case.values(torch.float32, 2)[..., 0] * 3
    generator = torch.Generator().manual_seed(case.seed)
    for result in ((out, lse), (tile_out, tile_lse)):
        blind_rows(*result, {"none": 0.0, "some": 0.4, "all": 1.0}[blind], generator)
    expected_out, expected_lse = merged(out[case.indices()], lse[case.indices()], tile_out, tile_lse)
    untouched = torch.ones_like(lse, dtype=torch.bool)
    untouched[case.indices()] = False
    before, lse_before = out.clone(), lse.clone()
    merge_rows(out, lse, case.dilated, tile_out, tile_lse)
    eps = torch.finfo(torch.float32).eps
    for actual, expected, old in ((out, expected_out, before), (lse, expected_lse, lse_before)):
        torch.testing.assert_close(actual[case.indices()].double(), expected, rtol=8 * eps, atol=16 * eps)
        assert torch.equal(actual[untouched], old[untouched])


def blind_rows(out: Tensor, lse: Tensor, chance: float, generator: torch.Generator) -> None:
    """Let some rows see no key: LSE = −inf and out = 0."""
    is_blind = torch.rand(lse.shape, generator=generator) < chance
    lse.masked_fill_(is_blind, -math.inf)
    out.masked_fill_(is_blind.unsqueeze(-1), 0.0)


def merged(out: Tensor, lse: Tensor, tile_out: Tensor, tile_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two results in fp64. A row without keys in both has out = 0 and LSE = −inf."""
    out, lse, tile_out, tile_lse = (x.double() for x in (out, lse, tile_out, tile_lse))
    total = lse.exp() + tile_lse.exp()
    weighted = out * lse.exp()[..., None] + tile_out * tile_lse.exp()[..., None]
    return weighted / total.masked_fill(total == 0, 1.0)[..., None], total.log()


@fixed_examples(30)
@given(case=rows_cases(), value_dtype=st.sampled_from(DTYPES), takes=st.booleans())
def test_the_same_rows_of_two_tensors_are_added_and_filled(case, value_dtype, takes):
    tensor, other = case.tensor(torch.float16), case.tensor(value_dtype, 1)
    expected = tensor.clone()
    at = case.indices()
    expected[at] = (tensor.double() + other.double())[at].float().half()
    left = other.clone()
    if takes:
        left[at] = 0.0
    add_rows([Rows(tensor, case.dilated, other)], takes=takes)
    assert torch.equal(tensor, expected)
    assert torch.equal(other, left)
    fill_rows([(tensor, case.dilated), (other, case.dilated)], -math.inf)
    expected[at] = -math.inf
    assert torch.equal(tensor, expected)
    assert (other[at] == -math.inf).all()


@fixed_examples(30)
@given(case=rows_cases(head_dims=(4, 1, 3, 20)), takes=st.booleans())
def test_the_same_rows_of_two_results_are_merged(case: RowsCase, takes: bool) -> None:
    out, other = case.tensor(torch.float16), case.tensor(torch.float32, 1)
    lse, other_lse = out[..., 0].float() * 3, other[..., 0] * 3
    at = case.indices()
    blind_rows(out, lse, 0.3, torch.Generator().manual_seed(case.seed))
    expected_out, expected_lse = merged(out[at], lse[at], other[at], other_lse[at])
    left = other_lse.clone()
    if takes:
        left[at] = -math.inf
    merge_rows(out, lse, case.dilated, other, other_lse, same_rows=True, takes=takes)
    assert torch.equal(other_lse, left)
    torch.testing.assert_close(out[at].double(), expected_out, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(lse[at].double(), expected_lse, rtol=1e-6, atol=2e-6)


SMALL = RowsCase(1, 30, 2, 3, (0, 1), (0, 1), (0, 1, 30, 2, 14))


def test_a_launch_without_rows_does_nothing() -> None:
    case = replace(SMALL, batch=0)
    gather_many([Rows(case.tensor(torch.float32), case.dilated, case.values(torch.float32))])
    gather_many([])
    out, tile_out = case.tensor(torch.float32), case.values(torch.float32)
    merge_rows(out, out[..., 0], case.dilated, tile_out, tile_out[..., 0])


def test_tensors_without_values_and_on_other_devices_are_left_to_torch() -> None:
    with FakeTensorMode():
        fake = torch.zeros(1, device="cuda")
    assert not any(map(can_launch, (fake, torch.zeros(1), torch.zeros(1, device="meta"))))


@fixed_examples(40)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    counts=st.lists(st.integers(1, 4), min_size=4, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    launched=st.booleans(),
)
def test_added_parts_equal_a_loop(lengths: list[int], counts: list[int], dtype: torch.dtype, launched: bool) -> None:
    """Each part has summands of its own, which lie anywhere. Gaps between parts keep their values."""
    random, parts, start, end = torch.Generator().manual_seed(sum(lengths)), [], 3, 0
    for length, count in zip(lengths, counts, strict=False):
        parts.append(SumPart(start, length, tuple(end + 2 * number * length for number in range(count))))
        start, end = start + length + 5, end + 2 * count * length
    into = torch.randn(start, generator=random)
    summands = torch.randn(end, generator=random).to(dtype)
    exact = into.double()
    for part in parts:
        for source in part.sources:
            exact[part.start : part.start + part.length] += summands[source : source + part.length].double()
    with mock.patch.object(rows, "can_launch", return_value=launched):
        add_parts(into, summands, Sums(tuple(parts)))
    torch.testing.assert_close(into.double(), exact, rtol=1e-6, atol=1e-6)
