"""The communication buffers that the cost model counts, against those that ranks take in their calls."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ring_backends import DilatedPattern, RingSchedule, SequenceLayout
from ring_backends.engine.call import AttentionCall, AttentionInputs
from ring_backends.engine.results import BlockGrads, BlockOut
from ring_backends.engine.run import backward, forward
from ring_backends.engine.wire import Hops
from ring_backends.kernels.base import Kernel
from ring_backends.ring.members import Traffic
from ring_backends.ring.wire_memory import CallMemory
from ring_backends.schedule.planner import rank_plan
from ring_backends.testing.fine_cuts import every_branch_on_trees, fine_cuts
from ring_backends.testing.marks import MORE_CASES, THOROUGH, matrix_but
from ring_backends.testing.strategies import AttentionCase, attention_cases, in_parts

META = torch.device("meta")
DTYPES = torch.float32, torch.bfloat16, torch.float64


class CountedMemory(CallMemory):
    """Counts the bytes that buffers take at one time.

    Attributes:
        peak: the largest number so far.
    """

    def __init__(self) -> None:
        super().__init__(META)
        self.taken: dict[Tensor, int] = {}
        self.peak = 0

    def take(self, size: int, *, zeroed: bool = False) -> Tensor:
        buffer = super().take(size, zeroed=zeroed)
        self.taken[buffer] = size
        self.peak = max(self.peak, sum(self.taken.values()))
        return buffer

    def give_back(self, *buffers: Tensor) -> None:
        for buffer in buffers:
            del self.taken[buffer]


def bytes_taken(
    schedule: RingSchedule,
    rank: int,
    dtype: torch.dtype,
    *,
    is_backward: bool,
    grad_wire_dtype: torch.dtype | None = None,
    **sizes: Any,
) -> int:
    """The most bytes that the buffers of a rank take at one time. The tiles compute nothing."""
    call = AttentionCall(schedule, rank, mock.create_autospec(Kernel, instance=True), 1.0, None, grad_wire_dtype)
    call._plans[is_backward] = rank_plan(schedule, rank, itemsize=dtype.itemsize, backward=is_backward, **sizes)
    shape = sizes["batch"], schedule.layout.local_len(rank)
    query, key = (
        torch.empty(*shape, heads, sizes["head_dim"], dtype=dtype, device=META)
        for heads in (len(schedule.heads), len(schedule.kv_heads))
    )
    inputs = AttentionInputs(query, key, key, is_causal=schedule.is_causal, seq_len=schedule.layout.seq_len)
    transfer, memory = mock.Mock(**{"wait.return_value": None}), CountedMemory()
    posts, call_of_ring, agreement = mock.Mock(return_value=transfer), mock.MagicMock(), mock.MagicMock()
    hops = Hops(rank, posts, call_of_ring, agreement, Traffic(), memory, call.ring_ranks)
    with mock.patch.object(BlockOut, "finish"), mock.patch.object(BlockGrads, "finish"):
        if is_backward:
            backward(call, inputs, query, query[..., 0], query, hops)
        else:
            forward(call, inputs, hops)
    assert not memory.taken
    return memory.peak


def check(schedule: RingSchedule, dtype: torch.dtype, **sizes: Any) -> list[int]:
    """Check that no rank takes more bytes than the schedule says.

    Returns:
        The most bytes that a rank takes in a forward, and in a backward.
    """
    found = []
    wire_dtypes = (None, torch.bfloat16) if dtype == torch.bfloat16 else (None,)
    for is_backward in (False, True):
        travel = schedule.travel(itemsize=dtype.itemsize, backward=is_backward, **sizes)
        taken = [
            bytes_taken(schedule, rank, dtype, is_backward=is_backward, grad_wire_dtype=wire_dtype, **sizes)
            for rank in range(schedule.layout.ring_size)
            for wire_dtype in wire_dtypes[: 1 + is_backward]
        ]
        assert max(taken) <= travel.buffer_bytes
        found.append(max(taken))
    return found


@in_parts(3)
@settings(max_examples=8, deadline=None)
@example(  # a rank in the middle receives rows of two segments at a time
    case=AttentionCase(seq_len=36, segment_lengths=(18,), dilation_rates=(1,)),
    ring_size=3,
    kind="contiguous",
    dtype=torch.float32,
    fine=False,
)
@example(  # rows of a segment arrive from below and, after the last rank, from above
    case=AttentionCase(seq_len=160, segment_lengths=(120,), dilation_rates=(1,), is_causal=True),
    ring_size=8,
    kind="zigzag",
    dtype=torch.float32,
    fine=False,
)
@given(
    case=attention_cases(max_n=96),
    ring_size=st.integers(2, 8),
    kind=st.sampled_from(["contiguous", "zigzag"]),
    dtype=st.sampled_from(DTYPES),
    fine=st.booleans(),
)
def test_no_rank_takes_more_than_the_schedule_says(
    part: int, case: AttentionCase, ring_size: int, kind: Any, dtype: torch.dtype, fine: bool
) -> None:
    """With ``fine``, heads are cut into blocks, and the rows of hops into shares."""
    schedule = case.schedule(ring_size, kind).of_members[-1]
    with fine_cuts() if fine else nullcontext():
        check(schedule, dtype, batch=1, head_dim=16, buffer_bytes=0, few_hops=False)


@THOROUGH
@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(
    case=attention_cases(max_n=96),
    ring_size=st.integers(2, 9),
    kind=st.sampled_from(["contiguous", "zigzag"]),
    dtype=st.sampled_from(DTYPES),
    message_cost=st.sampled_from([0.0, 5.0]),
    share=st.sampled_from([1e9, 1.0, 0.3]),
)
def test_rows_on_trees_take_no_more_than_the_schedule_says(
    case: AttentionCase, ring_size: int, kind: Any, dtype: torch.dtype, message_cost: float, share: float
) -> None:
    """The rows travel in one lot or in several, in one hop or in several. dK and dV travel as sums or in bf16."""
    with every_branch_on_trees(message_cost, share=share):
        check(case.schedule(ring_size, kind).of_members[-1], dtype, batch=1, head_dim=16, buffer_bytes=0)


@pytest.mark.parametrize("is_causal", matrix_but(False, of=(True, False)))
@pytest.mark.parametrize(
    ("device_type", "layout"), [pytest.param("cpu", "contiguous", marks=MORE_CASES), ("cuda", "zigzag")]
)
def test_buffers_of_long_calls_stay_in_the_budget(device_type: str, layout: Any, is_causal: bool) -> None:
    """The 32 heads do not divide into equal blocks as small as the budget asks for."""
    pattern = DilatedPattern((None,), (1,))
    schedule = RingSchedule(pattern, SequenceLayout(2**18, 4, layout), 32, is_causal=is_causal)
    sizes = {"batch": 1, "head_dim": 64, "device_type": device_type}
    taken = check(schedule, torch.bfloat16, **sizes)
    for is_backward in (False, True):
        travel = schedule.travel(itemsize=2, backward=is_backward, **sizes)
        limits, tensor_bytes = travel.volume.limits, travel.volume.tensor_bytes
        budget = max(limits.communication_share * tensor_bytes, limits.buffer_bytes)
        assert 0.6 * travel.buffer_bytes <= taken[is_backward] <= travel.buffer_bytes <= budget
