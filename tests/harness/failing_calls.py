"""Shared by tests of failing calls: a small case, the way a call ended on a rank, and time limits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from ring_backends.ring.ring import Ring
from ring_backends.testing.strategies import AttentionCase

SMALL_CASE = AttentionCase(16, (16,), (1,), batch=2, num_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float64)


SHORT = 3.0
"""Timeout in seconds of rings in tests that wait for the timeout."""


A_MOMENT = 10.0
"""Seconds by which a busy machine may exceed a timeout. Without a timeout, these calls would take a minute or more."""


def shorten(*rings: Ring, seconds: float = SHORT) -> None:
    """Give the next calls of this rank a short timeout. On a busy machine, the first calls of a ring take seconds."""
    for ring in rings:
        assert ring.agreement is not None
        ring.agreement.timeout = ring.agreement.notices.timeout = timedelta(seconds=seconds)


AT_ONCE = 20.0
"""Limit in seconds for errors that do not wait for a timeout. It is far below the 60 s timeout of these rings."""


@dataclass(frozen=True)
class Ended:
    """How a call ended on a rank."""

    error: str = "no error"
    bases: tuple[str, ...] = ()
    message: str = ""
    seconds: float = 0.0

    def is_a(self, error_class: type[Exception]) -> bool:
        return error_class.__name__ in self.bases

    def check(self, error_class: type[Exception], *texts: str, within: float = math.inf) -> None:
        """Check that the call raised ``error_class`` within some seconds, and that its message contains the texts."""
        assert self.is_a(error_class), self
        for text in texts:
            assert text in self.message, self
        assert self.seconds < within, self


def ending(function: Callable[..., Any], *args: Any, **options: Any) -> Ended:
    """Call a function. Returns how it ended."""
    start = time.monotonic()
    try:
        function(*args, **options)
    except Exception as error:
        bases = tuple(base.__name__ for base in type(error).__mro__)
        return Ended(type(error).__name__, bases, str(error), time.monotonic() - start)
    return Ended(seconds=time.monotonic() - start)


ODD_RANK = 1
"""The rank that does something else than the others, or fails."""
