"""FSDP: sharded modules and their ranks, models that are wrapped already, and refused set-ups."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor

from ring_backends.multihead import RingDilatedMultiheadAttention
from ring_backends.testing.failing_calls import ending
from ring_backends.testing.marks import matrix_but
from ring_backends.testing.models import OneParameter, make_model, unit_sgd
from ring_backends.testing.rings import TWO, RingSpec, ring_of
from ring_backends.testing.training_runs import Recipe, State, Trainer, check_ranks, train, train_alone
from ring_backends.testing.world import World, on_every_rank

pytest.importorskip("numpy")  # the adapter needs NumPy

from fsdp_cases import ADAPTER, STRATEGIES, parallelize

from ring_backends.adapters import fsdp
from ring_backends.adapters.fsdp.sharding import find_blocks


def parameters_of(rings: RingSpec, strategy: str) -> list[DTensor]:
    trainer = Trainer(ADAPTER, rings, "contiguous", Recipe(dtype=torch.float32), {"strategy": strategy})
    parameters = list(trainer.state.model.parameters())
    assert all(isinstance(parameter, DTensor) for parameter in parameters), parameters
    return parameters


@pytest.mark.parametrize(
    ("strategy", "placement"), [("fsdp2", "(4,) (Shard(dim=0),)"), ("hsdp", "(2, 2) (Replicate(), Shard(dim=0))")]
)
@on_every_rank
def test_parameters_are_sharded_over_data_and_ring(strategy: str, placement: str) -> None:
    parameters = parameters_of(TWO, strategy)
    found = {f"{tuple(parameter.device_mesh.shape)} {parameter.placements}" for parameter in parameters}
    assert found == {placement}, found


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])
@pytest.mark.parametrize(
    ("chosen", "wanted"),
    [(None, ["", "blocks.0", "blocks.1"]), ("blocks.1.projections", ["", "blocks.1.projections"])],
)
@on_every_rank
def test_each_block_is_sharded_by_itself(strategy: str, chosen: str | None, wanted: list[str]) -> None:
    """With ``blocks=None``, the adapter finds the blocks."""
    model = make_model("blocks", lambda: fsdp.RingDilatedAttention([8], [1]), torch.float32, 0)
    blocks = None if chosen is None else [model.get_submodule(chosen)]
    parts = parallelize({"strategy": strategy, "blocks": blocks}, model).model.named_modules()
    names = [name for name, part in parts if isinstance(part, (FSDPModule, FullyShardedDataParallel))]
    names = sorted(name.replace("_fsdp_wrapped_module.", "") for name in names)
    assert names == wanted, names


@pytest.mark.parametrize("strategy", ["fsdp2", "hsdp"])
@on_every_rank
def test_multihead_layers_as_blocks_cause_no_warning(strategy: str) -> None:
    """FSDP2 warns of a module that returns a view."""
    attentions = [fsdp.RingDilatedAttention([8], [1], ring=ring_of(ADAPTER, TWO)) for _ in range(2)]
    model = nn.Sequential(*(RingDilatedMultiheadAttention(8, 2, attention) for attention in attentions))
    state = parallelize({"strategy": strategy}, model, TWO)
    assert all(isinstance(layer, FSDPModule) for layer in model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "FSDP2-wrapped module")
        out = state.model(torch.ones(1, 4, 8))
        state.backward(state.loss(out.square().sum(), 4))


def wrapped(model: nn.Module, sharding: str, **options: Any) -> FullyShardedDataParallel:
    mesh = init_device_mesh("cpu", (2, 2)) if sharding == "HYBRID_SHARD" else None
    strategy, cpu = ShardingStrategy[sharding], torch.device("cpu")
    return FullyShardedDataParallel(model, sharding_strategy=strategy, device_id=cpu, device_mesh=mesh, **options)


def train_wrapped(rings: RingSpec, recipe: Recipe, sharding: str) -> list[State]:
    """Train a model that is wrapped in FullyShardedDataParallel before ``parallelize``."""
    wrap = partial(wrapped, sharding=sharding, use_orig_params=True)
    return train(ADAPTER, rings, "zigzag", recipe, {}, wrap)


@pytest.mark.parametrize(
    "sharding", matrix_but("FULL_SHARD", of=("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"))
)
def test_a_model_wrapped_before_parallelize(world: World, sharding: str) -> None:
    recipe = Recipe(dtype=torch.float32)
    check_ranks(world.run(train_wrapped, TWO, recipe, sharding), train_alone(TWO, "zigzag", recipe), 1e-6, sharding)


def initialise_differently(strategy: str) -> list[State]:
    """Take two steps. Ranks initialise the model differently. A buffer is expanded from one element."""

    def odd(model: nn.Module) -> nn.Module:
        model.register_buffer("expanded", torch.full((1, 1), float(dist.get_rank())).expand(64, 64))
        model.register_buffer("short", torch.arange(6, dtype=torch.int16).view(2, 3).t() + dist.get_rank())
        return model if strategy in STRATEGIES else wrapped(model, strategy)

    options = {"strategy": strategy} if strategy in STRATEGIES else {}
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


@on_every_rank
def test_setups_that_are_refused() -> None:
    """Gradients reduced only over ranks with the same part of a sequence or not at all, and contradictory options."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "ring"))
    group = mesh.get_group("data")

    def wrap(module: nn.Module, **options: Any) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True, **options)

    ignoring = nn.Sequential(OneParameter(), OneParameter())
    one, sharded, drift = OneParameter(), OneParameter(), "replicas would drift apart"
    fully_shard(sharded, mesh=mesh["data"])
    others, fsdp1 = "the gradients of the other parameters would not be reduced", {"strategy": "fsdp1"}
    refused: list[tuple[type[Exception], str, dict[str, Any], nn.Module | None]] = [
        (ValueError, drift, {"mesh": mesh["data"]}, None),
        (ValueError, "already sharded by fully_shard", {}, sharded),
        (RuntimeError, drift, {**fsdp1, "process_group": group}, None),
        (RuntimeError, drift, {}, wrap(OneParameter(), process_group=group)),
        (ValueError, drift, {}, wrap(ignoring, ignored_modules=[ignoring[1]])),
        (ValueError, others, {}, nn.Sequential(OneParameter(), wrap(OneParameter()))),
        (ValueError, drift, {"ignored_params": {one.weight}}, one),
        (ValueError, drift, {**fsdp1, "ignored_states": [one.weight]}, one),
        (ValueError, drift, {**fsdp1, "ignored_modules": [one]}, one),
        (ValueError, "strategy = 'zero'", {"strategy": "zero"}, None),
        (ValueError, "mp_policy and mixed_precision", {"mp_policy": object(), "mixed_precision": torch.bfloat16}, None),
        (ValueError, "FullyShardedDataParallel already", {"blocks": []}, wrap(OneParameter())),
        (ValueError, "not a submodule", {"blocks": [nn.Linear(1, 1)]}, None),
        (ValueError, "max_grad_norm = 1.0", {**fsdp1, "max_grad_norm": 1.0}, OneParameter().double()),
    ]
    for error, text, options, model in refused:
        ending(parallelize, options, model, TWO).check(error, text)


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


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])
@on_every_rank
def test_blocks_that_share_a_module_are_not_sharded_apart(strategy: str) -> None:
    """A step on the ranks equals the same step alone."""
    torch.manual_seed(0)
    model, alone, x = SharedPart(), SharedPart(), torch.arange(4.0)[None]
    assert find_blocks(model) == []
    alone.load_state_dict(model.state_dict())
    state = parallelize({"strategy": strategy}, model, TWO)
    state.backward(state.loss(state.model(x).square().sum(), 1, dist.get_world_size()))
    state.step()
    optimizer = unit_sgd(alone.parameters())
    alone(x).square().sum().backward()
    optimizer.step()
    torch.testing.assert_close(state.full_state_dict(), dict(alone.state_dict()))


