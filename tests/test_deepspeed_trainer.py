"""Hugging Face's Trainer on rings, with its DeepSpeed integration, equals the Trainer on one process."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from trainer_cases import assert_equal, run

from ring_backends.testing.world import World


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.matrix(reason="trains two models")), 3])
def test_zero(stage: int) -> None:
    expected = run("llama", None)
    with World(2) as ranks:
        found = ranks.run(run, "llama", 2, "zigzag", f"zero{stage}")
    for results in (expected, *found):
        results.pop("flops")  # transformers does not count partitioned parameters
    assert_equal(found, expected)
