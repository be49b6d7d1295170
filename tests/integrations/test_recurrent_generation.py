"""Text that models with convolutions and recurrent layers generate on a ring is what transformers generates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from native_ranks import assert_near, on_ring
from recurrent_models import KINDS, Batch, logits_of, make_model
from torch import Tensor
from transformers_checks import PRELOAD as PRELOAD

from ring_backends import Ring
from ring_backends.integrations.transformers import generate, use_ring
from ring_backends.testing.marks import matrix_but
from ring_backends.testing.rings import LAYOUTS, RingSpec
from ring_backends.testing.world import World

PROMPTS: dict[str, tuple[Batch, dict[str, Any]]] = {
    "greedy": (Batch(23), {}),
    "beams": (Batch(23, left=6), {"num_beams": 3, "num_return_sequences": 2}),
    "fewer rows than the window of a convolution": (Batch(8, left=3), {}),
    "a prompt that is not distributed": (Batch(3), {}),
    "again": (Batch(40), {"num_beams": 2}),
}


def generated(ring: Ring | None, kind: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Texts, and the logits of their new tokens. One process computes whole texts.

    With its cache, MiniMax of transformers mixes up beams, and reads padding.
    """
    model = make_model(kind, initializer_range=0.1, use_cache=True)
    if ring is not None:
        use_ring(model, ring)
    found = {}
    for name, (batch, options) in PROMPTS.items():
        inputs = {"attention_mask": batch.rows.long(), **batch.inputs}
        options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **options}
        options |= {"return_dict_in_generate": True, "output_logits": True}
        if ring is None:
            text = model.generate(**inputs, **options, use_cache=False)
        else:
            text = generate(model, ring, **inputs, **options)
        found[name] = text.sequences, torch.stack(text.logits)
    return found


def check(world: World, kind: str, size: int, layouts: Iterable[Any]) -> None:
    spec, wanted = RingSpec(str(size), (tuple(range(size)),), "size"), generated(None, kind)
    for layout in layouts:
        for found in world.run(on_ring, generated, kind, layout=layout, rings=spec):
            for name, (text, logits) in wanted.items():
                assert_near(found[name][1], logits, 2e-4)
                assert torch.equal(found[name][0], text), name


QUICK = ("falcon_h1", "minimax")


@pytest.mark.parametrize("kind", matrix_but(*QUICK, of=KINDS))
def test_rings_of_two(pair: World, kind: str) -> None:
    check(pair, kind, 2, LAYOUTS)


@pytest.mark.parametrize("kind", matrix_but(of=("qwen3_next", "falcon_h1", "jamba")))
def test_rings_of_three(worlds: Callable[[int], World], kind: str) -> None:
    check(worlds(3), kind, 3, ("zigzag",))


def generated_and_called(ring: Ring) -> Tensor:
    """The logits of a call after a text was generated."""
    model, batch = make_model("jamba"), Batch(31, left=4)
    use_ring(model, ring)
    generate(model, ring, Batch(23).inputs["input_ids"], max_new_tokens=2, do_sample=False)
    return ring.unshard(model(**batch.inputs).logits.detach(), seq_len=batch.length)


def test_a_call_after_a_text(pair: World) -> None:
    batch = Batch(31, left=4)
    wanted = logits_of(make_model("jamba"), batch)
    for found in pair.run(on_ring, generated_and_called):
        assert_near(found[batch.rows], wanted[batch.rows], 1e-4)
