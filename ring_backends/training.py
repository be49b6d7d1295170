"""Training over data × ring: a loss whose gradient is exact, steps, checkpoints.

The commonest mistake under sequence sharding is a gradient that is off by the ring size, or by the share of valid
tokens on each rank. The rule here: each rank's loss *sum*, divided by the number of valid tokens of the whole step,
times whatever the framework's reducer divides by. That divisor is measured once, through the real reducer.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_backends.ring import Ring

_UNFINISHED, _REPLACED, _DISCARDED = ".unfinished", ".replaced", ".discarded"
"""What the names of a checkpoint end in while it is written, and of the one before while that takes its place."""

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class TrainingState(ABC):
    """A model being trained over data × ring, the same way whatever framework reduces its gradients.

    Attributes:
        model: the wrapped model, to be called in the forward pass.
        optimizer: the optimizer, from ``make_optimizer``.
        divisor: what the framework's reducer divides the ranks' summed gradients by.
        step_count: optimizer steps taken so far; part of a checkpoint.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    divisor: float
    step_count: int
    _loads_alone: ClassVar[bool] = False  # no rank waits for another while it reads a checkpoint

    def __init__(self, ring: Ring, max_grad_norm: float | None, accumulation_steps: int) -> None:
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm = {max_grad_norm}: must be positive; None does not clip.")
        if not isinstance(accumulation_steps, int) or accumulation_steps < 1:
            raise ValueError(f"accumulation_steps = {accumulation_steps}: must be an int of at least 1.")
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        if ring.data_size * ring.size != world_size:
            raise ValueError(
                f"data size × ring size = {ring.data_size} × {ring.size}, but the world has {world_size} ranks: "
                "training runs on all of them; use rings that tile the world evenly."
            )
        self.ring = ring
        self.max_grad_norm = max_grad_norm
        self.accumulation_steps = accumulation_steps
        self.step_count = 0
        self._backward_calls = 0

    def global_count(self, local_count: int | Tensor) -> int:
        """The sum of a count over all ranks of the world."""
        count = torch.as_tensor(local_count, dtype=torch.int64, device=_world_device()).clone()
        if dist.is_initialized():
            dist.all_reduce(count)
        return int(count)

    def loss(
        self, local_loss_sum: Tensor, local_token_count: int | Tensor, step_token_count: int | None = None
    ) -> Tensor:
        """The loss to call :meth:`backward` on: its reduced gradient is that of the mean over all valid tokens.

        Args:
            local_loss_sum: scalar, the sum of the losses of this rank's valid tokens.
            local_token_count: how many those are.
            step_token_count: valid tokens of the whole step, over all ranks and micro-batches (:meth:`global_count`
                of a
                rank's own sum). None counts this micro-batch over the ranks, which is the whole step unless
                accumulating.

        Raises:
            ValueError: several micro-batches make a step and ``step_token_count`` is not given.
        """
        if step_token_count is None:
            if self.accumulation_steps > 1:
                raise ValueError(
                    f"step_token_count is not given with accumulation_steps = {self.accumulation_steps}: the mean is "
                    "over all "
                    "micro-batches of a step; pass state.global_count(this rank's valid tokens of the whole step)."
                )
            step_token_count = self.global_count(local_token_count)
        return local_loss_sum * (self.divisor / max(1, step_token_count))

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of one micro-batch; the last one of a step reduces the sum over the ranks."""
        self._backward(loss)
        self._backward_calls += 1
        self._expect_micro_batch(ends_step=self._backward_calls + 1 >= self.accumulation_steps)

    def step(self) -> None:
        """Clip, let the optimizer take its step, and clear the gradients.

        Raises:
            RuntimeError: fewer backward calls were made than make a step.
        """
        if self._backward_calls < self.accumulation_steps:
            raise RuntimeError(
                f"step() after {self._backward_calls} of {self.accumulation_steps} backward calls: the gradients are "
                "not reduced yet; call backward() once per micro-batch first."
            )
        self._step()
        self._backward_calls = 0
        self._expect_micro_batch(ends_step=self.accumulation_steps == 1)
        self.step_count += 1

    @abstractmethod
    def _backward(self, loss: Tensor) -> None:
        """Run the framework's backward of one micro-batch."""

    @abstractmethod
    def _step(self) -> None:
        """Clip to ``max_grad_norm`` if it is given, step the optimizer, and clear the gradients."""

    @abstractmethod
    def _expect_micro_batch(self, *, ends_step: bool) -> None:
        """Called before each micro-batch's forward, for frameworks that have to know whether to reduce after it."""

    @abstractmethod
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write model, optimizer and step count, all ranks together; whole or not at all."""

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read what :meth:`save` wrote, all ranks together.

        Raises:
            ValueError: this is not a whole checkpoint of such a model by this adapter. The parameters may be of either
                then.
            OSError: it cannot be read.
            RuntimeError: gradients of a step that is not finished would be added to those of the next one.
        """
        if self._backward_calls:
            raise RuntimeError(
                f"load() after {self._backward_calls} backward calls of a step: their gradients would count in the "
                "next one; call step() first, since load() undoes it."
            )
        place = find_checkpoint(path) or path
        failed = True
        try:
            self._load(place)
            failed = False
        except Exception as error:  # there are many, by framework and by what is wrong
            if _is_no_fault_of_a_file(error):
                raise
            raise ValueError(
                f"path = {os.fspath(path)!r}: not a whole checkpoint of this model by this adapter; give one that its "
                f"save() wrote. {type(error).__name__}: {error}"
            ) from error
        finally:
            if self._loads_alone and dist.is_initialized():
                self._compare_loads(path, failed)

    def _compare_loads(self, path: str | os.PathLike[str], failed: bool) -> None:
        """Where every rank reads for itself: all go on from the same step, or none does."""
        mine = torch.tensor([-1 if failed else self.step_count], device=_world_device())
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        steps = [int(step) for step in everyone]
        if not failed and len(set(steps)) > 1:
            told = ", ".join(f"rank {rank}: {'none' if step < 0 else step}" for rank, step in enumerate(steps))
            raise ValueError(
                f"path = {os.fspath(path)!r}: the ranks read different steps from it ({told}); give a path that is the "
                "same checkpoint on every host."
            )

    @abstractmethod
    def _load(self, path: str | os.PathLike[str]) -> None:
        """Read model, optimizer and step count."""

    @abstractmethod
    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole model's state as CPU tensors, by the model's own names, on every rank."""


class ReplicatedTraining(TrainingState):
    """Training with a whole replica of model and optimizer on every rank, whose wrapper reduces the gradients.

    Args:
        wrap: makes a module reduce its gradients over the world, as DistributedDataParallel does.
    """

    _loads_alone = True

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        ring: Ring,
        wrap: Callable[[nn.Module], nn.Module],
        max_grad_norm: float | None,
        accumulation_steps: int,
        mixed_precision: torch.dtype | None = None,
    ) -> None:
        check_mixed_precision(mixed_precision)
        super().__init__(ring, max_grad_norm, accumulation_steps)
        self._replica = model
        self.model = wrap(model)
        run_under_autocast(self.model, mixed_precision)
        self.optimizer = make_optimizer(model.parameters())
        self.divisor = measure_divisor(lambda gradient: _reduced_by(wrap, gradient, device_of(model)))
        self._unreduced = contextlib.ExitStack()
        self._expect_micro_batch(ends_step=accumulation_steps == 1)

    def _expect_micro_batch(self, *, ends_step: bool) -> None:
        self._unreduced.close()
        if not ends_step and self.model is not self._replica:
            self._unreduced.enter_context(self.model.no_sync())  # type: ignore[operator]

    def _backward(self, loss: Tensor) -> None:
        loss.backward()

    def _step(self) -> None:
        if self.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._replica.parameters(), self.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def save(self, path: str | os.PathLike[str]) -> None:
        model, optimizer = self._replica.state_dict(), self.optimizer.state_dict()
        by_first_rank(lambda: save_file({"model": model, "optimizer": optimizer, "step": self.step_count}, path))

    def _load(self, path: str | os.PathLike[str]) -> None:
        state = torch.load(path, map_location=device_of(self.model), weights_only=True)
        self._replica.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step_count = state["step"]

    def full_state_dict(self) -> dict[str, Tensor]:
        return {name: tensor.detach().cpu().clone() for name, tensor in self._replica.state_dict().items()}


def check_mixed_precision(dtype: object) -> None:
    """Refuse a dtype that no model is trained in mixed precision with.

    Raises:
        TypeError, ValueError: it is not torch.bfloat16, nor None.
    """
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"mixed_precision = {dtype!r}: expected torch.bfloat16, or None for the model's own dtype.")
    if dtype not in (None, torch.bfloat16):
        raise ValueError(
            f"mixed_precision = {dtype}: must be torch.bfloat16 or None; in fp16 the gradients of a mean over all "
            "tokens of a long sequence underflow."
        )


def run_under_autocast(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Let a model's forward, and with it its backward, compute in ``dtype``; parameters and gradients keep theirs."""
    if dtype is not None:
        model.forward = torch.autocast(device_of(model).type, dtype)(model.forward)


