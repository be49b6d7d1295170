"""FSDP: sharded modules and their ranks, models that are wrapped already, and refused set-ups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from ring_backends.testing.failing_calls import Ended, ending
from ring_backends.testing.marks import matrix_but
from ring_backends.testing.models import OneParameter, make_model, unit_sgd
from ring_backends.testing.rings import FOUR, TWO, TWO_BY_HOSTS, RingSpec, ring_of
from ring_backends.testing.training_runs import Recipe, State, Trainer, check_ranks, train, train_alone
from ring_backends.testing.world import World

pytest.importorskip("numpy")  # the adapter needs NumPy

from fsdp_cases import ADAPTER, STRATEGIES, parallelize_one_parameter

from ring_backends.adapters import fsdp
from ring_backends.adapters.fsdp.sharding import find_blocks


def placements(strategy: str) -> set[str]:
    """The mesh shapes and placements of the parameters of a model."""
    trainer = Trainer(ADAPTER, TWO, "contiguous", Recipe(dtype=torch.float32), {"strategy": strategy})
    found = set()
    for parameter in trainer.state.model.parameters():
        assert isinstance(parameter, DTensor)
        found.add(f"{tuple(parameter.device_mesh.shape)} {parameter.placements}")
    return found


@pytest.mark.parametrize(
    ("strategy", "placement"), [("fsdp2", "(4,) (Shard(dim=0),)"), ("hsdp", "(2, 2) (Replicate(), Shard(dim=0))")]
)
def test_parameters_are_sharded_over_data_and_ring(world: World, strategy: str, placement: str) -> None:
    assert world.run(placements, strategy) == [{placement}] * 4


def mesh_by_hosts() -> list[list[int]]:
    """The ranks of the device mesh that HSDP creates for rings ordered by host."""
    recipe = Recipe(dtype=torch.float32)
    trainer = Trainer(ADAPTER, TWO_BY_HOSTS, "contiguous", recipe, {"strategy": "hsdp"})
    parameter = next(trainer.state.model.parameters())
    assert isinstance(parameter, DTensor)
    ranks: list[list[int]] = parameter.device_mesh.mesh.tolist()
    return ranks


def test_hsdp_mesh_of_rings_by_hosts(world: World) -> None:
    assert world.run(mesh_by_hosts) == [[[0, 2], [1, 3]]] * 4


def sharded_parts(strategy: str, blocks: str | None) -> list[str]:
    """The names of the sharded modules. With ``blocks=None``, the adapter finds the blocks."""
    model = make_model("blocks", lambda: fsdp.RingDilatedAttention([8], [1]), torch.float32, 0)
    chosen = None if blocks is None else [model.get_submodule(blocks)]
    ring = ring_of(ADAPTER, FOUR)
    state = fsdp.parallelize(model, unit_sgd, ring, strategy=strategy, blocks=chosen)  # type: ignore[arg-type]
    parts = state.model.named_modules()
    names = [name for name, part in parts if isinstance(part, (FSDPModule, FullyShardedDataParallel))]
    return sorted(name.replace("_fsdp_wrapped_module.", "") for name in names)


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])
def test_each_block_is_sharded_by_itself(world: World, strategy: str) -> None:
    assert world.run(sharded_parts, strategy, None) == [["", "blocks.0", "blocks.1"]] * 4
    assert world.run(sharded_parts, strategy, "blocks.1.projections") == [["", "blocks.1.projections"]] * 4


def train_wrapped(rings: RingSpec, recipe: Recipe, sharding: str) -> list[State]:
    """Train a model that is wrapped in FullyShardedDataParallel before ``parallelize``."""

    mesh = init_device_mesh("cpu", (2, 2)) if sharding == "HYBRID_SHARD" else None

    def wrapped(model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy[sharding],
            device_id=torch.device("cpu"),
            device_mesh=mesh,
            use_orig_params=True,
        )

    return train(ADAPTER, rings, "zigzag", recipe, {}, wrapped)


@pytest.mark.parametrize("sharding", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"])
def test_a_model_wrapped_before_parallelize(world: World, sharding: str) -> None:
    recipe = Recipe(dtype=torch.float32)
    check_ranks(world.run(train_wrapped, TWO, recipe, sharding), train_alone(TWO, "zigzag", recipe), 1e-6, sharding)


def initialise_differently(strategy: str) -> list[State]:
    """Take two steps. Ranks initialise the model differently. A buffer is expanded from one element."""

    def odd(model: nn.Module) -> nn.Module:
        model.register_buffer("expanded", torch.full((1, 1), float(dist.get_rank())).expand(64, 64))
        model.register_buffer("short", torch.arange(6, dtype=torch.int16).view(2, 3).t() + dist.get_rank())
        if strategy in ("NO_SHARD", "HYBRID_SHARD"):
            mesh = init_device_mesh("cpu", (2, 2)) if strategy == "HYBRID_SHARD" else None
            sharding, cpu = ShardingStrategy[strategy], torch.device("cpu")
            return FullyShardedDataParallel(model, sharding_strategy=sharding, device_id=cpu, device_mesh=mesh)
        return model

    options = {} if strategy in ("NO_SHARD", "HYBRID_SHARD") else {"strategy": strategy}
    recipe = Recipe(dtype=torch.float32, rate=0.02, steps=2, seed=dist.get_rank())
    return train(ADAPTER, TWO, "zigzag", recipe, options, odd)


@pytest.mark.parametrize("strategy", matrix_but("fsdp2", of=(*STRATEGIES, "NO_SHARD", "HYBRID_SHARD")))
def test_replicas_with_different_initial_parameters_become_equal(world: World, strategy: str) -> None:
    by_rank = world.run(initialise_differently, strategy)
    for states in by_rank[1:]:
        for state, first in zip(states, by_rank[0], strict=True):
            parameters = [name for name in state if name not in ("expanded", "short")]
            assert all(torch.equal(state[name], first[name]) for name in parameters)
    if strategy in STRATEGIES:
        first = by_rank[-1][0]
        assert (float(first["expanded"][5, 7]), first["short"].t().flatten().tolist()) == (0, [0, 1, 2, 3, 4, 5])


def shard_only_over_data() -> dict[str, Ended]:
    """Request, in every possible way, to reduce gradients only over ranks with the same part of a sequence."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "ring"))
    group = mesh.get_group("data")

    def wrap(module: nn.Module, **options: Any) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True, **options)

    ignoring = nn.Sequential(OneParameter(), OneParameter())
    partly = nn.Sequential(OneParameter(), wrap(OneParameter()))
    sharded = OneParameter()
    fully_shard(sharded, mesh=mesh["data"])
    return {
        "fully_shard": parallelize_one_parameter(TWO, {"mesh": mesh["data"]}),
        "fully_shard before": parallelize_one_parameter(TWO, {}, sharded),
        "fsdp1": parallelize_one_parameter(TWO, {"strategy": "fsdp1", "process_group": group}),
        "fsdp1 before": parallelize_one_parameter(TWO, {}, wrap(OneParameter(), process_group=group)),
        "ignored before": parallelize_one_parameter(TWO, {}, wrap(ignoring, ignored_modules=[ignoring[1]])),
        "a part only": parallelize_one_parameter(TWO, {}, partly),
    }


