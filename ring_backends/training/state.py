"""Training over data × ring: a loss whose gradient is exact, optimizer steps, and training checkpoints.

The most common mistake under sequence sharding is a gradient that is off by the ring size, or by each rank's share of
the valid tokens. :meth:`TrainingState.loss` avoids both. It divides each rank's loss *sum* by the number of valid
tokens of the whole step, and multiplies it by the number by which the framework's reducer divides. That divisor is
measured once, with the framework's own reducer.

A gradient reducer assumes that all ranks make the same calls in the same order, so the ranks check it before each
collective of the framework. If a call follows the same call as in the step before, nothing is compared; otherwise the
rank first compares it with the other ranks. So a rank that leaves the usual sequence waits for a comparison while
the others wait in the framework's collective, and all of them raise RingMismatchError.

Fields that change in each step, such as learning rates and numbers of tokens, are compared with the number of tokens
of the step: the one exchange that a step needs.

If one rank cannot read a checkpoint, all ranks raise.
"""

from __future__ import annotations

import copy
import inspect
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from ring_backends.errors import RingMismatchError, RingPeerError
from ring_backends.ring.calls import NOTHING
from ring_backends.ring.collectives import agree, broadcast, do_on_all, do_on_rank0
from ring_backends.ring.ring import Ring
from ring_backends.schedule.checks import check_integer
from ring_backends.training.checkpoint_files import (
    CheckpointNotFoundError,
    StrPath,
    as_loadable,
    check_folder,
    check_place,
    find_checkpoint,
    is_not_caused_by_content,
    read_manifest,
    replace_folder,
)
from ring_backends.training.checkpoints import FORMAT, read_state, write_state
from ring_backends.training.contents import (
    Groups,
    check_contents,
    describe_contents,
    in_groups,
    with_names,
    with_numbers,
)
from ring_backends.training.describe import (
    check_count,
    describe_model,
    describe_optimizer,
    describe_options,
    describe_settings,
    make_settings_loadable,
    parameter_names,
    persistent_buffers,
)
from ring_backends.training.elementwise import check_elementwise
from ring_backends.training.events import Events
from ring_backends.training.reducer import check_device, check_mixed_precision, device_of, new_scaler, unscale

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def copied(value: Any) -> Any:
    """A copy of a value of a state_dict: of a tensor, on the CPU."""
    return value.detach().cpu().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


class TokenCounts:
    """The numbers of tokens with which the losses of a step were scaled.

    Attributes:
        since_backward: of the losses since the last backward.
        of_step: of the backward calls of the step; None stands for a loss that was not scaled.
    """

    def __init__(self) -> None:
        self.since_backward: set[float] = set()
        self.of_step: set[float | None] = set()

    def take(self) -> list[float]:
        """The counts since the last backward, which begins now."""
        counts = sorted(self.since_backward)
        self.since_backward.clear()
        return counts

    def rescaling(self, step_token_count: float | None) -> float:
        """The factor that turns the gradient into that of the mean over ``step_token_count`` tokens."""
        if step_token_count is None:
            return 1.0
        if len(self.of_step) > 1 or None in self.of_step:
            counts = ", ".join(sorted(map(str, self.of_step)))
            raise ValueError(
                f"step_token_count = {step_token_count}: the losses of this step were scaled with different numbers of "
                f"tokens ({counts}), so no factor fits all of them; make every loss of a step with state.loss(), and "
                "pass the same step_token_count each time."
            )
        (used,) = self.of_step
        assert used is not None
        return (used or 1) / (step_token_count or 1)


def _check_loss(loss: Tensor) -> None:
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss is a {type(loss).__name__}: expected a tensor; pass what state.loss() returns.")
    if loss.numel() != 1:
        raise ValueError(f"loss has shape {[*loss.shape]}: expected one number; pass its sum to state.loss().")
    if not loss.requires_grad:
        raise ValueError(
            "loss depends on no parameter, and the other ranks wait for this rank's gradients: on a rank without "
            "valid tokens pass 0 * output.sum(), and call the model with gradients enabled."
        )


