"""The time of training steps on small models, relative to the framework or the Trainer alone."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from clock import calls_in_turns
from report import Repeats, Row, Shrink, compared
from torch import Tensor, nn

from ring_backends.registry import load_adapter
from ring_backends.testing.world import World

NUM_BLOCKS, WIDTH, HEADS, TOKENS = 16, 128, 4, 2048
FRAMEWORKS = {"fsdp": "fully_shard", "deepspeed": "ZeRO 3"}
ZERO = {"stage": 3, "reduce_bucket_size": 1_000_000, "stage3_prefetch_bucket_size": 100_000, "sub_group_size": 10**6}
LLAMA = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4}


def blocks(
    repeats: Repeats = 31,
    shrink: Shrink = 1,
    frameworks: Annotated[str, typer.Option(help="Adapters of the frameworks.")] = ",".join(FRAMEWORKS),
) -> Iterator[Row]:
    """Measure forwards and steps of 16 small blocks on two ranks, relative to the framework without `parallelize`.

    A forward has 2,048 tokens. The frameworks are FSDP2 and DeepSpeed's ZeRO 3. The framework gathers the parameters of
    every block by themselves. Both models have the same attention modules, so the difference is what `parallelize` adds
    for each block and for each step.
    """
    for name in frameworks.split(","):
        with World(2, call_timeout=3600.0) as world:
            of_ranks = world.run(measure_blocks, name, TOKENS // shrink, repeats)
        for part in ("forward", "step"):
            # All ranks have to finish, so the slowest rank counts.
            ours, alone = (
                [max(call) for call in zip(*(found[part][who] for found in of_ranks), strict=True)] for who in (0, 1)
            )
            times = compared(seconds=ours, framework_alone=alone)
            yield {"framework": FRAMEWORKS[name], "part": part, **times}


class Block(nn.Module):
    """A residual block: attention and two layers."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), attention
        self.projections, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.projections(self.norm(x)).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        x = x + self.output(self.attention(query, key, value, is_causal=True).flatten(-2))
        out: Tensor = x + self.layers(x)
        return out


def measure_blocks(framework: str, tokens: int, repeats: int) -> dict[str, list[list[float]]]:
    """The seconds of each forward and step on this rank, of ours and of the framework alone, which take turns."""
    adapter = load_adapter(framework)
    ring = adapter.initialize()
    x = torch.randn(1, tokens // ring.size, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))

    def model() -> nn.Module:
        torch.manual_seed(0)
        attentions = (adapter.RingDilatedAttention([tokens // 4, tokens], [1, 4], ring=ring) for _ in range(NUM_BLOCKS))
        return nn.Sequential(*map(Block, attentions))

    options = {} if framework == "fsdp" else {"zero_stage": 3, "config": {"zero_optimization": ZERO}}
    state = adapter.parallelize(model(), optimizer_of, ring, **options)

    def finish_step(loss_sum: Tensor) -> None:
        state.backward(state.loss(loss_sum, tokens // ring.size))
        state.step()

    contestants = (state.model, finish_step), alone(framework, model(), ring.size / tokens)
    forwards = [partial(torch.no_grad()(module), x) for module, _ in contestants]
    steps = [lambda module=module, end=end: end(module(x).square().sum()) for module, end in contestants]
    return {
        "step": calls_in_turns(steps, repeats, warm_up=3),
        "forward": calls_in_turns(forwards, repeats, warm_up=3),
    }


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-4)


def alone(framework: str, model: Any, scale: float) -> tuple[nn.Module, Callable[[Tensor], None]]:
    """The framework's own model, and what its training loop does with the sum of the losses."""
    if framework == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (*model, model):
            fully_shard(part, mesh=mesh)
        optimizer = optimizer_of(model.parameters())

        def finish_step(loss_sum: Tensor) -> None:
            (loss_sum * scale).backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, finish_step

    import deepspeed

    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": ZERO, "zero_allow_untested_optimizer": True}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model.parameters()), config=config)

    def finish_engine_step(loss_sum: Tensor) -> None:
        engine.backward(loss_sum * scale)
        engine.step()

    return engine, finish_engine_step


def attach(repeats: Repeats = 11, shrink: Shrink = 1) -> Iterator[Row]:
    """Measure steps of a Llama of 4 layers with 2,048 tokens on one rank, with `attach` relative to without.

    The attention is the model's own, and one thread computes.
    """
    with World(1, call_timeout=3600.0) as world:
        ((ours, without),) = world.run(measure_trainers, TOKENS // shrink, repeats)
    yield compared(seconds=ours, trainer_alone=without)


def measure_trainers(tokens: int, repeats: int) -> list[list[float]]:
    """The seconds of each step, with the ring and without, which take turns."""
    import transformers

    from ring_backends.integrations import trainer as integration

    def make_trainer(folder: str) -> Any:
        config = transformers.LlamaConfig(**LLAMA, num_attention_heads=4, use_cache=False)
        args = transformers.TrainingArguments(folder, use_cpu=True, report_to=[])
        trainer = transformers.Trainer(transformers.LlamaForCausalLM(config), args)
        trainer.model.train()
        return trainer

    with tempfile.TemporaryDirectory() as folder:
        trainers = make_trainer(folder), make_trainer(folder)
        integration.attach(trainers[0])
        input_ids = torch.randint(LLAMA["vocab_size"], (1, tokens))
        batch = {"input_ids": input_ids, "labels": input_ids, "attention_mask": torch.ones_like(input_ids)}

        def step(trainer: Any) -> None:
            trainer.training_step(trainer.model, dict(batch), torch.tensor(tokens - 1))
            trainer.model.zero_grad()

        return calls_in_turns([partial(step, trainer) for trainer in trainers], repeats)
