"""Attention inside a compiled graph: custom operators, so that a call does not break the graph.

On one device, a call is one operator in the forward graph and one in the backward graph:
``ring_backends::attend_forward`` and ``ring_backends::attend_backward``. Everything besides tensors is a constant of
the graph, and no tensor is on the CPU. So a CUDA graph can contain the operators.

On a ring, a call is a sequence of operators, both in the forward graph and in the backward graph:

- ``ring_backends::begin_forward`` or ``begin_backward`` agrees with the other ranks and begins the computation.
- ``ring_backends::post_hop`` posts the next hop, and computes tiles up to the hop after it. The graph has one such
  operator for each hop that this rank takes part in.
- ``ring_backends::end_forward`` or ``end_backward`` returns the result.

Each operator takes a tensor that the operator before it returned. So no compiler pass drops, repeats or reorders them.
The number of the module is an input of the graph, not a constant, so that equal blocks share one graph. These operators
work on the host in every call, so a CUDA graph must not contain them. A call with dropout on one device uses them too,
since its seed is drawn on the host.

All operators run the same code as a call outside of a graph. Sizes are constants, since the plan depends on them. A
sequence of another length is compiled again. Arguments are checked during compilation. If a check fails, torch raises
its own error, which quotes this package's error.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.library import custom_op

from ring_backends.engine.autograd import attend as attend_under_autograd
from ring_backends.engine.backward import backward
from ring_backends.engine.call import autocast, check_call
from ring_backends.engine.forward import forward
from ring_backends.engine.hops import ByHops, finish
from ring_backends.engine.inputs import AttentionInputs
from ring_backends.kernels.dtype import without_autocast
from ring_backends.kernels.merge import statistics_dtype
from ring_backends.ring.calls import backward_of
from ring_backends.ring.ring import Ring
from ring_backends.schedule.pattern import DilatedPattern

if TYPE_CHECKING:
    from ring_backends.attention import RingDilatedAttention

_modules: WeakValueDictionary[int, RingDilatedAttention] = WeakValueDictionary()
_running: dict[int, _Running] = {}
_numbers = itertools.count()


def register_module(module: RingDilatedAttention) -> Tensor:
    """Return a number by which operators find the module, as a tensor, so that it becomes an input of the graph."""
    number = next(_numbers)
    _modules[number] = module
    return torch.tensor([number], device="cpu")


def constants(pattern: DilatedPattern, ring: Ring, scale: float | None, kernel: str) -> dict[str, Any]:
    """The values that a graph depends on besides its inputs, in types that torch.compile can compare."""
    return {
        "pattern": (
            pattern.segment_lengths,
            pattern.dilation_rates,
            pattern.head_mode,
            pattern.offset,
            pattern.padding,
        ),
        "ring": (ring.size, ring.rank, ring.layout_kind),
        "scale": scale,
        "kernel": kernel,
    }


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def attend(
    handle: Tensor | None, tensors: tuple[Tensor | None, ...], options: dict[str, Any], constants: dict[str, Any]
) -> Any:
    """Compute a call of attention while torch.compile traces it with fake tensors.

    Args:
        handle: the tensor that :func:`register_module` returned; None on one device without dropout.
        tensors, options: the tensors and options of the call's :class:`AttentionInputs`.
        constants: the result of :func:`constants`.
    """
    options, as_json = json.loads(_to_json(options)), _to_json(constants)
    inputs = AttentionInputs.of([None if x is None else _with_constant_sizes(x) for x in tensors], options)
    query, key, value = map(autocast, (inputs.query, inputs.key, inputs.value))
    inputs = replace(inputs, query=query, key=key, value=value)
    needs_gradients = inputs.needs_gradients
    _, call = check_call(inputs, *_arguments(as_json))
    # The graph is for one length only, so it holds the length even if the caller did not pass seq_len.
    constant_options = _to_json(replace(inputs, seq_len=call.layout.seq_len).options)
    if handle is None:
        return attend_under_autograd(inputs, _OneDeviceExecutor(constant_options, as_json))
    directions = (False, True) if needs_gradients else (False,)
    num_hops = [call.plan(inputs, backward=direction).num_hops(backward=direction) for direction in directions]
    return attend_under_autograd(inputs, _HopsExecutor(handle, constant_options, needs_gradients, num_hops))


def _to_json(values: dict[str, Any]) -> str:
    # torch may pass numbers as symbols. The graph holds them as constants.
    return json.dumps(values, default=lambda number: int(number) if isinstance(number, torch.SymInt) else float(number))


@lru_cache(maxsize=256)
def _arguments(constants: str) -> tuple[DilatedPattern, Ring, float | None, str]:
    """The arguments of :func:`check_call` besides the inputs."""
    values = json.loads(constants)
    size, rank, layout = values["ring"]
    ring = Ring(size=size, rank=rank, ranks=tuple(range(size)), layout_kind=layout)
    return DilatedPattern(*values["pattern"]), ring, values["scale"], values["kernel"]


def _with_constant_sizes(tensor: Tensor) -> Tensor:
    return tensor.view([int(size) for size in tensor.shape])


@dataclass(frozen=True)
class _OneDeviceExecutor:
    """Computes a call by putting one operator per direction into the graph."""

    options: str
    constants: str

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor, int, AttentionInputs]:
        return *attend_forward(inputs.tensors, self.options, self.constants), 0, inputs

    def backward(
        self, inputs: AttentionInputs, out: Tensor, lse: Tensor, grad_out: Tensor, call_number: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        tensors = *inputs.tensors, out, lse, grad_out
        return cast(tuple[Tensor, Tensor, Tensor], attend_backward(tensors, self.options, self.constants))


@dataclass
class _HopsExecutor:
    """Computes a call by putting the operators of its hops into the graph."""

    module: Tensor
    options: str
    needs_gradients: bool
    num_hops: list[int]
    _forward: Tensor = field(init=False)

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor, int, AttentionInputs]:
        running = begin_forward(self.module, inputs.tensors, self.options, self.needs_gradients)
        for _ in range(self.num_hops[0]):
            running = post_hop(running)
        out, lse, self._forward = end_forward(running, inputs.tensors)
        return out, lse, 0, inputs

    def backward(
        self, inputs: AttentionInputs, out: Tensor, lse: Tensor, grad_out: Tensor, call_number: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        tensors = *inputs.tensors, out, lse, grad_out
        running = begin_backward(self._forward, tensors, self.options)
        for _ in range(self.num_hops[1]):
            running = post_hop(running)
        return cast(tuple[Tensor, Tensor, Tensor], end_backward(running, tensors))


@custom_op("ring_backends::attend_forward", mutates_args=())
def attend_forward(tensors: Sequence[Tensor | None], options: str, constants: str) -> tuple[Tensor, Tensor]:
    """out and LSE of a call on one device.

    Args:
        tensors, options: the tensors of the call's inputs, and their options as JSON.
        constants: the result of :func:`constants`, as JSON.
    """
    inputs = AttentionInputs.of(tensors, json.loads(options))
    with without_autocast(inputs.query.device):
        inputs, call = check_call(inputs, *_arguments(constants))
        return finish(forward(call, inputs, None))


@custom_op("ring_backends::attend_backward", mutates_args=())
def attend_backward(tensors: Sequence[Tensor | None], options: str, constants: str) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value of a call on one device.

    Args:
        tensors: the tensors of the call's inputs, then out, LSE and the gradient of out.
        options, constants: as for the forward.
    """
    *of_inputs, out, lse, grad_out = tensors
    assert out is not None
    assert lse is not None
    assert grad_out is not None
    inputs = AttentionInputs.of(of_inputs, json.loads(options))
    with without_autocast(out.device):
        inputs, call = check_call(inputs, *_arguments(constants))
        return finish(backward(call, inputs, out, lse, grad_out, None))


