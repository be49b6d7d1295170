"""Public functions return a result or raise a documented error for any arguments."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ring_backends import DilatedPattern, Ring, RingSchedule, SequenceLayout, dilated_attention
from ring_backends.testing.strategies import AttentionCase, attention_cases, in_parts

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
FUZZ = settings(max_examples=200, deadline=None, derandomize=True, database=None, suppress_health_check=SLOW)
DOCUMENTED = (ValueError, TypeError)
SIZES = st.integers(0, 5)
HUGE = 2**31


@st.composite
def odd_tensors(draw: st.DrawFn) -> Tensor:
    """Tensors of any small shape and dtype, with special values and unusual strides."""
    shape = draw(st.lists(SIZES, max_size=6))
    dtype = draw(st.sampled_from(["float32", "float64", "bfloat16", "float16", "int64", "bool", "complex64"]))
    number = draw(st.sampled_from([0.0, 1.0, -1e30, float("nan"), float("inf")]))
    tensor = torch.full(shape, number).to(getattr(torch, dtype))
    how = draw(st.sampled_from(["plain", "transposed", "expanded", "every other", "meta"]))
    if how == "transposed":
        return tensor.permute(list(reversed(range(tensor.dim()))))
    if how == "expanded":
        return tensor[..., :1].expand(tensor.shape) if tensor.dim() and tensor.shape[-1] else tensor
    if how == "every other":
        return tensor.repeat_interleave(2, 0)[::2] if tensor.dim() else tensor
    return tensor.to("meta") if how == "meta" else tensor


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 70),
    st.sampled_from([HUGE, 2**63, -(2**63), 10**30]),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["all", "grouped", "mod", "block", "branch", "every", "masked", "zeros", "contiguous", "zigzag"]),
    st.binary(max_size=3),
    st.lists(st.one_of(st.integers(-2, 40), st.floats(), st.text(max_size=2), st.none()), max_size=4),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
    odd_tensors(),
    st.just(object()),
    st.just(torch.Size([2])),
)
ARGUMENTS = (
    *("query", "key", "value", "segment_lengths", "dilation_rates"),
    *("is_causal", "head_mode", "offset", "padding", "window_lengths", "scale", "kernel"),
    *("key_padding_mask", "return_lse", "document_ids", "dropout_p", "dropout_seed", "sinks", "score_mod"),
)


@in_parts(8)
@settings(FUZZ, max_examples=50)
@given(
    case=attention_cases(max_n=24), changes=st.dictionaries(st.sampled_from(ARGUMENTS), JUNK, min_size=1, max_size=3)
)
def test_attention(part: int, case: AttentionCase, changes: dict[str, Any]) -> None:
    """Make a valid call with some arguments replaced by arbitrary values."""
    query, key, value, _, mask = case.tensors()
    arguments = {"query": query, "key": key, "value": value, "key_padding_mask": mask, **case.options()}
    arguments |= {"document_ids": case.document_ids(), "dropout_p": case.dropout_p, **changes}
    try:
        result = dilated_attention(**arguments)
    except DOCUMENTED:
        return
    out = result[0] if isinstance(result, tuple) else result
    query, _, value = numbers = [arguments[name] for name in ("query", "key", "value")]
    assert (out.shape, out.dtype) == ((*query.shape[:3], value.shape[3]), query.dtype)
    finite = all(x.device.type == "cpu" and x.isfinite().all() for x in numbers)
    moderate = finite and abs(arguments["scale"] or 1) < 1e3
    if moderate and all(x.abs().amax() < 1e3 for x in numbers if x.numel()):
        assert out.isfinite().all()


@FUZZ
@given(st.lists(JUNK, min_size=2, max_size=6))
def test_patterns(arguments: list[Any]) -> None:
    try:
        pattern = DilatedPattern(*arguments)
        pattern.check(seq_len=40, num_heads=4)
    except DOCUMENTED:
        return
    assert len(pattern.segment_lengths) == len(pattern.dilation_rates) > 0


@FUZZ
@given(JUNK, JUNK, JUNK, JUNK, JUNK)
def test_layouts_and_schedules(seq_len: Any, ring_size: Any, kind: Any, heads: Any, kv_heads: Any) -> None:
    try:
        layout = SequenceLayout(seq_len, ring_size, kind)
        schedule = RingSchedule(DilatedPattern((8, 40), (1, 3)), layout, heads, kv_heads)
    except DOCUMENTED:
        return
    if max(seq_len, ring_size, heads) < 100:
        assert sum(map(layout.local_len, range(ring_size))) == seq_len
        assert schedule.wire_bytes(0, batch=1, head_dim=4, itemsize=4) >= 0


@FUZZ
@given(odd_tensors(), JUNK, JUNK)
def test_rings_of_one(tensor: Tensor, dim: Any, seq_len: Any) -> None:
    ring = Ring()
    assert ring.shard(tensor, 0) is tensor
    try:
        unsharded = ring.unshard(tensor, dim, seq_len)
    except DOCUMENTED:
        return
    assert unsharded is tensor


LAYOUT_KINDS = st.sampled_from(["contiguous", "zigzag"])


def mostly(valid: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Values that may be valid, and sometimes any others."""
    return st.integers(0, 3).flatmap(lambda number: valid if number else JUNK.filter(lambda value: value is not HUGE))


@FUZZ
@given(odd_tensors(), mostly(SIZES), mostly(st.integers(-2, 2)), mostly(st.none()), LAYOUT_KINDS)
def test_halos(rows: Tensor, width: Any, dim: Any, seq_len: Any, layout: Any) -> None:
    try:
        halo = Ring(layout_kind=layout).halo(rows, width, dim, seq_len)
    except DOCUMENTED:
        return
    shape = [*rows.shape]
    shape[dim] = width * (2 if layout == "zigzag" else 1)
    assert ([*halo.shape], halo.dtype, halo.device) == (shape, rows.dtype, rows.device)


@FUZZ
@given(odd_tensors(), mostly(odd_tensors()), st.booleans(), LAYOUT_KINDS)
def test_entering_states(state: Tensor, decay: Any, matrix: bool, layout: Any) -> None:
    try:
        entering = Ring(layout_kind=layout).entering_state(decay, state, matrix=matrix)
    except DOCUMENTED:
        return
    assert (entering.shape, entering.dtype, entering.device) == (state.shape, state.dtype, state.device)
