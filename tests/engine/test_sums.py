"""Plans with a base branch, and the sums of the other branches in bf16 and fp16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from test_synchronisation import no_hops, run
from triton_interpreter import results

from ring_backends import DilatedPattern
from ring_backends.engine.call import AttentionInputs, check_call
from ring_backends.engine.results import BlockOut
from ring_backends.kernels import per_tile
from ring_backends.kernels.math import MathKernel
from ring_backends.kernels.rows import gather
from ring_backends.ring.ring import Ring
from ring_backends.schedule import limits
from ring_backends.schedule.planner import rank_plan
from ring_backends.testing.calls import check_results, check_rounded, expected
from ring_backends.testing.fine_cuts import fine_cuts
from ring_backends.testing.strategies import AttentionCase


@pytest.fixture(params=[True, False], ids=["cut base", "whole base"])
def cuts_base(request: pytest.FixtureRequest) -> Iterator[None]:
    """Plan for the CPU with and without cuts of the base branch, as on an accelerator."""
    with mock.patch.object(limits, "ON_CPU", replace(limits.ON_CPU, cuts_base=request.param)):
        rank_plan.cache_clear()
        yield
    rank_plan.cache_clear()


OVERLAPPING = AttentionCase(96, (32, 48, 96), (1, 2, 4), batch=2, num_heads=4, num_kv_heads=2, head_dim=16)
CASES = {
    "overlapping": OVERLAPPING,
    "causal": replace(OVERLAPPING, is_causal=True, offset="block"),
    "ragged": replace(OVERLAPPING, seq_len=90, segment_lengths=(16, 40, 90), is_causal=True),
    "four branches": replace(OVERLAPPING, segment_lengths=(32, 48, 96, 96), dilation_rates=(1, 2, 4, 8)),
    "two dense branches": replace(OVERLAPPING, segment_lengths=(32, 96), dilation_rates=(1, 1)),
    "one branch": replace(OVERLAPPING, segment_lengths=(32,), dilation_rates=(1,), is_causal=True),
    "no base": replace(OVERLAPPING, dilation_rates=(2, 4, 8)),
    "key mask": replace(OVERLAPPING, masked="rows"),
    "documents": replace(OVERLAPPING, documents="some"),
    "dropout": replace(OVERLAPPING, dropout_p=0.3),
    "zero keys": replace(OVERLAPPING, seq_len=90, segment_lengths=(32, 90), dilation_rates=(1, 2), padding="zeros"),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_rounding_is_bounded_by_plain_attention(cuts_base: None, name: str, dtype: torch.dtype) -> None:
    case = replace(CASES[name], dtype=dtype)
    check_rounded(results(case, kernel="auto"), case)


@pytest.mark.parametrize("head_mode", ["all", "grouped"])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
def test_tiles_cut_by_lattices(num_kv_heads: int, head_mode: str) -> None:
    """A kernel that reads strided rows gets large tiles in parts, whose query rows are views."""
    heads = {"num_heads": 8, "num_kv_heads": num_kv_heads, "head_mode": head_mode}
    case = AttentionCase(96, (12, 48, 96), (2, 3, 8), batch=2, dtype=torch.float64, **heads)
    with (
        mock.patch.object(MathKernel, "reads_strided_rows", True),
        mock.patch.object(per_tile, "MIN_PART_FLOPS", 0),
        mock.patch.object(BlockOut, "merge_tile", autospec=True, side_effect=BlockOut.merge_tile) as merged,
    ):
        check_results(results(case, kernel="math"), expected(case), 1e-12)
    if num_kv_heads == 8 and head_mode == "all":
        cut = [call.args[1] for call in merged.call_args_list]
        assert len(cut) > len(case.segment_lengths)
        assert all(len(tile.lattices) == 1 for tile in cut)


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_finely_cut_tiles_do_not_store_over_each_other(num_kv_heads: int) -> None:
    """Query heads with different offsets share a key/value head, and the tiles are cut by heads."""
    branches = {"segment_lengths": (8, 64), "dilation_rates": (1, 2)}
    case = replace(OVERLAPPING, seq_len=64, num_kv_heads=num_kv_heads, dtype=torch.bfloat16, **branches)
    with fine_cuts(512):
        check_rounded(results(case, kernel="auto"), case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_launch_adds_two_values_to_one_element(dtype: torch.dtype) -> None:
    """Programs of one launch add without atomic operations."""
    ring = Ring(size=4, rank=0, ranks=(0, 1, 2, 3))
    query, key, value = torch.zeros(3, 1, 16, 2, 8, dtype=dtype)
    inputs, call = check_call(
        AttentionInputs(query, key, value, seq_len=64), DilatedPattern([64, 64], [1, 2]), ring, None, "auto"
    )
    launches = []

    def check_disjoint(stored: Any = (), added: Any = ()) -> None:
        launches.append(len(added))
        written: dict[int, set[int]] = {}
        for tensor, rows, _ in [*stored, *added]:
            numbers = gather(torch.arange(tensor.numel()).view(tensor.shape), rows).flatten().tolist()
            before = written.setdefault(tensor.data_ptr(), set())
            assert not before.intersection(numbers)
            before.update(numbers)

    with mock.patch("ring_backends.engine.wire.scatter_many", check_disjoint):
        run(call, inputs, no_hops("cpu"))
    assert sum(launches) > 2
