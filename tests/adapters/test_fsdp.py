"""The FSDP adapter passes the shared suites with every strategy, and with compiled and checkpointed blocks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
import torch.distributed as dist
from command_line import check_alone
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as checkpointing

from ring_backends.activation_checkpointing import keep_attention
from ring_backends.errors import RingMismatchError
from ring_backends.testing.compiled import Graphs
from ring_backends.testing.failing_calls import ending
from ring_backends.testing.marks import THOROUGH, matrix_but
from ring_backends.testing.models import Block, BlocksOfExperts, Experts
from ring_backends.testing.rings import FOUR, TWO
from ring_backends.testing.suite import A_GRADIENT, EVERY_ADAPTER, AdapterTests, AllTrainingTests
from ring_backends.testing.training import renew_closed_worlds
from ring_backends.testing.training_runs import Recipe, State, Trainer, check_moves, check_ranks, train, train_alone
from ring_backends.testing.unequal_ranks import MICRO_BATCHES, train_experts
from ring_backends.testing.world import World, on_every_rank

pytest.importorskip("numpy")  # the adapter needs NumPy

from fsdp_cases import ADAPTER, COPIES, STRATEGIES, parallelize


@pytest.fixture(autouse=True)
def renew_worlds(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from renew_closed_worlds(request)


class TestFSDP(AdapterTests):
    adapter = ADAPTER
    core_in_matrix = True
    quick = EVERY_ADAPTER
    without = MappingProxyType(COPIES)


class TestHSDP(AllTrainingTests):
    adapter = ADAPTER
    framework_options = MappingProxyType({"strategy": "hsdp"})
    without = MappingProxyType(COPIES)
    quick, more_cases = A_GRADIENT, False


class TestFSDP1(AllTrainingTests):
    adapter = ADAPTER
    framework_options = MappingProxyType({"strategy": "fsdp1"})
    without = MappingProxyType(
        {
            **COPIES,
            "early steps": "FullyShardedDataParallel reduces gradients in the last backward of a step only",
            "fp64 clipping": "FullyShardedDataParallel computes norms in fp32 only",
            "evaluation within a step": "FullyShardedDataParallel keeps whole parameters after it; the step is lost",
        }
    )
    quick, more_cases = A_GRADIENT, False


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_that_call_different_blocks_are_reported(world: World, strategy: str) -> None:
    """Each expert is a block, which FSDP gathers when it is called."""
    arguments = train_experts, ADAPTER, (8, 10), MICRO_BATCHES["one"], {"strategy": strategy}
    for outcome in world.run_collect(*arguments, make_model=Experts):
        outcome.check(RingMismatchError, "experts.0", "experts.1", "leave them out of blocks=")


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_every_rank
def test_ranks_whose_losses_depend_on_different_blocks_are_reported(strategy: str) -> None:
    """All ranks call all blocks. One rank detaches the output of a block."""
    state = parallelize({"strategy": strategy}, BlocksOfExperts((4, 4)))
    if dist.get_rank() == 1:
        state.model.get_submodule("blocks.0").register_forward_hook(lambda module, inputs, out: out.detach())
    loss = state.loss(state.model(torch.ones(2, 5, 4), 0).sum(), 10)
    ended = ending(state.backward, loss)
    ended.check(RingMismatchError, "add 0 * output")
    message = r"behind the loss \(rank 0: .*blocks\.0'\], rank 1: .*blocks\.1'\], rank 2: .*blocks\.0'\]"
    assert re.search(message, ended.message), ended


def train_compiled(recipe: Recipe, strategy: str) -> tuple[list[State], list[Counter[str]]]:
    """Train with compiled blocks. Returns the states, and the operators of the graphs."""
    torch.compiler.reset()
    graphs = Graphs()
    trainer = Trainer(ADAPTER, FOUR, "zigzag", recipe, {"strategy": strategy})
    for block in trainer.state.model.get_submodule("blocks").children():
        block.compile(fullgraph=True, backend=graphs.backend)
    return trainer.states(), graphs.operators()


@pytest.mark.parametrize("strategy", matrix_but("fsdp2", of=("fsdp2", "hsdp")))
def test_a_compiled_block_is_one_graph(world: World, strategy: str) -> None:
    recipe = Recipe(dtype=torch.float32)
    by_rank = world.run(train_compiled, recipe, strategy)
    check_ranks([states for states, _ in by_rank], train_alone(FOUR, "zigzag", recipe), 1e-6)
    for _, operators in by_rank:  # one graph for both blocks
        assert operators == [{"ring_forward": 1}, {"ring_backward": 1}]


def train_checkpointed(recipe: Recipe, strategy: str, how: str) -> list[State]:
    implementation = checkpointing.CheckpointImpl["REENTRANT" if how == "reentrant" else "NO_REENTRANT"]
    options = {"context_fn": keep_attention} if how == "kept" else {}
    wrap = partial(checkpointing.checkpoint_wrapper, checkpoint_impl=implementation, **options)

    def checkpointed(model: nn.Module) -> nn.Module:
        checkpointing.apply_activation_checkpointing(model, wrap, lambda module: isinstance(module, Block))
        return model

    states = train(ADAPTER, TWO, "zigzag", recipe, {"strategy": strategy}, checkpointed)
    return [{name.replace("_checkpoint_wrapped_module.", ""): x for name, x in state.items()} for state in states]


@pytest.mark.parametrize("strategy", matrix_but("fsdp2", of=STRATEGIES))
@pytest.mark.parametrize("how", matrix_but("kept", of=("non-reentrant", "kept", "reentrant")))
def test_activation_checkpointing(world: World, strategy: str, how: str) -> None:
    recipe = Recipe(dtype=torch.float32)
    by_rank = world.run(train_checkpointed, recipe, strategy, how)
    check_ranks(by_rank, train_alone(TWO, "zigzag", recipe), 1e-6)


@THOROUGH
@on_every_rank
def test_fsdp1_evaluates_only_between_steps() -> None:
    """Evaluate before each step, then after one and two micro-batches."""
    recipe = Recipe(dtype=torch.float32, accumulation_steps=2, rate=0.02, steps=2)
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
    check_moves(states, train_alone(TWO, "zigzag", recipe), 1e-5, "fsdp1")
    for number in (1, 2):
        trainer.state.backward(trainer.loss(tokens, labels, 1))
        ending(evaluate).check(RuntimeError, f"after {number} backward calls")


@on_every_rank
def test_fsdp1_refuses_an_early_step() -> None:
    state = parallelize({"strategy": "fsdp1", "accumulation_steps": 2}, rings=TWO)
    state.backward(state.loss(state.model(torch.ones(1)).sum(), 1, 4))
    ending(state.step).check(RuntimeError, "step() after 1 of 2 backward calls", "strategy='fsdp2'")


@pytest.mark.matrix(reason="starts a process that imports the framework")
def test_one_process_without_a_launcher(tmp_path: Path) -> None:
    check_alone(tmp_path, "fsdp", *({"strategy": strategy} for strategy in STRATEGIES))
