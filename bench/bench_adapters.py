"""Every adapter under pytest-benchmark: `pytest bench/bench_adapters.py --benchmark-only`.

The benchmarks are forward and backward of every usable adapter on two local ranks, and of `dilated_attention` on one
device. Without `--benchmark-only`, the lengths are tiny, and this is a test.
"""

from __future__ import annotations

from typing import Any

import pytest
from case import ADAPTERS, CALLS, ONE_DEVICE
from ranks import DIRECTIONS, Direction, Worlds

from ring_backends import available_adapters

pytest.importorskip("pytest_benchmark", reason='needs the extra "bench"')

CASE = CALLS["dilated"]["dilated, causal, zigzag"].shortened(8)
SECONDS: list[float] = []
"""The times of all calls so far, measured by the ranks. They exclude the pipe to this process."""


@pytest.mark.parametrize("contestant", [ONE_DEVICE, *ADAPTERS])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.benchmark(timer=lambda: sum(SECONDS))
def test_call(worlds: Worlds, benchmark: Any, pytestconfig: Any, direction: Direction, contestant: str) -> None:
    if contestant in ADAPTERS and (reason := available_adapters()[contestant]):
        pytest.skip(reason)
    case = CASE.but(contestant=contestant, ring_size=2 if contestant in ADAPTERS else 1)
    if not pytestconfig.getoption("benchmark_only"):
        case = case.shortened(32)

    def call() -> Any:
        found = worlds.time(case, direction)
        SECONDS.append(found["seconds"])
        return found

    benchmark.group = f"{direction}, {case.seq_len:,} tokens"
    found = benchmark.pedantic(call, rounds=5, warmup_rounds=1)
    benchmark.extra_info["sent_bytes"] = found["bytes"]
    assert (min(found["bytes"]) > 0) == (case.ring_size > 1)
