"""Training GigaPath's slide encoder with FSDP2 equals training on one process."""

from __future__ import annotations

from collections.abc import Iterator

import gigapath_cases as cases
import pytest
import torch

from ring_backends import Ring
from ring_backends.testing.rings import TWO_OF_TWO
from ring_backends.testing.world import World

ADAPTER = "ring_backends.adapters.fsdp"


@pytest.fixture(scope="module")
def two() -> Iterator[World]:
    with World(2, preload=[ADAPTER]) as ranks:
        yield ranks


def test_training(two: World) -> None:
    losses, parameters = cases.train(cases.ClassificationHead(cases.make_model()), Ring())
    for found, after in two.run(cases.train_here, TWO_OF_TWO, ADAPTER):
        assert found == pytest.approx(losses, abs=1e-10)
        for name, right in parameters.items():
            torch.testing.assert_close(after[name], right, rtol=0, atol=1e-10)
