"""A training loop of Hugging Face Accelerate on rings equals the loop on one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from trainer_cases import assert_equal, run_accelerate

from ring_backends.testing.world import World

PRELOAD = ["accelerate", "transformers.models.llama.modeling_llama", "ring_backends.integrations.accelerate"]


@pytest.fixture(scope="module")
def two() -> Iterator[World]:
    with World(2, preload=PRELOAD) as ranks:
        yield ranks


@pytest.mark.parametrize("name", ["llama", pytest.param("lora", marks=pytest.mark.matrix(reason="trains four models"))])
def test_two_ranks(two: World, name: str) -> None:
    """1 × 2 in both layouts, and 2 × 1."""
    if name == "lora":
        pytest.importorskip("peft")
    expected = run_accelerate(name, None)
    for ring_size, layout in ((2, "contiguous"), (2, "zigzag"), (1, "contiguous")):
        assert_equal(two.run(run_accelerate, name, ring_size, layout), expected)


def test_two_by_two() -> None:
    """Packed documents, on two rings of two."""
    with World(4, preload=PRELOAD) as ranks:
        found = ranks.run(run_accelerate, "qwen3-packed", 2, "zigzag")
    assert_equal(found, run_accelerate("qwen3-packed", None))
