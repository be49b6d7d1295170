"""Training with FairScale: OSS with ShardedDataParallel, or its FullyShardedDataParallel, over data × ring.

ShardedDataParallel reduces gradients by an explicit call after the whole backward. By default it reduces them in
backward hooks and finishes when a run of autograd's engine ends. ``checkpoint_wrapper`` starts such runs within a
backward. Gradients would then be reduced twice or only in part, without an error.
"""

from __future__ import annotations

import contextlib
import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import FullyShardedDataParallel, ShardedDataParallel
from fairscale.nn.misc.flatten_params_wrapper import FlatParameter
from fairscale.optim import OSS
from torch import Tensor, nn

from ring_backends.ring.rendezvous import world_ring
from ring_backends.ring.ring import Ring
from ring_backends.training.contents import with_names, with_numbers
from ring_backends.training.reducer import device_of, fill_missing_gradients, measure_divisor, probe, under_autocast
from ring_backends.training.state import MakeOptimizer, TrainingState, refuse_copies

MakeFor = Callable[[nn.Module], torch.optim.Optimizer]


class FairScaleTraining(TrainingState):
    """The base class of both strategies. It measures the divisor on a model of one weight, wrapped like the model."""

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        ring: Ring,
        max_grad_norm: float | None,
        accumulation_steps: int,
        mixed_precision: torch.dtype | None,
        options: dict[str, Any],
    ) -> None:
        self._options = options
        with world_ring(ring).report_refusals():
            self._check_model(model)
        compared = {**options, "mixed_precision": mixed_precision}
        super().__init__(model, ring, max_grad_norm, accumulation_steps, compared)
        make = partial(self._make_optimizer, make_optimizer)
        self._module, self.model, self.optimizer = self._wrap(model, make, mixed_precision)
        refuse_copies(self.model, "FairScale's wrapper holds process groups")
        self.divisor = measure_divisor(self._world, self._reduced)

    @abstractmethod
    def _check_model(self, model: nn.Module) -> None:
        """Refuse a model or options that FairScale cannot wrap."""

    @abstractmethod
    def _wrap(
        self, model: nn.Module, make_optimizer: MakeFor, mixed_precision: torch.dtype | None = None
    ) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
        """The module whose state_dict has the model's own names, the wrapped model, and its optimizer."""

    @abstractmethod
    def _run_backward(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, ends_step: bool) -> None:
        """Run the backward of one micro-batch. Reduce the gradients if it ends the step."""

    def _reduced(self, gradient: float) -> float:
        """Send ``gradient`` of one weight through the reducer, and read the result from an SGD step."""
        weight, x = probe(device_of(self.model), gradient)
        _, model, optimizer = self._wrap(weight, lambda model: torch.optim.SGD(model.parameters(), lr=1.0))
        self._run_backward(model, optimizer, model(x).sum(), True)
        optimizer.step()
        (moved,) = model.state_dict().values()
        return -float(moved)

    def _expect_micro_batch(self, *, ends_step: bool) -> None:
        """Nothing to do: the forward does not depend on whether its backward ends the step."""

    def _backward(self, loss: Tensor) -> None:
        ends_step = self._backward_calls + 1 >= self.accumulation_steps
        self._run_backward(self.model, self.optimizer, loss, ends_step)


