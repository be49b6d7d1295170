"""A call of attention under autograd: saves query, key, value, out and LSE, and computes the backward from them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from ring_backends.engine.backward import backward
from ring_backends.engine.call import AttentionCall
from ring_backends.engine.forward import forward
from ring_backends.engine.inputs import TENSORS, AttentionInputs
from ring_backends.engine.recomputation import attend_as_operator
from ring_backends.engine.wire import Hops
from ring_backends.kernels.dtype import without_autocast
from ring_backends.kernels.merge import weight_of
from ring_backends.kernels.score_mod import check_unchanged, read_values
from ring_backends.ring.calls import backward_of


class Executor(Protocol):
    """Computes a call: with hops over the ring, as operators of a compiled graph, or from gathered K and V."""

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor, int, AttentionInputs]:
        """Return out, LSE [batch, local seq, heads], the call's number, and the inputs for its backward."""
        ...

    def backward(
        self, inputs: AttentionInputs, out: Tensor, lse: Tensor, grad_out: Tensor, call_number: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of query, key and value."""
        ...


Start = Callable[[str, AttentionInputs], "Hops | None"]
"""(direction, inputs) -> Hops: waits until the ranks agree on a forward or backward. Returns None in a ring of one."""


def no_hops(direction: str, inputs: AttentionInputs) -> None:
    """The :data:`Start` of a ring of one."""


@dataclass(frozen=True)
class RingExecutor:
    """Computes a call with the hops of its ring. It alone computes calls with a score_mod.

    Attributes:
        start: waits until the ranks agree on a forward or backward.
        report_refusals: wraps the checks before a backward, and reports their errors to the other ranks.
    """

    call: AttentionCall
    start: Start = no_hops
    report_refusals: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor, int, AttentionInputs]:
        if self.start is not no_hops:
            _refuse_tangents(inputs)
        return attend_as_operator(self._forward, inputs)

    def _forward(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor, int]:
        hops = self.start("forward", inputs)
        return *forward(self.call, inputs, hops), 0 if hops is None else hops.call.number

    def backward(
        self, inputs: AttentionInputs, out: Tensor, lse: Tensor, grad_out: Tensor, call_number: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        return backward(self.call, inputs, out, lse, grad_out, self.start(backward_of(call_number), inputs))


def _refuse_tangents(inputs: AttentionInputs) -> None:
    """Refuse forward-mode differentiation: a hop would drop the tangents.

    Raises:
        RuntimeError: a tensor has a tangent.
    """
    for name, tensor in zip(TENSORS, inputs.tensors, strict=True):
        if tensor is not None and unpack_dual(tensor).tangent is not None:
            raise RuntimeError(
                f"{name} has a tangent: forward-mode differentiation is not supported on a ring of several ranks; use "
                "the backward, or one device."
            )


def attend(inputs: AttentionInputs, executor: Executor) -> Any:
    """Compute one call under autograd. Return out, or with ``return_lse`` (out, LSE [batch, heads, local seq])."""
    if inputs.needs_gradients or torch.compiler.is_compiling():
        out, lse = _Attend.apply(executor, inputs.options, *inputs.tensors)  # type: ignore[no-untyped-call]
    else:
        with without_autocast(inputs.query.device):
            out, lse, *_ = executor.forward(inputs)
    return (out, lse.transpose(1, 2)) if inputs.return_lse else out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, executor: Executor, options: dict[str, Any], *tensors: Any) -> tuple[Tensor, Tensor]:
        inputs = AttentionInputs.of(tensors, options)
        with without_autocast(inputs.query.device):
            out, lse, ctx.call_number, inputs = executor.forward(inputs)
        ctx.executor, ctx.options = executor, options
        score_mod = options.get("score_mod")
        ctx.read = None if score_mod is None else read_values(score_mod)
        ctx.save_for_backward(*inputs.tensors, out, lse)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # or autograd makes a gradient of zeros for the LSE in every backward
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors
        if grad_out is None:  # the other ranks may need this rank's hops
            grad_out = torch.zeros_like(out)
        inputs = AttentionInputs.of(tensors, ctx.options)
        if ctx.read is not None:
            with ctx.executor.report_refusals():
                check_unchanged(ctx.options["score_mod"], ctx.read)
        grad_sinks = None
        with torch.no_grad(), without_autocast(out.device):
            grads = ctx.executor.backward(inputs, out, lse, grad_out, ctx.call_number)
            if inputs.sinks is not None and ctx.needs_input_grad[-1]:
                grad_sinks = _grad_of_sinks(inputs.sinks, out, lse, grad_out)
        grads = *grads, None, None, None, grad_sinks
        if torch.is_grad_enabled():
            depends_on = [x for x in (*inputs.tensors, grad_out) if x is not None]
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
