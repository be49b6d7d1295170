"""Training over data × ring: a loss whose gradient is exact, optimizer steps and training checkpoints.

:class:`TrainingState` is what every adapter's ``parallelize`` returns; a subclass adds what its framework does
differently. It knows nothing of attention, and imports ``ring`` and ``errors``.
"""

from __future__ import annotations

from ring_backends.training.state import MakeOptimizer, ReplicatedTraining, TrainingState

__all__ = ["MakeOptimizer", "ReplicatedTraining", "TrainingState"]