class ShardedTraining(FairScaleTraining):
    """OSS and ShardedDataParallel: every rank holds the whole model and updates some of its parameters.

    OSS.clip_grad_norm is not used. It rounds the norm to the parameters' dtype, but a rank without parameters sends
    fp32. With bf16 parameters this mismatch ends the process. OSS.clip_grad_norm also refuses fp64.
    """

    optimizer: OSS

    @property
    def _optimizer_class(self) -> type:
        return type(self.optimizer.optim)

    def _check_model(self, model: nn.Module) -> None:
        _check_options(self._options, _OSS_OPTIONS | _SHARDED_DDP_OPTIONS, "OSS and ShardedDataParallel")
        others = [
            f"{name}, a {type(x).__name__}" for name, x in model.state_dict().items() if not isinstance(x, Tensor)
        ]
        if others:
            raise ValueError(
                f"the model's state_dict has {', '.join(others[:8])}: ShardedDataParallel copies only tensors to the "
                "other ranks; let get_extra_state return a tensor, or use another adapter."
            )
        if self._options.get("group") is not self._options.get("process_group"):
            raise ValueError(
                "group and process_group differ: OSS broadcasts the parameters whose gradients ShardedDataParallel "
                "has reduced; pass the same group for both, or better none, since training uses the whole world."
            )

    def _wrap(
        self, model: nn.Module, make_optimizer: MakeFor, mixed_precision: torch.dtype | None = None
    ) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
        oss_options = {name: value for name, value in self._options.items() if name in _OSS_OPTIONS}
        optimizer = _shard(make_optimizer(model), oss_options)
        options = {name: value for name, value in self._options.items() if name in _SHARDED_DDP_OPTIONS}
        # TrainingState broadcasts buffers after each step.
        options.setdefault("broadcast_buffers", False)
        wrapped = ShardedDataParallel(under_autocast(model, mixed_precision), optimizer, **options)
        # The optimizer's own zero_grad would detach gradients from the buckets in which they are reduced.
        optimizer.zero_grad = wrapped.zero_grad
        return model, wrapped, optimizer

    def _check_training_mode(self, call: str) -> None:
        if not self.model.training:
            raise RuntimeError(
                f"{call}() of a model in eval mode: ShardedDataParallel reduces gradients in training mode only, so "
                "replicas would drift apart; call state.model.train() first."
            )

    def _describe_graph(self, loss: Tensor) -> Mapping[str, object]:
        self._check_training_mode("backward")
        return super()._describe_graph(loss)

    def _run_backward(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, ends_step: bool) -> None:
        with model.no_sync():  # type: ignore[operator]
            loss.backward()
        if ends_step:
            fill_missing_gradients(_parameters(optimizer))
            model.reduce()  # type: ignore[operator]

    def _check_early_step(self) -> None:
        self._check_training_mode("step")

    def _reduce_accumulated(self) -> None:
        if not self.model._manual_reduce:  # a call in eval mode has removed the functions that reduce() calls
            self.model.refresh_trainable()  # type: ignore[operator]
        fill_missing_gradients(_parameters(self.optimizer))
        self.model.reduce()  # type: ignore[operator]

    def _step(self) -> bool:
        if self.max_grad_norm is not None:
            owned = [parameter for parameter in _parameters(self.optimizer.optim) if parameter.grad is not None]
            squares = torch.zeros((), dtype=torch.float64, device=device_of(self.model))
            for parameter in owned:
                precise = torch.promote_types(parameter.dtype, torch.float32)
                squares += torch.linalg.vector_norm(parameter.grad, dtype=precise).double().square()
            dist.all_reduce(squares)
            nn.utils.clip_grads_with_norm_(owned, self.max_grad_norm, squares.sqrt())
        self.optimizer.step()
        self.model.zero_grad(set_to_none=True)
        return True

    def _optimizer_state(self) -> dict[str, Any]:
        self.optimizer.consolidate_state_dict(recipient_rank=0)
        return super()._optimizer_state() if dist.get_rank() == 0 else {}

    def _load_optimizer(self, state: dict[str, Any]) -> None:
        self.optimizer.optim.state.clear()  # OSS keeps states that are not in the checkpoint
        super()._load_optimizer(state)


