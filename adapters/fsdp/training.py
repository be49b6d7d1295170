"""Training with FSDP: every gradient is reduced over all ranks of data × ring.

FSDP1 and FSDP2 take the same steps. They measure the reducer's divisor with a probe that is wrapped like the model,
copy rank 0's parameters to all ranks, shard the model, and make the optimizer from the sharded parameters. Checkpoints
have the format of torch.distributed.checkpoint. A run with another ring size or number of ranks can read them.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException, load, save  # type: ignore[attr-defined]
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._flat_param import FlatParameter
from torch.distributed.tensor import DTensor

from ring_backends.adapters.fsdp.reading import CheckpointPlanner, CheckpointReader
from ring_backends.adapters.fsdp.sharding import Sharding
from ring_backends.errors import RingPeerError
from ring_backends.ring.rendezvous import start_world_of_one
from ring_backends.ring.ring import Ring
from ring_backends.torch_internals import internal
from ring_backends.training.checkpoint_files import (
    StrPath,
    as_loadable,
    check_folder,
    is_not_caused_by_content,
    read_manifest,
    replace_folder,
)
from ring_backends.training.contents import Groups, match_groups
from ring_backends.training.describe import describe_model, own_name
from ring_backends.training.reducer import (
    device_of,
    is_eager_forward,
    mark_outputs,
    measure_divisor,
    modules_in_backward,
    probe,
)
from ring_backends.training.state import PARTS_BEHIND_LOSS, MakeOptimizer, TrainingState, copied


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
        self._refuse_copies("each rank holds shards of its parameters, and it holds process groups")
        self._check_calls_of(self.model, self._sharded_parts())
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

    def _save(self, path: StrPath) -> None:
        """Write a folder of torch.distributed.checkpoint. It replaces an earlier one once it is complete."""
        # An optimizer that has not stepped has no state, and get_optimizer_state_dict would make it step.
        state = self._checkpoint(with_optimizer=self.step_count > 0)
        holds = {"adapter": "fsdp", "contents": self._contents(state["model"]), "step": self.step_count}
        holds |= self._scaler_state()
        state["model"] = self._loadable(state["model"])

        def write(folder: Path) -> None:
            with _failures_as_errors():
                save(state, checkpoint_id=folder)

        replace_folder(self._world, path, write, holds)

    def _check(self, path: Path) -> str:
        digest = check_folder(self._world, path)
        manifest = read_manifest(path)
        if manifest["adapter"] != "fsdp":
            raise ValueError(f"it was written by the {manifest['adapter']} adapter")
        return digest

    def _load(self, path: Path) -> None:
        """Read what :meth:`save` wrote, with any strategy, ring size and number of ranks.

        Raises:
            ValueError: it holds another model.
        """
        manifest, reader = read_manifest(path), CheckpointReader(path)
        contents = self._check_contents(manifest)
        saved = set(reader.read_metadata().state_dict_metadata)
        with_optimizer = any(name.startswith("optimizer.") for name in saved)
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.state.clear()
        self._load_settings(reader, contents["groups"])
        with self._all_trained():
            state, groups = self._checkpoint(with_optimizer), None
            if with_optimizer:
                groups = state["optimizer"].pop("param_groups")
                _fit_states(state["optimizer"]["state"], saved)
            _read(reader, state)
            set_model_state_dict(self.model, state["model"])
            self.optimizer.state.clear()
            if with_optimizer:
                torchs_names = {name: first for first, name in self._names_of_tied().items()}
                states = _renamed(state["optimizer"]["state"], torchs_names)
                optimizer: Any = {"state": states, "param_groups": groups}
                options = StateDictOptions(strict=False)
                set_optimizer_state_dict(self.model, self.optimizer, optimizer, options=options)
        self._load_scaler(manifest)
        self.step_count = state["step"]

    def _load_settings(self, reader: CheckpointReader, groups: Groups) -> None:
        """Read the settings of the optimizer's groups. They decide which states it keeps, such as SGD's momentum."""
        metadata, read = reader.read_metadata(), dict[str, Any]()
        for key, value in metadata.state_dict_metadata.items():
            if key.startswith("optimizer.param_groups."):
                read[key] = None
                if isinstance(value, TensorStorageMetadata):
                    read[key] = torch.empty(value.size, dtype=value.properties.dtype, device=device_of(self.model))
        if not read:
            return
        _read(reader, read)
        settings: list[dict[str, Any]] = [{} for _ in groups]
        for key, value in read.items():
            _, _, index, *outer, name = metadata.planner_data[key]
            place = settings[index]
            for part in outer:
                place = place.setdefault(part, {})
            place[name] = value
        order = match_groups(groups, self._group_names())
        assert order is not None
        for index, group in zip(order, self.optimizer.param_groups, strict=True):
            settings[index].update((name, group[name]) for name in ("params", "param_names") if name in group)
            group.clear()
            group.update(settings[index])

    @contextlib.contextmanager
    def _all_trained(self) -> Iterator[None]:
        """Train all parameters of the optimizer temporarily: torch loads no states of frozen ones."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        frozen = [x for x in parameters if not x.requires_grad and x.is_floating_point()]
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)

    def _checkpoint(self, with_optimizer: bool) -> dict[str, Any]:
        state: dict[str, Any] = {"model": self._model_state(), "step": self.step_count}
        if with_optimizer:
            optimizer: dict[str, Any] = dict(get_optimizer_state_dict(self.model, self.optimizer))
            optimizer["state"] = _renamed(optimizer["state"], self._names_of_tied())
            state["optimizer"] = as_loadable(optimizer, "the optimizer's state")
        return state

    def _names_of_tied(self) -> dict[str, str]:
        """The names of tied parameters in a checkpoint, by torch's names, which depend on the model's order."""
        by_first = {own_name(name): self._names[id(parameter)] for name, parameter, _ in self._trained}
        return {first: names[0] for first, names in by_first.items() if len(names) == 1 and names[0] != first}

    saves_a_folder = True

    def _model_state(self) -> dict[str, Any]:
        return get_model_state_dict(self.model)

    @abstractmethod
    def _sharded_parts(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules, by name, that all-gather their own parameters when they are called. The model itself is one."""

    @abstractmethod
    def _clip(self, max_norm: float) -> None:
        """Clip the norm of the whole gradient, over all shards."""

    @abstractmethod
    def _whole_state(self, module: nn.Module) -> dict[str, Any]:
        """The unsharded state of a sharded module, by the module's own names, on every rank."""


def _read(reader: CheckpointReader, state: dict[str, Any]) -> None:
    """Read the values of ``state`` from a checkpoint, tensors in place."""
    with _failures_as_errors():
        load(state, storage_reader=reader, planner=CheckpointPlanner())


def _renamed(states: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(name, name): values for name, values in states.items()}


def _fit_states(states: dict[str, dict[str, Any]], saved: Collection[str]) -> None:
    """Leave out the parameters without a saved state, such as those on which no loss has depended.

    Raises:
        ValueError: the optimizer has no place for a saved state.
    """
    here = {f"optimizer.state.{name}.{key}" for name, values in states.items() for key in values}
    others = sorted(name for name in saved if name.startswith("optimizer.state.") and name not in here)
    if others:
        raise ValueError(
            f"the optimizer does not keep {', '.join(others[:8])}, which the checkpoint has: let make_optimizer pass "
            "the arguments of the run that saved"
        )
    for name in [*states]:
        if states[name] and not any(f"optimizer.state.{name}.{key}" in saved for key in states[name]):
            del states[name]


@contextlib.contextmanager
def _failures_as_errors() -> Iterator[None]:
    """Convert torch's CheckpointException, which is a BaseException but not an Exception.

    Raises:
        BaseException: the error of this rank, if the content of the checkpoint did not cause it, such as
            KeyboardInterrupt or an OSError.
        RingPeerError: another rank raised such an error.
        RuntimeError: otherwise.
    """
    try:
        yield
    except CheckpointException as failure:
        errors = {rank: error for rank, (error, _) in failure.failures.items()}
        own = errors.get(dist.get_rank())
        if own is not None and is_not_caused_by_content(own):
            raise own from failure
        by_rank = "; ".join(f"rank {rank}: {type(error).__name__}: {error}" for rank, error in errors.items())
        message = f"torch.distributed.checkpoint failed ({by_rank})"
        if any(is_not_caused_by_content(error) for error in errors.values()):
            raise RingPeerError(
                f"{message}; the checkpoint is not the cause. Look at the logs of these ranks."
            ) from failure
        raise RuntimeError(message) from failure


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
