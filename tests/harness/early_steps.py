"""Steps before the last micro-batch, as at the end of an epoch. The gradient is that of the micro-batches so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ring_backends.errors import RingMismatchError
from ring_backends.testing.capabilities import AdapterSuite, core, requires
from ring_backends.testing.failing_calls import AT_ONCE, ODD_RANK, Ended, ending
from ring_backends.testing.marks import MORE_CASES, matrix_but
from ring_backends.testing.rings import ONE_OF_TWO, TWO, TWO_OF_TWO, RingSpec, new_ring, ring_here
from ring_backends.testing.training_checkpoints import save_and_load
from ring_backends.testing.training_runs import Recipe, check_ranks, train, train_alone
from ring_backends.testing.unequal_ranks import Steps, check_experts, parallelize_one, train_experts
from ring_backends.testing.world import World

EARLY = Recipe(dtype=torch.float32, accumulation_steps=4)

every_early_step = pytest.mark.parametrize("num_micro_batches", matrix_but(1, of=(1, 3)))


EARLY_STEPS: Steps = [[(1, None, 0, 1)], [(1, None, 0, 1), (None, 0, 1, 1)]]
"""The experts of an early step and of a full step. Rank 1 uses no expert in the first micro-batch."""


def step_with_other_counts(adapter: str, options: Mapping[str, Any]) -> list[Ended]:
    """Steps whose gradient no factor can rescale, and a count that is not a number of tokens."""
    state = parallelize_one(adapter, ring_here(adapter, TWO), options, accumulation_steps=3)
    endings = []

    def backward(*count: int) -> None:
        out = state.model(torch.ones(1)).sum()
        state.backward(state.loss(out, 1, *count) if count else out)

    backward()
    endings.append(ending(lambda: state.step(4)))
    state.step()
    backward(8)
    backward(4)
    endings += [ending(lambda: state.step(4)), ending(lambda: state.step(-1))]
    state.step()
    backward(8)
    backward()  # no count of an earlier loss belongs to it
    endings.append(ending(lambda: state.step(4)))
    state.step()
    return endings


def step_after_a_recorded_loss(adapter: str, options: Mapping[str, Any]) -> float:
    """The gradient of a step with 8 times as many tokens as its loss was given. Another loss is computed for a log."""
    state = parallelize_one(adapter, ring_here(adapter, TWO), options)
    before = float(state.full_state_dict()["weight"])
    out = state.model(torch.ones(1)).sum()
    loss = state.loss(out, 1, 1)
    state.loss(out.detach(), 1, 8)
    state.backward(loss)
    state.step(8)
    return before - float(state.full_state_dict()["weight"])


def _train(num_micro_batches: int, *count: int) -> Callable[[Any], None]:
    def train(state: Any) -> None:
        for _ in range(num_micro_batches):
            state.backward(state.loss(state.model(torch.ones(1)).sum(), 1, 8))
        state.step(*count)

    return train


DIFFERENCES: dict[str, tuple[str, Callable[[Any], None], Callable[[Any], None]]] = {
    "micro-batches": ("order of calls", _train(2), _train(1)),
    "counts": ("step_token_count", _train(2, 4), _train(2, 5)),
    "a count on one rank": ("step_token_count", _train(2), _train(2, 8)),
}
"""The field that the error names, and the calls of most ranks and of one rank."""


def step_differently(adapter: str, name: str, options: Mapping[str, Any]) -> Ended:
    ring = new_ring(adapter, TWO)
    state = parallelize_one(adapter, ring, options, accumulation_steps=4)
    _, usual, odd = DIFFERENCES[name]
    return ending(lambda: (odd if dist.get_rank() == ODD_RANK else usual)(state))


@requires("training")
class EarlyStepTests(AdapterSuite):
    def check(self, world: World, rings: RingSpec, recipe: Recipe, tolerance: float) -> None:
        by_rank = world.run(train, self.adapter, rings, "zigzag", recipe, self.framework_options)
        check_ranks(by_rank, train_alone(rings, "zigzag", recipe), tolerance, recipe)

    @requires("gradient accumulation")
    @every_early_step
    @pytest.mark.parametrize(
        "is_rescaled", matrix_but(True, of=(False, True)), ids=["own count", "count of a full step"]
    )
    def test_the_gradient_is_that_of_the_micro_batches_so_far(
        self, pair: World, num_micro_batches: int, is_rescaled: bool
    ) -> None:
        recipe = replace(EARLY, micro_batches=(num_micro_batches,), is_rescaled=is_rescaled)
        self.check(pair, TWO_OF_TWO, recipe, 1e-6)

    @MORE_CASES
    @requires("gradient accumulation")
    @every_early_step
    def test_full_steps_follow(self, pair: World, num_micro_batches: int) -> None:
        recipe = replace(EARLY, micro_batches=(num_micro_batches, 4, num_micro_batches, 4), steps=4)
        recipe = replace(recipe, optimizer="momentum", rate=0.02, is_rescaled=True)
        self.check(pair, ONE_OF_TWO, recipe, 1e-4)

    @MORE_CASES
    @requires("gradient accumulation", "gradient clipping")
    def test_the_gradient_is_rescaled_before_it_is_clipped(self, pair: World) -> None:
        for max_grad_norm in (0.01, 1e6):
            recipe = replace(EARLY, micro_batches=(1,), is_rescaled=True, max_grad_norm=max_grad_norm)
            self.check(pair, TWO_OF_TWO, recipe, 1e-5)

    @MORE_CASES
    @requires("gradient accumulation", "save and load")
    def test_a_checkpoint_after_an_early_step(self, pair: World, tmp_path: Any) -> None:
        """Two steps, of which the second is early, precede the checkpoint. Five steps follow it."""
        recipe = replace(EARLY, micro_batches=(4, 3, 3, 4, 4, 3, 4, 4), optimizer="momentum", rate=0.02)
        arguments = self.adapter, TWO_OF_TWO, recipe, str(tmp_path / "run"), self.framework_options
        for uninterrupted, resumed in pair.run(save_and_load, *arguments):
            assert resumed.losses == uninterrupted.losses
            assert all(torch.equal(tensor, resumed.state[name]) for name, tensor in uninterrupted.state.items())

    @MORE_CASES
    @requires("gradient accumulation", "parameters of some ranks")
    @pytest.mark.parametrize("evaluate", [False, True], ids=["", "evaluated"])
    def test_ranks_may_use_different_parameters_in_an_early_step(self, world: World, evaluate: bool) -> None:
        if evaluate and "evaluation within a step" in self.without:
            pytest.skip(self.without["evaluation within a step"])
        arguments = self.adapter, (4, 4), EARLY_STEPS, self.framework_options
        check_experts(world.run(train_experts, *arguments, evaluates=evaluate), (4, 4), EARLY_STEPS)

    @core
    @requires("gradient accumulation")
    def test_a_count_that_cannot_apply_is_refused(self, world: World) -> None:
        for endings in world.run(step_with_other_counts, self.adapter, self.framework_options):
            no_count, counts, negative, mixed = endings
            no_count.check(ValueError, "step_token_count = 4: ", "(None)")
            counts.check(ValueError, "different numbers of tokens (4, 8)")
            negative.check(ValueError, "step_token_count = -1")
            mixed.check(ValueError, "different numbers of tokens (8, None)")

    @core
    def test_a_loss_for_a_log_does_not_count(self, world: World) -> None:
        for gradient in world.run(step_after_a_recorded_loss, self.adapter, self.framework_options):
            assert gradient == pytest.approx(world.size / 8)

    @requires("gradient accumulation")
    @MORE_CASES
    @pytest.mark.parametrize("name", DIFFERENCES)
    def test_ranks_that_step_differently_are_reported(self, world: World, name: str) -> None:
        for ended in world.run(step_differently, self.adapter, name, self.framework_options):
            ended.check(RingMismatchError, DIFFERENCES[name][0], within=AT_ONCE)
