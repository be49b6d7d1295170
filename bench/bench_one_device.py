"""Compares dilated attention on one device and one thread with its bare kernel calls and with plain SDPA."""

from __future__ import annotations

from typing import Any

import pytest
from case import ON_ONE_RANK, Branches, Case
from clock import CLOCK

pytestmark = pytest.mark.benchmark(timer=CLOCK)
CONTESTANTS = ON_ONE_RANK


def bench_one_device(
    measure: Any, branches: Branches, contestant: str, dtype: str, seq_len: int, direction: Any
) -> None:
    measure(Case(contestant, seq_len, branches=branches, dtype=dtype), direction)
