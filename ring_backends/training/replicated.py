"""Training with a whole replica of model and optimizer on every rank, as DistributedDataParallel does it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_backends.ring.ring import Ring
from ring_backends.training.reducer import (
    UnusedParameters,
    device_of,
    fill_missing_gradients,
    measure_divisor,
    probe,
    sparse_parameters,
    under_autocast,
)
from ring_backends.training.state import MakeOptimizer, TrainingState


class ReplicatedTraining(TrainingState):
    """Training with a whole replica of model and optimizer on every rank. A wrapper reduces the gradients.

    Args:
        wrap: makes a module reduce its gradients over the world, as DistributedDataParallel does.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        ring: Ring,
        wrap: Callable[[nn.Module], nn.Module],
        max_grad_norm: float | None,
        accumulation_steps: int,
        mixed_precision: torch.dtype | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        options = {"mixed_precision": mixed_precision, **options}
        super().__init__(model, ring, max_grad_norm, accumulation_steps, options)
        self._module, self._unwrapped = model, under_autocast(model, mixed_precision)
        self.model = wrap(self._unwrapped)
        self.optimizer = self._make_optimizer(make_optimizer, model)
        self.divisor = measure_divisor(self._world, lambda gradient: _reduced_by(wrap, gradient, device_of(model)))
        finds_unused = ("find_unused_parameters", "static_graph")
        self._unused = None
        self._remembers_use = False
        if self._is_wrapped and not any(getattr(self.model, name, False) for name in finds_unused):
            self._unused = UnusedParameters(model)
        self._calls = _Calls()
        self.model.register_forward_pre_hook(self._calls)
        self._unreduced = contextlib.ExitStack()
        self._expect_micro_batch(ends_step=accumulation_steps == 1)

    @property
    def _is_wrapped(self) -> bool:
        """False in a world of one, where nothing is reduced."""
        return self.model is not self._unwrapped

    def _expect_micro_batch(self, *, ends_step: bool) -> None:
        self._unreduced.close()
        if not ends_step and self._is_wrapped:
            self._unreduced.enter_context(self.model.no_sync())  # type: ignore[operator]

    def _describe_graph(self, loss: Tensor) -> Mapping[str, object]:
        if not self._calls.since_backward and self._is_wrapped:
            raise RuntimeError(
                "backward() without a call of state.model since the last backward(): DistributedDataParallel reduces "
                "only gradients of its own forward; call state.model(...), not the model inside of it, once for each "
                "backward(), and do not pass state.model as a whole to a reentrant checkpoint."
            )
        return super()._describe_graph(loss)

    def _backward(self, loss: Tensor) -> None:
        self._calls.since_backward = False
        ends_step = self._backward_calls + 1 == self.accumulation_steps
        if ends_step and self._remembers_use:
            self._fill_missing_gradients()
            self._remembers_use = False
        if self._unused is not None:
            self._unused.begin()
        loss.backward()
        if self._unused is not None and ends_step:
            self._unused.end()

    def _reduce_accumulated(self) -> None:
        # DistributedDataParallel reduces in a backward only.
        if not self._is_wrapped:
            return
        self._fill_missing_gradients()
        # With find_unused_parameters=True, DistributedDataParallel has recorded the parameters used in these backwards.
        # The next backward that reduces requires a gradient of each of them, also if its step leaves some of them out.
        self._remembers_use = self._unused is None
        for parameter in self._module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(self.divisor)

    def _fill_missing_gradients(self) -> None:
        fill_missing_gradients(self._module.parameters(), sparse_parameters(self._module))

    def _step(self) -> bool:
        fill_missing_gradients(self._module.parameters())
        if self.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._module.parameters(), self.max_grad_norm)
        self.optimizer.step()
        self._module.zero_grad(set_to_none=True)
        return True


class _Calls:
    """Whether a module has been called with gradients enabled since the last backward.

    A forward pre-hook; a class, so that a model with it can be copied.
    """

    def __init__(self) -> None:
        self.since_backward = False

    def __call__(self, *_: object) -> None:
        self.since_backward = self.since_backward or torch.is_grad_enabled()


def _reduced_by(wrap: Callable[[nn.Module], nn.Module], gradient: float, device: torch.device) -> float:
    """Send this rank's ``gradient`` of one parameter through the wrapper's reducer, and return the result."""
    module, x = probe(device, gradient)
    reducer = wrap(module)  # keep a reference until after backward: the reducer's hooks die with it
    reducer(x).sum().backward()
    assert module.weight.grad is not None
    return float(module.weight.grad)
