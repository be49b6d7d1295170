"""Attention inside a compiled graph: custom operators, so that a call does not break the graph.

A call is one operator in the forward graph and one in the backward graph. They run the same code as a call outside of a
graph, with all its hops. Sizes are constants, since the plan depends on them. A sequence of another length is compiled
again. Arguments are checked during compilation. If a check fails, torch raises its own error, which quotes this
package's error.

On one device without dropout, everything besides tensors is a constant of the graph, and no tensor is on the CPU. So a
CUDA graph can contain the operators ``ring_backends::attend_forward`` and ``ring_backends::attend_backward``. On a
ring, ``ring_backends::ring_forward`` and ``ring_backends::ring_backward`` work on the host in every call, so a CUDA
graph must not contain them. A call with dropout on one device uses them too, since its seed is drawn on the host. The
number of the module is an input of the graph, not a constant, so that equal blocks share one graph.
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
from ring_backends.engine.inputs import AttentionInputs
from ring_backends.kernels.dtype import without_autocast
from ring_backends.kernels.merge import statistics_dtype
from ring_backends.ring.calls import backward_of
from ring_backends.ring.ring import Ring
from ring_backends.schedule.pattern import DilatedPattern

if TYPE_CHECKING:
    from ring_backends.attention import RingDilatedAttention

_modules: WeakValueDictionary[int, RingDilatedAttention] = WeakValueDictionary()
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
            pattern.window_lengths,
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
    return attend_under_autograd(inputs, _OnHostExecutor(handle, constant_options, as_json, needs_gradients))


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


def _settings(constants: str) -> tuple[DilatedPattern, float | None, str]:
    """Pattern, scale and kernel of a call when it was traced. The module may have others before the backward."""
    pattern, _, scale, kernel = _arguments(constants)
    return pattern, scale, kernel


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
class _OnHostExecutor:
    """Computes a call by putting the operators of a module into the graph."""

    module: Tensor
    options: str
    constants: str
    needs_gradients: bool
    _forward: Tensor = field(init=False)

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor, int, AttentionInputs]:
        options = self.options, self.constants, self.needs_gradients
        out, lse, self._forward = ring_forward(self.module, inputs.tensors, *options)
        return out, lse, 0, inputs

    def backward(
        self, inputs: AttentionInputs, out: Tensor, lse: Tensor, grad_out: Tensor, call_number: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        tensors = *inputs.tensors, out, lse, grad_out
        return cast(tuple[Tensor, Tensor, Tensor], ring_backward(self._forward, tensors, self.options, self.constants))


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
        return forward(call, inputs, None)


@custom_op("ring_backends::attend_backward", mutates_args=())
def attend_backward(tensors: Sequence[Tensor | None], options: str, constants: str) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value of a call on one device.

    Args:
        tensors: the tensors of the call's inputs, then out, LSE and the gradient of out.
        options, constants: as for the forward.
    """
    inputs, out, lse, grad_out = _inputs_of_backward(tensors, options)
    with without_autocast(inputs.query.device):
        inputs, call = check_call(inputs, *_arguments(constants))
        return backward(call, inputs, out, lse, grad_out, None)


def _inputs_of_backward(
    tensors: Sequence[Tensor | None], options: str
) -> tuple[AttentionInputs, Tensor, Tensor, Tensor]:
    """The inputs of the call, out, LSE and the gradient of out."""
    *of_inputs, out, lse, grad_out = tensors
    assert out is not None
    assert lse is not None
    assert grad_out is not None
    return AttentionInputs.of(of_inputs, json.loads(options)), out, lse, grad_out


# Inductor puts no operator with this tag into a CUDA graph.
_ON_HOST = (torch.Tag.cudagraph_unsafe,)


def _module(number: int) -> RingDilatedAttention:
    if number not in _modules:
        raise RuntimeError(
            "the attention module of a compiled call was deleted before the forward or backward of the call ran; keep "
            "a reference to the model until then."
        )
    return _modules[number]


@custom_op("ring_backends::ring_forward", mutates_args=(), tags=_ON_HOST)
def ring_forward(
    module: Tensor, tensors: Sequence[Tensor | None], options: str, constants: str, needs_gradients: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """out and LSE of a call, and the numbers of its module and of the call, which the backward needs."""
    attention, inputs = _module(int(module)), AttentionInputs.of(tensors, json.loads(options))
    # The tensors were cast during tracing, so autocast must not cast them again.
    with without_autocast(inputs.query.device):
        inputs, call = attention._check_call(inputs, _settings(constants))
        hops = attention._start(call, inputs, needs_gradients=needs_gradients)("forward", inputs)
        out, lse = forward(call, inputs, hops)
    number = 0 if hops is None else hops.call.number
    return out, lse, torch.tensor([int(module), number], device="cpu")


@custom_op("ring_backends::ring_backward", mutates_args=(), tags=_ON_HOST)
def ring_backward(
    numbers: Tensor, tensors: Sequence[Tensor | None], options: str, constants: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value.

    Args:
        numbers: the last result of ``ring_forward``.
        tensors, options, constants: as for ``attend_backward``.
    """
    module, call_number = numbers.tolist()
    attention = _module(module)
    inputs, out, lse, grad_out = _inputs_of_backward(tensors, options)
    with without_autocast(inputs.query.device):
        inputs, call = attention._check_call(inputs, _settings(constants))
        hops = attention._start(call, inputs, needs_gradients=True)(backward_of(call_number), inputs)
        return backward(call, inputs, out, lse, grad_out, hops)


@attend_forward.register_fake
def _fake_results(tensors: Sequence[Tensor | None], *constants: str) -> tuple[Tensor, Tensor]:
    query, _, value, *_ = tensors
    assert query is not None
    assert value is not None
    lse = query.new_empty(query.shape[:3], dtype=statistics_dtype(query.dtype))
    return query.new_empty(*query.shape[:3], value.shape[3]), lse


@attend_backward.register_fake
def _fake_grads(tensors: Sequence[Tensor | None], *constants: str) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (x.new_empty(x.shape) for x in tensors[:3] if x is not None)
    return query, key, value


@ring_forward.register_fake
def _(
    module: Tensor, tensors: Sequence[Tensor | None], options: str, constants: str, needs_gradients: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return *_fake_results(tensors), module.new_empty(2)


@ring_backward.register_fake
def _(numbers: Tensor, tensors: Sequence[Tensor | None], options: str, constants: str) -> tuple[Tensor, Tensor, Tensor]:
    return cast(tuple[Tensor, Tensor, Tensor], _fake_grads(tensors))


RESULT_OPERATORS = [torch.ops.ring_backends.ring_forward.default, torch.ops.ring_backends.attend_forward.default]
"""The operators that return out and LSE."""
