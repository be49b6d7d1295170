"""What a Trainer, an Accelerator or a model cannot do on a ring is an error by name, on every rank, before a step."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
from native_ranks import world_of
from small_models import build, transformers
from torch import Tensor
from trainer_cases import Accelerator, Case, make_model, make_trainer, reset_accelerate

from ring_backends import AdapterUnavailableError, Ring
from ring_backends.integrations.accelerate import attach as attach_accelerator
from ring_backends.integrations.trainer import attach
from ring_backends.integrations.transformers.whole_batches import use_ring
from ring_backends.testing.failing_calls import ending
from ring_backends.testing.world import on_every_rank

TOKENS = torch.arange(1, 9).view(1, 8)


PRELOAD = ("transformers.trainer", "ring_backends.integrations.trainer")
world = world_of(2)


def on_a_ring(model: Any) -> Any:
    use_ring(model, Ring())
    return model


@pytest.mark.parametrize(
    ("kind", "task", "fields", "message"),
    [
        ("bert", "ForMultipleChoice", {}, "BertForMultipleChoice: .* does not list it .* its head may pool rows"),
        ("llama", "ForQuestionAnswering", {}, "LlamaForQuestionAnswering: .* does not list it as a language"),
        ("t5", "ForSeq2SeqLM", {"d_model": 32, "d_kv": 8, "d_ff": 32}, "is_encoder_decoder = True"),
        ("mpt", "ForCausalLM", {"n_heads": 4, "n_layers": 1}, "attn_implementation of Mpt.* own"),
    ],
    ids=str,
)
def test_models(kind: str, task: str, fields: dict[str, int], message: str) -> None:
    model = build(kind, task, **fields)
    with pytest.raises(ValueError, match=message):
        on_a_ring(model)


def test_a_model_on_two_rings() -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM: is on a ring already"):
        on_a_ring(on_a_ring(make_model("llama")))


def test_a_model_that_is_wrapped() -> None:
    with pytest.raises(TypeError, match="model = Sequential: expected a model of transformers"):
        on_a_ring(torch.nn.Sequential(make_model("llama")))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"use_cache": True}, "use_cache = True: not supported by a ring; leave it out. generate"),
        ({"logits_to_keep": 1}, "logits_to_keep = 1: not supported"),
        ({"return_dict": False}, "return_dict = False: not supported"),
        ({"inputs_embeds": torch.zeros(1, 8, 32)}, "inputs_embeds is given"),
        ({"input_ids": None}, "input_ids is not given"),
        ({"labels": TOKENS[:, :7]}, r"labels is \[1, 7\]: expected \[1, 8\]"),
        ({"attention_mask": torch.ones(8, 8)[None, None]}, r"attention_mask is \[1, 1, 8, 8\]: expected \[batch, 8"),
        ({"lengths": torch.tensor([8])}, r"lengths is \[1\]: expected \[batch, 8"),
        ({"output_router_logits": True}, "output_router_logits = True: LlamaForCausalLM has another router loss"),
        ({"output_attentions": True}, "output_attentions = True: a ring has no matrix"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_arguments_of_a_call(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        on_a_ring(make_model("llama"))(**{"input_ids": TOKENS, **arguments})


def test_generate() -> None:
    with pytest.raises(ValueError, match="generate"):
        on_a_ring(make_model("llama")).generate(TOKENS, max_new_tokens=2)


def test_another_attention_implementation() -> None:
    model = on_a_ring(make_model("llama"))
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="attn_implementation of LlamaForCausalLM = 'eager': expected 'ring_dilated_"):
        model(TOKENS)


class OwnLoss(transformers.Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha: not supported by a ring; leave it out"),
        ({"use_cache": True}, "use_cache: not supported by a ring"),
        ({"eval_use_gather_object": True}, "eval_use_gather_object: not supported"),
        ({"train_sampling_strategy": "batch_rebalance"}, "train_sampling_strategy = 'batch_rebalance'"),
        ({"label_names": ["start_positions"]}, "label_names: not supported by a ring"),
        ({"accelerator_config": {"dispatch_batches": True}}, "split_batches or dispatch_batches = True"),
    ],
)
def test_arguments_of_a_trainer(arguments: dict[str, Any], message: str) -> None:
    try:
        trainer = make_trainer(Case(), 1, **arguments)
    except TypeError:
        pytest.skip("this release of transformers has no such argument")
    with pytest.raises(ValueError, match=message):
        attach(trainer)


def test_other_trainers() -> None:
    classifier = make_trainer(Case(task="sequence"), 1, label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match="label_smoothing_factor with a sequence classifier: not supported"):
        attach(classifier)
    smoothed = make_trainer(Case(), 1, label_smoothing_factor=0.1)
    smoothed.model.__class__ = type("OwnLlama", (type(smoothed.model),), {})
    with pytest.raises(ValueError, match=r"label_smoothing_factor = 0.1: the Trainer does not shift the labels of Own"):
        attach(smoothed)
    trainer = make_trainer(Case(), 1)
    trainer.model_wrapped = torch.nn.Sequential(trainer.model)
    with pytest.raises(ValueError, match=r"a wrapped model: not supported by a ring; call attach\(\) before train"):
        attach(trainer)
    trainer.__class__ = OwnLoss
    with pytest.raises(ValueError, match=r"OwnLoss\.compute_loss: the loss of a ring"):
        attach(trainer)


def test_what_is_no_trainer() -> None:
    with pytest.raises(TypeError, match=r"trainer = object: expected a transformers\.Trainer"):
        attach(object())
    with pytest.raises(TypeError, match=r"accelerator = object: expected an accelerate\.Accelerator"):
        attach_accelerator(object(), make_model("llama"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="with GPUs, Accelerate uses all processes")
@on_every_rank
def test_an_accelerator_of_one_process() -> None:
    """Without GPUs and without ``cpu=True``, an Accelerator does not use the other processes."""
    reset_accelerate()
    ended = ending(attach_accelerator, Accelerator(), make_model("llama"))
    ended.check(ValueError, "accelerator.num_processes = 1: 2 processes were started")


def batches_by_rank(self: Any, loader: Any, **_: Any) -> Any:
    self._dataloaders.append([int(os.environ["RANK"])])
    return self._dataloaders[-1]


def count_world(self: Any, batches: Any, device: Any) -> Tensor:
    return torch.tensor(2 * batches[0]["labels"].numel())


CHANGES: dict[str, Any] = {
    "Accelerator.prepare_data_loader": batches_by_rank,
    "Accelerator.gather": lambda self, tensor: tensor.repeat(2) + 1,
    "Trainer._get_num_items_in_batch": count_world,
    "Trainer.get_total_train_batch_size": lambda *_, **__: 7,
    "Trainer.floating_point_ops": None,
}


@pytest.mark.parametrize("name", CHANGES)
@on_every_rank
def test_releases_without_the_hooks(name: str) -> None:
    """One hook of a library has changed."""
    owner, method = name.split(".")
    owners, trainer = {"Accelerator": Accelerator, "Trainer": transformers.Trainer}, make_trainer(Case(), 1)
    with mock.patch.object(owners[owner], method, CHANGES[name]):
        ending(attach, trainer).check(AdapterUnavailableError, method)
