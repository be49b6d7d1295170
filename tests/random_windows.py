"""Compare random calls with windows on rings of 2 to 8 ranks with the dense fp64 reference.

`python tests/random_windows.py fsdp 210` runs 30 cases on each size of ring, half of them in each layout.
"""

from __future__ import annotations

import sys

import torch
from hypothesis import HealthCheck, given, seed, settings

from ring_backends.testing.calls import FP64_TOLERANCE, check_results, expected, join, run_cases
from ring_backends.testing.rings import LAYOUTS, RingSpec
from ring_backends.testing.strategies import AttentionCase, attention_cases
from ring_backends.testing.world import World

SIZES = range(2, 9)


def draw(number: int, of_seed: int) -> list[AttentionCase]:
    """Random cases, each with at least one window."""
    found: list[AttentionCase] = []

    @seed(of_seed)
    @settings(max_examples=3 * number, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(attention_cases(max_n=90, paddings=["masked"], windows=[True], dtypes=[torch.float64]))
    def collect(case: AttentionCase) -> None:
        if case.window_lengths is not None and any(case.window_lengths):
            found.append(case)

    collect()
    return found[:number]


def main(adapter: str, number: int) -> None:
    compared = 0
    for size in SIZES:
        cases, rings = draw(-(-number // len(SIZES)), size), RingSpec(str(size), (tuple(range(size)),), "size")
        with World(size, call_timeout=1200.0) as world:
            for index, layout in enumerate(LAYOUTS):
                some = cases[index :: len(LAYOUTS)]
                answers = run_cases(world, f"ring_backends.adapters.{adapter}", rings, layout, some)
                for case, (of_ring,) in zip(some, answers, strict=True):
                    check_results(join(of_ring, case.seq_len, layout), expected(case), FP64_TOLERANCE, case)
                    compared += 1
    print(f"{adapter}: {compared} cases on rings of 2 to 8 are within {FP64_TOLERANCE}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