def refuse_copies(model: nn.Module, reason: str) -> None:
    """Let copies and pickles of a wrapped model raise TypeError.

    Args:
        reason: why they are impossible, as one clause.
    """

    def refuse(*_: object) -> NoReturn:
        raise TypeError(
            f"state.model cannot be copied or pickled: {reason}. Copy the module before parallelize() wraps it, or "
            "load state.full_state_dict() into another module of its class."
        )

    # copy and pickle look these up on the instance.
    vars(model).update(__deepcopy__=refuse, __reduce_ex__=refuse)


def _read(world: Ring, path: StrPath, read: Callable[[], Any]) -> Any:
    """Let every rank read; if one cannot, all raise."""

    def read_here() -> Any:
        try:
            return read()
        except (RingMismatchError, RingPeerError):
            raise
        except Exception as error:  # the class depends on the framework and on the damage
            if is_not_caused_by_content(error):
                raise
            raise ValueError(
                f"path = {os.fspath(path)!r}: not a whole checkpoint of this model; give one that save() wrote. "
                f"{type(error).__name__}: {error}"
            ) from error

    return do_on_all(world, f"loading {os.fspath(path)!r}", read_here, ValueError)


def _text_of(world: Ring, path: object) -> str:
    with world.report_refusals():
        text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
        if not isinstance(text, str):
            raise TypeError(f"path = {path!r}: expected a str or an os.PathLike; give that of a checkpoint.")
    return text


