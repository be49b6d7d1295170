"""Attention inside a compiled graph: every hop is an operator of the graph, and so nothing breaks the graph in two.

Under ``torch.compile`` a call of attention becomes a row of custom operators, in the forward graph as in the backward:

- ``ring_backends::begin_forward`` or ``begin_backward``: agrees with the other ranks, and begins the walk of the plan;
- ``ring_backends::post_hop``: posts the walk's next hop, and goes on, over the tiles, to where it posts another; once
  for every hop that this rank takes part in;
- ``ring_backends::end_forward`` or ``end_backward``: gives the result.

Each takes the walk from the one before it, so that no pass over the graph drops, repeats or reorders them. What runs
inside of them is the very walk that runs outside of a graph. Which module they belong to is an input of the graph and
not a constant in it, so that blocks that are alike share one graph. Sizes are constants, since the plan depends on
them: a sequence of another length is compiled anew. Arguments are checked while compiling, and an error is torch's own
with this package's as its cause.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.library import custom_op

from ring_backends.engine.call import Request, autocast, no_hops
from ring_backends.engine.call import attend as attend_under_autograd
from ring_backends.engine.walk import ByHops, Hops, Inputs, Walk
from ring_backends.kernels.merge import statistics_dtype
from ring_backends.ring.agreement import backward_of
from ring_backends.ring.ring import Ring
from ring_backends.schedule.pattern import DilatedPattern

if TYPE_CHECKING:
    from ring_backends.attention import RingDilatedAttention

_modules: WeakValueDictionary[int, RingDilatedAttention] = WeakValueDictionary()
_walks: dict[int, _WalkUnderWay] = {}
_numbers = itertools.count()


def enlist(module: RingDilatedAttention) -> Tensor:
    """Number a module, for operators to find it by; as a tensor, which torch.compile makes an input of the graph."""
    number = next(_numbers)
    _modules[number] = module
    return torch.tensor([number], device="cpu")


def constants(pattern: DilatedPattern, ring: Ring, scale: float | None, kernel: str) -> tuple[Any, ...]:
    """What a graph depends on besides its inputs, as plain values, which is what torch.compile can compare."""
    branches = (pattern.segment_lengths, pattern.dilation_rates, pattern.head_mode, pattern.offset, pattern.padding)
    return *branches, ring.size, ring.rank, ring.layout_kind, scale, kernel


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def attend(
    handle: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    document_ids: Tensor | None,
    dropout_seed: Tensor | None,
    is_causal: bool,
    seq_len: int | None,
    return_lse: bool,
    dropout_p: float,
    segment_lengths: tuple[int, ...],
    dilation_rates: tuple[int, ...],
    head_mode: Any,
    offset: Any,
    padding: Any,
    ring_size: int,
    ring_rank: int,
    layout: Any,
    scale: float | None,
    kernel: str,
) -> Any:
    """What torch.compile traces in place of a call of attention, with tensors that hold no numbers."""
    query, key, value = map(_with_constant_sizes, autocast(query, key, value))
    mask, documents = (None if x is None else _with_constant_sizes(x) for x in (key_padding_mask, document_ids))
    inputs = Inputs(query, key, value, mask, documents, dropout_seed)
    seq_len = None if seq_len is None else int(seq_len)
    pattern = DilatedPattern(segment_lengths, dilation_rates, head_mode, offset, padding)
    ring = Ring(size=ring_size, rank=ring_rank, ranks=tuple(range(ring_size)), layout_kind=layout)
    # A plan is made of tensors that do hold numbers. What makes torch trace is set per thread, hence another thread.
    with ThreadPoolExecutor(1) as untraced:
        request = untraced.submit(
            Request.check, inputs, pattern, ring, is_causal, seq_len, scale, kernel, return_lse, dropout_p
        ).result()
    walk = _TracedWalk(handle, request.walk, is_causal, request.schedule.layout.seq_len, request.needs_gradients)
    return attend_under_autograd(request.inputs, walk, no_hops, return_lse)


def _with_constant_sizes(tensor: Tensor) -> Tensor:
    return tensor.view([int(size) for size in tensor.shape])


@dataclass
class _TracedWalk:
    """Puts the operators of one call's walks into the graph, in place of a :class:`~ring_backends.engine.walk.Walk`."""

    module: Tensor
    walk: Walk
    is_causal: bool
    seq_len: int
    needs_gradients: bool
    _forward: Tensor = field(init=False)

    def forward(self, inputs: Inputs, hops: Hops | None) -> ByHops[tuple[Tensor, Tensor]]:
        tensors = _tensors(inputs)
        walk = begin_forward(self.module, *tensors, self.is_causal, self.seq_len, self.needs_gradients)
        walk = yield from self._by_hops(walk, self.walk.forward_plan.num_hops(backward=False))
        out, lse, self._forward = end_forward(walk, *tensors)
        return out, lse

    def backward(
        self, inputs: Inputs, out: Tensor, lse: Tensor, grad_out: Tensor, hops: Hops | None
    ) -> ByHops[tuple[Tensor, Tensor, Tensor]]:
        tensors = [*_tensors(inputs), out, lse, grad_out]
        walk = begin_backward(self._forward, *tensors, self.is_causal, self.seq_len)
        walk = yield from self._by_hops(walk, self.walk.backward_plan.num_hops(backward=True))
        return cast(tuple[Tensor, Tensor, Tensor], end_backward(walk, *tensors))

    def _by_hops(self, walk: Tensor, num_hops: int) -> ByHops[Tensor]:
        for _ in range(num_hops):
            yield
            walk = post_hop(walk)
        return walk


