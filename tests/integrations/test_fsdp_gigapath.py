"""Training GigaPath's slide encoder with FSDP equals training on one process."""

from __future__ import annotations

import gigapath_cases as cases
import pytest
import torch
from native_ranks import assert_near, world_of

from ring_backends import Ring
from ring_backends.testing.marks import matrix_but
from ring_backends.testing.rings import TWO_OF_TWO
from ring_backends.testing.world import World

ADAPTER = "ring_backends.adapters.fsdp"


PRELOAD = (ADAPTER,)
two = world_of(2)


@pytest.mark.matrix(reason="test_gigapath.py trains on a ring; here the wrapper is another one")
def test_training(two: World) -> None:
    losses, parameters = cases.train(cases.ClassificationHead(cases.make_model()), Ring())
    for found, after in two.run(cases.train_here, TWO_OF_TWO, ADAPTER):
        assert found == pytest.approx(losses, abs=1e-10)
        assert_near(after, parameters)


@pytest.mark.parametrize("strategy", matrix_but("fsdp2", of=("fsdp2", "hsdp", "fsdp1")))
def test_bf16_does_not_move_tiles(two: World, strategy: str) -> None:
    model = cases.make_model(dtype=torch.float32)
    tiles, coords = cases.make_slide(600, torch.float32)
    with cases.own_code(model):
        wanted = cases.ClassificationHead(model)(tiles, coords)
    for places, out in two.run(cases.classify_in_bf16, TWO_OF_TWO, ADAPTER, strategy=strategy):
        assert places == model.coords_to_pos(coords, model.tile_size).tolist()
        assert_near(out, wanted, 0.05)
