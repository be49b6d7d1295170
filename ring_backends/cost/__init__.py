"""Predicts the cost of a ring: the cost model, measurements of the machine, and the choice of a ring size.

The model is arithmetic over a schedule. Only the probes compute and communicate. No module of this package calls
attention. The package imports ``ring``, ``kernels`` and ``schedule``.
"""

from __future__ import annotations

from ring_backends.cost.default_branches import default_branches
from ring_backends.cost.hardware import Hardware
from ring_backends.cost.model import RingCost

__all__ = ["Hardware", "RingCost", "default_branches"]
