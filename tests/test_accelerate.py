"""A training loop of Hugging Face Accelerate on rings equals the loop on one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from trainer_cases import assert_equal, run_accelerate, sums

from ring_backends.testing.world import World

LONG = pytest.mark.matrix(reason="trains more models")
PRELOAD = ["accelerate", "transformers.models.llama.modeling_llama", "ring_backends.integrations.accelerate"]


@pytest.fixture(scope="module")
def two() -> Iterator[World]:
    with World(2, preload=PRELOAD) as ranks:
        yield ranks


@pytest.mark.parametrize("name", ["llama", pytest.param("lora", marks=LONG)])
def test_two_ranks(two: World, name: str) -> None:
    """1 × 2 in both layouts, and 2 × 1."""
    if name == "lora":
        pytest.importorskip("peft")
    expected = run_accelerate(name, None)
    for ring_size, layout in ((2, "contiguous"), (2, "zigzag"), (1, "contiguous")):
        assert_equal(two.run(run_accelerate, name, ring_size, layout), expected)


@LONG
@pytest.mark.parametrize("name", ["qwen3-packed", "llama", "lora"])
def test_two_by_two(name: str) -> None:
    if name == "lora":
        pytest.importorskip("peft")
    with World(4, preload=PRELOAD) as ranks:
        assert_equal(ranks.run(run_accelerate, name, 2, "zigzag"), run_accelerate(name, None))


def test_reduce_takes_one_value_per_ring(two: World) -> None:
    assert two.run(sums, 2) == [(1.0, 1.0)] * 2
    assert two.run(sums, 1) == [(3.0, 1.5)] * 2
