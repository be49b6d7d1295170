"""Heads that pool rows, on a ring: how they pool is found out, and other ways are refused."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from ring_backends.testing.marks import matrix_but

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers")

import transformers
from model_sizes import SIZES
from native_ranks import assert_near, on_ring
from trainer_cases import OWN_SIZES
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ring_backends import Ring
from ring_backends.integrations.transformers import use_ring
from ring_backends.testing.world import World

N = 21
TOKENS = torch.randint(3, 23, (3, N), generator=torch.Generator().manual_seed(0))


def make_model(kind: Any, task: str = "ForSequenceClassification", **fields: Any) -> Any:
    has_interface = kind != "modernbert" or transformers.ModernBertModel._can_set_attn_implementation()
    if kind not in CONFIG_MAPPING or not has_interface:
        pytest.skip("this release of transformers has no such model, or one with an attention of its own")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **OWN_SIZES.get(kind, {}), **fields})
    return getattr(transformers, f"AutoModel{task}").from_config(config).double().eval()


def batch(padding: int, on_the_left: bool = False) -> dict[str, Tensor]:
    places = torch.arange(N).flip(0) if on_the_left else torch.arange(N)
    mask = places < torch.tensor([[N], [13], [2]])
    return {"input_ids": TOKENS.masked_fill(~mask, padding), "attention_mask": mask.long()}


def results(model: Any, on_the_left: bool = False) -> tuple[Tensor, ...]:
    outputs = model(**batch(model.config.pad_token_id, on_the_left), labels=torch.tensor([0, 1, 1]))
    return outputs.logits.detach(), outputs.loss.detach()


MODELS = {
    "last": ("llama", {}, True),
    "first": ("distilbert", {}, False),
    "pooler": ("bert", {}, False),
    "mean": ("modernbert", {"classifier_pooling": "mean", "local_attention": 64}, True),
}


def on_a_ring(ring: Ring, name: str) -> list[tuple[Tensor, ...]]:
    kind, fields, takes_left = MODELS[name]
    model = make_model(kind, **fields)
    use_ring(model, ring)
    copied = copy.deepcopy(model)
    return [results(model), results(copied), results(model, takes_left)]


@pytest.mark.parametrize("name", matrix_but("last", of=MODELS))
def test_the_result_is_that_of_the_whole_sequences(pair: World, name: str) -> None:
    """Also in a deep copy, and with padding on the left if the head does not read it."""
    kind, fields, takes_left = MODELS[name]
    model = make_model(kind, **fields)
    expected = [results(model), results(model), results(model, takes_left)]
    for of_rank in (on_a_ring(Ring(), name), *pair.run(on_ring, on_a_ring, name)):
        for found, right in zip(of_rank, expected, strict=True):
            for one, other in zip(found, right, strict=True):
                assert_near(one, other)


def pooled_by_bert(ring: Ring) -> Tensor:
    model = make_model("bert", "")
    use_ring(model, ring)
    pooled: Tensor = model(**batch(0)).pooler_output.detach()
    return pooled


def test_the_pooler_of_a_model_without_a_head(pair: World) -> None:
    expected = make_model("bert", "")(**batch(0)).pooler_output
    for pooled in (pooled_by_bert(Ring()), *pair.run(on_ring, pooled_by_bert)):
        assert_near(pooled, expected)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (("eurobert", {"classifier_pooling": "late"}), "EuroBert.*: its head pools rows in another way than"),
        (("albert", {"embedding_size": 32}), "AlbertForSequenceClassification: its pooler gets one row"),
    ],
)
def test_other_ways_are_refused(model: tuple[str, dict[str, Any]], message: str) -> None:
    made = make_model(model[0], **model[1])
    for _ in range(2):  # the hooks of the first call are gone
        with pytest.raises(ValueError, match=message):
            use_ring(made, Ring())


def test_what_else_is_refused() -> None:
    with pytest.raises(ValueError, match=r"LlamaForSequenceClassification: .*pass probe=True"):
        use_ring(make_model("llama"), Ring(), probe=False)
    model = make_model("bert")
    use_ring(model, Ring())
    with pytest.raises(ValueError, match=r"padding that the head of Bert.* reads: .* 'first', .*pad on the right"):
        model(**batch(0, on_the_left=True))