def by_first_rank(action: Callable[[], None]) -> None:
    """Let rank 0 alone do something, which is done when this returns; if it fails, raise on every rank."""
    error: Exception | None = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            action()
        except Exception as raised:
            error = raised
    failed = torch.tensor([error is not None], dtype=torch.uint8, device=_world_device())
    if dist.is_initialized():
        dist.broadcast(failed, src=0)
    if error is not None:
        raise error
    if failed.item():
        raise RuntimeError("rank 0 could not write the checkpoint; the error that it raises says why.")


def save_file(state: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """``torch.save``, whole or not at all."""
    replace_file(path, lambda file: torch.save(state, file))


def _is_no_fault_of_a_file(error: Exception) -> bool:
    """Whether reading failed for another reason than what was read; torch says EINVAL of a file that was cut off."""
    if isinstance(error, OSError):
        return error.errno != errno.EINVAL
    return isinstance(error, (MemoryError, torch.OutOfMemoryError, dist.DistError))


def replace_file(path: str | os.PathLike[str], write: Callable[[IO[bytes]], object]) -> None:
    """Let ``write`` fill a file, which is at ``path`` once it is whole and on the disk."""
    path = Path(path).resolve()  # of a link, where it leads to
    unfinished = path.with_name(path.name + _UNFINISHED)
    with unfinished.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def replace_folder(path: str | os.PathLike[str], write: Callable[[Path], object]) -> None:
    """Let ``write``, on all ranks together, fill a folder, which is at ``path`` once it is whole.

    A folder cannot be put in the place of another at one stroke: a run that is killed in between leaves the old one
    beside, for :func:`find_checkpoint`.
    """
    path = Path(path).resolve()
    unfinished, replaced, discarded = (
        path.with_name(path.name + ending) for ending in (_UNFINISHED, _REPLACED, _DISCARDED)
    )

    def clear() -> None:
        if replaced.exists():
            os.replace(replaced, discarded if path.exists() else path)
        for leftover in (unfinished, discarded):
            _remove(leftover)

    def replace() -> None:
        if path.exists():
            os.replace(path, replaced)
        os.replace(unfinished, path)
        if replaced.exists():
            os.replace(replaced, discarded)  # what has the other name is whole
        _remove(discarded)

    by_first_rank(clear)
    write(unfinished)
    if dist.is_initialized():
        dist.barrier()
    by_first_rank(replace)


def find_checkpoint(path: str | os.PathLike[str]) -> Path | None:
    """Where rank 0 sees the checkpoint of this name: at ``path``, beside it if a save was killed, or nowhere."""
    path = Path(path).resolve()
    places = [path, path.with_name(path.name + _REPLACED)]
    found = next((index for index, place in enumerate(places) if place.exists()), len(places))
    of_first = torch.tensor([found], device=_world_device())
    if dist.is_initialized():
        dist.broadcast(of_first, src=0)
    return [*places, None][int(of_first)]


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def device_of(model: nn.Module) -> torch.device:
    """Where a model's parameters are."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _world_device() -> torch.device:
    """Where the world's process group moves tensors."""
    needs_gpu = dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda" if needs_gpu else "cpu")


def _reduced_by(wrap: Callable[[nn.Module], nn.Module], gradient: float, device: torch.device) -> float:
    """What a wrapper's reducer makes of one parameter whose gradient on this rank is ``gradient``."""
    probe = nn.Linear(1, 1, bias=False, device=device)
    reducer = wrap(probe)  # has to live until backward, whose hooks are its own
    reducer(torch.full((1, 1), gradient, device=device)).sum().backward()
    assert probe.weight.grad is not None
    return float(probe.weight.grad)


def measure_divisor(reduced: Callable[[float], float]) -> float:
    """What a framework's reducer divides by: send one known gradient per rank through it, and see what comes out.

    Args:
        reduced: takes this rank's gradient of one parameter, returns what the real reducer makes of it on this rank.

    Raises:
        RuntimeError: the ranks get different gradients, so that replicas would drift apart.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mine = torch.tensor(reduced(float(rank + 1)), dtype=torch.float64, device=_world_device())
    everywhere = [mine.clone() for _ in range(world_size)]
    if world_size > 1:
        dist.all_gather(everywhere, mine)
    values = [float(value) for value in everywhere]
    if max(values) - min(values) > 1e-6 * abs(values[0]):
        raise RuntimeError(
            f"the ranks get different gradients from the reducer ({values} for one parameter), so replicas would drift "
            "apart: it has to reduce over all ranks of data × ring; do not restrict its process group."
        )
    return world_size * (world_size + 1) / 2 / values[0]
