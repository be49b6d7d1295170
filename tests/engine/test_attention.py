"""One device and a ring of threads against the dense fp64 reference: out, LSE, dq, dk and dv are checked each."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton_interpreter import error_norm

from ring_backends import DilatedPattern, dilated_attention
from ring_backends.engine import call
from ring_backends.engine.call import AttentionInputs
from ring_backends.kernels import aten_cpu
from ring_backends.kernels.steps import split_scale
from ring_backends.ring.ring import Ring
from ring_backends.schedule.planner import rank_plan
from ring_backends.testing.calls import Results, expected, largest, local_call, whole
from ring_backends.testing.fine_cuts import every_branch_on_trees, fine_cuts
from ring_backends.testing.marks import THOROUGH, matrix_but
from ring_backends.testing.rings import LAYOUTS
from ring_backends.testing.strategies import AttentionCase, attention_cases, in_parts
from ring_backends.testing.thread_ring import ThreadRing, ThreadRingDilatedAttention, run_in_threads

NAMES = Results._fields[:5]
layouts = st.sampled_from(LAYOUTS)


def module_options(case: AttentionCase) -> dict[str, Any]:
    return {**case.pattern_options(), "scale": case.scale, "dropout_p": case.dropout_p}


def single_device_results(case: AttentionCase, **more: Any) -> Results:
    def attend(*tensors: Tensor, seq_len: int, **options: Any) -> Any:
        return dilated_attention(*tensors, **module_options(case), **options, **more)

    return local_call("", Ring(), case, attention=attend).results()


def thread_ring_results(case: AttentionCase, ring_size: int, layout: Any) -> tuple[Results, tuple[ThreadRing, ...]]:
    """The whole results of a ring of threads, and its rings by rank, which have the traffic."""

    def attend(ring: ThreadRing) -> tuple[Results, ThreadRing]:
        ring = case.on_ring(ring)
        attention = ThreadRingDilatedAttention(ring=ring, **module_options(case))
        return local_call("", ring, case, attention=attention).results(), ring

    results, rings = zip(*run_in_threads(ring_size, attend, layout=layout), strict=True)
    return whole(results, case.seq_len, layout), rings


def check_exact(actual: Results, exact: Results) -> None:
    for name, tensor in exact.computed().items():
        assert error_norm(getattr(actual, name), tensor) < 1e-10, name


@in_parts(5)
@settings(max_examples=30, deadline=None)
@given(case=attention_cases(dtypes=[torch.float64]))
def test_single_device_equals_the_reference(part: int, case: AttentionCase) -> None:
    check_exact(single_device_results(case), expected(case))


def test_out_may_be_changed_in_place_until_the_backward() -> None:
    """As with ``scaled_dot_product_attention``, the backward needs the unchanged result."""
    query = torch.ones(1, 8, 2, 4, requires_grad=True)
    out = dilated_attention(query, query, query, [4, 8], [1, 2])
    assert out._base is None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.mul_(2).sum().backward()


IN_GROUPS = AttentionCase(
    *(61, (9, 61), (2, 3)),
    num_heads=6,
    num_kv_heads=2,
    value_dim=5,
    scale=-0.3,
    masked="random",
    documents="some",
    ulysses_size=3,
    dtype=torch.float64,
)
"""Groups of three. The second rank needs both key/value heads, and each of the others needs one."""


@in_parts(5)
@settings(max_examples=6, deadline=None)
@example(IN_GROUPS, 6, "zigzag")
@given(attention_cases(dtypes=[torch.float64], max_n=100), st.sampled_from([2, 3, 4, 1, 5, 7, 8, 13, 16]), layouts)
def test_ring_equals_the_reference_and_sends_the_bytes_of_the_schedule(part, case, ring_size, layout):
    actual, rings = thread_ring_results(case, ring_size, layout)
    check_exact(actual, expected(case))
    check_bytes(case, rings)


def check_bytes(case: AttentionCase, rings: tuple[ThreadRing, ...]) -> None:
    """Check that the ranks have sent the bytes of the schedule in one forward and backward."""
    sizes = {"batch": case.batch, "head_dim": case.head_dim, "value_dim": case.value_dim, "itemsize": 8}
    sizes |= {"masked": case.masked is not None, "document_bytes": 0 if case.documents is None else 8}
    sizes["buffer_bytes"] = case.buffer_bytes
    for ring in rings:
        schedule = case.schedule(ring.size, ring.layout_kind)
        forward, backward = (schedule.wire_bytes(ring.rank, **sizes, backward=direction) for direction in (False, True))
        assert ring.traffic.bytes == forward + backward


def check_rounds_like(got: Results, case: AttentionCase, *others: Results) -> None:
    """No error exceeds twice the largest of the others, and some roundings."""
    exact = expected(case)
    for name in NAMES:
        found, right, *tensors = (getattr(results, name) for results in (got, exact, *others))
        tolerance = 64 * torch.finfo(tensors[0].dtype).eps * max(1.0, largest(right))
        assert error_norm(found, right) <= 2 * max(error_norm(x, right) for x in tensors) + tolerance, name


@in_parts(5)
@settings(max_examples=5, deadline=None)
@given(
    case=attention_cases(dtypes=[torch.float64], max_n=60),
    ring_size=st.sampled_from([2, 3, 4, 1, 7]),
    layout=layouts,
    cut=st.booleans(),
    message_cost=st.sampled_from([None, 0.0, None, 0.3, 5.0]),
    share=st.sampled_from([1e9, 1.0, 0.3]),
)
def test_fine_cuts_and_trees_equal_the_reference(part, case, ring_size, layout, cut, message_cost, share):
    """Rows on trees travel in one lot, or in several."""
    trees = contextlib.nullcontext() if message_cost is None else every_branch_on_trees(message_cost, share=share)
    with fine_cuts() if cut or message_cost is None else contextlib.nullcontext(), trees:
        actual, rings = thread_ring_results(case, ring_size, layout)
        check_exact(actual, expected(case))
        check_bytes(case, rings)


@THOROUGH
@pytest.mark.parametrize(("cut", "on_trees"), [(True, False), (True, True)])
@settings(max_examples=5, deadline=None)
@given(
    case=attention_cases(dtypes=[torch.float32, torch.bfloat16], max_n=60),
    ring_size=st.sampled_from([1, 2, 3, 4, 5]),
    layout=layouts,
)
def test_fine_cuts_and_trees_round_like_others(case, ring_size, layout, cut, on_trees):
    others = [thread_ring_results(case, ring_size, layout)[0]]
    if on_trees:
        # One device has tiles with as many keys. The kernel rounds the LSE of such tiles more than that of small ones.
        others.append(single_device_results(case))
    with (
        fine_cuts() if cut else contextlib.nullcontext(),
        every_branch_on_trees() if on_trees else contextlib.nullcontext(),
    ):
        actual, _ = thread_ring_results(case, ring_size, layout)
    check_rounds_like(actual, case, *others)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", matrix_but(torch.bfloat16, of=(torch.float32, torch.bfloat16)), ids=str)
def test_a_sparse_branch_takes_few_hops(layout: str, is_causal: bool, dtype: torch.dtype) -> None:
    """Ranks of a ring of 8 post one hop in a forward. A backward takes two, or four if no memory is left for more."""
    case = AttentionCase(
        4096, (64, 256, 4096), (1, 4, 64), num_heads=2, num_kv_heads=2, is_causal=is_causal, dtype=dtype
    )
    query, key, value, grad_out, _ = case.tensors()

    def attend(ring: ThreadRing) -> list[int]:
        attention = ThreadRingDilatedAttention(case.segment_lengths, case.dilation_rates, ring=ring)
        leaves = [ring.shard(x).requires_grad_() for x in (query, key, value)]
        with mock.patch.object(attention, "ring_pass", wraps=attention.ring_pass) as ring_pass:
            out = attention(*leaves, is_causal=is_causal)
            forward = ring_pass.call_count
            torch.autograd.grad(out, leaves, ring.shard(grad_out))
            return [forward, ring_pass.call_count - forward]

    hops = run_in_threads(8, attend, layout=layout)
    assert all(forward == 1 and backward <= 4 for forward, backward in hops), hops


@pytest.mark.parametrize("scale", [-0.3, 0.0, 1e-45])
def test_kernels_get_a_positive_scale(scale: float) -> None:
    case = AttentionCase(128, (64, 128), (1, 2), 2, 4, 2, 16, is_causal=True, scale=scale, dtype=torch.float64)
    # With any other scale, torch's operator returns NaN, and the math kernel computes the tile again.
    with mock.patch.object(aten_cpu, "blockwise", None):
        results = single_device_results(case, kernel="aten_cpu_flash")
    check_exact(results, expected(case))
    assert split_scale(1e-45) == split_scale(0.0) == (0.0, 1.0)


@pytest.mark.parametrize("autocast_dtype", [torch.bfloat16, torch.float16])
def test_autocast_as_in_scaled_dot_product_attention(autocast_dtype: torch.dtype) -> None:
    """Autocast casts all dtypes except fp64, also mixed ones. Gradients have the dtypes of the inputs."""
    query = torch.randn(1, 32, 2, 8, requires_grad=True)
    key = torch.randn(1, 32, 2, 8).half().requires_grad_()
    value = torch.randn(1, 32, 2, 8).bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=autocast_dtype):
        out = dilated_attention(query, key, value, [32], [1])
        plain = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (query, key, value))
        ).transpose(1, 2)
        assert out.dtype == plain.dtype == autocast_dtype
        double = dilated_attention(*(x.double() for x in (query, key, value)), [32], [1])
        assert double.dtype == torch.float64
        with pytest.raises(ValueError, match="key has dtype"):
            dilated_attention(query.double(), key, value, [32], [1])
    torch.testing.assert_close(out, plain, rtol=0, atol=2e-2)
    out.backward(torch.randn_like(out))
    assert [x.grad.dtype for x in (query, key, value)] == [torch.float32, torch.float16, torch.bfloat16]


def test_a_call_under_autocast_is_another_call() -> None:
    """Checked calls are kept. A call has other plans under autocast."""
    inputs = AttentionInputs(*torch.randn(3, 1, 64, 2, 8).unbind())
    made = []
    for is_enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_enabled):
            made.append(call.look_up(inputs, DilatedPattern([16, 64], [1, 2]), Ring(), None, "auto"))
    (plain, of_plain), (cast, of_cast) = made
    assert (plain.query.dtype, cast.query.dtype) == (torch.float32, torch.bfloat16)
    assert of_plain is not of_cast


def test_a_forward_without_gradients_plans_no_backward() -> None:
    query, key, value = (torch.randn(1, 12, 2, 4, requires_grad=True) for _ in range(3))
    with mock.patch.object(call, "rank_plan", wraps=rank_plan) as planned:
        with torch.no_grad():
            dilated_attention(query, key, value, [4, 12], [1, 2])
        assert [options.kwargs["backward"] for options in planned.call_args_list] == [False]
        dilated_attention(query, key, value, [4, 12], [1, 2]).sum().backward()
    assert [options.kwargs["backward"] for options in planned.call_args_list] == [False, True]


def test_tensors_without_values_are_refused_on_a_ring() -> None:
    ring = Ring(size=2, rank=0, ranks=(0, 1), agreement=mock.Mock())
    attention = ThreadRingDilatedAttention([8], [1], ring=ring)
    tensors = torch.empty(3, 1, 4, 2, 8, device="meta")
    with pytest.raises(ValueError, match="query is a meta or fake tensor, and the ring has 2 ranks"):
        attention(*tensors)


def test_ranks_of_a_group_with_little_work_are_named() -> None:
    """The first head sees 16 keys, the second one 256."""
    ring, rows = Ring(size=2, ranks=(0, 1), ulysses_size=2), torch.zeros(1, 128, 2, 4)
    with pytest.warns(UserWarning, match="have 6%, 94% of its work"):
        call.check_call(
            AttentionInputs(rows, rows, rows), DilatedPattern.grouped([16, None], [1, 1]), ring, None, "auto"
        )
