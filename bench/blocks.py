"""The time of `parallelize` relative to the framework alone, for a model of many small blocks on two ranks.

Every block is a unit of its own, whose parameters the framework gathers. Both models have the same attention modules,
so the difference is what `parallelize` adds for each block and for each step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from calls import in_turns
from options import Repeats, Shrink
from report import Row, compared
from torch import Tensor, nn

from ring_backends.registry import load_adapter
from ring_backends.ring.ring import Ring
from ring_backends.testing.world import World

NUM_BLOCKS, WIDTH, HEADS, TOKENS = 16, 128, 4, 2048
FRAMEWORKS = {"fsdp": "fully_shard", "deepspeed": "ZeRO 3"}

_ZERO = {"stage": 3, "reduce_bucket_size": 1_000_000, "stage3_prefetch_bucket_size": 100_000, "sub_group_size": 10**6}


def blocks(
    repeats: Repeats = 31,
    shrink: Shrink = 1,
    frameworks: Annotated[str, typer.Option(help="Adapters of the frameworks.")] = ",".join(FRAMEWORKS),
) -> list[Row]:
    """Measure forwards and steps of 16 small blocks on two ranks, relative to the framework without `parallelize`.

    A forward has 2,048 tokens. The frameworks are FSDP2 and DeepSpeed's ZeRO 3.
    """
    rows = []
    for name in frameworks.split(","):
        with World(2, call_timeout=3600.0) as world:
            of_ranks = world.run(measure, name, TOKENS // shrink, repeats)
        for part in ("forward", "step"):
            # All ranks have to finish, so the slowest rank counts.
            ours, alone = (
                [max(call) for call in zip(*(r[part][who] for r in of_ranks), strict=True)] for who in (0, 1)
            )
            times = compared(seconds=ours, framework_alone=alone)
            rows.append({"framework": FRAMEWORKS[name], "part": part, **times})
    return rows


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


@dataclass(frozen=True)
class Contestant:
    """A model, and what a training loop does with its loss sum."""

    model: nn.Module
    finish_step: Callable[[Tensor], None]

    def forward(self, x: Tensor) -> None:
        with torch.no_grad():
            self.model(x)

    def step(self, x: Tensor) -> None:
        self.finish_step(self.model(x).square().sum())


def measure(framework: str, tokens: int, repeats: int) -> dict[str, list[list[float]]]:
    """The seconds of each forward and step on this rank, of ours and of the framework alone, which take turns."""
    adapter = load_adapter(framework)
    ring = adapter.initialize()
    x = torch.randn(1, tokens // ring.size, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    contestants = _ours(framework, adapter, ring, tokens), _alone(framework, adapter, ring, tokens)
    return {
        part: in_turns([partial(getattr(contestant, part), x) for contestant in contestants], repeats, warm_up=3)
        for part in ("step", "forward")
    }


def _model(adapter: Any, ring: Ring, tokens: int) -> nn.Module:
    torch.manual_seed(0)
    blocks = (Block(adapter.RingDilatedAttention([tokens // 4, tokens], [1, 4], ring=ring)) for _ in range(NUM_BLOCKS))
    return nn.Sequential(*blocks)


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-4)


def _ours(framework: str, adapter: Any, ring: Ring, tokens: int) -> Contestant:
    options = {} if framework == "fsdp" else {"zero_stage": 3, "config": {"zero_optimization": _ZERO}}
    state = adapter.parallelize(_model(adapter, ring, tokens), _optimizer, ring, **options)

    def finish_step(loss_sum: Tensor) -> None:
        state.backward(state.loss(loss_sum, tokens // ring.size))
        state.step()

    return Contestant(state.model, finish_step)


def _alone(framework: str, adapter: Any, ring: Ring, tokens: int) -> Contestant:
    model = _model(adapter, ring, tokens)
    if framework == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (ring.size,))
        for part in (*model, model):  # type: ignore[misc]
            fully_shard(part, mesh=mesh)
        optimizer = _optimizer(model.parameters())

        def finish_step(loss_sum: Tensor) -> None:
            (loss_sum * (ring.size / tokens)).backward()
            optimizer.step()
            optimizer.zero_grad()

        return Contestant(model, finish_step)

    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": _ZERO,
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=_optimizer(model.parameters()), config=config)

    def finish_engine_step(loss_sum: Tensor) -> None:
        engine.backward(loss_sum * (ring.size / tokens))
        engine.step()

    return Contestant(engine, finish_engine_step)
