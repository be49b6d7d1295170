"""Training over data × ring: a loss whose gradient is exact, steps, checkpoints.

The commonest mistake under sequence sharding is a gradient that is off by the ring size, or by the share of valid
tokens on each rank. The rule here: each rank's loss *sum*, divided by the number of valid tokens of the whole step,
times whatever the framework's reducer divides by. That divisor is measured once, through the real reducer.

What a reducer takes for granted, the ranks compare: that they train the same parameters by the same optimizer with the
same settings, and make the same calls of a step. What differs is an error on every rank before the step.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_backends.errors import RingMismatchError, RingPeerError
from ring_backends.ring.collectives import agree, broadcast, do_on_all, do_on_rank0, framework_collectives
from ring_backends.ring.rendezvous import world_ring
from ring_backends.ring.ring import Ring
from ring_backends.schedule.checks import check_integer
from ring_backends.training.checkpoint_files import (
    CheckpointNotFoundError,
    as_loadable,
    check_file,
    check_place,
    find_checkpoint,
    save_file,
)
from ring_backends.training.describe import (
    check_count,
    describe_model,
    describe_optimizer,
    describe_options,
    describe_settings,
    make_settings_loadable,
    non_tensor_entries,
    persistent_buffers,
)
from ring_backends.training.reducer import (
    UnusedParameters,
    check_mixed_precision,
    device_of,
    is_eager_forward,
    measure_divisor,
    probe,
    under_autocast,
)

StrPath = str | os.PathLike[str]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class TrainingState(ABC):
    """A model being trained over data × ring, the same way whatever framework reduces its gradients.

    Attributes:
        model: the wrapped model, to be called in the forward pass.
        optimizer: the optimizer, from ``make_optimizer``.
        divisor: what the framework's reducer divides the ranks' summed gradients by.
        step_count: optimizer steps taken so far; part of a checkpoint.
        skipped_steps: calls of :meth:`step` in which the framework left the parameters as they were, since the gradient
            was not finite. Only DeepSpeed's ZeRO 1 to 3 do so.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    divisor: float
    step_count: int

    def __init__(
        self,
        model: nn.Module,
        ring: Ring,
        max_grad_norm: float | None,
        accumulation_steps: int,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Check the arguments, compare them and the model with the other ranks', and share the model's buffers.

        Args:
            model: as the user made it, before it is wrapped.
            options: what else ``parallelize`` was given; compared as far as they are plain values.
        """
        self._world = world_ring(ring)
        with self._world.report_refusals():
            if max_grad_norm is not None and not 0 < max_grad_norm < math.inf:
                raise ValueError(f"max_grad_norm = {max_grad_norm}: must be positive and finite; None does not clip.")
            check_integer("accumulation_steps", accumulation_steps, 1)
        self.ring = ring
        self.max_grad_norm = None if max_grad_norm is None else float(max_grad_norm)
        self.accumulation_steps = accumulation_steps
        self.step_count = self.skipped_steps = 0
        self._backward_calls = 0
        self._step_token_count: float | None = None
        self._failure: str | None = None
        self._trained: list[tuple[str, nn.Parameter, bool]] = []
        self._buffers = persistent_buffers(model)
        fields = {
            "adapter": type(self).__name__,
            "max_grad_norm": self.max_grad_norm,
            "accumulation_steps": accumulation_steps,
            **describe_options(options),
        }
        agree(self._world, "parallelize", {**fields, **self._describe(model)})
        broadcast(self._world, "buffers in parallelize", [buffer for buffer in model.buffers() if not buffer.is_meta])

    def global_count(self, local_count: float | Tensor) -> int | float:
        """The sum of a count over all ranks of the world: an int where all of them are, else a float.

        Args:
            local_count: this rank's; fractions too, as of weighted tokens.

        Raises:
            ValueError, TypeError: it is no finite number of at least 0.
            RingMismatchError, RingPeerError: a rank makes another call, or is gone.
        """
        with self._world.report_refusals():
            count = check_count("local_count", local_count)
        by_rank = agree(self._world, "global_count", None, [count, isinstance(count, int)])
        total = math.fsum(rank_count for rank_count, _ in by_rank)
        return int(total) if all(is_int for _, is_int in by_rank) else total

    def loss(
        self,
        local_loss_sum: Tensor,
        local_token_count: float | Tensor,
        step_token_count: float | Tensor | None = None,
    ) -> Tensor:
        """The loss to call :meth:`backward` on: its reduced gradient is that of the mean over all valid tokens.

        Args:
            local_loss_sum: scalar, the sum of the losses of this rank's valid tokens.
            local_token_count: how many those are; with weighted losses the sum of the weights.
            step_token_count: valid tokens of the whole step, over all ranks and micro-batches: :meth:`global_count` of
                a rank's own sum. None counts this micro-batch over the ranks, which is the whole step unless
                accumulating.

        Raises:
            ValueError, TypeError: several micro-batches make a step and ``step_token_count`` is not given, or a count
                is no finite number of at least 0.
        """
        with self._world.report_refusals():
            if step_token_count is None and self.accumulation_steps > 1:
                raise ValueError(
                    f"step_token_count is not given with accumulation_steps = {self.accumulation_steps}: the mean is "
                    "over all micro-batches of a step; pass state.global_count(this rank's valid tokens of the whole "
                    "step)."
                )
            if step_token_count is not None:
                step_token_count = check_count("step_token_count", step_token_count)
        total = self.global_count(local_token_count) if step_token_count is None else step_token_count
        self._step_token_count = total
        return local_loss_sum * (self.divisor / (total or 1))

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of one micro-batch; the last one of a step reduces the sum over the ranks.

        Args:
            loss: of :meth:`loss`, one number. It has to depend on the model's output on every rank: of a rank without
                valid tokens it is a sum over none of them, or 0 times one, and not a constant.

        Raises:
            ValueError, TypeError: ``loss`` is not one number, or depends on no parameter.
            RuntimeError: all backward calls of the step have been made, or parameters are trained or frozen that were
                not so in ``parallelize``.
            RingMismatchError: the ranks are in different steps or micro-batches, use different ``step_token_count``, or
                their losses depend on different parts of the model and the framework cannot have that.
            RingPeerError: a rank does not make the call, or raised something in it.
        """
        self._check_usable()
        with self._world.report_refusals():
            self._check_loss(loss)
            if self._backward_calls == self.accumulation_steps:
                raise RuntimeError(
                    f"backward() after all {self.accumulation_steps} backward calls of a step: its gradients are "
                    "reduced already; call step() first, add the losses up, or raise accumulation_steps."
                )
            behind = self._describe_graph(loss)
        try:
            self._agree("backward", {"step_token_count": self._step_token_count, **behind})
        except RingMismatchError as error:
            if not any(name in str(error) for name in behind):
                raise
            raise RingMismatchError(
                f"{error} The framework reduces gradients as they come: let the losses of all ranks depend on the same "
                "parts of the model, by 0 * output where a rank wants no gradient."
            ) from error
        with self._framework_collectives("backward"):
            self._backward(loss)
        self._backward_calls += 1
        self._expect_micro_batch(ends_step=self._backward_calls + 1 >= self.accumulation_steps)

    def step(self) -> None:
        """Clip, let the optimizer take its step, and clear the gradients. All ranks then have rank 0's buffers.

        Raises:
            RuntimeError: fewer backward calls were made than make a step.
            RingMismatchError: the ranks are in different steps, or their optimizers have different settings.
            RingPeerError: a rank does not make the call.
        """
        with self._world.report_refusals():
            if self._backward_calls < self.accumulation_steps:
                raise RuntimeError(
                    f"step() after {self._backward_calls} of {self.accumulation_steps} backward calls: the gradients "
                    "are not reduced yet; call backward() once per micro-batch first."
                )
            self._check_optimizer()
            optimizer = {"optimizer": self._optimizer_class.__name__, **describe_settings(self.optimizer)}
        self._agree("step", {**optimizer, **self._describe_gradients()})
        with self._framework_collectives("step"):
            is_stepped = self._step()
        if is_stepped:
            self.step_count += 1
        else:
            self.skipped_steps += 1
        self._backward_calls = 0
        self._step_token_count = None
        self._broadcast_buffers("step")
        self._expect_micro_batch(ends_step=self.accumulation_steps == 1)

    def _check_loss(self, loss: Tensor) -> None:
        if not isinstance(loss, Tensor):
            raise TypeError(f"loss is a {type(loss).__name__}: expected a tensor; pass what state.loss() returns.")
        if loss.numel() != 1:
            raise ValueError(f"loss has shape {[*loss.shape]}: expected one number; pass its sum to state.loss().")
        if not loss.requires_grad:
            raise ValueError(
                "loss depends on no parameter, and the other ranks wait for this one's part of the backward: on a rank "
                "without valid tokens pass a sum over none of them, or 0 * output.sum(), and call the model with "
                "gradients enabled."
            )

    _allows_freezing = False
    """Whether parameters may be frozen and thawed between steps."""

    def _describe_graph(self, loss: Tensor) -> Mapping[str, object]:
        """What of the graph behind a loss has to be alike on all ranks; called by all of them before a backward.

        Raises:
            RuntimeError: parameters are frozen or trained that were not when the framework was told.
        """
        changed = [name for name, parameter, was_trained in self._trained if parameter.requires_grad != was_trained]
        if not changed:
            return {}
        if self._allows_freezing:
            return {"frozen or trained since parallelize()": changed}
        raise RuntimeError(
            f"requires_grad of {', '.join(changed[:8])} has changed since parallelize(), and the framework goes by "
            "what it was then: set it before parallelize(), or use the fsdp adapter, which takes such a change."
        )

    def _check_optimizer(self) -> None:
        """Refuse parameters that were added to the optimizer, and whose gradients nobody reduces."""
        known = {id(parameter) for _, parameter, _ in self._trained}
        groups = self.optimizer.param_groups
        num_others = sum(id(parameter) not in known for group in groups for parameter in group["params"])
        if num_others:
            raise RuntimeError(
                f"optimizer has {num_others} parameters that the model did not have in parallelize(): gradients of "
                "what is added later are not reduced; have it in the model before parallelize()."
            )

    def _describe_gradients(self) -> Mapping[str, object]:
        """What of the gradients has to be alike on all ranks before a step."""
        return {}

    @contextlib.contextmanager
    def _framework_collectives(self, name: str) -> Iterator[None]:
        """Around what the framework does by collectives of its own. After an error in there nothing more is trained."""
        try:
            with framework_collectives(self._world, name):
                yield
        except BaseException as error:
            if self.ring.agreement is not None:  # where a rank of the same ring may be waiting for a hop
                self.ring.agreement.report_error(name, error)
            self._failure = f"{name}() raised {type(error).__name__} in step {self.step_count + 1}"
            raise

    @abstractmethod
    def _backward(self, loss: Tensor) -> None:
        """Run the framework's backward of one micro-batch."""

    @abstractmethod
    def _step(self) -> bool:
        """Clip to ``max_grad_norm`` if it is given, step the optimizer, and clear the gradients.

        Returns:
            Whether the parameters were updated: False where the framework skips a step by itself.
        """

    @abstractmethod
    def _expect_micro_batch(self, *, ends_step: bool) -> None:
        """Called before each micro-batch's forward, for frameworks that have to know whether to reduce after it."""

    def save(self, path: StrPath) -> None:
        """Write model, optimizer and step count, all ranks together; whole or not at all.

        Raises:
            ValueError: there is something else than a checkpoint at ``path``, or the optimizer has settings that could
                not be loaded again.
            RuntimeError: rank 0 could not write it, with what it raised; OSError on rank 0.
            RingMismatchError, RingPeerError: a rank makes another call, or is gone.
        """
        self._agree_on_path("save", path)
        do_on_rank0(self._world, "saving a checkpoint", lambda: check_place(path, is_folder=self.saves_a_folder))
        do_on_all(self._world, "saving a checkpoint", lambda: make_settings_loadable(self.optimizer), ValueError)
        self._broadcast_buffers("save")
        self._save(path)

    def load(self, path: StrPath) -> None:
        """Read what :meth:`save` wrote, all ranks together.

        Raises:
            ValueError: this is not a whole checkpoint of such a model and optimizer by this adapter, on some rank. The
                model may be partly loaded.
            OSError: it cannot be read; FileNotFoundError, which is a ValueError too, where there is none.
            RuntimeError: gradients of a step that is not finished would be added to those of the next one.
            RingMismatchError, RingPeerError: a rank makes another call, or is gone.
        """
        with self._world.report_refusals():
            if self._backward_calls:
                raise RuntimeError(
                    f"load() after {self._backward_calls} backward calls of a step: their gradients would count in the "
                    "next one; call step() first, since load() undoes it."
                )
        self._agree_on_path("load", path)
        place = find_checkpoint(self._world, path)
        if place is None:
            raise CheckpointNotFoundError(f"path = {os.fspath(path)!r}: there is no checkpoint; save() writes one.")
        digest = self._read(path, lambda: self._check(place))
        digests = agree(self._world, "comparing checkpoints", None, [int(digest[:12], 16)])
        if any(other != digests[0] for other in digests):
            told = ", ".join(f"rank {rank}: {int(number):012x}" for rank, (number,) in enumerate(digests))
            raise ValueError(
                f"path = {os.fspath(path)!r}: the ranks see different checkpoints there ({told}); give a path that is "
                "the same checkpoint on every host."
            )
        self._read(path, lambda: self._load(place))

    def _read(self, path: StrPath, read: Callable[[], Any]) -> Any:
        """Let every rank read; if one cannot, all raise."""

        def read_here() -> Any:
            try:
                return read()
            except (RingMismatchError, RingPeerError):
                raise
            except Exception as error:  # there are many, by framework and by what is wrong
                if is_not_a_file_error(error):
                    raise
                raise ValueError(
                    f"path = {os.fspath(path)!r}: not a whole checkpoint of this model by this adapter; give one that "
                    f"its save() wrote. {type(error).__name__}: {error}"
                ) from error

        return do_on_all(self._world, f"loading {os.fspath(path)!r}", read_here, ValueError)

    saves_a_folder = False
    """Whether what :meth:`save` writes is a folder, and no file."""

    @abstractmethod
    def _save(self, path: StrPath) -> None:
        """Write model, optimizer, its class and ``step_count``, all ranks together."""

    @abstractmethod
    def _check(self, path: Path) -> str:
        """Make sure, on this rank and without the others, that a checkpoint is whole and fits; return its digest."""

    @abstractmethod
    def _load(self, path: Path) -> None:
        """Read model, optimizer and ``step_count``."""

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole model's state as CPU tensors, by the model's own names, on every rank; buffers are rank 0's.

        Raises:
            RingMismatchError, RingPeerError: a rank makes another call, or is gone.
        """
        self._agree("full_state_dict", {})
        self._broadcast_buffers("full_state_dict")
        return self._full_state_dict()

    @abstractmethod
    def _full_state_dict(self) -> dict[str, Tensor]:
        """The state, by whatever collectives the framework needs."""

    @property
    def _optimizer_class(self) -> type:
        """That of what ``make_optimizer`` made, which the framework may have wrapped."""
        return type(self.optimizer)

    def _make_optimizer(self, make_optimizer: MakeOptimizer, model: nn.Module) -> torch.optim.Optimizer:
        """The user's optimizer of a model's parameters; if making it fails on one rank, all raise.

        Raises:
            ValueError, TypeError: it is none, or of other parameters.
            RingMismatchError: the ranks' optimizers have the parameters in other places.
        """
        names = {id(parameter): name for name, parameter in model.named_parameters()}

        def make() -> torch.optim.Optimizer:
            optimizer = make_optimizer(model.parameters())
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise TypeError(f"make_optimizer returned {optimizer!r}: expected a torch.optim.Optimizer.")
            made_of = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            others = made_of - names.keys()
            if others:
                raise ValueError(
                    f"make_optimizer returned an optimizer with {len(others)} parameters that the model "
                    "does not have, and whose gradients would not be reduced: make it of the parameters that "
                    "make_optimizer is called with."
                )
            left_out = [name for name, x in model.named_parameters() if x.requires_grad and id(x) not in made_of]
            if left_out and self.max_grad_norm is not None:
                raise ValueError(
                    f"make_optimizer leaves out {', '.join(left_out[:8])}, and max_grad_norm = {self.max_grad_norm} is "
                    "of the whole gradient: freeze them by requires_grad_(False), or leave max_grad_norm out."
                )
            return optimizer

        optimizer = do_on_all(self._world, "make_optimizer", make, ValueError)
        self._trained = [(name, parameter, parameter.requires_grad) for name, parameter in model.named_parameters()]
        agree(self._world, "make_optimizer", describe_optimizer(optimizer, names))
        return optimizer

    def has_checkpoint(self, path: StrPath) -> bool:
        """Whether rank 0 sees something at ``path`` that :meth:`load` could read; all ranks make this call."""
        return find_checkpoint(self._world, path) is not None

    def _describe(self, model: nn.Module) -> dict[str, object]:
        """What of a model has to be alike on all ranks."""
        return describe_model(model)

    def _check_calls_of(self, parts: Iterable[tuple[str, nn.Module]]) -> None:
        """Make sure, before each call of one of these modules, that all ranks call it.

        For frameworks that gather a module's parameters when it is called. Of ranks that call different modules each
        would compute with a mixture of their parameters, or be ended by a collective of another size.
        """
        for name, part in parts:
            part.register_forward_pre_hook(partial(self._compare_call, name), prepend=True)

    def _compare_call(self, name: str, *_: object) -> None:
        if not is_eager_forward():
            return
        try:
            agree(self._world, "forward of the model", {"part": name or "all of it"})
        except RingMismatchError as error:
            raise RingMismatchError(
                f"{error} The framework gathers a part's parameters from all ranks when it is called: let every rank "
                "call the same parts, on no rows if need be; or have them sharded together with what is around them "
                "(fsdp: leave them out of blocks=; deepspeed: zero_stage=2)."
            ) from error

    def _agree(self, name: str, fields: Mapping[str, object]) -> None:
        """Make sure that all ranks make this call, with these fields, at this point of the training."""
        self._check_usable()
        point = {"step": self.step_count + self.skipped_steps, "backward calls": self._backward_calls}
        agree(self._world, name, {**point, **fields})

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise RuntimeError(
                f"{self._failure}, and may have left half a gradient behind: nothing more is done with this state; go "
                "on from the last checkpoint in new processes."
            )

    def _broadcast_buffers(self, name: str) -> None:
        """Give all ranks rank 0's buffers, of those that a state_dict has: the ranks saw different tokens."""
        if not self._buffers:
            return
        with self._world.report_refusals():
            buffers: list[Any] = [getattr(module, buffer, None) for module, buffer in self._buffers]
            for (module, buffer), found in zip(self._buffers, buffers, strict=True):
                if not isinstance(found, Tensor):
                    raise ValueError(
                        f"buffer {buffer} of a {type(module).__name__} is {found!r}, and was a tensor when the model "
                        "was handed to parallelize(): keep it one, since all ranks get rank 0's."
                    )
        broadcast(self._world, f"buffers in {name}", buffers)

    def _agree_on_path(self, name: str, path: StrPath) -> None:
        with self._world.report_refusals():
            fields = {"path": os.fspath(path)}
        self._agree(name, fields)


class ReplicatedTraining(TrainingState):
    """Training with a whole replica of model and optimizer on every rank, whose wrapper reduces the gradients.

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
        with world_ring(ring).report_refusals():
            check_mixed_precision(mixed_precision)
        options = {"mixed_precision": mixed_precision, **options}
        super().__init__(model, ring, max_grad_norm, accumulation_steps, options)
        self._replica, self._wrapped = model, under_autocast(model, mixed_precision)
        self.model = wrap(self._wrapped)
        self.optimizer = self._make_optimizer(make_optimizer, model)
        self.divisor = measure_divisor(self._world, lambda gradient: _reduced_by(wrap, gradient, device_of(model)))
        by_itself = ("find_unused_parameters", "static_graph")
        self._unused = None
        if self.model is not self._wrapped and not any(getattr(self.model, name, False) for name in by_itself):
            self._unused = UnusedParameters(model)
        self._calls = _Calls()
        self.model.register_forward_pre_hook(self._calls)
        self._unreduced = contextlib.ExitStack()
        self._expect_micro_batch(ends_step=accumulation_steps == 1)

    def _expect_micro_batch(self, *, ends_step: bool) -> None:
        self._unreduced.close()
        if not ends_step and self.model is not self._wrapped:
            self._unreduced.enter_context(self.model.no_sync())  # type: ignore[operator]

    def _describe_graph(self, loss: Tensor) -> Mapping[str, object]:
        if not self._calls.since_backward and self.model is not self._wrapped:
            raise RuntimeError(
                "backward() without a call of state.model since the last one: DistributedDataParallel reduces the "
                "gradients of what went through it alone; call state.model(...), not the model inside of it, once for "
                "each backward(), and under no reentrant checkpoint as a whole."
            )
        return super()._describe_graph(loss)

    def _backward(self, loss: Tensor) -> None:
        self._calls.since_backward = False
        if self._unused is not None:
            self._unused.begin()
        loss.backward()
        if self._unused is not None and self._backward_calls + 1 == self.accumulation_steps:
            self._unused.end()

    def _step(self) -> bool:
        for parameter in self._replica.parameters():
            if parameter.requires_grad and parameter.grad is None:  # as of one that some other rank used
                parameter.grad = torch.zeros_like(parameter)
        if self.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._replica.parameters(), self.max_grad_norm)
        self.optimizer.step()
        self._replica.zero_grad(set_to_none=True)
        return True

    def _save(self, path: StrPath) -> None:
        save_states(self, self._replica.state_dict(), self.optimizer.state_dict(), path)

    def _check(self, path: Path) -> str:
        return check_file(path)

    def _load(self, path: Path) -> None:
        state = read_states(path, device_of(self.model), self._optimizer_class)
        self._replica.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step_count = state["step"]

    def _full_state_dict(self) -> dict[str, Tensor]:
        return {name: tensor.detach().cpu().clone() for name, tensor in self._replica.state_dict().items()}


class _Calls:
    """Whether a module has been called with gradients enabled since the last backward; a hook that can be copied."""

    def __init__(self) -> None:
        self.since_backward = False

    def __call__(self, *_: object) -> None:
        self.since_backward = self.since_backward or torch.is_grad_enabled()


def save_states(state: TrainingState, model: MutableMapping[str, Any], optimizer: Any, path: StrPath) -> None:
    """Let rank 0 write a checkpoint that is one file, from states that only rank 0 need have."""

    def content() -> dict[str, Any]:
        model.update(non_tensor_entries(model, "the model's state_dict"))
        return {
            "model": model,
            "optimizer": as_loadable(optimizer, "the optimizer's state_dict"),
            "optimizer_class": state._optimizer_class.__name__,
            "step": state.step_count,
        }

    save_file(state._world, content, path)


def read_states(path: Path, device: torch.device | str, optimizer_class: type) -> dict[str, Any]:
    """What :func:`save_states` wrote.

    Raises:
        ValueError: it is of another optimizer.
    """
    states: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    check_optimizer_class(states["optimizer_class"], optimizer_class)
    return states


def check_optimizer_class(saved: str, wanted: type) -> None:
    if saved != wanted.__name__:
        raise ValueError(f"it holds the state of a {saved}, and make_optimizer made a {wanted.__name__}")


def is_not_a_file_error(error: BaseException) -> bool:
    """Whether reading failed for another reason than what was read; torch says EINVAL of a file that was cut off."""
    if isinstance(error, OSError):
        return error.errno != errno.EINVAL
    return not isinstance(error, Exception) or isinstance(error, (MemoryError, torch.OutOfMemoryError, dist.DistError))


def _reduced_by(wrap: Callable[[nn.Module], nn.Module], gradient: float, device: torch.device) -> float:
    """What a wrapper's reducer makes of one parameter whose gradient on this rank is ``gradient``."""
    module, x = probe(device, gradient)
    reducer = wrap(module)  # has to live until backward, whose hooks are its own
    reducer(x).sum().backward()
    assert module.weight.grad is not None
    return float(module.weight.grad)
