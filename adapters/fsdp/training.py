"""Training with FSDP: every gradient is reduced over all ranks of data × ring.

FSDP1 and FSDP2 take the same steps. They measure the reducer's divisor with a probe that is wrapped like the model,
copy rank 0's parameters to all ranks, shard the model, and make the optimizer from the sharded parameters.
"""

from __future__ import annotations

import contextlib
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp._flat_param import FlatParameter
from torch.distributed.tensor import DTensor

from ring_backends.adapters.fsdp.sharding import Sharding
from ring_backends.ring.rendezvous import start_world_of_one
from ring_backends.ring.ring import Ring
from ring_backends.torch_internals import internal
from ring_backends.training.contents import renamed
from ring_backends.training.describe import describe_model, own_name
from ring_backends.training.events import PARTS_BEHIND_LOSS
from ring_backends.training.reducer import (
    device_of,
    is_eager_forward,
    mark_outputs,
    measure_divisor,
    modules_in_backward,
    probe,
)
from ring_backends.training.state import MakeOptimizer, TrainingState, copied, refuse_copies


class ShardedTraining(TrainingState):
    """The base class of FSDP2 and FSDP1.

    Args:
        wrap: returns the sharding; called after the other arguments are checked.
        blocks: the modules of the model, each of which is sharded as one unit.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        ring: Ring,
        wrap: Callable[[], Sharding],
        blocks: Sequence[nn.Module],
        max_grad_norm: float | None,
        accumulation_steps: int,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(model, ring, max_grad_norm, accumulation_steps, options)
        start_world_of_one()
        sharding, device = wrap(), device_of(model)
        divisors = {measure_divisor(self._world, partial(self._reduced_by, shard, device)) for shard in sharding.probes}
        if len(divisors) > 1:
            raise ValueError(
                f"model has parts whose reducers divide by {sorted(divisors)}: no scale of the loss fits all of them; "
                "wrap every part over the same ranks."
            )
        (self.divisor,) = divisors
        self.model = sharding.shard(model, blocks)
        refuse_copies(self.model, "each rank holds shards of its parameters, and it holds process groups")
        self._events.watch_calls(self.model, self._sharded_parts())
        for name, part in self._sharded_parts():
            part.register_forward_hook(partial(mark_outputs, name))
        self.optimizer = self._make_optimizer(make_optimizer, self.model)
        self._expect_micro_batch(ends_step=accumulation_steps == 1)

    def _reduced_by(self, shard: Callable[[nn.Module], nn.Module], device: torch.device, gradient: float) -> float:
        """Send this rank's ``gradient`` of one parameter through the wrapper's reducer, and return the result.

        The result is read from a step of SGD from 0, since each wrapper shards gradients in its own way.
        """
        module, x = probe(device, gradient)
        wrapped = shard(module)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=1.0)
        wrapped(x).sum().backward()
        optimizer.step()
        return -float(self._whole_state(wrapped)["weight"])

    _allows_freezing = True

    def _describe_graph(self, loss: Tensor) -> Mapping[str, object]:
        if self._world.size == 1:
            return super()._describe_graph(loss)
        # The backward all-gathers each part when it reaches it, and reduces the part's gradients afterwards.
        return {**super()._describe_graph(loss), PARTS_BEHIND_LOSS: modules_in_backward(loss)}

    def _backward(self, loss: Tensor) -> None:
        loss.backward()

    def _step(self) -> bool:
        if self.max_grad_norm is not None:
            self._clip(self.max_grad_norm)
        self.optimizer.step()
        self.model.zero_grad(set_to_none=True)
        return True

    def _full_state_dict(self) -> dict[str, Any]:
        return {name: copied(value) for name, value in self._whole_state(self.model).items()}

    _is_sharded = True

    def _model_state(self) -> dict[str, Any]:
        return get_model_state_dict(self.model)

    def _load_model(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state)

    @abstractmethod
    def _sharded_parts(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules, by name, that all-gather their own parameters when they are called. The model itself is one."""

    @abstractmethod
    def _clip(self, max_norm: float) -> None:
        """Clip the norm of the whole gradient, over all shards."""

    @abstractmethod
    def _whole_state(self, module: nn.Module) -> dict[str, Any]:
        """The unsharded state of a sharded module, by the module's own names, on every rank."""