class TrainingState(ABC):
    """A model in training over data × ring. Its interface is the same for every framework.

    A subclass runs the framework's backward and step. It sets ``_module``, the module whose state_dict has the model's
    own names; or it overrides ``_model_state``, ``_load_model`` and ``_full_state_dict``.

    Attributes:
        model: the wrapped model, to be called in the forward.
        ring: the ring of the attention.
        optimizer: the optimizer, as ``make_optimizer`` or the framework made it.
        divisor: the number by which the framework's reducer divides the sum of the ranks' gradients.
        step_count: optimizer steps taken so far; part of a checkpoint.
        skipped_steps: calls of :meth:`step` that left the parameters unchanged, because the gradient was not finite.
            Only ``mixed_precision=torch.float16`` and DeepSpeed's ZeRO 1 to 3 do so.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    divisor: float
    _module: nn.Module

    _is_sharded: ClassVar[bool] = False
    """Whether all ranks write and read a checkpoint together. Otherwise rank 0 writes whole tensors."""

    _format: ClassVar[str] = FORMAT
    """The format of the files of a checkpoint."""

    _allows_freezing: ClassVar[bool] = False
    """Whether ``requires_grad`` of parameters may change between steps."""

    _mixed_precisions: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16, torch.float16)
    """The dtypes that ``mixed_precision`` may be."""

    _flattens: str | None = None
    """Where the optimizer gets flat parts of parameters: what an error says about it, with the way out."""

    _saves_flat: str | None = None
    """Where a checkpoint holds flat parts of the parameters: what an error says about it, with the way out."""

    def __init__(
        self,
        model: nn.Module,
        ring: Ring,
        max_grad_norm: float | None,
        accumulation_steps: int,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Check the arguments, compare them and the model with the other ranks', and broadcast the model's buffers.

        Args:
            model: as the user made it, before it is wrapped.
            options: the other arguments of ``parallelize`` by name. Plain values are compared.
        """
        self.ring, self._events = ring, Events(ring)
        self._world = self._events.world
        with self._world.report_refusals():
            if max_grad_norm is not None and not 0 < max_grad_norm < math.inf:
                raise ValueError(f"max_grad_norm = {max_grad_norm}: must be positive and finite; None does not clip.")
            check_integer("accumulation_steps", accumulation_steps, 1)
            check_mixed_precision(options.get("mixed_precision"), self._mixed_precisions)
            check_device(device_of(model))
        self.max_grad_norm = None if max_grad_norm is None else float(max_grad_norm)
        self.accumulation_steps = accumulation_steps
        self.step_count = self.skipped_steps = 0
        self._backward_calls = 0
        self._tokens = TokenCounts()
        self._is_compared = False
        self._trained: list[tuple[str, nn.Parameter, bool]] = []
        self._buffers = persistent_buffers(model)
        self._scaler: torch.amp.GradScaler | None = None
        if options.get("mixed_precision") == torch.float16:
            self._scaler = new_scaler(device_of(model), self._world)
        fields = {
            "adapter": type(self).__name__,
            "max_grad_norm": self.max_grad_norm,
            "accumulation_steps": accumulation_steps,
            **describe_options(options),
        }
        agree(self._world, "parallelize", {**fields, **self._describe(model)})
        for parameter in model.parameters():  # frameworks would count such a gradient in different ways
            parameter.grad = None
        broadcast(self._world, "buffers in parallelize", [buffer for buffer in model.buffers() if not buffer.is_meta])

    def global_count(self, local_count: float | Tensor) -> int | float:
        """The sum of a count over all ranks of the world: an int if every rank's count is an int, else a float.

        Args:
            local_count: this rank's count. It may be a fraction, as with weighted tokens.

        Raises:
            ValueError, TypeError: ``local_count`` is not a finite number of at least 0.
            RingMismatchError: a rank makes another call, or has passed other values to the calls since the last count,
                such as another learning rate.
            RingPeerError: a rank is gone.
        """
        with self._world.report_refusals():
            count = check_count("local_count", local_count)
        # Settings that differ are known before the step.
        settings, event = describe_settings(self.optimizer), self._events.event("global_count", {})
        numbers = [count, isinstance(count, int)]
        by_rank = agree(self._world, "global_count", event.fields, numbers, values=settings)
        self._is_compared = True
        total = math.fsum(rank_count for rank_count, _ in by_rank)
        return int(total) if all(is_int for _, is_int in by_rank) else total

    def loss(
        self,
        local_loss_sum: Tensor,
        local_token_count: float | Tensor,
        step_token_count: float | Tensor | None = None,
    ) -> Tensor:
        """The loss for :meth:`backward`. Its reduced gradient is that of the mean over all valid tokens.

        It is not the mean loss. For that, add up loss sums and token counts over all ranks, and divide.

        Args:
            local_loss_sum: scalar, the sum of the losses of this rank's valid tokens.
            local_token_count: the number of those tokens; with weighted losses, the sum of the weights.
            step_token_count: valid tokens of the whole step, over all ranks and micro-batches. It is the result of
                ``global_count(this rank's tokens of the step)``. None adds up ``local_token_count`` over the ranks, and
                is allowed only if a step has one micro-batch.

        Raises:
            ValueError, TypeError: ``step_token_count`` is not given with ``accumulation_steps`` above 1, or a count is
                not a finite number of at least 0.
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
        loss = local_loss_sum * (self.divisor / (total or 1))
        if loss.requires_grad:  # others are for a record only
            self._tokens.since_backward.add(total)
        return loss

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of one micro-batch. After a step's last backward, all gradients are reduced over the ranks.

        Args:
            loss: one number, from :meth:`loss`. On every rank it must depend on the model's output. A rank without
                valid tokens passes a sum over no tokens, or ``0 * output.sum()``, not a constant.

        Raises:
            ValueError, TypeError: ``loss`` is not one number, or depends on no parameter.
            RuntimeError: all backward calls of the step have been made, or ``requires_grad`` of a parameter has changed
                since ``parallelize`` (``fsdp`` allows this).
            RingMismatchError: the ranks are in different steps or micro-batches, pass different ``step_token_count``,
                or their losses depend on different parts of the model and the framework cannot reduce that.
            RingPeerError: a rank does not make the call, or raised an error in it.
        """
        self._events.check_usable()
        with self._world.report_refusals():
            _check_loss(loss)
            if self._backward_calls == self.accumulation_steps:
                raise RuntimeError(
                    f"backward() after all {self.accumulation_steps} backward calls of a step: the gradients are "
                    "reduced already; call step() first, also where an epoch ends with fewer backward calls "
                    "(step(step_token_count)), pass the sum of the losses, or raise accumulation_steps."
                )
            graph = self._describe_graph(loss)
        counts = self._tokens.take()
        self._agree("backward", graph, {"step_token_count": counts}, if_new=True)
        with self._events.framework_collectives("backward", self.step_count + 1):
            self._backward(loss if self._scaler is None else self._scaler.scale(loss))
        self._tokens.of_step.update(counts or [None])
        self._backward_calls += 1
        self._expect_micro_batch(ends_step=self._backward_calls + 1 >= self.accumulation_steps)

    def step(self, step_token_count: float | Tensor | None = None) -> None:
        """Clip the gradient, step the optimizer, clear the gradients, and give all ranks rank 0's buffers.

        After fewer than ``accumulation_steps`` backward calls, as at the end of an epoch, this call reduces the
        gradient of the micro-batches so far and steps.

        Args:
            step_token_count: valid tokens of the micro-batches that the step really has, over all ranks. The gradient
                becomes that of the mean over these tokens, although :meth:`loss` was given another number. None keeps
                the number given to :meth:`loss`.

        Raises:
            RuntimeError: no backward call was made since the last step.
            ValueError, TypeError: ``step_token_count`` is not a finite number of at least 0, or the losses of the step
                were not all scaled with one number by :meth:`loss`.
            RingMismatchError: the ranks are in different steps, have made different numbers of backward calls, pass
                different ``step_token_count``, or their optimizers have different settings.
            RingPeerError: a rank does not make the call.
        """
        with self._world.report_refusals():
            if not self._backward_calls:
                raise RuntimeError(
                    f"step() after 0 of {self.accumulation_steps} backward calls: there is no gradient; call "
                    "backward() at least once before step()."
                )
            is_early = self._backward_calls < self.accumulation_steps
            if is_early:
                self._check_early_step()
            if step_token_count is not None:
                step_token_count = check_count("step_token_count", step_token_count)
            factor = self._tokens.rescaling(step_token_count)
            self._check_optimizer()
            fields = {"optimizer": self._optimizer_class.__name__, **self._describe_gradients()}
            values = {"step_token_count": step_token_count, **describe_settings(self.optimizer)}
        self._agree("step", fields, values, after_hops=True, if_new=self._is_compared)
        self._is_compared = False
        with self._events.framework_collectives("step", self.step_count + 1):
            if is_early:
                self._expect_micro_batch(ends_step=True)
                self._reduce_accumulated()
            if factor != 1:
                self._scale_gradients(factor)
            is_updated = (self._scaler is None or unscale(self._scaler, self.optimizer)) and self._step()
        if is_updated:
            self.step_count += 1
        else:
            self.skipped_steps += 1
        self._backward_calls = 0
        self._tokens.of_step.clear()
        self._broadcast_buffers("step")
        self._expect_micro_batch(ends_step=self.accumulation_steps == 1)

    def _describe_graph(self, loss: Tensor) -> Mapping[str, object]:
        """The properties of the graph behind ``loss`` that must be equal on all ranks. Called before each backward.

        Raises:
            RuntimeError: ``requires_grad`` of a parameter has changed, and the framework does not allow it.
        """
        changed = [name for name, parameter, was_trained in self._trained if parameter.requires_grad != was_trained]
        if not changed:
            return {}
        if self._allows_freezing:
            return {"frozen or trained since parallelize()": changed}
        raise RuntimeError(
            f"requires_grad of {', '.join(changed[:8])} has changed since parallelize(), and the framework still uses "
            "the earlier value: set it before parallelize(), or use the fsdp adapter, which allows such a change."
        )

    def _check_optimizer(self) -> None:
        """Refuse parameters that were added to the optimizer later: their gradients are not reduced."""
        known = {id(parameter) for _, parameter, _ in self._trained}
        groups = self.optimizer.param_groups
        num_others = sum(id(parameter) not in known for group in groups for parameter in group["params"])
        if num_others:
            raise RuntimeError(
                f"optimizer has {num_others} parameters that the model did not have in parallelize(): gradients of "
                "parameters added later are not reduced; add them to the model before parallelize()."
            )

    def _describe_gradients(self) -> Mapping[str, object]:
        """The properties of the gradients that must be equal on all ranks before a step."""
        return {}

    @abstractmethod
    def _backward(self, loss: Tensor) -> None:
        """Run the framework's backward of one micro-batch."""

    def _check_early_step(self) -> None:  # noqa: B027 - most frameworks can reduce them
        """Refuse a step before the last micro-batch if the framework cannot reduce the gradients then."""

    def _reduce_accumulated(self) -> None:
        """Reduce the gradients of the backward calls so far, none of which has ended a step.

        A subclass implements this, unless its :meth:`_check_early_step` refuses such a step.
        """
        raise NotImplementedError

    def _scale_gradients(self, factor: float) -> None:
        """Multiply the reduced gradient by ``factor``."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    @abstractmethod
    def _step(self) -> bool:
        """Clip to ``max_grad_norm`` if it is given, step the optimizer, and clear the gradients.

        Returns:
            Whether the parameters were updated. False if the framework skipped the step.
        """

    @abstractmethod
    def _expect_micro_batch(self, *, ends_step: bool) -> None:
        """Called before each micro-batch's forward: some frameworks must know whether its backward will reduce."""

    def _make_optimizer(self, make_optimizer: MakeOptimizer, model: nn.Module) -> torch.optim.Optimizer:
        """Call the user's ``make_optimizer`` and check the result. If it fails on one rank, all raise.

        Raises:
            ValueError, TypeError: the result is not an optimizer, or has parameters that the model does not have.
            RingMismatchError: the ranks' optimizers order the parameters differently.
        """
        names = {id(parameter): name for name, parameter in model.named_parameters()}

        def make() -> torch.optim.Optimizer:
            optimizer = make_optimizer(model.parameters())
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise TypeError(f"make_optimizer returned {optimizer!r}: expected a torch.optim.Optimizer.")
            parameters = inspect.signature(optimizer.step).parameters.values()
            needed = [
                x.name for x in parameters if x.default is x.empty and x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)
            ]
            if needed:
                raise ValueError(
                    f"make_optimizer returned {type(optimizer).__name__}, whose step() needs {', '.join(needed)}: "
                    "state.step() has only gradients; return an optimizer whose step() needs no arguments."
                )
            made_of = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            others = made_of - names.keys()
            if others:
                raise ValueError(
                    f"make_optimizer returned an optimizer with {len(others)} parameters that the model does not have: "
                    "their gradients would not be reduced; use the parameters that make_optimizer is called with."
                )
            left_out = [name for name, x in model.named_parameters() if x.requires_grad and id(x) not in made_of]
            if left_out and self.max_grad_norm is not None:
                raise ValueError(
                    f"make_optimizer leaves out {', '.join(left_out[:8])}, and max_grad_norm = {self.max_grad_norm} "
                    "clips the whole gradient: freeze them with requires_grad_(False), or leave max_grad_norm out."
                )
            if self._flattens is not None:
                check_elementwise(optimizer, self._flattens)
            return optimizer

        optimizer = do_on_all(self._world, "make_optimizer", make, ValueError)
        self._trained = [(name, parameter, parameter.requires_grad) for name, parameter in model.named_parameters()]
        self._names = parameter_names(model, self._names_in)
        agree(self._world, "make_optimizer", describe_optimizer(optimizer, names))
        return optimizer

    def _describe(self, model: nn.Module) -> dict[str, object]:
        """The properties of a model that must be equal on all ranks."""
        return describe_model(model)

    # Saving and loading

    def save(self, path: StrPath) -> None:
        """Write a checkpoint of model, optimizer and step count. All ranks make this call; it is atomic.

        Raises:
            ValueError: ``path`` is a folder that is not a checkpoint or a special file, or the optimizer has settings
                or the model has an extra state that could not be loaded again.
            OSError, RuntimeError: rank 0 could not write the checkpoint. It raises the OSError; the other ranks raise a
                RuntimeError with its message.
            RingMismatchError, RingPeerError: a rank makes another call, or is gone.
        """
        self._agree("save", {"path": _text_of(self._world, path)})
        do_on_rank0(self._world, "saving a checkpoint", lambda: check_place(path))
        do_on_all(self._world, "saving a checkpoint", lambda: make_settings_loadable(self.optimizer), ValueError)
        self._broadcast_buffers("save")
        self._save(path)

    def load(self, path: StrPath) -> None:
        """Read a checkpoint that :meth:`save` wrote. All ranks make this call.

        The settings of the optimizer become those of the checkpoint. The order of the parameters may differ, unless the
        framework stores flat parts of them.

        Raises:
            ValueError: the checkpoint is one of another adapter, model, optimizer or version, or its checksums do not
                match; nothing has changed. Or a file of it cannot be read; the model may be partly loaded.
            OSError: the checkpoint cannot be read. If there is none, the error is both a FileNotFoundError and a
                ValueError.
            RuntimeError: backward calls were made since the last step. Their gradients would count in the next one.
            RingMismatchError, RingPeerError: a rank makes another call, or is gone.
        """
        with self._world.report_refusals():
            if self._backward_calls:
                raise RuntimeError(
                    f"load() after {self._backward_calls} backward calls of a step: their gradients would count in the "
                    "next step; call step() first; load() then replaces its result."
                )
        self._agree("load", {"path": _text_of(self._world, path)})
        place = find_checkpoint(self._world, path)
        if place is None:
            raise CheckpointNotFoundError(
                f"path = {os.fspath(path)!r}: there is no checkpoint; give a path that save() wrote."
            )
        digest = _read(self._world, path, lambda: self._check(place))
        digests = agree(self._world, "comparing checkpoints", None, [int(digest[:12], 16)])
        if any(other != digests[0] for other in digests):
            by_rank = ", ".join(f"rank {rank}: {int(number):012x}" for rank, (number,) in enumerate(digests))
            raise ValueError(
                f"path = {os.fspath(path)!r}: the ranks see different checkpoints there ({by_rank}); give a path that "
                "leads to the same checkpoint on every host."
            )
        _read(self._world, path, lambda: self._load(place))

    def has_checkpoint(self, path: StrPath) -> bool:
        """Whether rank 0 sees a checkpoint at ``path``. All ranks make this call."""
        return find_checkpoint(self._world, _text_of(self._world, path)) is not None

    def full_state_dict(self) -> dict[str, Any]:
        """The state of the whole model on every rank: CPU tensors by the model's own names, with rank 0's buffers.

        Extra states of modules (``get_extra_state``) that are no tensors are copied as they are on this rank.

        Raises:
            RingMismatchError, RingPeerError: a rank makes another call, or is gone.
        """
        self._agree("full_state_dict", {})
        self._broadcast_buffers("full_state_dict")
        return self._full_state_dict()

    def _save(self, path: StrPath) -> None:
        """Write model, optimizer, ``step_count`` and :meth:`_contents`. Called on all ranks."""
        model, optimizer = self._model_state(), self._optimizer_state()
        contents = self._contents(model)

        def loadable() -> dict[str, Any]:
            return {
                "model": {name: as_loadable(x, f"the model's state_dict[{name!r}]") for name, x in model.items()},
                "optimizer": as_loadable(optimizer, "the optimizer's state_dict"),
                "step": self.step_count,
                **({} if self._scaler is None else {"scaler": self._scaler.state_dict()}),
            }

        state = do_on_all(self._world, "saving a checkpoint", loadable, ValueError)
        self._replace_folder(path, partial(write_state, state=state, is_sharded=self._is_sharded), contents)

    def _replace_folder(self, path: StrPath, write: Callable[[Path], object], contents: Mapping[str, Any]) -> None:
        """Let ``write`` fill a folder, and let the folder replace the checkpoint at ``path``. Called on all ranks."""
        holds = {"format": self._format, "contents": contents}
        if self._is_sharded:
            replace_folder(self._world, path, write, holds)
        else:
            do_on_rank0(self._world, "saving a checkpoint", lambda: replace_folder(Ring(), path, write, holds))

    def _check(self, path: Path) -> str:
        """Check, without the other ranks, that a checkpoint is whole and has this format; return its digest."""
        digest, found = check_folder(self._world, path), read_manifest(path)["format"]
        if found != self._format:
            raise ValueError(f"its format is that of {found}, but this adapter reads that of {self._format}")
        return digest

    def _load(self, path: Path) -> None:
        """Check the contents, then read model, optimizer and ``step_count``. Called on all ranks."""
        model = self._model_state()
        check_contents(read_manifest(path)["contents"], self._contents(model), self._saves_flat)
        state = read_state(path, model, device_of(self.model), is_sharded=self._is_sharded)
        self._load_model({**model, **state["model"]})
        self._load_optimizer(in_groups({"state": {}, **state["optimizer"]}, self._group_names()))
        if self._scaler is not None and "scaler" in state:  # a run with fp16 may go on from one without
            self._scaler.load_state_dict(state["scaler"])
        self.step_count = state["step"]

    def _contents(self, state: Mapping[str, object]) -> dict[str, Any]:
        """What a checkpoint holds: the part of it that a load compares. JSON-serializable.

        Args:
            state: what :meth:`_model_state` returned.
        """
        groups, names = self._group_names(), self._names
        frozen = {name for _, x, _ in self._trained if not x.requires_grad for name in names[id(x)]}
        return describe_contents(state, self._optimizer_class, groups, sorted(frozen))

    def _group_names(self) -> Groups:
        """The model's own names of the parameters in each parameter group of the optimizer."""
        groups = self.optimizer.param_groups
        return [[name for x in group["params"] for name in self._names[id(x)]] for group in groups]

    def _names_in(self, parameter: nn.Parameter) -> Sequence[str]:
        """The names of the parameters in a flat parameter, relative to its module. Empty if it is not flat."""
        return ()

    def _model_state(self) -> dict[str, Any]:
        """The model's state_dict: tensors with whole shapes, by the model's own names. Called on all ranks."""
        return self._module.state_dict()

    def _full_state_dict(self) -> dict[str, Any]:
        """The state of the whole model. Called on all ranks, so it may use the framework's collectives."""
        return {name: copied(value) for name, value in self._module.state_dict().items()}

    def _load_model(self, state: dict[str, Any]) -> None:
        """Load a state of :meth:`_model_state`."""
        self._module.load_state_dict(state)

    def _optimizer_state(self) -> dict[str, Any]:
        """The optimizer's state_dict, with names in place of the numbers of parameters. Called on all ranks.

        If the model is not sharded, only rank 0 needs it.
        """
        return with_names(self.optimizer.state_dict(), self._group_names())

    def _load_optimizer(self, state: dict[str, Any]) -> None:
        """Load a state of :meth:`_optimizer_state`, whose groups are those of this optimizer."""
        self.optimizer.load_state_dict(with_numbers(state))

    @property
    def _optimizer_class(self) -> type:
        """The class of the optimizer that ``make_optimizer`` returned. The framework may have wrapped the optimizer."""
        return type(self.optimizer)

    def _agree(
        self, name: str, fields: Mapping[str, object], values: Mapping[str, object] = NOTHING, **how: bool
    ) -> None:
        """Compare a call with the other ranks (:meth:`Events.agree`)."""
        self._events.agree(name, {"backward calls": self._backward_calls, **fields}, values, **how)

    def _broadcast_buffers(self, name: str) -> None:
        """Give all ranks rank 0's persistent buffers: each rank has updated its own from different tokens."""
        if not self._buffers:
            return
        with self._world.report_refusals():
            buffers: list[Any] = [getattr(module, buffer, None) for module, buffer in self._buffers]
            for (module, buffer), found in zip(self._buffers, buffers, strict=True):
                if not isinstance(found, Tensor):
                    raise ValueError(
                        f"buffer {buffer} of a {type(module).__name__} is {found!r}, but was a tensor in "
                        "parallelize(): assign a tensor to it, since rank 0's value is copied to all ranks."
                    )
        broadcast(self._world, f"buffers in {name}", buffers)