def _tensors(inputs: Inputs) -> list[Any]:
    return [getattr(inputs, field.name) for field in fields(inputs)]


class _WalkUnderWay:
    """A walk that goes on from hop to hop."""

    def __init__(self, by_hops: ByHops[Any], device: torch.device) -> None:
        self._by_hops, self._device = by_hops, device
        self._result: Any = None
        self.go_on()

    def go_on(self) -> None:
        with torch.autocast(self._device.type, enabled=False):
            try:
                next(self._by_hops)
            except StopIteration as end:
                self._result = end.value

    def result(self) -> Any:
        assert self._result is not None, "the graph has fewer hops than the walk"
        return self._result


# A walk travels from operator to operator as three numbers: the module's, the walk's, and the ring's for the call.


def _module(number: int) -> RingDilatedAttention:
    if number not in _modules:
        raise RuntimeError(
            "the attention module of a compiled call is gone, and its forward or backward runs only now; keep the "
            "model until then."
        )
    return _modules[number]


def _request(attention: RingDilatedAttention, inputs: Inputs, is_causal: bool, seq_len: int) -> Request:
    """The call, whose tensors were cast while tracing; autocast may be on here where it was off there."""
    with torch.autocast(inputs.query.device.type, enabled=False):
        return attention._request(inputs, is_causal, seq_len)


def _begin(module: int, by_hops: ByHops[Any], call_number: int, device: torch.device) -> Tensor:
    number = next(_numbers)
    _walks[number] = _WalkUnderWay(by_hops, device)
    return torch.tensor([module, number, call_number], device="cpu")


@custom_op("ring_backends::begin_forward", mutates_args=())
def begin_forward(
    module: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    document_ids: Tensor | None,
    dropout_seed: Tensor | None,
    is_causal: bool,
    seq_len: int,
    needs_gradients: bool,
) -> Tensor:
    """Begin the forward of one call."""
    attention = _module(int(module))
    inputs = Inputs(query, key, value, key_padding_mask, document_ids, dropout_seed)
    request = _request(attention, inputs, is_causal, seq_len)
    hops = attention._start(request, needs_gradients=needs_gradients)("forward")
    call_number = 0 if hops is None else hops.call.number
    return _begin(int(module), request.walk.forward(request.inputs, hops), call_number, query.device)


@custom_op("ring_backends::begin_backward", mutates_args=())
def begin_backward(
    forward: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    document_ids: Tensor | None,
    dropout_seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    is_causal: bool,
    seq_len: int,
) -> Tensor:
    """Begin the backward of the call whose forward was this one."""
    module, _, call_number = forward.tolist()
    attention = _module(module)
    inputs = Inputs(query, key, value, key_padding_mask, document_ids, dropout_seed)
    request = _request(attention, inputs, is_causal, seq_len)
    hops = attention._start(request, needs_gradients=True)(backward_of(call_number))
    walk = request.walk.backward(request.inputs, out, lse, grad_out, hops)
    return _begin(module, walk, call_number, query.device)


@custom_op("ring_backends::post_hop", mutates_args=())
def post_hop(walk: Tensor) -> Tensor:
    """Post the next hop, and go on."""
    number = int(walk[1])
    under_way = _walks.pop(number)  # a walk that fails is not gone on with
    under_way.go_on()
    _walks[number] = under_way
    return walk.clone()


# The tensors that a walk reads are arguments of its end too: a compiler may use their memory after their last use.


@custom_op("ring_backends::end_forward", mutates_args=())
def end_forward(
    walk: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    document_ids: Tensor | None,
    dropout_seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, LSE) of the walk, and its numbers for the backward, which then needs nothing else of the forward."""
    out, lse = _walks.pop(int(walk[1])).result()
    return out, lse, walk.clone()


@custom_op("ring_backends::end_backward", mutates_args=())
def end_backward(
    walk: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    document_ids: Tensor | None,
    dropout_seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    grad_out: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    return cast(tuple[Tensor, Tensor, Tensor], _walks.pop(int(walk[1])).result())


def _fake_walk(module_or_walk: Tensor, *args: object) -> Tensor:
    return module_or_walk.new_empty(3)


for _operator in (begin_forward, begin_backward, post_hop):
    _operator.register_fake(_fake_walk)


@end_forward.register_fake
def _(walk: Tensor, query: Tensor, *args: object) -> tuple[Tensor, Tensor, Tensor]:
    lse = query.new_empty(query.shape[:3], dtype=statistics_dtype(query.dtype))
    return query.new_empty(query.shape), lse, _fake_walk(walk)


@end_backward.register_fake
def _(walk: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: object) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


END_FORWARD = torch.ops.ring_backends.end_forward.default
