"""Training by FairScale: OSS with ShardedDataParallel, its options, optimizers and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fairscale_cases import ADAPTER, CASE, GroupedRecipe, parallelize_one_parameter, parallelize_with, train_here
from torch import Tensor, nn

from ring_backends.activation_checkpointing import remember_attention
from ring_backends.testing.calls import local_call
from ring_backends.testing.capabilities import AdapterSuite
from ring_backends.testing.failing_calls import Ended, ending
from ring_backends.testing.marks import matrix_but
from ring_backends.testing.models import OneParameter, unit_sgd
from ring_backends.testing.rings import FOUR, TWO, RingSpec, backend, ring_here, ring_of
from ring_backends.testing.training_runs import Recipe, State, Trainer, check_ranks, every_mesh, train, train_alone
from ring_backends.testing.world import World


class LossySGD(torch.optim.SGD):
    """An optimizer that does not keep an argument in its defaults."""

    def __init__(self, parameters: Any, lr: float, slowness: float = 1.0) -> None:
        super().__init__(parameters, lr=lr / slowness)
        self.slowness = slowness


def parallelize_over_data_alone() -> list[Ended]:
    """Pass the data group to OSS and ShardedDataParallel, and to only one of them."""
    ring = ring_of(ADAPTER, TWO)
    group = [dist.new_group([0, 2]), dist.new_group([1, 3])][ring.rank]
    options = [{"group": group, "process_group": group}, {"group": group}, {"process_group": group}]
    return [parallelize_one_parameter(ring, **chosen) for chosen in options]


def optimizers_that_cannot_be_sharded() -> dict[str, Ended]:
    ring = ring_here(ADAPTER, FOUR)
    mixed = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).bfloat16())
    return {
        "an argument lost": parallelize_one_parameter(ring, lambda parameters: LossySGD(parameters, 0.1, 3.0)),
        "no optimizer": parallelize_one_parameter(ring, lambda parameters: "SGD"),
        "two dtypes": parallelize_one_parameter(ring, model=mixed),
    }


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.5},
    "Adam": {"lr": 0.1, "betas": (0.5, 0.6), "amsgrad": True},
    "AdamW": {"lr": 0.1, "weight_decay": 0.3},
    "Adagrad": {"lr": 0.1, "initial_accumulator_value": 0.2},
    "Adafactor": {"lr": 0.1, "beta2_decay": -0.5},
    "NAdam": {"lr": 0.1, "decoupled_weight_decay": True},
    "RMSprop": {"lr": 0.1, "centered": True},
}


def parameters_after_two_steps(name: str) -> tuple[str, list[Tensor]]:
    """Take two steps. Returns the class of the sharded optimizer, and the parameters."""
    ring = ring_here(ADAPTER, FOUR)
    model = three_layers()
    state = backend(ADAPTER).parallelize(
        model, lambda parameters: getattr(torch.optim, name)(parameters, **OPTIMIZERS[name]), ring
    )
    for _ in range(2):
        state.backward(state.loss(state.model(torch.ones(2, 5)).square().sum(), 1))
        state.step()
    return type(state.optimizer.optim).__name__, list(state.full_state_dict().values())


def three_layers() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def train_checkpointed(rings: RingSpec, recipe: Recipe, what: str) -> list[State]:
    """Train with FairScale's activation checkpointing around every block, every block and the head, or the model."""
    from fairscale.nn import checkpoint_wrapper

    def checkpointed(model: Any) -> nn.Module:
        blocks = [model] if what == "model" else [*model.blocks]
        for module in [*blocks, model.head] if what == "blocks and head" else blocks:
            checkpoint_wrapper(module)
        return model

    return train(ADAPTER, rings, "zigzag", recipe, {}, checkpointed)


