"""Helpers of the tests of the DeepSpeed adapter."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ring_backends.multihead import RingDilatedMultiheadAttention
from ring_backends.testing.models import OneParameter, unit_sgd
from ring_backends.testing.rings import TWO, RingSpec, ring_of
from ring_backends.testing.strategies import AttentionCase
from ring_backends.testing.training_runs import IGNORED, Recipe, State, check_ranks, loss_sum, train, train_alone
from ring_backends.testing.world import World

pytest.importorskip("deepspeed")

from ring_backends.adapters import deepspeed as backend

ADAPTER = "ring_backends.adapters.deepspeed"


_FP32 = "DeepSpeed reduces gradients and keeps optimizer states in fp32"


WITHOUT = MappingProxyType(
    {
        "fp64 parameters": _FP32,
        "fp64 clipping": _FP32,
        "another ring size": "DeepSpeed's checkpoints hold one shard per rank",
        "copies of a wrapped model": "an engine holds process groups",
        "loss scaling": "DeepSpeed scales the loss by itself, and only for models in fp16",
    }
)


WITHOUT_ZERO = MappingProxyType(
    {
        **WITHOUT,
        "another order of parameters": "ZeRO stores flat parts of the parameters in the optimizer's order",
        "parameters of some ranks": "ZeRO reduces gradients in the order in which they arrive",
    }
)


SMALL_BUFFERS = {"reduce_bucket_size": 10_000, "stage3_prefetch_bucket_size": 10_000, "sub_group_size": 100_000}
"""Small buffers for ZeRO. The default buffers take gigabytes."""


def zero(stage: int, **options: Any) -> dict[str, Any]:
    """Options of ``parallelize`` for a ZeRO stage with small buffers."""
    return {"zero_stage": stage, "config": {"zero_optimization": SMALL_BUFFERS}, **options}


def offloaded(stage: int) -> dict[str, Any]:
    """Options of ``parallelize`` for a ZeRO stage that keeps the optimizer's states in host memory."""
    config = {
        "zero_optimization": SMALL_BUFFERS | {"offload_optimizer": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": False,
    }
    return zero(stage, config=config)


def check_stage(
    world: World, rings: RingSpec, options: Mapping[str, Any], recipe: Recipe, tolerance: float, function: Any = train
) -> None:
    """Check that parameters change as in one process, and that all ranks have bitwise equal parameters."""
    by_rank = world.run(function, ADAPTER, rings, "zigzag", recipe, dict(options))
    check_ranks(by_rank, train_alone(rings, "zigzag", recipe), tolerance, f"{options} of {rings}")


HOPS = AttentionCase(seq_len=48, segment_lengths=(12, 48), dilation_rates=(1, 2), num_heads=4, num_kv_heads=4)


def parallelize_here(options: Mapping[str, Any], model: nn.Module | None = None) -> Any:
    ring = ring_of(ADAPTER, TWO)
    model = OneParameter().float() if model is None else model
    return backend.parallelize(model, unit_sgd, ring, **options)


NEEDS: Any = {"seq_len": 16, "segment_lengths": [16], "dilation_rates": [1], "num_heads": 2, "head_dim": 4}
"""The arguments that ``ring_size="auto"`` requires."""


class SmallModel(nn.Module):
    """A model with rotary positions. Its input is tokens [batch, local seq], its output logits."""

    def __init__(self, ring: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 32)
        attention = backend.RingDilatedAttention([8, 32], [1, 3], ring=ring)
        self.layer = RingDilatedMultiheadAttention(32, 4, attention, num_kv_heads=2, rotary=True)
        self.head = nn.Linear(32, 11)

    def forward(self, tokens: Tensor, seq_len: int) -> Tensor:
        logits: Tensor = self.head(self.layer(self.embedding(tokens), is_causal=True, seq_len=seq_len))
        return logits


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1024.0)


def one_step(model: nn.Module, ring: Any, stage: int) -> list[State]:
    """The states before and after a step of a :class:`SmallModel` on a ring."""
    state = backend.parallelize(model, sgd, ring, **zero(stage))
    states = [state.full_state_dict()]
    tokens, labels = (ring.shard(x) for x in a_batch())
    state.backward(state.loss(loss_sum(state.model(tokens, 32), labels), (labels >= 0).sum()))
    state.step()
    return [*states, state.full_state_dict()]


def one_step_alone() -> list[State]:
    model = SmallModel(None)
    states = [copy.deepcopy(model.state_dict())]
    optimizer = sgd(model.parameters())
    tokens, labels = a_batch()
    (loss_sum(model(tokens, 32), labels) / (labels >= 0).sum()).backward()
    optimizer.step()
    return [*states, model.state_dict()]


def a_batch() -> tuple[Tensor, Tensor]:
    """Tokens and labels [2, 32]. The last quarter of the labels is ignored."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(11, (2, 32), generator=generator)
    labels = tokens.roll(-1, 1)
    labels[:, 24:] = IGNORED
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = IGNORED
    return tokens, labels