class FullyShardedTraining(FairScaleTraining):
    """FairScale's FullyShardedDataParallel: each rank has a flat shard of the parameters of every wrapped unit."""

    _flattens = "FairScale's FSDP gives it flat parts of the parameters; use strategy='sharded_ddp'"
    _saves_flat = (
        "FairScale's FSDP stores the optimizer's states in this order of the model's parameters. Or use "
        "strategy='sharded_ddp' for both runs"
    )

    def _check_model(self, model: nn.Module) -> None:
        _check_options(self._options, _FSDP_OPTIONS, "FullyShardedDataParallel")
        reasons = fsdp_not_supported_reasons(model)
        if reasons:
            raise ValueError(
                f"strategy = 'fsdp': FairScale's FSDP cannot run here: {'; '.join(reasons)}. Use "
                "strategy='sharded_ddp', or the fsdp adapter, which is torch's own."
            )

    def _wrap(
        self, model: nn.Module, make_optimizer: MakeFor, mixed_precision: torch.dtype | None = None
    ) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
        wrapped = FullyShardedDataParallel(model, **self._options)
        optimizer = make_optimizer(wrapped)
        return wrapped, under_autocast(wrapped, mixed_precision), optimizer

    def _run_backward(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, ends_step: bool) -> None:
        loss.backward()  # reduces every micro-batch into the shard; no_sync would keep whole gradients

    def _reduce_accumulated(self) -> None:
        """Nothing to do: every backward has reduced its gradients."""

    def _step(self) -> bool:
        if self.max_grad_norm is not None:
            self._module.clip_grad_norm_(self.max_grad_norm)  # type: ignore[operator]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return True

    def _optimizer_state(self) -> dict[str, Any]:
        # FairScale replaces Adam's step tensors in the state that it is given, so give it a copy.
        state = self.optimizer.state_dict()
        state["state"] = {index: dict(values) for index, values in state["state"].items()}
        of_copy = SimpleNamespace(state_dict=lambda: state)
        with _padded_parameters(self._module):
            whole: Any = self._module.gather_full_optim_state_dict(of_copy)  # type: ignore[operator]
        return {} if whole is None else with_names(whole, self._group_names())

    def _names_in(self, parameter: nn.Parameter) -> Sequence[str]:
        return parameter.metadata()[0] if isinstance(parameter, FlatParameter) else ()

    def _load_optimizer(self, state: dict[str, Any]) -> None:
        if "param_id_map" not in state:
            raise ValueError("FairScale's FSDP has not written it; pass strategy='sharded_ddp', which can read it")
        state["param_id_map"] = {int(number): place for number, place in state["param_id_map"].items()}
        shard = self._module.get_shard_from_optim_state_dict(with_numbers(state))  # type: ignore[operator]
        self.optimizer.load_state_dict(shard)


@contextlib.contextmanager
def _padded_parameters(module: nn.Module) -> Iterator[None]:
    """Give the parameters of a single rank the attribute that only sharded ones have, and that FairScale reads."""
    wrappers = [part for part in module.modules() if isinstance(part, FullyShardedDataParallel)]
    whole = [x for wrapper in wrappers for x in wrapper.params if not x._is_sharded]
    for parameter in whole:
        parameter._full_param_padded = parameter
    try:
        yield
    finally:
        for parameter in whole:
            del parameter._full_param_padded


def fsdp_not_supported_reasons(model: nn.Module) -> list[str]:
    """The reasons why FairScale's FSDP cannot train a model on this machine; empty if it can."""
    reasons = []
    if not torch.cuda.is_available():
        reasons.append("it calls torch.cuda.stream in every forward, and this machine has no CUDA device")
    devices = sorted({parameter.device.type for parameter in model.parameters()} - {"cuda"})
    if devices:
        reasons.append(f"it computes on CUDA devices, and the model has parameters on {', '.join(devices)}")
    return reasons


def _shard(optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> OSS:
    """Build an OSS from the optimizer's class and parameter groups, with its defaults as constructor arguments."""
    made_by = type(optimizer)
    arguments = list(inspect.signature(made_by).parameters.values())[1:]
    defaults = {argument.name: optimizer.defaults.get(argument.name) for argument in arguments}
    lost = [
        str(argument.replace(annotation=argument.empty, default=argument.empty))
        for argument in arguments
        if argument.name not in optimizer.defaults
    ]
    if lost:
        raise ValueError(
            f"make_optimizer returned a {made_by.__name__}, which OSS cannot build again: its constructor takes "
            f"{', '.join(lost)}, but {made_by.__name__}.defaults does not contain it; store every argument of the "
            "constructor in the optimizer's defaults, under its name."
        )
    dtypes = {str(parameter.dtype) for parameter in _parameters(optimizer) if parameter.requires_grad}
    if len(dtypes) > 1:
        raise ValueError(
            f"the parameters to train have dtypes {' and '.join(sorted(dtypes))}: OSS packs each rank's parameters "
            "into one buffer of one dtype; cast the model to one dtype, and use torch.autocast to compute in another."
        )
    return OSS([dict(group) for group in optimizer.param_groups], optim=made_by, **options, **defaults)


def _arguments(function: Any, *besides: str) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters) - {*besides}


_OSS_OPTIONS = _arguments(OSS, "params", "optim", "default")
_SHARDED_DDP_OPTIONS = _arguments(ShardedDataParallel, "module", "sharded_optimizer")
_FSDP_OPTIONS = _arguments(FullyShardedDataParallel, "module")


def _check_options(options: Mapping[str, Any], known: frozenset[str], what: str) -> None:
    unknown = sorted(set(options) - known)
    if unknown:
        raise ValueError(f"unknown framework option {unknown}: {what} takes {', '.join(sorted(known))}.")


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
