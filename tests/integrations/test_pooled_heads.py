"""Heads that pool rows, on a ring: how they pool is found out, and other ways are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from native_ranks import assert_near, on_ring
from small_models import build, transformers
from torch import Tensor
from trainer_cases import OWN_SIZES

from ring_backends import Ring
from ring_backends.integrations.transformers import use_ring
from ring_backends.testing.marks import matrix_but
from ring_backends.testing.world import World

N = 21
TOKENS = torch.randint(3, 23, (3, N), generator=torch.Generator().manual_seed(0))


def make_model(kind: Any, task: str = "ForSequenceClassification", **fields: Any) -> Any:
    has_interface = kind != "modernbert" or transformers.ModernBertModel._can_set_attn_implementation()
    if kind not in transformers.CONFIG_MAPPING or not has_interface:
        pytest.skip("this release of transformers has no such model, or one with an attention of its own")
    return build(kind, task, **{**OWN_SIZES.get(kind, {}), **fields}).double().eval()


def batch(padding: int, on_the_left: bool = False) -> dict[str, Tensor]:
    places = torch.arange(N).flip(0) if on_the_left else torch.arange(N)
    mask = places < torch.tensor([[N], [13], [2]])
    return {"input_ids": TOKENS.masked_fill(~mask, padding), "attention_mask": mask.long()}


def results(model: Any, on_the_left: bool = False) -> list[Tensor]:
    labels = {"labels": torch.tensor([0, 1, 1])} if hasattr(model, "classifier") or hasattr(model, "score") else {}
    outputs = model(**batch(model.config.pad_token_id, on_the_left), **labels)
    return [outputs[name].detach() for name in ("logits", "loss", "pooler_output") if name in outputs]


HEAD = "ForSequenceClassification"
MODELS = {
    "last": ("llama", HEAD, {}, True),
    "first": ("distilbert", HEAD, {}, False),
    "pooler": ("bert", HEAD, {}, False),
    "mean": ("modernbert", HEAD, {"classifier_pooling": "mean", "local_attention": 64}, True),
    "no head": ("bert", "", {}, False),
}


def results_of(ring: Ring | None, name: str) -> list[list[Tensor]]:
    """Results of a model, without a ring if it is None, of a deep copy, and with padding on the left."""
    kind, task, fields, takes_left = MODELS[name]
    model = make_model(kind, task, **fields)
    if ring is not None:
        use_ring(model, ring)
    return [results(model), results(copy.deepcopy(model)), results(model, takes_left)]


@pytest.mark.parametrize("name", matrix_but("last", "no head", of=MODELS))
def test_the_result_is_that_of_the_whole_sequences(pair: World, name: str) -> None:
    """Also in a deep copy, and with padding on the left if the head does not read it."""
    expected = results_of(None, name)
    for of_rank in (results_of(Ring(), name), *pair.run(on_ring, results_of, name)):
        assert_near(of_rank, expected)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("eurobert", {"classifier_pooling": "late"}, "EuroBert.*: its head pools rows in another way than"),
        ("albert", {"embedding_size": 32}, "AlbertForSequenceClassification: its pooler gets one row"),
    ],
)
def test_other_ways_are_refused(kind: str, fields: dict[str, Any], message: str) -> None:
    model = make_model(kind, **fields)
    for _ in range(2):  # the hooks of the first call are gone
        with pytest.raises(ValueError, match=message):
            use_ring(model, Ring())


def test_what_else_is_refused() -> None:
    with pytest.raises(ValueError, match=r"LlamaForSequenceClassification: .*pass probe=True"):
        use_ring(make_model("llama"), Ring(), probe=False)
    model = make_model("bert")
    use_ring(model, Ring())
    with pytest.raises(ValueError, match=r"padding that the head of Bert.* reads: .* 'first', .*pad on the right"):
        model(**batch(0, on_the_left=True))