class RememberingBlock(nn.Module):
    """A block with FairScale's activation checkpointing that keeps attention.

    FairScale passes arguments on unchanged. One argument can therefore be the function of ``remember_attention``, which
    serves one call.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.inner = CallsItsFirstArgument(block)

    def forward(self, *args: Any) -> Any:
        return self.inner(remember_attention(self.inner.block), *args)


class CallsItsFirstArgument(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, function: Any, *args: Any) -> Any:
        return function(*args)


def count_checkpointed(how: str) -> tuple[list[Tensor], int, int]:
    """Two blocks: gradients, messages of the forward, and messages of forward and backward."""
    from fairscale.nn import checkpoint_wrapper

    ring = ring_of(ADAPTER, FOUR)
    call = local_call(ADAPTER, ring, CASE)
    attention, options = call.attention, call.options

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=CASE.dtype))

        def forward(self, query: Tensor) -> Any:
            return attention(query * self.scale, call.key.detach(), call.value.detach(), **options)

    blocks: list[nn.Module] = [Attends(), Attends()]
    if how == "fairscale":
        blocks = [checkpoint_wrapper(block) for block in blocks]
    if how == "remembered":
        blocks = [RememberingBlock(block) for block in blocks]
        for block in blocks:
            checkpoint_wrapper(block.inner)  # type: ignore[arg-type]
    ring.traffic.reset()
    out = call.query
    for block in blocks:
        out = block(out)
    forward = ring.traffic.messages
    out.backward(call.grad_out)
    grads = [call.query.grad, *(parameter.grad for block in blocks for parameter in block.parameters())]
    return grads, forward, ring.traffic.messages  # type: ignore[return-value]


def clip_one_parameter(dtype: torch.dtype) -> tuple[float, float]:
    """The change of a parameter with a clipped and with an unclipped gradient. Three ranks own no parameter."""
    moved = []
    for max_grad_norm in (0.5, 100.0):
        ring = ring_here(ADAPTER, FOUR)
        state = backend(ADAPTER).parallelize(OneParameter().to(dtype), unit_sgd, ring, max_grad_norm=max_grad_norm)
        state.backward(state.loss(state.model(torch.tensor([3.0], dtype=dtype)).sum(), 1))
        state.step()
        moved.append(-float(state.full_state_dict()["weight"]))
    return moved[0], moved[1]


def backward_in_eval_mode() -> Ended:
    trainer = Trainer(ADAPTER, TWO, "contiguous", Recipe(dtype=torch.float32), {})
    trainer.state.model.eval()
    ((tokens, labels),) = trainer.micro_batches(0)
    return ending(lambda: trainer.state.backward(trainer.loss(tokens, labels, 20)))


def step_early_in_eval_mode() -> Ended:
    trainer = Trainer(ADAPTER, TWO, "contiguous", Recipe(dtype=torch.float32, accumulation_steps=2), {})
    tokens, labels = trainer.micro_batches(0)[0]
    trainer.state.backward(trainer.loss(tokens, labels, 20))
    trainer.state.model.eval()
    return ending(trainer.state.step)


def unused_on_some_ranks() -> tuple[list[float], list[float]]:
    """The changes of two parameters, and the expected changes. Rank 0 uses only the first parameter."""
    ring = ring_here(ADAPTER, FOUR)
    model = nn.ModuleList([OneParameter(), OneParameter()])
    state = backend(ADAPTER).parallelize(_Branching(model), unit_sgd, ring, reduce_buffer_size=0)
    state.backward(state.model(torch.tensor([1.0])).sum())
    state.step()
    moved = [-float(tensor) for tensor in state.full_state_dict().values()]
    return moved, [1.0, 3 / 4]


class _Branching(nn.Module):
    def __init__(self, branches: nn.ModuleList) -> None:
        super().__init__()
        self.branches = branches

    def forward(self, x: Tensor) -> Tensor:
        used = self.branches[:1] if dist.get_rank() == 0 else self.branches
        return torch.stack([branch(x) for branch in used]).sum(0)


def save_one_step(path: str, recipe: Recipe) -> State:
    trainer = Trainer(ADAPTER, TWO, "contiguous", recipe, {})
    trainer.step(0)
    trainer.state.save(path)
    trainer.step(1)
    return trainer.state.full_state_dict()


class TestFairScaleTraining(AdapterSuite):
    adapter = ADAPTER

    @pytest.mark.parametrize("reduce_buffer_size", matrix_but(0, of=(0, 200)))
    @every_mesh
    def test_gradients_outside_of_buckets(self, world: World, rings: RingSpec, reduce_buffer_size: int) -> None:
        """Reduce gradients one by one, or small ones in buckets. The recipes use fp32, and fp64 micro-batches."""
        options = {"reduce_buffer_size": reduce_buffer_size, "broadcast_buffers": False}
        for recipe, tolerance in (
            (Recipe(dtype=torch.float32), 1e-6),
            (Recipe(accumulation_steps=2, max_grad_norm=0.1, rate=1.0, steps=3), 1e-9),
        ):
            by_rank = world.run(train, self.adapter, rings, "zigzag", recipe, options)
            check_ranks(by_rank, train_alone(rings, "zigzag", recipe), tolerance)

    @pytest.mark.parametrize("what", matrix_but("blocks", "model", of=("blocks", "blocks and head", "model")))
    @pytest.mark.parametrize("rings", matrix_but(TWO, of=(FOUR, TWO)), ids=str)
    def test_activation_checkpointing(self, world: World, rings: RingSpec, what: str) -> None:
        for recipe, tolerance in (
            (Recipe(dtype=torch.float32), 1e-6),
            (Recipe(accumulation_steps=2, rate=0.1, steps=2), 1e-9),
        ):
            by_rank = world.run(train_checkpointed, rings, recipe, what)
            check_ranks(by_rank, train_alone(rings, "zigzag", recipe), tolerance)

    def test_the_hops_of_activation_checkpointing(self, world: World) -> None:
        """FairScale repeats the hops of the forward, unless ``remember_attention`` keeps the results."""
        plain, twice, kept = (world.run(count_checkpointed, how) for how in ("plain", "fairscale", "remembered"))
        for rank, (wanted, forward, messages) in enumerate(plain):
            for way in (twice, kept):
                for grad, right in zip(way[rank][0], wanted, strict=True):
                    torch.testing.assert_close(grad, right, rtol=0, atol=1e-12)
            assert kept[rank][1:] == (forward, messages)
            assert twice[rank][1:] == (forward, messages + forward)
            assert forward > 0

    def test_parameter_groups_keep_their_options(self, world: World) -> None:
        recipe = GroupedRecipe(rate=0.01, steps=3)
        by_rank = world.run(train_here, self.adapter, TWO, "zigzag", recipe, {})
        check_ranks(by_rank, train_alone(TWO, "zigzag", recipe), 1e-10)

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_optimizers_are_rebuilt(self, world: World, name: str) -> None:
        model = three_layers()
        optimizer = getattr(torch.optim, name)(model.parameters(), **OPTIMIZERS[name])
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 5)).square().sum().backward()
            optimizer.step()
        for made_by, parameters in world.run(parameters_after_two_steps, name):
            assert made_by == name
            for got, wanted in zip(parameters, model.parameters(), strict=True):
                torch.testing.assert_close(got, wanted.detach(), rtol=1e-5, atol=1e-6)

    def test_optimizers_that_cannot_be_rebuilt_are_refused(self, world: World) -> None:
        for endings in world.run(optimizers_that_cannot_be_sharded):
            endings["an argument lost"].check(ValueError, "takes slowness")
            endings["no optimizer"].check(TypeError)
            endings["two dtypes"].check(ValueError, "torch.bfloat16 and torch.float32")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"strategy": "zero"}, "strategy = 'zero'"),
            ({"find_unused_parameters": True}, "find_unused_parameters"),
            ({"bucket_cap_mb": 25}, "bucket_cap_mb"),
        ],
    )
    def test_unknown_options_are_refused(self, world: World, options: dict[str, Any], message: str) -> None:
        for ended in world.run(parallelize_with, options):
            ended.check(ValueError, message)

    def test_a_reducer_that_lets_replicas_drift_is_refused(self, world: World) -> None:
        for both, *one in world.run(parallelize_over_data_alone):
            both.check(RuntimeError, "drift")
            for ended in one:
                ended.check(ValueError, "group and process_group differ")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
    def test_clipping_where_some_ranks_own_no_parameter(self, world: World, dtype: torch.dtype) -> None:
        for clipped, whole in world.run(clip_one_parameter, dtype):
            assert clipped == pytest.approx(0.5, rel=1e-2 if dtype == torch.bfloat16 else 1e-5)
            assert whole == pytest.approx(3.0)

    @pytest.mark.parametrize("call", [backward_in_eval_mode, step_early_in_eval_mode])
    def test_a_reduction_in_eval_mode_is_refused(self, world: World, call: Callable[[], Ended]) -> None:
        for ended in world.run(call):
            ended.check(RuntimeError, "eval mode")

    def test_a_parameter_that_a_rank_does_not_use(self, world: World) -> None:
        for moved, wanted in world.run(unused_on_some_ranks):
            assert moved == pytest.approx(wanted)

    def test_plain_torch_loads_the_checkpoint(self, world: World, tmp_path: Path) -> None:
        """A single process without FairScale resumes from it."""
        recipe = Recipe(optimizer="adam", rate=0.02, steps=1)
        wanted = world.run(save_one_step, str(tmp_path / "checkpoint.pt"), recipe)[0]
        state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
        assert state["step"] == 1

        class FromCheckpoint(Recipe):
            def make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
                optimizer = super().make_optimizer(parameters)
                optimizer.load_state_dict(state["optimizer"])
                return optimizer

        def loaded(model: nn.Module) -> nn.Module:
            model.load_state_dict(state["model"])
            return model

        recipe = FromCheckpoint(optimizer="adam", rate=0.02, steps=1)
        states = train_alone(TWO, "contiguous", recipe, loaded, first_step=1)
        for name, tensor in states[-1].items():
            torch.testing.assert_close(wanted[name], tensor, rtol=1e-9, atol=1e-9)
