"""The FSDP adapter: everything that the shared suites ask of any adapter, by every strategy, and what is FSDP's own."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from ring_backends.activation_checkpointing import keep_attention
from ring_backends.errors import RingMismatchError
from ring_backends.testing import training_runs, unequal_ranks
from ring_backends.testing.compiled import Graphs
from ring_backends.testing.failing_calls import Ended, ending
from ring_backends.testing.models import Block, BlocksOfExperts, Experts, OneParameter, make_model
from ring_backends.testing.rings import FOUR, TWO, TWO_BY_HOSTS, RingSpec, ring_here
from ring_backends.testing.suite import AdapterTests, AllTrainingTests
from ring_backends.testing.traffic import planned_hops
from ring_backends.testing.training_checkpoints import Stretch, five_steps, load_and_go_on
from ring_backends.testing.training_runs import Recipe, State, Trainer, check_moves, check_ranks, train, train_alone
from ring_backends.testing.unequal_ranks import check_experts, train_experts
from ring_backends.testing.world import World

pytest.importorskip("numpy")  # which the adapter needs

from ring_backends.adapters import fsdp
from ring_backends.adapters.fsdp import training as fsdp_training
from ring_backends.adapters.fsdp.sharding import Strategy
from ring_backends.training.checkpoint_files import MANIFEST

ADAPTER = "ring_backends.adapters.fsdp"
STRATEGIES = ("fsdp2", "hsdp", "fsdp1")

every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


COPIES = {"copies of a wrapped model": "FSDP's modules refuse it"}


class TestFSDP(AdapterTests):
    adapter = ADAPTER
    core_in_matrix = True
    without = MappingProxyType(COPIES)


@pytest.mark.slow
class TestHSDP(AllTrainingTests):
    adapter = ADAPTER
    framework_options = MappingProxyType({"strategy": "hsdp"})


@pytest.mark.slow
class TestFSDP1(AllTrainingTests):
    adapter = ADAPTER
    framework_options = MappingProxyType({"strategy": "fsdp1"})
    without = MappingProxyType(
        {
            "fp64 clipping": "FullyShardedDataParallel computes norms in fp32 only",
            "evaluation within a step": "FullyShardedDataParallel keeps whole parameters after it, and loses the step",
        }
    )


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def parallelize_one_parameter(rings: RingSpec, options: Mapping[str, Any], model: nn.Module | None = None) -> Ended:
    ring = ring_here(ADAPTER, rings)
    assert ring is not None
    return ending(lambda: fsdp.parallelize(OneParameter() if model is None else model, sgd, ring, **options))


@pytest.mark.parametrize("strategy", ["hsdp", "fsdp1"])
def test_ranks_may_use_different_parameters(world: World, strategy: str) -> None:
    by_rank = world.run(train_experts, ADAPTER, (8, 10), False, {"strategy": strategy})
    check_experts(by_rank, (8, 10), accumulate=False)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_that_call_different_blocks_are_reported(world: World, strategy: str) -> None:
    for outcome in world.run_collect(train_experts_as_blocks, strategy):
        assert outcome.raised(RingMismatchError), outcome
        assert "experts.0" in outcome.message, outcome
        assert "experts.1" in outcome.message, outcome
        assert "leave them out of blocks=" in outcome.message, outcome


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_whose_losses_depend_on_different_blocks_are_reported(world: World, strategy: str) -> None:
    """All ranks call all blocks, and one rank cuts the gradient off behind one of them."""
    for outcome in world.run_collect(cut_a_gradient_off, strategy):
        assert outcome.raised(RingMismatchError), outcome
        told = r"behind the loss \(rank 0: .*blocks\.0'\], rank 1: .*blocks\.1'\], rank 2: .*blocks\.0'\]"
        assert re.search(told, outcome.message), outcome
        assert "add 0 * output" in outcome.message, outcome


def cut_a_gradient_off(strategy: str) -> None:
    state = fsdp.parallelize(BlocksOfExperts((4, 4)), sgd, ring_here(ADAPTER, FOUR), strategy=strategy)
    if dist.get_rank() == 1:
        state.model.get_submodule("blocks.0").register_forward_hook(lambda module, inputs, out: out.detach())
    state.backward(state.loss(state.model(torch.ones(2, 5, 4), 0).sum(), 10))


def interrupt_a_load(path: str) -> str:
    """Ctrl-C on one rank while the others read too: what each of them raises."""
    state = fsdp.parallelize(OneParameter(), sgd, ring_here(ADAPTER, TWO))
    state.save(path)
    interrupted = mock.patch.object(fsdp_training.CheckpointPlanner, "create_local_plan", side_effect=KeyboardInterrupt)
    with interrupted if dist.get_rank() == 1 else contextlib.nullcontext():
        try:
            state.load(path)
        except BaseException as error:
            return type(error).__name__
    return "no error"


def test_an_interrupted_load_does_not_blame_the_checkpoint(world: World, tmp_path: Path) -> None:
    told = world.run(interrupt_a_load, str(tmp_path / "checkpoint"))
    assert told == ["RingPeerError", "KeyboardInterrupt", "RingPeerError", "RingPeerError"]


def train_experts_as_blocks(strategy: str) -> None:
    """Every expert is sharded by itself, and gathered when it is called."""
    with mock.patch.object(unequal_ranks, "BlocksOfExperts", Experts):
        train_experts(ADAPTER, (8, 10), False, {"strategy": strategy})


@pytest.mark.parametrize("strategy", ["hsdp", "fsdp1"])
@pytest.mark.parametrize("rings", [FOUR, TWO, TWO_BY_HOSTS], ids=["1x4", "2x2", "2x2-by-hosts"])
def test_gradients_are_those_of_the_whole_batch(world: World, rings: RingSpec, strategy: str) -> None:
    """A few of the cases of the classes above."""
    recipe = Recipe(dtype=torch.float32)
    by_rank = world.run(train, ADAPTER, rings, "zigzag", recipe, {"strategy": strategy})
    check_ranks(by_rank, train_alone(rings, "zigzag", recipe), 1e-6, strategy)


# What is sharded, and over which ranks.


def placements(strategy: str) -> set[str]:
    """How the parameters of a model lie over the ranks."""
    trainer = Trainer(ADAPTER, TWO, "contiguous", Recipe(dtype=torch.float32), {"strategy": strategy})
    found = set()
    for parameter in trainer.state.model.parameters():
        assert isinstance(parameter, DTensor)
        found.add(f"{tuple(parameter.device_mesh.shape)} {parameter.placements}")
    return found


@pytest.mark.parametrize(
    ("strategy", "placement"),
    [("fsdp2", "(4,) (Shard(dim=0),)"), ("hsdp", "(2, 2) (Replicate(), Shard(dim=0))")],
)
def test_parameters_are_sharded_over_data_and_ring(world: World, strategy: str, placement: str) -> None:
    assert world.run(placements, strategy) == [{placement}] * 4


def mesh_by_hosts() -> list[list[int]]:
    """The ranks of the replicas that HSDP makes of rings by hosts."""
    recipe = Recipe(dtype=torch.float32)
    trainer = Trainer(ADAPTER, TWO_BY_HOSTS, "contiguous", recipe, {"strategy": "hsdp"})
    parameter = next(trainer.state.model.parameters())
    assert isinstance(parameter, DTensor)
    ranks: list[list[int]] = parameter.device_mesh.mesh.tolist()
    return ranks


def test_replicas_are_the_rings_that_hosts_make(world: World) -> None:
    assert world.run(mesh_by_hosts) == [[[0, 2], [1, 3]]] * 4


def sharded_parts(strategy: str, blocks: str | None) -> list[str]:
    """The modules that gather their parameters by themselves; ``blocks`` None lets the adapter find them."""
    model = make_model("blocks", lambda: fsdp.RingDilatedAttention([8], [1]), torch.float32, 0)
    chosen = None if blocks is None else [model.get_submodule(blocks)]
    ring = ring_here(ADAPTER, FOUR)
    assert ring is not None
    state = fsdp.parallelize(model, sgd, ring, strategy=strategy, blocks=chosen)  # type: ignore[arg-type]
    parts = state.model.named_modules()
    names = [name for name, part in parts if isinstance(part, (FSDPModule, FullyShardedDataParallel))]
    return sorted(name.replace("_fsdp_wrapped_module.", "") for name in names)


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])
def test_each_block_is_sharded_by_itself(world: World, strategy: str) -> None:
    assert world.run(sharded_parts, strategy, None) == [["", "blocks.0", "blocks.1"]] * 4
    assert world.run(sharded_parts, strategy, "blocks.1.projections") == [["", "blocks.1.projections"]] * 4


# Models that are wrapped already.


def train_wrapped(rings: RingSpec, recipe: Recipe, sharding: str) -> list[State]:
    """Train a model that is a FullyShardedDataParallel before ``parallelize`` sees it."""

    mesh = init_device_mesh("cpu", (2, 2)) if sharding == "HYBRID_SHARD" else None

    def wrapped(*args: Any) -> nn.Module:
        return FullyShardedDataParallel(
            make_model(*args),
            sharding_strategy=ShardingStrategy[sharding],
            device_id=torch.device("cpu"),
            device_mesh=mesh,
            use_orig_params=True,
        )

    with mock.patch.object(training_runs, "make_model", wrapped):
        return train(ADAPTER, rings, "zigzag", recipe, {})


@pytest.mark.parametrize("sharding", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"])
def test_a_model_that_is_wrapped_already(world: World, sharding: str) -> None:
    recipe = Recipe(dtype=torch.float32)
    check_ranks(world.run(train_wrapped, TWO, recipe, sharding), train_alone(TWO, "zigzag", recipe), 1e-6, sharding)


def begin_differently(strategy: str) -> list[State]:
    """Two steps of a model that each rank has initialised by its own, with a buffer of one number in many places."""

    def odd(*args: Any) -> nn.Module:
        model = make_model(*args[:-1], dist.get_rank())
        model.register_buffer("expanded", torch.full((1, 1), float(dist.get_rank())).expand(64, 64))
        model.register_buffer("short", torch.arange(6, dtype=torch.int16).view(2, 3).t() + dist.get_rank())
        if strategy in ("NO_SHARD", "HYBRID_SHARD"):
            mesh = init_device_mesh("cpu", (2, 2)) if strategy == "HYBRID_SHARD" else None
            sharding, cpu = ShardingStrategy[strategy], torch.device("cpu")
            return FullyShardedDataParallel(model, sharding_strategy=sharding, device_id=cpu, device_mesh=mesh)
        return model

    options = {} if strategy in ("NO_SHARD", "HYBRID_SHARD") else {"strategy": strategy}
    with mock.patch.object(training_runs, "make_model", odd):
        return train(ADAPTER, TWO, "zigzag", Recipe(dtype=torch.float32, rate=0.02, steps=2), options)


@pytest.mark.parametrize("strategy", ["fsdp2", "hsdp", "fsdp1", "NO_SHARD", "HYBRID_SHARD"])
def test_replicas_that_begin_differently_become_alike(world: World, strategy: str) -> None:
    by_rank = world.run(begin_differently, strategy)
    for states in by_rank[1:]:
        for state, first in zip(states, by_rank[0], strict=True):
            parameters = [name for name in state if name not in ("expanded", "short")]
            assert all(torch.equal(state[name], first[name]) for name in parameters)
    if strategy in STRATEGIES:
        first = by_rank[-1][0]
        assert (float(first["expanded"][5, 7]), first["short"].t().flatten().tolist()) == (0, [0, 1, 2, 3, 4, 5])


# Compiled blocks.


def train_compiled(recipe: Recipe, strategy: str) -> tuple[list[State], list[Counter[str]]]:
    """Train with each block compiled into one graph; the operators of the graphs."""
    torch.compiler.reset()
    graphs = Graphs()
    trainer = Trainer(ADAPTER, FOUR, "zigzag", recipe, {"strategy": strategy})
    for block in trainer.state.model.get_submodule("blocks").children():
        block.compile(fullgraph=True, backend=graphs.backend)
    return trainer.states(), graphs.operators()


@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("hsdp", marks=pytest.mark.slow)])
def test_a_compiled_block_is_one_graph_with_the_hops_of_the_schedule(world: World, strategy: str) -> None:
    recipe = Recipe(dtype=torch.float32)
    by_rank = world.run(train_compiled, recipe, strategy)
    check_ranks([states for states, _ in by_rank], train_alone(FOUR, "zigzag", recipe), 1e-6)
    case = replace(training_runs.CASE, batch=training_runs.BATCH, dtype=torch.float32, is_causal=True)
    for rank, (_, (forward, backward)) in enumerate(by_rank):  # one graph for both blocks
        assert forward["post_hop"] == planned_hops(case, FOUR, "zigzag", rank, backward=False) > 0
        assert backward["post_hop"] == planned_hops(case, FOUR, "zigzag", rank, backward=True)
        assert forward["begin_forward"] == backward["begin_backward"] == 1


# Activation checkpointing.


def train_checkpointed(recipe: Recipe, strategy: str, how: str) -> list[State]:
    implementation = CheckpointImpl.REENTRANT if how == "reentrant" else CheckpointImpl.NO_REENTRANT
    options = {"context_fn": keep_attention} if how == "kept" else {}

    def checkpointed(*args: Any) -> nn.Module:
        model = make_model(*args)
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=partial(checkpoint_wrapper, checkpoint_impl=implementation, **options),
            check_fn=lambda module: isinstance(module, Block),
        )
        return model

    with mock.patch.object(training_runs, "make_model", checkpointed):
        return train(ADAPTER, TWO, "zigzag", recipe, {"strategy": strategy})


@pytest.mark.parametrize(
    "strategy", ["fsdp2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("hsdp", "fsdp1"))]
)
@pytest.mark.parametrize("how", ["non-reentrant", "kept", pytest.param("reentrant", marks=pytest.mark.slow)])
def test_activation_checkpointing(world: World, strategy: str, how: str) -> None:
    recipe = Recipe(dtype=torch.float32)
    by_rank = world.run(train_checkpointed, recipe, strategy, how)
    check_ranks([[rename(state) for state in states] for states in by_rank], train_alone(TWO, "zigzag", recipe), 1e-6)


def rename(state: State) -> State:
    return {name.replace("_checkpoint_wrapped_module.", ""): tensor for name, tensor in state.items()}


# Evaluation.


def evaluate_by_fsdp1() -> tuple[list[State], list[Ended]]:
    """States after steps with an evaluation before each; and evaluations after one and after both micro-batches."""
    recipe = Recipe(dtype=torch.float32, accumulation_steps=2, rate=0.02)
    trainer = Trainer(ADAPTER, TWO, "zigzag", recipe, {"strategy": "fsdp1"})
    tokens, labels = trainer.micro_batches(0)[0]

    def evaluate() -> None:
        with torch.no_grad():
            trainer.loss(tokens, labels, 1)

    states = [trainer.state.full_state_dict()]
    for step in range(2):
        evaluate()
        trainer.step(step)
        states.append(trainer.state.full_state_dict())
    endings = []
    for _ in range(2):
        trainer.state.backward(trainer.loss(tokens, labels, 1))
        endings.append(ending(evaluate))
    return states, endings


def test_fsdp1_evaluates_between_steps_alone(world: World) -> None:
    recipe = Recipe(dtype=torch.float32, accumulation_steps=2, rate=0.02, steps=2)
    wanted = train_alone(TWO, "zigzag", recipe)
    for states, endings in world.run(evaluate_by_fsdp1):
        check_moves(states, wanted, 1e-5, "fsdp1")
        for number, ended in enumerate(endings, 1):
            assert ended.is_a(RuntimeError), ended
            assert f"after {number} backward calls" in ended.message


# Set-ups in which replicas would drift apart.


def shard_over_data_alone() -> dict[str, Ended]:
    """Gradients reduced over the ranks that hold the same part of a sequence, in every way there is to ask for it."""
    ring = ring_here(ADAPTER, TWO)
    assert ring is not None
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


def test_sharding_over_data_alone_is_refused(world: World) -> None:
    for endings in world.run(shard_over_data_alone):
        for ended in endings.values():
            assert ended.error in ("ValueError", "RuntimeError"), endings
        assert "replicas would drift apart" in endings["fully_shard"].message
        assert "fully_shard already" in endings["fully_shard before"].message
        assert "replicas would drift apart" in endings["fsdp1"].message
        assert "replicas would drift apart" in endings["fsdp1 before"].message
        assert "replicas would drift apart" in endings["ignored before"].message
        assert "nobody would reduce the gradients of the rest" in endings["a part only"].message


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
        assert ended.is_a(ValueError), ended
        assert "replicas would drift apart" in ended.message


def options_that_contradict() -> dict[str, Ended]:
    wrapped = FullyShardedDataParallel(OneParameter(), device_id=torch.device("cpu"))
    both = {"mp_policy": MixedPrecisionPolicy(), "mixed_precision": torch.bfloat16}
    return {
        "strategy = 'zero'": parallelize_one_parameter(FOUR, {"strategy": "zero"}),
        "mp_policy and mixed_precision": parallelize_one_parameter(FOUR, both),
        "FullyShardedDataParallel already": parallelize_one_parameter(FOUR, {"blocks": []}, wrapped),
        "no module inside": parallelize_one_parameter(FOUR, {"blocks": [nn.Linear(1, 1)]}),
        "max_grad_norm = 1.0": parallelize_one_parameter(
            FOUR, {"strategy": "fsdp1", "max_grad_norm": 1.0}, OneParameter().double()
        ),
    }


def test_options_that_contradict_are_refused(world: World) -> None:
    for endings in world.run(options_that_contradict):
        for told, ended in endings.items():
            assert ended.error in ("ValueError", "TypeError"), (told, ended)
            assert told in ended.message


# Checkpoints.


def save_after_two_steps(path: str, strategy: str) -> Stretch:
    trainer = Trainer(ADAPTER, TWO, "zigzag", ADAM, {"strategy": strategy})
    for step in range(2):
        trainer.step(step)
    trainer.state.save(path)
    trainer.state.save(path)  # over the one that is there
    return five_steps(trainer)


ADAM = Recipe(dtype=torch.float32, optimizer="adam", rate=0.02)


@pytest.mark.parametrize(
    ("saved_by", "loaded_by"), [("fsdp2", "fsdp1"), pytest.param("fsdp1", "hsdp", marks=pytest.mark.slow)]
)
def test_a_checkpoint_goes_on_by_another_strategy(world: World, tmp_path: Path, saved_by: str, loaded_by: str) -> None:
    path = str(tmp_path / "checkpoint")
    uninterrupted = world.run(save_after_two_steps, path, saved_by)[0]
    for resumed in world.run(load_and_go_on, ADAPTER, TWO, replace(ADAM, seed=9), path, {"strategy": loaded_by}):
        assert resumed.losses == pytest.approx(uninterrupted.losses, rel=1e-5)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["checkpoint"]


class PartlyUsed(nn.Module):
    """Two layers, of which the loss depends on one."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
        for number, parameter in enumerate(self.parameters()):
            nn.init.constant_(parameter, 0.1 * number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        moved: torch.Tensor = self.used(x)
        return moved


def save_and_load_partly_used(path: str, strategy: Strategy) -> tuple[list[float], list[float]]:
    """The used layer in the steps after a checkpoint, and in the same steps of a run that loaded it."""
    ring = ring_here(ADAPTER, FOUR)
    assert ring is not None

    def go_on(state: Any, steps: int) -> list[float]:
        values = []
        for _ in range(steps):
            state.backward(state.loss((state.model(torch.ones(4)) - 2).square().sum(), 1))
            state.step()
            values.append(float(state.full_state_dict()["used.weight"].sum()))
        return values

    states = [
        fsdp.parallelize(PartlyUsed(), lambda x: torch.optim.AdamW(x, lr=0.1), ring, strategy=strategy)
        for _ in range(2)
    ]
    go_on(states[0], 2)
    states[0].save(path)
    states[1].load(path)
    return go_on(states[0], 3), go_on(states[1], 3)


@every_strategy
def test_training_resumes_with_an_unused_parameter(world: World, tmp_path: Path, strategy: Strategy) -> None:
    for wanted, resumed in world.run(save_and_load_partly_used, str(tmp_path / "checkpoint"), strategy):
        assert resumed == wanted


def save_over(path: str, leftover: str) -> list[str]:
    """Save where a file or what an interrupted save left is; what lies there afterwards."""
    if dist.get_rank() == 0:
        if leftover == "file":
            Path(path).write_text("a checkpoint of another kind")
        else:
            (Path(path + leftover) / "inside").mkdir(parents=True)
            Path(path + leftover, MANIFEST).touch()
    dist.barrier()
    trainer = Trainer(ADAPTER, FOUR, "zigzag", ADAM, {})
    trainer.state.save(path)
    trainer.state.load(path)
    trainer.state.save(path)
    return sorted(entry.name for entry in Path(path).parent.iterdir())


@pytest.mark.parametrize("leftover", ["file", ".replaced", ".unfinished"])
def test_saving_over_leftovers(world: World, tmp_path: Path, leftover: str) -> None:
    assert world.run(save_over, str(tmp_path / "checkpoint"), leftover) == [["checkpoint"]] * 4


def load_what_is_no_checkpoint(missing: str, foreign: str, unwritable: str) -> list[Ended]:
    trainer = Trainer(ADAPTER, FOUR, "zigzag", ADAM, {})
    other = Trainer(ADAPTER, FOUR, "zigzag", replace(ADAM, model="odd"), {})
    other.state.save(foreign)
    loads = [ending(partial(trainer.state.load, path)) for path in (missing, foreign)]
    return [*loads, ending(partial(trainer.state.save, unwritable))]


def test_other_files_are_refused_as_checkpoints(world: World, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    paths = [str(tmp_path / name) for name in ("missing", "foreign", "file/checkpoint")]
    for missing, foreign, unwritable in world.run(load_what_is_no_checkpoint, *paths):
        assert missing.is_a(FileNotFoundError), missing
        assert paths[0] in missing.message
        assert foreign.is_a(ValueError), foreign
        assert "another model, without blocks.0" in foreign.message
        assert unwritable.error != "no error"


def save_before_the_first_step(path: str) -> tuple[list[float], list[float]]:
    trainer = Trainer(ADAPTER, TWO, "zigzag", ADAM, {})
    trainer.state.save(path)
    return five_steps(trainer).losses, load_and_go_on(ADAPTER, TWO, replace(ADAM, seed=9), path, {}).losses


def test_a_checkpoint_from_before_the_first_step(world: World, tmp_path: Path) -> None:
    for uninterrupted, resumed in world.run(save_before_the_first_step, str(tmp_path / "checkpoint")):
        assert resumed == uninterrupted


# Where there is one process.

ALONE = """
import torch
from ring_backends.adapters import fsdp as backend

ring = backend.initialize()
attention = backend.RingDilatedAttention([4, 8], [1, 2], ring=ring)
x = torch.randn(1, 8, 2, 4)
print(attention(x, x, x).shape, torch.distributed.is_initialized())
for strategy in ("fsdp2", "hsdp", "fsdp1"):
    state = backend.parallelize(torch.nn.Linear(2, 1), lambda p: torch.optim.SGD(p, lr=0.1), ring, strategy=strategy)
    state.backward(state.loss(state.model(torch.ones(1, 2)).sum(), 1))
    state.step()
    print(strategy, state.divisor, sorted(state.full_state_dict()))
"""


def test_one_process_without_a_launcher(tmp_path: Path) -> None:
    keep = ("PATH", "HOME", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
    environment = {name: os.environ[name] for name in keep if name in os.environ}
    done = subprocess.run(
        [sys.executable, "-c", ALONE], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "torch.Size([1, 8, 2, 4]) False" in done.stdout
    for strategy in STRATEGIES:
        assert f"{strategy} 1.0 ['bias', 'weight']" in done.stdout
