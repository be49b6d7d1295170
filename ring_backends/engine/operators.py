"""A call of attention under autograd, as Python functions and as custom operators.

Every call runs :meth:`RingExecutor.compute` and :meth:`RingExecutor.backward`: in eager mode directly, and under
activation checkpointing and in compiled graphs inside operators, which look the checked call up among the kept ones.

A policy of selective activation checkpointing decides for each operator whether to keep its result. While a policy is
active, every forward outside of graphs is the operator ``ring_backends::attend``. So the policy can keep the result,
and the forward is not computed again. A call with a score_mod is always computed again.

In a compiled graph, a call is one operator in the forward and one in the backward, so it does not break the graph.
Sizes are constants, since the plan depends on them. A sequence of another length is compiled again. Arguments are
checked during compilation. If a check fails, torch raises its own error, which quotes this package's error.

On one device without dropout, everything besides tensors is a constant of the graph, and no tensor is on the CPU. So a
CUDA graph can contain the operators ``ring_backends::attend_forward`` and ``ring_backends::attend_backward``. On a
ring, ``ring_backends::ring_forward`` and ``ring_backends::ring_backward`` work on the host in every call, so a CUDA
graph must not contain them. A call with dropout on one device uses them too, since its seed is drawn on the host. The
handle of the module is an input of the graph, not a constant, so that equal blocks share one graph.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.library import custom_op

from ring_backends.engine.binding import Binding, register, registered
from ring_backends.engine.call import OPTIONS, TENSORS, AttentionCall, AttentionInputs, check_call
from ring_backends.engine.run import backward, forward
from ring_backends.kernels.dtype import without_autocast
from ring_backends.kernels.merge import statistics_dtype, weight_of
from ring_backends.kernels.score_mod import check_unchanged, read_values
from ring_backends.ring.calls import backward_of
from ring_backends.ring.ring import Ring
from ring_backends.schedule.pattern import DilatedPattern
from ring_backends.torch_internals import has_values, in_dispatch_mode, version_of, without_dispatch_modes

Grads = tuple[Tensor, Tensor, Tensor]
"""The gradients of query, key and value."""


class Executor(Protocol):
    """Computes a call: with hops over the ring, as operators of a compiled graph, or from gathered K and V."""

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor, Any, AttentionInputs]:
        """Return out, LSE [batch, local seq, heads], the number of the call, and the inputs for its backward."""
        ...

    def backward(self, inputs: AttentionInputs, out: Tensor, lse: Tensor, grad_out: Tensor, number: Any) -> Grads:
        """Return the gradients of a call with this number."""
        ...


def attend(binding: Binding, inputs: AttentionInputs) -> Any:
    """Check and compute one call. Return out, or with ``return_lse`` (out, LSE [batch, heads, local seq])."""
    inputs, call = binding.check(inputs)
    needs_gradients = inputs.needs_gradients
    return execute(inputs, RingExecutor(binding, call, needs_gradients), needs_gradients=needs_gradients)


def execute(inputs: AttentionInputs, executor: Executor, *, needs_gradients: bool = True) -> Any:
    """Compute one call under autograd. Return as :func:`attend`."""
    if needs_gradients:
        out, lse = _Attend.apply(executor, inputs, *inputs.tensors)  # type: ignore[no-untyped-call]
    else:
        with without_autocast(inputs.query.device):
            out, lse, *_ = executor.forward(inputs)
    return (out, lse.transpose(1, 2)) if inputs.return_lse else out


class _Attend(torch.autograd.Function):
    """Saves query, key, value, out and LSE, and computes the backward from them. ``tensors`` are the inputs' own."""

    @staticmethod
    def forward(ctx: Any, executor: Executor, inputs: AttentionInputs, *tensors: Any) -> tuple[Tensor, Tensor]:
        with without_autocast(inputs.query.device):
            out, lse, ctx.number, inputs = executor.forward(inputs)
        out = out.detach()  # torch refuses in-place changes of a view from a custom function, such as ``out += x``
        ctx.executor, ctx.score_mod = executor, inputs.score_mod
        ctx.read = None if inputs.score_mod is None else read_values(inputs.score_mod)
        ctx.save_for_backward(*inputs.tensors, out, lse)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # or autograd makes a gradient of zeros for the LSE in every backward
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors
        if grad_out is None:  # the other ranks may need this rank's hops
            grad_out = torch.zeros_like(out)
        # The checked call has the other options.
        inputs = AttentionInputs.of(tensors, {"score_mod": ctx.score_mod})
        if ctx.read is not None:
            with ctx.executor.binding.ring.report_refusals():
                check_unchanged(ctx.score_mod, ctx.read)
        grad_sinks = None
        with torch.no_grad(), without_autocast(out.device):
            grads = ctx.executor.backward(inputs, out, lse, grad_out, ctx.number)
            if inputs.sinks is not None and ctx.needs_input_grad[-1]:
                grad_sinks = _grad_of_sinks(inputs.sinks, out, lse, grad_out)
        grads = *grads, None, None, None, grad_sinks
        if torch.is_grad_enabled():
            depends_on = [x for x in (*tensors, grad_out) if x is not None]
            grads = [None if x is None else _RefuseSecondDerivative.apply(x, *depends_on) for x in grads]  # type: ignore[no-untyped-call]
        return None, None, *grads


