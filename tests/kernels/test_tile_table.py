"""The tables of the Triton kernels: no two entries share a row. Random calls of test_triton.py check their links."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ring_backends.kernels.tile_table import parcels, tile_groups, tile_table
from ring_backends.schedule.planner import rank_plan
from ring_backends.testing.marks import THOROUGH
from ring_backends.testing.strategies import AttentionCase, attention_cases

Row = tuple[int, int]
"""The head and the position of a local row; or the offset of its parcel in the buffer, and its number in the parcel."""

Entries = list[list[list[Row]]]
"""The rows of each entry and segment."""


@THOROUGH
@settings(max_examples=100, deadline=None)
@given(
    case=attention_cases(max_n=40, max_heads=3),
    ring_size=st.integers(1, 4),
    layout=st.sampled_from(["contiguous", "zigzag"]),
    backward=st.booleans(),
)
def test_no_two_entries_share_a_row(case: AttentionCase, ring_size: int, layout: str, backward: bool) -> None:
    """The programs of a launch store rows without atomic operations. Triton's interpreter runs them one by one."""
    schedule = case.schedule(ring_size, layout).of_members[-1]
    for rank in range(schedule.layout.ring_size):
        plan = rank_plan(schedule, rank, batch=1, head_dim=4, itemsize=4, backward=backward)
        for _, step in plan.steps:
            for group in tile_groups(step.all_tiles) if step.all_tiles else ():
                tiles = step.all_tiles[group.tiles]
                offsets = tuple((1000 * (1 + number),) * 6 for number in range(len(parcels(tiles))))
                table = tile_table(tiles, offsets, torch.device("cpu"))
                for rows in (entries(table.queries), entries(table.keys)):
                    assert max(Counter(chain.from_iterable(chain.from_iterable(rows))).values()) == 1


def entries(table: Tensor) -> Entries:
    """The rows of each entry and segment of a table."""
    found = []
    for head, first, stride, rate, rows, segments, *others in table.tolist():
        name = others[1] if len(others) > 1 and others[1] else head
        starts = (first + segment * stride for segment in range(segments))
        found.append([[(name, start + i * rate) for i in range(rows)] for start in starts])
    return found