class FSDP2Training(ShardedTraining):
    """A model that ``fully_shard`` has sharded in place."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._was_trained: dict[Any, bool] = {}  # by FSDP2's objects of parameters
        self.model.register_forward_pre_hook(self._settle_frozen, prepend=True)
        _reduce_gradients_of_all_parameters(self.model)

    def _sharded_parts(self) -> Iterator[tuple[str, nn.Module]]:
        parts: Iterator[tuple[str, nn.Module]] = self.model.named_modules()
        return ((name, part) for name, part in parts if isinstance(part, FSDPModule))

    def _settle_frozen(self, *_: object) -> None:
        """A forward pre-hook that applies changes of ``requires_grad`` since the last forward.

        FSDP2 finds the dtypes of a group's gradients in the first forward, from the parameters that are trained then.
        After a forward without a backward, a module holds a whole parameter in place of the shard in the optimizer.
        The user may have frozen either of them.

        Raises:
            RuntimeError: parameters of several dtypes are trained in one group.
        """
        if not is_eager_forward():
            return
        for name, part in self._sharded_parts():
            for group in _groups(cast(FSDPModule, part)):
                if not self._apply_changes(group):
                    continue
                try:
                    internal(group, "_init_mp_dtypes", "freezing with FSDP2")()
                except AssertionError as error:
                    for parameter in group.fsdp_params:  # the next call checks again
                        del self._was_trained[parameter]
                    raise RuntimeError(
                        f"{name or 'the model'} has trained parameters of several dtypes, whose gradients FSDP2 cannot "
                        "reduce together: freeze those of all dtypes but one, or shard them apart by blocks=."
                    ) from error

    def _apply_changes(self, group: Any) -> bool:
        """Give the shard and the whole parameter the ``requires_grad`` that one of them has got. False: no change."""
        is_changed = False
        for parameter in group.fsdp_params:
            was_trained = self._was_trained.get(parameter)
            held = [parameter.sharded_param, *([parameter.unsharded_param] if group.is_unsharded else [])]
            if any(tensor.requires_grad != was_trained for tensor in held):
                is_trained = held[0].requires_grad if was_trained is None else not was_trained
                for tensor in held:
                    tensor.requires_grad_(is_trained)
                self._was_trained[parameter] = is_trained
                is_changed = True
        return is_changed

    def _expect_micro_batch(self, *, ends_step: bool) -> None:
        cast(FSDPModule, self.model).set_requires_gradient_sync(ends_step)

    def _reduce_accumulated(self) -> None:
        # FSDP2 reduces what is left over when a backward ends. This is the function that it calls then.
        purpose = "a step before the last micro-batch with FSDP2"
        state = internal(self.model, "_get_fsdp_state", purpose)()
        internal(state, "_root_post_backward_final_callback", purpose)()

    def _step(self) -> bool:
        for part in self.model.modules():
            if isinstance(part, FSDPModule):
                part.reshard()  # a forward without a backward leaves whole parameters in place of the shards
        return super()._step()

    def _clip(self, max_norm: float) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def _whole_state(self, module: nn.Module) -> dict[str, Any]:
        state = module.state_dict()
        return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in state.items()}


class FSDP1Training(ShardedTraining):
    """A model that FullyShardedDataParallel wraps."""

    _flattens = (
        "FSDP1 gives it flat parts of the parameters; use strategy='fsdp2' if torch supports the optimizer's DTensors, "
        "or the native adapter"
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._unreduced = contextlib.ExitStack()
        super().__init__(*args, **kwargs)
        self.model.register_forward_pre_hook(self._refuse_within_a_step)
        if any(not group["params"] for group in self.optimizer.param_groups):
            raise ValueError(
                "make_optimizer made a parameter group without parameters: FullyShardedDataParallel flattens "
                "parameters, and their shapes are lost; use strategy='fsdp2', or groups that do not depend on shapes."
            )
        dtypes = {parameter.dtype for parameter in self.model.parameters()}
        if self.max_grad_norm is not None and torch.float64 in dtypes:
            raise ValueError(
                f"max_grad_norm = {self.max_grad_norm} with parameters of fp64: FullyShardedDataParallel computes "
                "norms in fp32 only; use strategy='fsdp2', or leave max_grad_norm out."
            )

    def _describe(self, model: nn.Module) -> dict[str, object]:
        return describe_model(model, with_shapes=not isinstance(model, FullyShardedDataParallel))

    def _names_in(self, parameter: nn.Parameter) -> Sequence[str]:
        if not isinstance(parameter, FlatParameter):  # as with use_orig_params=True
            return ()
        return cast(Sequence[str], internal(parameter, "_fqns", "the names of parameters in a FlatParameter"))

    def _model_state(self) -> dict[str, Any]:
        # torch expects the names without those of wrapping modules, but does not remove that of a compiled module.
        return {own_name(name): value for name, value in super()._model_state().items()}

    def _optimizer_state(self) -> dict[str, Any]:
        with self._sharded_states():
            return renamed(FullyShardedDataParallel.optim_state_dict(self.model, self.optimizer), self._own_names())

    def _load_optimizer(self, state: dict[str, Any]) -> None:
        fsdp_names = {own: name for name, own in self._own_names().items()}
        with self._sharded_states():
            flat = FullyShardedDataParallel.optim_state_dict_to_load(
                self.model, self.optimizer, renamed(state, fsdp_names)
            )
        self.optimizer.load_state_dict(flat)

    @contextlib.contextmanager
    def _sharded_states(self) -> Iterator[None]:
        """Let FSDP return and take states as shards of whole tensors."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "FSDP.state_dict_type", FutureWarning)
            with FullyShardedDataParallel.state_dict_type(self.model, StateDictType.SHARDED_STATE_DICT):
                yield

    def _own_names(self) -> dict[str, str]:
        """The model's own names of the parameters, by the names that FSDP gives them."""
        own_names: dict[str, str] = {}
        for name, parameter, _ in self._trained:
            module = name[: name.rfind(".") + 1]
            whole = [module + inside for inside in self._names_in(parameter)] or [name]
            for wrapper in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module."):
                whole = [part.replace(wrapper, "") for part in whole]
            own_names.update(zip(whole, self._names[id(parameter)], strict=True))
        return own_names

    def _sharded_parts(self) -> Iterator[tuple[str, nn.Module]]:
        parts: Iterator[tuple[str, nn.Module]] = self.model.named_modules()
        return ((name, part) for name, part in parts if isinstance(part, FullyShardedDataParallel))

    def _expect_micro_batch(self, *, ends_step: bool) -> None:
        self._unreduced.close()
        if not ends_step:
            self._unreduced.enter_context(cast(FullyShardedDataParallel, self.model).no_sync())

    def _check_early_step(self) -> None:
        raise RuntimeError(
            f"step() after {self._backward_calls} of {self.accumulation_steps} backward calls: "
            "FullyShardedDataParallel reduces gradients in the last backward of a step only; call backward() "
            f"{self.accumulation_steps} times before step(), or use strategy='fsdp2'."
        )

    def _refuse_within_a_step(self, module: nn.Module, inputs: Any) -> None:
        is_over = self._backward_calls >= self.accumulation_steps
        if self._backward_calls and (is_over or not torch.is_grad_enabled()):
            raise RuntimeError(
                f"a forward without a backward, after {self._backward_calls} backward calls of a step: "
                "FullyShardedDataParallel would keep unsharded parameters, and the step would be lost; evaluate after "
                "step(), or use strategy='fsdp2'."
            )

    def _clip(self, max_norm: float) -> None:
        cast(FullyShardedDataParallel, self.model).clip_grad_norm_(max_norm)

    def _whole_state(self, module: nn.Module) -> dict[str, Any]:
        return cast(dict[str, Any], get_model_state_dict(module, options=StateDictOptions(full_state_dict=True)))


