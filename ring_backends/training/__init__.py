"""Training over data × ring: a loss whose gradient is exact, optimizer steps and training checkpoints.

Every adapter's ``parallelize`` returns a :class:`TrainingState`. Each framework has a subclass. This package does not
depend on attention.
"""

from __future__ import annotations

from ring_backends.training.losses import chunked_cross_entropy
from ring_backends.training.replicated import ReplicatedTraining
from ring_backends.training.state import MakeOptimizer, TrainingState

__all__ = ["MakeOptimizer", "ReplicatedTraining", "TrainingState", "chunked_cross_entropy"]
