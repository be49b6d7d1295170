"""Compare random calls of one kind with the dense fp64 reference, on rings of several sizes.

`python tests/engine/random_cases.py windows fsdp 210 --sizes 2,3,4,5,6,7,8` runs 30 cases on each size of ring, half in
each layout. The kinds are windows, sinks, score_mods and value_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import torch
import typer
from hypothesis import HealthCheck, given, seed, settings

from ring_backends.testing.calls import FP64_TOLERANCE, check_results, expected, join, run_cases
from ring_backends.testing.rings import LAYOUTS, RingSpec
from ring_backends.testing.score_functions import NAMES
from ring_backends.testing.strategies import AttentionCase, attention_cases
from ring_backends.testing.world import World

KINDS: dict[str, tuple[dict[str, Any], Callable[[AttentionCase], bool]]] = {
    "windows": ({"paddings": ["masked"], "windows": [True]}, lambda case: any(case.window_lengths or ())),
    "sinks": ({"sinks": [True]}, lambda case: case.sinks),
    "value_dim": ({"value_dims": [1, 2, 5, 24]}, lambda case: case.value_dim != case.head_dim),
    "score_mods": ({"score_mods": NAMES}, lambda case: case.score_mod is not None),
}


def draw(
    number: int, of_seed: int, belongs: Callable[[AttentionCase], bool] = lambda case: True, **options: Any
) -> list[AttentionCase]:
    """Random cases in fp64 that ``belongs`` accepts. ``options`` are those of ``attention_cases``."""
    found: list[AttentionCase] = []

    @seed(of_seed)
    @settings(max_examples=3 * number, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(attention_cases(dtypes=[torch.float64], **options))
    def collect(case: AttentionCase) -> None:
        if belongs(case):
            found.append(case)

    collect()
    return found[:number]


def main(
    kind: str, adapter: str, number: int, sizes: Annotated[str, typer.Option(help="Sizes of rings.")] = "1,2,3,4"
) -> None:
    compared, ring_sizes = 0, [int(size) for size in sizes.split(",")]
    options, belongs = KINDS[kind]
    for size in ring_sizes:
        cases = draw(-(-number // len(ring_sizes)), size, belongs, max_n=90, **options)
        rings = RingSpec(str(size), (tuple(range(size)),), "size")
        with World(size, call_timeout=1200.0) as world:
            for index, layout in enumerate(LAYOUTS):
                some = cases[index :: len(LAYOUTS)]
                answers = run_cases(world, f"ring_backends.adapters.{adapter}", rings, layout, some)
                for case, (of_ring,) in zip(some, answers, strict=True):
                    check_results(join(of_ring, case.seq_len, layout), expected(case), FP64_TOLERANCE, case)
                    compared += 1
    print(f"{adapter}: {compared} cases of {kind} on rings of {sizes} are within {FP64_TOLERANCE}")


if __name__ == "__main__":
    typer.run(main)
