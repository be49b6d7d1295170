"""Training by FairScale: OSS with ShardedDataParallel, its options, optimizers and checkpoints."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fairscale_cases import ADAPTER, CASE, GroupedRecipe
from torch import Tensor, nn

from ring_backends.activation_checkpointing import remember_attention
from ring_backends.testing.calls import local_call
from ring_backends.testing.capabilities import AdapterSuite
from ring_backends.testing.failing_calls import ending
from ring_backends.testing.marks import matrix_but
from ring_backends.testing.models import OneParameter, WithExtraState, weight_of
from ring_backends.testing.rings import FOUR, TWO, ring_of
from ring_backends.testing.training_runs import Recipe, State, Trainer, check_ranks, train, train_alone
from ring_backends.testing.training_steps import check_hooks
from ring_backends.testing.world import World, on_every_rank


class LossySGD(torch.optim.SGD):
    """An optimizer that does not keep an argument in its defaults."""

    def __init__(self, parameters: Any, lr: float, slowness: float = 1.0) -> None:
        super().__init__(parameters, lr=lr / slowness)
        self.slowness = slowness


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.5},
    "Adam": {"lr": 0.1, "betas": (0.5, 0.6), "amsgrad": True},
    "AdamW": {"lr": 0.1, "weight_decay": 0.3},
    "Adafactor": {"lr": 0.1, "beta2_decay": -0.5},
}


def three_layers() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def train_checkpointed(recipe: Recipe, what: str) -> list[State]:
    """Train with FairScale's activation checkpointing around every block, or the model."""
    from fairscale.nn import checkpoint_wrapper

    def checkpointed(model: Any) -> nn.Module:
        for module in [model] if what == "model" else model.blocks:
            checkpoint_wrapper(module)
        return model

    return train(ADAPTER, TWO, "zigzag", recipe, {}, checkpointed)


class CallsFirstArgument(nn.Module):
    """Calls the function of ``remember_attention``, which serves one call. FairScale passes arguments on unchanged."""

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

    blocks = [Attends(), Attends()]
    calls: list[Any] = blocks
    if how == "fairscale":
        calls = [checkpoint_wrapper(block) for block in blocks]
    if how == "remembered":
        calls = [partial(checkpoint_wrapper(CallsFirstArgument(block)), remember_attention(block)) for block in blocks]
    ring.traffic.reset()
    out = call.query
    for call_block in calls:
        out = call_block(out)
    forward = ring.traffic.messages
    out.backward(call.grad_out)
    grads = [call.query.grad, *(parameter.grad for block in blocks for parameter in block.parameters())]
    return grads, forward, ring.traffic.messages  # type: ignore[return-value]