class _Running:
    """A forward or backward that has been computed up to a hop."""

    def __init__(self, by_hops: ByHops[Any], device: torch.device) -> None:
        self._by_hops, self._device = by_hops, device
        self._result: Any = None
        self.resume()

    def resume(self) -> None:
        with without_autocast(self._device):
            try:
                next(self._by_hops)
            except StopIteration as end:
                self._result = end.value

    def result(self) -> Any:
        assert self._result is not None, "the graph has fewer hops than the plan"
        return self._result


# The other operators work on the host in every call. Inductor puts no operator with this tag into a CUDA graph.
_ON_HOST = (torch.Tag.cudagraph_unsafe,)

# Operators pass a computation on as a tensor of three numbers: the number of its module, its own number, and the number
# of its call.


def _module(number: int) -> RingDilatedAttention:
    if number not in _modules:
        raise RuntimeError(
            "the attention module of a compiled call was deleted before the forward or backward of the call ran; keep "
            "a reference to the model until then."
        )
    return _modules[number]


def _check(attention: RingDilatedAttention, tensors: Sequence[Tensor | None], options: str) -> Any:
    """Check the call again. Its tensors were cast during tracing, so autocast must not cast them here."""
    inputs = AttentionInputs.of(tensors, json.loads(options))
    with without_autocast(inputs.query.device):
        return attention.check_call(inputs)


