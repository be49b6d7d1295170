"""Training over data × ring: a loss whose gradient is exact, optimizer steps and training checkpoints.

:class:`TrainingState` is what every adapter's ``parallelize`` returns; a subclass adds what its framework does
differently. Nothing here knows attention. It imports ``ring``, ``schedule`` and ``errors``.
"""

from __future__ import annotations

from ring_backends.training.replicated import ReplicatedTraining
from ring_backends.training.state import MakeOptimizer, TrainingState

__all__ = ["MakeOptimizer", "ReplicatedTraining", "TrainingState"]