def test_sharding_only_over_data_is_refused(world: World) -> None:
    for endings in world.run(shard_only_over_data):
        for ended in endings.values():
            assert ended.error in ("ValueError", "RuntimeError"), endings
        assert "replicas would drift apart" in endings["fully_shard"].message
        assert "already sharded by fully_shard" in endings["fully_shard before"].message
        assert "replicas would drift apart" in endings["fsdp1"].message
        assert "replicas would drift apart" in endings["fsdp1 before"].message
        assert "replicas would drift apart" in endings["ignored before"].message
        assert "the gradients of the other parameters would not be reduced" in endings["a part only"].message


def ignore_a_parameter(options_of: str) -> Ended:
    model = OneParameter()
    options: dict[str, dict[str, Any]] = {
        "fully_shard": {"ignored_params": {model.weight}},
        "states": {"strategy": "fsdp1", "ignored_states": [model.weight]},
        "modules": {"strategy": "fsdp1", "ignored_modules": [model]},
    }
    return parallelize_one_parameter(FOUR, options[options_of], model)


@pytest.mark.parametrize("options_of", ["fully_shard", "states", "modules"])
def test_ignored_parameters_are_refused(world: World, options_of: str) -> None:
    for ended in world.run(ignore_a_parameter, options_of):
        ended.check(ValueError, "replicas would drift apart")