def _begin(module: int, by_hops: ByHops[Any], call_number: int, device: torch.device) -> Tensor:
    number = next(_numbers)
    _running[number] = _Running(by_hops, device)
    return torch.tensor([module, number, call_number], device="cpu")


@custom_op("ring_backends::begin_forward", mutates_args=(), tags=_ON_HOST)
def begin_forward(module: Tensor, tensors: Sequence[Tensor | None], options: str, needs_gradients: bool) -> Tensor:
    """Begin the forward of one call."""
    attention = _module(int(module))
    inputs, call = _check(attention, tensors, options)
    hops = attention.start(call, inputs, needs_gradients=needs_gradients)("forward")
    call_number = 0 if hops is None else hops.call.number
    return _begin(int(module), forward(call, inputs, hops), call_number, inputs.query.device)


@custom_op("ring_backends::begin_backward", mutates_args=(), tags=_ON_HOST)
def begin_backward(forward: Tensor, tensors: Sequence[Tensor | None], options: str) -> Tensor:
    """Begin the backward of a call.

    Args:
        forward: the last result of ``end_forward``.
        tensors: the tensors of the call's inputs, then out, LSE and the gradient of out.
        options: the options of the call's inputs, as JSON.
    """
    *of_inputs, out, lse, grad_out = tensors
    assert out is not None
    assert lse is not None
    assert grad_out is not None
    module, _, call_number = forward.tolist()
    attention = _module(module)
    inputs, call = _check(attention, of_inputs, options)
    hops = attention.start(call, inputs, needs_gradients=True)(backward_of(call_number))
    return _begin(module, backward(call, inputs, out, lse, grad_out, hops), call_number, out.device)


@custom_op("ring_backends::post_hop", mutates_args=(), tags=_ON_HOST)
def post_hop(running: Tensor) -> Tensor:
    """Post the next hop, and compute up to the one after it."""
    number = int(running[1])
    under_way = _running.pop(number)  # so that a failed computation is not resumed
    under_way.resume()
    _running[number] = under_way
    return running.clone()


# The end operators take the tensors that the computation reads, so that the compiler does not reuse their memory early.


@custom_op("ring_backends::end_forward", mutates_args=(), tags=_ON_HOST)
def end_forward(running: Tensor, tensors: Sequence[Tensor | None]) -> tuple[Tensor, Tensor, Tensor]:
    """Return out and LSE of the forward, and the numbers that its backward needs."""
    out, lse = _running.pop(int(running[1])).result()
    return out, lse, running.clone()


@custom_op("ring_backends::end_backward", mutates_args=(), tags=_ON_HOST)
def end_backward(running: Tensor, tensors: Sequence[Tensor | None]) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    return cast(tuple[Tensor, Tensor, Tensor], _running.pop(int(running[1])).result())


def _fake_running(module_or_running: Tensor, *args: object) -> Tensor:
    return module_or_running.new_empty(3)


for _operator in (begin_forward, begin_backward, post_hop):
    _operator.register_fake(_fake_running)


@attend_forward.register_fake
def _fake_results(tensors: Sequence[Tensor | None], *constants: str) -> tuple[Tensor, Tensor]:
    query = tensors[0]
    assert query is not None
    lse = query.new_empty(query.shape[:3], dtype=statistics_dtype(query.dtype))
    return query.new_empty(query.shape), lse


@attend_backward.register_fake
def _fake_grads(tensors: Sequence[Tensor | None], *constants: str) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (x.new_empty(x.shape) for x in tensors[:3] if x is not None)
    return query, key, value


@end_forward.register_fake
def _(running: Tensor, tensors: Sequence[Tensor | None]) -> tuple[Tensor, Tensor, Tensor]:
    return *_fake_results(tensors), _fake_running(running)


@end_backward.register_fake
def _(running: Tensor, tensors: Sequence[Tensor | None]) -> tuple[Tensor, Tensor, Tensor]:
    return cast(tuple[Tensor, Tensor, Tensor], _fake_grads(tensors))


RESULT_OPERATORS = [torch.ops.ring_backends.end_forward.default, torch.ops.ring_backends.attend_forward.default]
"""The operators that return out and LSE."""
