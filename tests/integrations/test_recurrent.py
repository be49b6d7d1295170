"""Models of transformers with convolutions and recurrent layers on a ring equal one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from native_ranks import on_ring
from recurrent_models import KINDS, Batch, alone, assert_equal, make_model, on_ranks
from transformers_checks import PRELOAD as PRELOAD

from ring_backends.testing.marks import matrix_but
from ring_backends.testing.rings import LAYOUTS, RingSpec
from ring_backends.testing.world import World

QUICK = ("qwen3_next", "jamba")
PACKED = ((3, 13, 8, 24), (7, 38, 3))
"""Documents of which some share a rank, one begins with the rows of a rank, and one lies on all ranks."""


@pytest.mark.parametrize("kind", KINDS)
def test_an_early_token_changes_late_logits(kind: str) -> None:
    """Otherwise a ring that passes nothing on would be equal, too."""
    model, tokens = make_model(kind), Batch(32).inputs["input_ids"]
    changed = tokens.clone()
    changed[:, 15] = tokens[:, 15] % 7 + 1 + (tokens[:, 15] % 7 + 1 == tokens[:, 15])
    first, second = (model(input_ids=x).logits for x in (tokens, changed))
    assert (first - second)[:, 16:].abs().max() > 0.01


def batches_of(kind: str, size: int) -> list[Batch]:
    """A batch with padding on each side, packed ones, and sequences shorter than a convolution."""
    packed = [] if kind == "minimax" else [Batch(48, documents=PACKED), Batch(5, documents=((1, 2, 2),))]
    return [Batch(61, right=17), Batch(40, left=17), *packed, Batch(size), Batch(2 * size + 1)]


def check(world: World, kind: str, size: int, layout: Any) -> None:
    batches = batches_of(kind, size)
    spec = RingSpec(str(size), (tuple(range(size)),), "size")
    assert_equal(world.run(on_ring, on_ranks, kind, batches, layout=layout, rings=spec), alone(kind, batches), batches)


@pytest.mark.parametrize("layout", matrix_but("zigzag", of=LAYOUTS))
@pytest.mark.parametrize("kind", matrix_but(*QUICK, of=KINDS))
def test_rings_of_two(pair: World, kind: str, layout: Any) -> None:
    check(pair, kind, 2, layout)


@pytest.mark.parametrize("layout", matrix_but(of=LAYOUTS))
@pytest.mark.parametrize("kind", matrix_but(of=KINDS))
def test_rings_of_three(worlds: Callable[[int], World], kind: str, layout: Any) -> None:
    check(worlds(3), kind, 3, layout)
