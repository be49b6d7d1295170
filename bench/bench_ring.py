"""Compares the rings of all usable adapters with a ring that sends all rows and with all-gather."""

from __future__ import annotations

from typing import Any

import pytest
from case import ADAPTERS, ALL_GATHER, DENSE_RING, Branches, Case
from clock import CLOCK

pytestmark = pytest.mark.benchmark(timer=CLOCK)
CONTESTANTS = (*ADAPTERS, DENSE_RING, ALL_GATHER)


def bench_ring(
    measure: Any, branches: Branches, contestant: str, ring_size: int, dtype: str, seq_len: int, direction: Any
) -> None:
    measure(Case(contestant, seq_len, ring_size, branches, dtype), direction)
