"""Predicts the cost of a ring: the cost model, measurements of the machine, and the choice of a ring size.

The model is arithmetic over a schedule. Only the probes compute and communicate. No module of this package calls
attention.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ring_backends.cost.branches import default_branches
    from ring_backends.cost.hardware import Hardware
    from ring_backends.cost.model import RingCost

__all__ = ["Hardware", "RingCost", "default_branches"]

_MODULES = {"Hardware": "hardware", "RingCost": "model", "default_branches": "branches"}


def __getattr__(name: str) -> Any:
    # When it is first used: a command imports this package without torch.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