def contradictory_options() -> dict[str, Ended]:
    wrapped = FullyShardedDataParallel(OneParameter(), device_id=torch.device("cpu"))
    both = {"mp_policy": MixedPrecisionPolicy(), "mixed_precision": torch.bfloat16}
    return {
        "strategy = 'zero'": parallelize_one_parameter(FOUR, {"strategy": "zero"}),
        "mp_policy and mixed_precision": parallelize_one_parameter(FOUR, both),
        "FullyShardedDataParallel already": parallelize_one_parameter(FOUR, {"blocks": []}, wrapped),
        "not a submodule": parallelize_one_parameter(FOUR, {"blocks": [nn.Linear(1, 1)]}),
        "max_grad_norm = 1.0": parallelize_one_parameter(
            FOUR, {"strategy": "fsdp1", "max_grad_norm": 1.0}, OneParameter().double()
        ),
    }


def test_contradictory_options_are_refused(world: World) -> None:
    for endings in world.run(contradictory_options):
        for text, ended in endings.items():
            assert ended.error in ("ValueError", "TypeError"), (text, ended)
            assert text in ended.message


class SharedPart(nn.Module):
    """A model whose blocks hold one module in common."""

    def __init__(self) -> None:
        super().__init__()
        part = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), part) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def train_shared_part(options: dict[str, Any]) -> list[State]:
    """The states of a model after a step on the ranks, and after the same step alone."""
    torch.manual_seed(0)
    model, alone, x = SharedPart(), SharedPart(), torch.arange(4.0)[None]
    alone.load_state_dict(model.state_dict())
    state = fsdp.parallelize(model, unit_sgd, ring_of(ADAPTER, TWO), **options)
    state.backward(state.loss(state.model(x).square().sum(), 1, dist.get_world_size()))
    state.step()
    optimizer = unit_sgd(alone.parameters())
    alone(x).square().sum().backward()
    optimizer.step()
    return [state.full_state_dict(), alone.state_dict()]


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])
def test_blocks_that_share_a_module_are_not_sharded_apart(world: World, strategy: str) -> None:
    assert find_blocks(SharedPart()) == []
    for got, wanted in world.run(train_shared_part, {"strategy": strategy}):
        for name, tensor in wanted.items():
            torch.testing.assert_close(got[name], tensor)


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters)


def flattened_here() -> list[Ended]:
    ring, strided = ring_of(ADAPTER, TWO), nn.Linear(4, 4)
    strided.weight = nn.Parameter(torch.randn(4, 8)[:, ::2])
    return [
        ending(lambda: fsdp.parallelize(nn.Linear(4, 4), adafactor, ring, strategy="fsdp1")),
        ending(lambda: fsdp.parallelize(strided, unit_sgd, ring, strategy="fsdp1")),
    ]


def test_what_fsdp1_cannot_flatten_is_refused(world: World) -> None:
    for optimizer, parameter in world.run(flattened_here):
        optimizer.check(
            ValueError,
            "Adafactor: it updates an element of a parameter by looking at other elements",
            "strategy='fsdp2'",
        )
        parameter.check(ValueError, "parameter weight of model has strides (8, 2)")


class Named(nn.Module):
    """A model whose blocks have two names: by a second name of their parent, or of their list."""

    def __init__(self, second_name: str) -> None:
        super().__init__()
        self.backbone = nn.Module()
        self.backbone.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(3))
        self.again: Any = self.backbone if second_name == "parent" else self.backbone.blocks


@pytest.mark.parametrize("second_name", ["parent", "list"])
def test_blocks_with_a_second_name_are_found_once(second_name: str) -> None:
    model = Named(second_name)
    assert list(map(id, find_blocks(model))) == list(map(id, model.backbone.blocks))