@on_every_rank
def test_what_fsdp1_cannot_flatten_is_refused() -> None:
    ring, strided = ring_of(ADAPTER, TWO), nn.Linear(4, 4)
    strided.weight = nn.Parameter(torch.randn(4, 8)[:, ::2])
    ended = ending(fsdp.parallelize, nn.Linear(4, 4), torch.optim.Adafactor, ring, strategy="fsdp1")
    looks = "Adafactor: it updates an element of a parameter by looking at other elements"
    ended.check(ValueError, looks, "strategy='fsdp2'")
    text = "parameter weight of model has strides (8, 2)"
    ending(parallelize, {"strategy": "fsdp1"}, strided, TWO).check(ValueError, text)


class TwoTypes(nn.Module):
    """An fp32 layer and a frozen bf16 layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4).bfloat16().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.first(x).bfloat16()).float()


@on_every_rank
def test_fsdp2_names_a_group_that_trains_parameters_of_two_dtypes() -> None:
    """The second layer is frozen in the first step. The refusal comes before the forward, so training goes on."""
    model, x = TwoTypes(), torch.ones(1, 4)
    state = parallelize({}, model, TWO)

    def step() -> None:
        state.backward(state.loss(state.model(x).square().sum(), 1))
        state.step()

    step()
    model.second.requires_grad_(True)
    for _ in range(2):
        ending(step).check(RuntimeError, "the model has trained parameters of several dtypes", "blocks=")
    model.second.requires_grad_(False)
    step()
    assert state.step_count == 2
