"""The time of a Trainer's step on a ring of one rank relative to the Trainer alone, for a small Llama."""

from __future__ import annotations

import tempfile
from functools import partial
from typing import Any

import torch
from calls import in_turns
from options import Repeats, Shrink
from report import Row, compared

from ring_backends.testing.world import World

TOKENS = 2048
SIZES = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4}


def attach(repeats: Repeats = 11, shrink: Shrink = 1) -> list[Row]:
    """Measure steps of a Llama of 4 layers with 2,048 tokens on one rank, with `attach` relative to without.

    The attention is the model's own, and one thread computes.
    """
    with World(1, call_timeout=3600.0) as world:
        ((ours, alone),) = world.run(measure, TOKENS // shrink, repeats)
    return [compared(seconds=ours, trainer_alone=alone)]


def measure(tokens: int, repeats: int) -> list[list[float]]:
    """The seconds of each step, with the ring and without, which take turns."""
    from ring_backends.integrations import trainer as integration

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trainers = make_trainer(folder), make_trainer(folder)
        integration.attach(trainers[0])
        input_ids = torch.randint(SIZES["vocab_size"], (1, tokens))
        batch = {"input_ids": input_ids, "labels": input_ids, "attention_mask": torch.ones_like(input_ids)}

        def step(trainer: Any) -> None:
            trainer.training_step(trainer.model, dict(batch), torch.tensor(tokens - 1))
            trainer.model.zero_grad()

        return in_turns([partial(step, trainer) for trainer in trainers], repeats)


def make_trainer(folder: str) -> Any:
    import transformers

    config = transformers.LlamaConfig(**SIZES, num_attention_heads=4, use_cache=False)
    args = transformers.TrainingArguments(folder, use_cpu=True, report_to=[])
    trainer = transformers.Trainer(transformers.LlamaForCausalLM(config), args)
    trainer.model.train()
    return trainer