class TestFairScaleTraining(AdapterSuite):
    adapter = ADAPTER

    @pytest.mark.parametrize("what", matrix_but("blocks", of=("blocks", "model")))
    def test_activation_checkpointing(self, world: World, what: str) -> None:
        for recipe, tolerance in (
            (Recipe(dtype=torch.float32), 1e-6),
            (Recipe(accumulation_steps=2, rate=0.1, steps=2), 1e-9),
        ):
            by_rank = world.run(train_checkpointed, recipe, what)
            check_ranks(by_rank, train_alone(TWO, "zigzag", recipe), tolerance)

    @on_every_rank
    def test_the_hops_of_activation_checkpointing(self) -> None:
        """FairScale repeats the hops of the forward, unless ``remember_attention`` keeps the results."""
        wanted, forward, messages = count_checkpointed("plain")
        assert forward > 0
        for how, more in (("fairscale", forward), ("remembered", 0)):
            grads, *sent = count_checkpointed(how)
            torch.testing.assert_close(grads, wanted, rtol=0, atol=1e-12)
            assert sent == [forward, messages + more], (how, sent, forward, messages)

    def test_parameter_groups_keep_their_options(self, world: World) -> None:
        recipe = GroupedRecipe(rate=0.01, steps=3)
        by_rank = world.run(train, self.adapter, TWO, "zigzag", recipe, {})
        check_ranks(by_rank, train_alone(TWO, "zigzag", recipe), 1e-10)

    @pytest.mark.parametrize("name", OPTIMIZERS)
    @on_every_rank
    def test_optimizers_are_rebuilt(self, name: str) -> None:
        def make(parameters: Any) -> Any:
            return getattr(torch.optim, name)(parameters, **OPTIMIZERS[name])

        state, alone = self.parallelize(three_layers(), make, self.ring()), three_layers()
        optimizer = make(alone.parameters())
        for _ in range(2):
            state.backward(state.loss(state.model(torch.ones(2, 5)).square().sum(), 1))
            state.step()
            optimizer.zero_grad()
            alone(torch.ones(2, 5)).square().sum().backward()
            optimizer.step()
        made_by = type(state.optimizer.optim).__name__
        assert made_by == name, made_by
        torch.testing.assert_close(state.full_state_dict(), dict(alone.state_dict()), rtol=1e-5, atol=1e-6)

    @on_every_rank
    def test_extra_states_of_modules_are_refused(self) -> None:
        ending(self.parallelize, WithExtraState(None), ring=self.ring()).check(ValueError, "_extra_state", "NoneType")

    @on_every_rank
    def test_optimizers_that_cannot_be_rebuilt_are_refused(self) -> None:
        ring, mixed = self.ring(), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).bfloat16())
        lossy = ending(self.parallelize, make_optimizer=lambda parameters: LossySGD(parameters, 0.1, 3.0), ring=ring)
        lossy.check(ValueError, "takes slowness")
        ending(self.parallelize, make_optimizer=lambda parameters: "SGD", ring=ring).check(TypeError)
        ending(self.parallelize, mixed, ring=ring).check(ValueError, "torch.bfloat16 and torch.float32")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"strategy": "zero"}, "strategy = 'zero'"),
            ({"find_unused_parameters": True}, "find_unused_parameters"),
            ({"bucket_cap_mb": 25}, "bucket_cap_mb"),
        ],
    )
    @on_every_rank
    def test_unknown_options_are_refused(self, options: dict[str, Any], message: str) -> None:
        ending(self.parallelize, ring=self.ring(), **options).check(ValueError, message)

    @on_every_rank
    def test_a_reducer_that_lets_replicas_drift_is_refused(self) -> None:
        """OSS and ShardedDataParallel get the data group, or only one of them gets it."""
        group = [dist.new_group([0, 2]), dist.new_group([1, 3])][self.ring(TWO).rank]
        ending(self.parallelize, group=group, process_group=group).check(RuntimeError, "drift")
        for option in ("group", "process_group"):
            ending(self.parallelize, **{option: group}).check(ValueError, "group and process_group differ")

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
    @pytest.mark.parametrize(("max_grad_norm", "moved"), [(0.5, 0.5), (100.0, 3.0)], ids=["clipped", "whole"])
    @on_every_rank
    def test_clipping_where_some_ranks_own_no_parameter(
        self, dtype: torch.dtype, max_grad_norm: float, moved: float
    ) -> None:
        state = self.parallelize(OneParameter().to(dtype), ring=self.ring(), max_grad_norm=max_grad_norm)
        state.backward(state.loss(state.model(torch.tensor([3.0], dtype=dtype)).sum(), 1))
        state.step()
        rtol = 1e-6 if moved == 3.0 else 1e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(-weight_of(state), moved, rtol=rtol, atol=0)

    @pytest.mark.parametrize("accumulation_steps", [1, 2], ids=["backward", "early step"])
    @on_every_rank
    def test_a_reduction_in_eval_mode_is_refused(self, accumulation_steps: int) -> None:
        recipe = Recipe(dtype=torch.float32, accumulation_steps=accumulation_steps)
        trainer = Trainer(ADAPTER, TWO, "contiguous", recipe, {})
        tokens, labels = trainer.micro_batches(0)[0]
        if accumulation_steps == 1:
            trainer.state.model.eval()
            ended = ending(lambda: trainer.state.backward(trainer.loss(tokens, labels, 20)))
        else:
            trainer.state.backward(trainer.loss(tokens, labels, 20))
            trainer.state.model.eval()
            ended = ending(trainer.state.step)
        ended.check(RuntimeError, "eval mode")

    def test_a_parameter_that_a_rank_does_not_use(self, world: World) -> None:
        world.run(check_hooks, self.adapter, {"reduce_buffer_size": 0})