def _grad_of_sinks(sinks: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor) -> Tensor:
    """The gradient of the sinks [heads] by this rank's rows. A sink's value is 0, so its dP is 0: dS = −P · delta."""
    delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -(weight_of(sinks.to(lse.dtype), lse) * delta).sum((0, 1)).to(sinks.dtype)


class _RefuseSecondDerivative(torch.autograd.Function):
    """Ties a gradient to the tensors it depends on. Differentiating it again raises an error instead of giving 0."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, *depends_on: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            "dilated attention has no second derivative: autograd does not record its backward; leave "
            "create_graph=True out."
        )


@dataclass(frozen=True, eq=False)
class RingExecutor:
    """Computes a checked call with the hops of its ring. It alone computes calls with a score_mod.

    Attributes:
        needs_gradients: whether the call has a backward.
    """

    binding: Binding
    call: AttentionCall
    needs_gradients: bool

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor, int, AttentionInputs]:
        """Compute the forward. While a mode intercepts operators, it is one operator, whose result a policy can keep.

        Returns:
            out, LSE, the call's number, and the inputs. Number and dropout seed are those of the forward that computed
            out.

        Raises:
            RuntimeError: a tensor of the call has been changed in place since that forward.
        """
        if not in_dispatch_mode() or not has_values(inputs.query):
            return *self.compute(inputs), inputs
        if inputs.score_mod is not None:  # an operator cannot run torch.vmap, which evaluates the score_mod
            with without_dispatch_modes():  # or a policy would keep the results of the kernels, which have all pairs
                return *self.compute(inputs), inputs
        options = _to_json(inputs.options | {"needs_gradients": self.needs_gradients})
        out, lse, numbers = _outside_graphs(register(self), inputs.tensors, options)
        _, call_number, _, *versions = numbers.tolist()
        now = _versions(inputs.tensors)
        changed = [name for name, *pair in zip(TENSORS, versions, now, strict=True) if pair[0] != pair[1]]
        if changed:
            raise RuntimeError(
                f"{' and '.join(changed)} of an attention has been changed in place since the forward of a "
                "checkpointed region. The region keeps the attention's result from before the change, so the gradient "
                "would be wrong: give the region a clone(), or change the tensor after the backward."
            )
        if inputs.dropout_seed is not None:
            inputs = replace(inputs, dropout_seed=numbers[2:3])
        return out, lse, call_number, inputs

    def compute(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor, int]:
        """Compute out, LSE and the call's number."""
        hops = self.binding.begin(self.call, inputs, "forward", needs_gradients=self.needs_gradients)
        return *forward(self.call, inputs, hops), 0 if hops is None else hops.call.number

    def backward(self, inputs: AttentionInputs, out: Tensor, lse: Tensor, grad_out: Tensor, number: int) -> Grads:
        hops = self.binding.begin(self.call, inputs, backward_of(number), needs_gradients=True)
        return backward(self.call, inputs, out, lse, grad_out, hops)