def _reduce_gradients_of_all_parameters(model: nn.Module) -> None:
    """Make FSDP2 reduce a gradient of every trained parameter, in one dtype: zeros if this rank has not used it.

    FSDP2 leaves parameters that a rank has not used in a step, such as those of an expert that got no tokens there, out
    of this rank's reduce-scatter. Other ranks include them, so gradients of different parameters would be added. Every
    rank must reduce zeros instead. torch 2.13 has a setting for that, but its zeros have the dtype of the parameters.

    In mixed precision, FSDP2 accumulates gradients over micro-batches in the dtype of the reduction. It leaves
    gradients that the last micro-batch is the first to give, and zeros, in the dtype of the parameters. It then refuses
    to reduce them together with accumulated gradients. So they are cast before.
    """
    for part in model.modules():
        if isinstance(part, FSDPModule):
            for group in _groups(part):
                group.post_backward = partial(_reduce_all, group, group.post_backward)


def _groups(part: FSDPModule) -> list[Any]:
    """The groups of parameters that FSDP2 reduces together. Before torch 2.13, a module has at most one."""
    state = internal(part, "_get_fsdp_state", "training with FSDP2")()
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return groups
    group = internal(state, "_fsdp_param_group", "training with FSDP2")
    return [] if group is None else [group]


def _reduce_all(group: Any, reduce: Callable[..., None], *unused: Any) -> None:
    """Set missing gradients before ``reduce``, FSDP2's own reduction of one group after its backward."""
    if group.reduce_grads:
        # A parameter that no forward has gathered yet has no such attribute.
        parameters = [parameter for parameter in group.fsdp_params if hasattr(parameter, "_unsharded_param")]
        missing = [parameter for parameter in parameters if parameter.unsharded_accumulated_grad is None]
        is_accumulated = len(missing) < len(parameters)
        for parameter in missing:
            whole = parameter.unsharded_param
            if whole.requires_grad and whole.grad is None:
                whole.grad = torch.zeros_like(whole)
            if is_accumulated:
                parameter.to_accumulated_grad_if_needed()
    reduce(*unused)
