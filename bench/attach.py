"""The time of a Trainer's step on a ring of one rank relative to the Trainer alone, for a small Llama."""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

import torch
from options import Json, Repeats, Shrink
from report import Row, ratios, report

from ring_backends.testing.world import World

TOKENS = 2048
SIZES = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4}


def attach_command(repeats: Repeats = 11, shrink: Shrink = 1, json: Json = None) -> None:
    """Measure steps of a Llama of 4 layers with 2,048 tokens on one rank, with `attach` relative to without.

    The attention is the model's own, and one thread computes.
    """
    report("attach", {"repeats": repeats, "shrink": shrink}, attach_steps(repeats, shrink), json)


def attach_steps(repeats: int, shrink: int) -> list[Row]:
    with World(1, call_timeout=3600.0) as world:
        (by_name,) = world.run(measure, TOKENS // shrink, repeats)
    ours, alone = by_name["attached"], by_name["alone"]
    times = {"seconds": statistics.median(ours), "trainer_alone": statistics.median(alone)}
    return [{**times, **ratios(ours, alone), "calls": {"ours": ours, "trainer alone": alone}}]


def measure(tokens: int, repeats: int) -> dict[str, list[float]]:
    """The seconds of each step by contestant. They take turns."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trainers = {name: make_trainer(folder) for name in ("attached", "alone")}
        attach_to_ring(trainers["attached"])
        seconds: dict[str, list[float]] = {name: [] for name in trainers}
        input_ids = torch.randint(SIZES["vocab_size"], (1, tokens))
        batch = {"input_ids": input_ids, "labels": input_ids, "attention_mask": torch.ones_like(input_ids)}
        for _ in range(repeats + 1):
            for name, trainer in trainers.items():
                begin = time.perf_counter()
                trainer.training_step(trainer.model, dict(batch), torch.tensor(tokens - 1))
                trainer.model.zero_grad()
                seconds[name].append(time.perf_counter() - begin)
    return {name: values[1:] for name, values in seconds.items()}


def make_trainer(folder: str) -> Any:
    import transformers

    config = transformers.LlamaConfig(**SIZES, num_attention_heads=4, use_cache=False)
    args = transformers.TrainingArguments(folder, use_cpu=True, report_to=[])
    trainer = transformers.Trainer(transformers.LlamaForCausalLM(config), args)
    trainer.model.train()
    return trainer


def attach_to_ring(trainer: Any) -> None:
    from ring_backends.integrations.trainer import attach

    attach(trainer)