# --- operators --------------------------------------------------------------------------------------------------------


def _forward(handle: Tensor | None, tensors: Sequence[Tensor | None], options: str) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the forward of a call.

    Args:
        handle: the result of :func:`register`; None on one device without dropout, if ``options`` has the settings.
        tensors: the tensors of the call's inputs.
        options: JSON of the inputs' options, of ``needs_gradients`` and of :func:`settings_of`. Without settings, the
            operator takes those of the attention.

    Returns:
        out, LSE and numbers. The numbers are int64 on the CPU: the handle, the call's number, the dropout seed, and how
        often each tensor has been changed in place. Without a handle there are none.
    """
    with _without_autocast(tensors):
        executor, inputs = _decode(None if handle is None else int(handle), tensors, options)
        out, lse, call_number = executor.compute(inputs)
    if handle is None:
        return out, lse, out.new_empty(0)
    seed = 0 if inputs.dropout_seed is None else int(inputs.dropout_seed)
    numbers = [int(handle), call_number, seed, *_versions(tensors)]
    return out, lse, torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _backward(numbers: Tensor | None, tensors: Sequence[Tensor | None], options: str) -> Grads:
    """Compute the gradients of query, key and value.

    Args:
        numbers: the last result of the forward; None if it had no handle.
        tensors: the tensors of the call's inputs, then out, LSE and the gradient of out.
        options: as in the forward.
    """
    *of_inputs, out, lse, grad_out = tensors
    assert out is not None
    assert lse is not None
    assert grad_out is not None
    handle, call_number = (None, 0) if numbers is None else numbers.tolist()[:2]
    with _without_autocast(tensors):
        executor, inputs = _decode(handle, of_inputs, options)
        return executor.backward(inputs, out, lse, grad_out, call_number)


def _decode(handle: int | None, tensors: Sequence[Tensor | None], options: str) -> tuple[RingExecutor, AttentionInputs]:
    of_inputs, traced, needs_gradients = _parsed(options)
    if handle is not None:
        binding = registered(handle)
        if traced is not None:  # the module may have other settings than when it was traced
            binding = replace(binding, pattern=traced.pattern, scale=traced.scale, kernel=traced.kernel)
    else:
        assert traced is not None
        binding = traced
    inputs, call = binding.check(AttentionInputs.of(tensors, of_inputs))
    return RingExecutor(binding, call, needs_gradients), inputs


@lru_cache(maxsize=256)
def _parsed(options: str) -> tuple[dict[str, Any], Binding | None, bool]:
    """The options of the inputs; the binding with the traced settings, without a connected ring; needs_gradients."""
    values, traced = json.loads(options), None
    if "pattern" in values:
        size, rank, layout, ulysses_size, fits_heads = values["ring"]
        groups = {"ulysses_size": ulysses_size, "fits_heads": fits_heads}
        ring = Ring(size=size, rank=rank, ranks=tuple(range(size)), layout_kind=layout, **groups)
        traced = Binding(DilatedPattern(*values["pattern"]), ring, values["scale"], values["kernel"])
    return {name: values[name] for name in OPTIONS}, traced, values["needs_gradients"]


def _without_autocast(tensors: Sequence[Tensor | None]) -> contextlib.AbstractContextManager[object]:
    """The tensors are cast already, so autocast must not cast them again."""
    assert tensors[0] is not None
    return without_autocast(tensors[0].device)


def _versions(tensors: Sequence[Tensor | None]) -> list[int]:
    """How often each tensor of a call has been changed in place. Autograd counts this."""
    return [-1 if x is None else version_of(x) for x in tensors]


_outside_graphs = custom_op("ring_backends::attend", _forward, mutates_args=())
_attend_forward = custom_op("ring_backends::attend_forward", _forward, mutates_args=())
_attend_backward = custom_op("ring_backends::attend_backward", _backward, mutates_args=())
# Inductor puts no operator with this tag into a CUDA graph.
_on_host = (torch.Tag.cudagraph_unsafe,)
_ring_forward = custom_op("ring_backends::ring_forward", _forward, mutates_args=(), tags=_on_host)
_ring_backward = custom_op("ring_backends::ring_backward", _backward, mutates_args=(), tags=_on_host)

RESULT_OPERATORS = [
    torch.ops.ring_backends.attend.default,
    torch.ops.ring_backends.ring_forward.default,
    torch.ops.ring_backends.attend_forward.default,
]
"""The operators that return out and LSE."""

# The function is also the operator's decomposition. Modes that decompose operators, such as torch's FlopCounterMode,
# see the operators of the kernels. If torch removes these private names, such a mode sees one operator.
with contextlib.suppress(AttributeError):
    RESULT_OPERATORS[0].py_impl(torch._C.DispatchKey.CompositeImplicitAutograd)(_forward)


@_attend_forward.register_fake
@_ring_forward.register_fake
def _(handle: Tensor | None, tensors: Sequence[Tensor | None], options: str) -> tuple[Tensor, Tensor, Tensor]:
    query, _, value, *_ = tensors
    assert query is not None
    assert value is not None
    lse = query.new_empty(query.shape[:3], dtype=statistics_dtype(query.dtype))
    numbers = query.new_empty(0) if handle is None else handle.new_empty(3 + len(TENSORS))
    return query.new_empty(*query.shape[:3], value.shape[3]), lse, numbers


@_attend_backward.register_fake
@_ring_backward.register_fake
def _(numbers: Tensor | None, tensors: Sequence[Tensor | None], options: str) -> Grads:
    query, key, value = (x.new_empty(x.shape) for x in tensors[:3] if x is not None)
    return query, key, value


# --- compiled graphs --------------------------------------------------------------------------------------------------


def settings_of(pattern: DilatedPattern, ring: Ring, scale: float | None, kernel: str) -> dict[str, Any]:
    """The settings that a graph depends on, in types that torch.compile can compare."""
    return {
        "pattern": (
            pattern.segment_lengths,
            pattern.dilation_rates,
            pattern.head_mode,
            pattern.offset,
            pattern.padding,
            pattern.window_lengths,
        ),
        "ring": (ring.size, ring.rank, ring.layout_kind, ring.ulysses_size, ring.fits_heads),
        "scale": scale,
        "kernel": kernel,
    }


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def attend_in_graph(handle: Tensor | None, tensors: tuple[Tensor | None, ...], options: dict[str, Any]) -> Any:
    """Compute a call of attention while torch.compile traces it with fake tensors.

    Args:
        handle: the result of :func:`register`; None on one device without dropout.
        tensors: the tensors of the call's inputs.
        options: the options of the inputs, and the result of :func:`settings_of`.
    """
    given, traced, _ = _parsed(_to_json(options | {"needs_gradients": False}))
    assert traced is not None
    sized = [None if x is None else x.view([int(size) for size in x.shape]) for x in tensors]
    inputs = AttentionInputs.of(sized, given)
    inputs, call = check_call(inputs, traced.pattern, traced.ring, traced.scale, traced.kernel)
    # The graph is for one length only, so it holds the length even if the caller did not pass seq_len.
    constants = options | {"seq_len": call.layout.seq_len, "needs_gradients": inputs.needs_gradients}
    return execute(inputs, _GraphExecutor(handle, _to_json(constants)))


def _to_json(values: dict[str, Any]) -> str:
    # torch may pass numbers as symbols. The graph holds them as constants.
    return json.dumps(values, default=lambda number: int(number) if isinstance(number, torch.SymInt) else float(number))


@dataclass(frozen=True)
class _GraphExecutor:
    """Computes a call by putting one operator per direction into the graph."""

    handle: Tensor | None
    options: str

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor, Tensor | None, AttentionInputs]:
        operator = _attend_forward if self.handle is None else _ring_forward
        out, lse, numbers = operator(self.handle, inputs.tensors, self.options)
        return out, lse, None if self.handle is None else numbers, inputs

    def backward(
        self, inputs: AttentionInputs, out: Tensor, lse: Tensor, grad_out: Tensor, number: Tensor | None
    ) -> Grads:
        operator = _attend_backward if self.handle is None else _ring_backward
        grads: Grads = operator(number, (*inputs.tensors, out, lse, grad_out), self.options)
        return grads
