"""Saving and loading a training state, by all ranks in one call.

If one rank cannot read a checkpoint, all ranks raise. Each adapter defines the content and format of its checkpoints.
"""

from __future__ import annotations

import errno
import os
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ring_backends.errors import RingMismatchError, RingPeerError
from ring_backends.ring.collectives import agree, do_on_all, do_on_rank0
from ring_backends.training.checkpoint_files import (
    CheckpointNotFoundError,
    StrPath,
    check_place,
    find_checkpoint,
)
from ring_backends.training.comparison import ComparedTraining
from ring_backends.training.describe import make_settings_loadable


class SavedTraining(ComparedTraining):
    """A training run that can be saved and loaded.

    Attributes:
        optimizer: the optimizer, as ``make_optimizer`` or the framework made it.
    """

    optimizer: torch.optim.Optimizer

    saves_a_folder = False
    """Whether :meth:`save` writes a folder instead of a file."""

    def save(self, path: StrPath) -> None:
        """Write a checkpoint of model, optimizer and step count. All ranks make this call; it is atomic.

        Raises:
            ValueError: ``path`` is a folder that is not a checkpoint or a special file, or the optimizer has settings
                that could not be loaded again.
            RuntimeError: rank 0 could not write the checkpoint. Its OSError is in the message. Rank 0 raises it.
            RingMismatchError, RingPeerError: a rank makes another call, or is gone.
        """
        self._agree_on_path("save", path)
        do_on_rank0(self._world, "saving a checkpoint", lambda: check_place(path, is_folder=self.saves_a_folder))
        do_on_all(self._world, "saving a checkpoint", lambda: make_settings_loadable(self.optimizer), ValueError)
        self._broadcast_buffers("save")
        self._save(path)

    def load(self, path: StrPath) -> None:
        """Read a checkpoint that :meth:`save` wrote. All ranks make this call.

        Raises:
            ValueError: the checkpoint is damaged, or is not one of the same adapter, model and optimizer. The model may
                be partly loaded.
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
        self._agree_on_path("load", path)
        place = find_checkpoint(self._world, path)
        if place is None:
            raise CheckpointNotFoundError(
                f"path = {os.fspath(path)!r}: there is no checkpoint; give a path that save() wrote."
            )
        digest = self._read(path, lambda: self._check(place))
        digests = agree(self._world, "comparing checkpoints", None, [int(digest[:12], 16)])
        if any(other != digests[0] for other in digests):
            by_rank = ", ".join(f"rank {rank}: {int(number):012x}" for rank, (number,) in enumerate(digests))
            raise ValueError(
                f"path = {os.fspath(path)!r}: the ranks see different checkpoints there ({by_rank}); give a path that "
                "leads to the same checkpoint on every host."
            )
        self._read(path, lambda: self._load(place))

    def has_checkpoint(self, path: StrPath) -> bool:
        """Whether rank 0 sees a checkpoint at ``path``. All ranks make this call."""
        return find_checkpoint(self._world, path) is not None

    def full_state_dict(self) -> dict[str, Tensor]:
        """The state of the whole model on every rank: CPU tensors by the model's own names, with rank 0's buffers.

        Raises:
            RingMismatchError, RingPeerError: a rank makes another call, or is gone.
        """
        self._agree("full_state_dict", {})
        self._broadcast_buffers("full_state_dict")
        return self._full_state_dict()

    @abstractmethod
    def _save(self, path: StrPath) -> None:
        """Write model, optimizer, its class and ``step_count``. Called on all ranks."""

    @abstractmethod
    def _check(self, path: Path) -> str:
        """Check, without the other ranks, that a checkpoint is whole and fits this state; return its digest."""

    @abstractmethod
    def _load(self, path: Path) -> None:
        """Read model, optimizer and ``step_count``. Called on all ranks."""

    @abstractmethod
    def _full_state_dict(self) -> dict[str, Tensor]:
        """The state of the whole model. Called on all ranks, so it may use the framework's collectives."""

    @property
    def _optimizer_class(self) -> type:
        """The class of the optimizer that ``make_optimizer`` returned. The framework may have wrapped the optimizer."""
        return type(self.optimizer)

    def _read(self, path: StrPath, read: Callable[[], Any]) -> Any:
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
                    f"path = {os.fspath(path)!r}: not a whole checkpoint of this model by this adapter; give one that "
                    f"this adapter's save() wrote. {type(error).__name__}: {error}"
                ) from error

        return do_on_all(self._world, f"loading {os.fspath(path)!r}", read_here, ValueError)

    def _agree_on_path(self, name: str, path: StrPath) -> None:
        with self._world.report_refusals():
            fields = {"path": os.fspath(path)}
        self._agree(name, fields)


def check_optimizer_class(saved: str, wanted: type) -> None:
    """Refuse a checkpoint of another optimizer.

    Raises:
        ValueError: ``saved``, the name of the class in the checkpoint, is not the name of ``wanted``.
    """
    if saved != wanted.__name__:
        raise ValueError(f"it holds the state of optimizer {saved}, but make_optimizer returned {wanted.__name__}")


def is_not_caused_by_content(error: BaseException) -> bool:
    """Whether reading failed for a reason other than the content of the file.

    torch raises an OSError with EINVAL for a file that was cut off.
    """
    if isinstance(error, OSError):
        return error.errno != errno.EINVAL
    return not isinstance(error, Exception) or isinstance(error, (MemoryError, torch.OutOfMemoryError, dist.DistError))
