"""Training states whose checkpoint is a single file: rank 0 writes the whole model and the whole optimizer."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ring_backends.training.checkpoint_files import StrPath, as_loadable, check_file, save_file
from ring_backends.training.describe import non_tensor_entries
from ring_backends.training.reducer import device_of
from ring_backends.training.state import TrainingState, check_optimizer_class


class SingleFileTraining(TrainingState):
    """A training state that can collect model and optimizer on rank 0.

    A subclass sets ``_module``, the module whose state_dict has the model's own names.
    """

    _module: nn.Module

    @abstractmethod
    def _optimizer_state(self) -> Any:
        """The state of the whole optimizer, at least on rank 0. Called on all ranks."""

    def _load_optimizer(self, state: Any) -> None:
        """Load what :meth:`_optimizer_state` returned on rank 0."""
        self.optimizer.load_state_dict(state)

    def _load_device(self) -> torch.device:
        """The device on which a checkpoint's tensors are loaded."""
        return device_of(self.model)

    def _save(self, path: StrPath) -> None:
        model, optimizer = self._module.state_dict(), self._optimizer_state()

        def content() -> dict[str, Any]:
            model.update(non_tensor_entries(model, "the model's state_dict"))
            return {
                "model": model,
                "optimizer": as_loadable(optimizer, "the optimizer's state_dict"),
                "optimizer_class": self._optimizer_class.__name__,
                "step": self.step_count,
            }

        save_file(self._world, content, path)

    def _check(self, path: Path) -> str:
        return check_file(path)

    def _load(self, path: Path) -> None:
        state: dict[str, Any] = torch.load(path, map_location=self._load_device(), weights_only=True)
        check_optimizer_class(state["optimizer_class"], self._optimizer_class)
        self._module.load_state_dict(state["model"])
        self._load_optimizer(state["optimizer"])
        self.step_count = state["step"]

    def _full_state_dict(self) -> dict[str, Tensor]:
        return {name: tensor.detach().cpu().clone() for name, tensor in self._module.state_dict().items()}
