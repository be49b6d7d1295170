"""Training steps: losses, changes between steps, steps that fail on one rank, and early steps.

If a framework cannot execute the step of a rank, every rank raises and no rank steps. The gradient of a step before the
last micro-batch, as at the end of an epoch, is that of the micro-batches so far.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_backends.errors import RingMismatchError, RingPeerError
from ring_backends.testing.capabilities import AdapterSuite, core, requires
from ring_backends.testing.failing_calls import AT_ONCE, ODD_RANK, Ended, ending
from ring_backends.testing.marks import MORE_CASES, THOROUGH, matrix_but
from ring_backends.testing.models import BlocksOfExperts, Normalized, OneParameter, TwoLayers, unit_sgd, weight_of
from ring_backends.testing.rings import ONE_OF_TWO, TWO, TWO_OF_TWO, backend, ring_here
from ring_backends.testing.training_checkpoints import save_and_load
from ring_backends.testing.training_runs import Recipe, State, TrainingSuite, check_moves
from ring_backends.testing.unequal_ranks import NUM_RANKS, WIDTHS, Steps, check_experts, check_states, rows_of, sgd
from ring_backends.testing.world import World, on_every_rank
from ring_backends.training.reducer import fill_missing_gradients

STEPS, COUNT = 3, 10

Change = Callable[[nn.Module, torch.optim.Optimizer, int], None]
"""(model, optimizer, step) -> None: a change of model or optimizer before a step."""


def _nothing(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    pass


def _clear_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()


def _freeze_the_first(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for name, parameter in model.named_parameters():
        if "layers.0" in name:
            parameter.requires_grad_(step != 1)


CHANGES: dict[str, Change] = {"nothing": _nothing, "cleared gradients": _clear_gradients, "frozen": _freeze_the_first}


def train_two_layers(suite: AdapterSuite, change: str = "nothing", other_order: bool = False) -> list[State]:
    """Train. Returns the state after each step. With ``other_order``, some ranks call the layers in another order."""
    state, rank, states = suite.parallelize(TwoLayers(), sgd), dist.get_rank(), []
    for step in range(STEPS):
        CHANGES[change](state.model, state.optimizer, step)
        out = state.model(rows_of(rank, step), rank % 2 if other_order else 0)
        state.backward(state.loss(out.square().sum(), COUNT))
        state.step()
        states.append(state.full_state_dict())
    return states


def train_two_layers_alone(change: str = "nothing") -> list[State]:
    """The training of :func:`train_two_layers` in one process with plain torch."""
    model = TwoLayers()
    optimizer = sgd(model.parameters())
    states = []
    for step in range(STEPS):
        CHANGES[change](model, optimizer, step)
        optimizer.zero_grad()
        for rank in range(NUM_RANKS):
            (model(rows_of(rank, step), 0).square().sum() / (NUM_RANKS * COUNT)).backward()
        optimizer.step()
        states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    return states


def freeze_later(suite: AdapterSuite) -> tuple[Ended, list[State]]:
    states: list[State] = []
    return ending(lambda: states.extend(train_two_layers(suite, "frozen"))), states


FROZEN = (("blocks.0.",), (), ("blocks.1.", "out."), ("blocks.",), ())
"""The frozen parts of each pair of steps."""


def set_frozen(model: nn.Module, step: int) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in FROZEN[step // 2]))


def train_frozen_parts(suite: AdapterSuite, evaluates: bool, precision: torch.dtype | None) -> list[State]:
    """Train with parts that are frozen in some steps. Returns the state before the first step and after each step."""
    model, rank = BlocksOfExperts((4,)), dist.get_rank()
    set_frozen(model, 0)
    options: dict[str, Any] = {} if precision is None else {"mixed_precision": precision}
    state = suite.parallelize(model, sgd, **options)
    states = [state.full_state_dict()]
    for step in range(2 * len(FROZEN)):
        if step % 2 == 0:
            if evaluates:
                with torch.no_grad():
                    state.model(rows_of(rank, 9), 0)
            set_frozen(state.model, step)
        while state.step_count == step:  # the scale of an fp16 loss begins too large
            out = state.model(rows_of(rank, step), 0)
            state.backward(state.loss(out.float().square().sum(), COUNT))
            state.step()
        states.append(state.full_state_dict())
    return states


def train_frozen_parts_alone() -> list[State]:
    model = BlocksOfExperts((4,))
    optimizer, states = sgd(model.parameters()), [{name: x.clone() for name, x in model.state_dict().items()}]
    for step in range(2 * len(FROZEN)):
        set_frozen(model, step)
        optimizer.zero_grad()
        for rank in range(NUM_RANKS):
            (model(rows_of(rank, step), 0).square().sum() / (NUM_RANKS * COUNT)).backward()
        fill_missing_gradients(model.parameters())
        optimizer.step()
        states.append({name: x.clone() for name, x in model.state_dict().items()})
    return states


LOSSES: dict[str, tuple[type[Exception], str, Callable[[Tensor], Any]]] = {
    "a constant": (ValueError, "loss depends on no parameter", lambda out: torch.zeros(())),
    "many numbers": (ValueError, "loss has shape [2, 5, 4]", lambda out: out),
    "a number": (TypeError, "loss is a float", lambda out: 0.0),
}


def raise_in_backward(suite: AdapterSuite) -> tuple[Ended, Ended, Ended]:
    """One rank raises during backward. Then all ranks call step() and backward() again.

    The rank raises before the backward of attention. The other rank of its ring then waits for its hops. The ranks of
    the other ring continue to the reduction of gradients.
    """
    ring = suite.new_ring(TWO)
    state = suite.parallelize(TwoLayers(), sgd, ring)
    attention = backend(suite.adapter).RingDilatedAttention([10], [1], ring=ring)
    x = state.model(rows_of(dist.get_rank(), 0), 0).unflatten(2, (2, 2))
    out = attention(x, x, x)
    if dist.get_rank() == ODD_RANK:
        out.register_hook(lambda grad: 1 // 0)
    ended = ending(lambda: state.backward(state.loss(out.sum(), 1, 4)))
    return ended, ending(state.step), ending(lambda: state.backward(out.sum()))


def die_in_backward(suite: AdapterSuite) -> None:
    """A rank is killed in backward, so that the others wait for it, or lose it, in the reduction of gradients."""
    state = suite.parallelize(TwoLayers(), sgd, suite.new_ring(TWO))
    out = state.model(rows_of(dist.get_rank(), 0), 0)
    if dist.get_rank() == ODD_RANK:
        out.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
    state.backward(state.loss(out.sum(), 1, 4))


OPTIMIZERS: dict[str, tuple[type[Exception], str, Any]] = {
    "LBFGS": (ValueError, "returned LBFGS, whose step() needs closure", torch.optim.LBFGS),
    "another parameter": (ValueError, "1 parameters that the model does not have", lambda x: sgd([*x, torch.zeros(3)])),
    "left out": (ValueError, "make_optimizer leaves out", lambda parameters: sgd([next(iter(parameters))])),
    "none": (TypeError, "make_optimizer returned None", lambda parameters: None),
}


def check_hooks(adapter: str, options: Mapping[str, Any]) -> None:
    """The step of a parameter with gradient 3 on rank 0 only, and with a hook that doubles the gradient."""
    model = TwoLayers()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    model.get_parameter("layers.1.bias").register_hook(lambda grad: 2 * grad)
    state = backend(adapter).parallelize(model, unit_sgd, ring_here(adapter, TWO), **options)
    layers = [0, 1] if dist.get_rank() == 0 else [0]
    state.backward(state.loss(3 * state.model(torch.zeros(1, 4), 0, layers).sum(), 1, 1))
    state.step()
    torch.testing.assert_close(state.full_state_dict()["layers.1.bias"][0], torch.tensor(-12.0))


@requires("training")
class TrainingStepTests(AdapterSuite):
    @on_every_rank
    def test_gradients_may_be_computed_in_another_order(self) -> None:
        if "parameters of some ranks" in self.without:
            ending(train_two_layers, self, other_order=True).check(RingMismatchError)
        else:
            check_states(train_two_layers(self, other_order=True), train_two_layers_alone())

    @on_every_rank
    def test_the_program_may_clear_gradients(self) -> None:
        check_states(train_two_layers(self, "cleared gradients"), train_two_layers_alone("cleared gradients"))

    @requires("frozen parameters")
    def test_parameters_frozen_later_are_refused_or_handled(self, world: World) -> None:
        by_rank = world.run(freeze_later, self)
        if by_rank[0][0].error == "no error":
            wanted = train_two_layers_alone("frozen")
            for _, states in by_rank:
                check_states(states, wanted)
            return
        for ended, _ in by_rank:
            ended.check(RuntimeError, "requires_grad of ")

    @on_every_rank
    def test_parameters_that_are_added_later_are_refused(self) -> None:
        state = self.parallelize(TwoLayers(), sgd)
        state.backward(state.loss(state.model(torch.ones(1, 4), 0).sum(), 1))
        state.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        ending(state.step).check(RuntimeError, "in parallelize()", "added later")

    @THOROUGH
    @core
    @pytest.mark.parametrize("kind", matrix_but("a constant", of=LOSSES))
    @on_every_rank
    def test_invalid_losses_are_reported(self, kind: str) -> None:
        """One rank passes an invalid loss."""
        state, (error, message, make) = self.parallelize(TwoLayers(), sgd, self.new_ring(TWO)), LOSSES[kind]
        out, is_odd = state.model(rows_of(dist.get_rank(), 0), 0), dist.get_rank() == ODD_RANK
        ended = ending(state.backward, make(out) if is_odd else state.loss(out.sum(), 1, 4))
        ended.check(error if is_odd else RingMismatchError, message, within=AT_ONCE)

    def test_an_error_in_a_backward_is_reported(self) -> None:
        """This test uses its own world, because the error closes the connections of the framework's groups."""
        with World(4, preload=[self.adapter]) as ranks:
            endings = ranks.run(raise_in_backward, self)
        for rank, (ended, step, backward) in enumerate(endings):
            ended.check(ZeroDivisionError if rank == ODD_RANK else RingPeerError, "division", within=AT_ONCE)
            for later in (step, backward):
                later.check(RuntimeError, within=AT_ONCE)
            assert "backward() raised" in backward.message, backward

    @THOROUGH
    @requires("a lost rank")
    def test_a_rank_that_dies_in_a_backward_is_reported(self) -> None:
        with World(4, preload=[self.adapter]) as ranks:
            outcomes = ranks.run_collect(die_in_backward, self)
        assert outcomes.pop(ODD_RANK).status == "died"
        for outcome in outcomes:
            assert outcome.raised(RingPeerError), outcome

    @requires("frozen parameters")
    @pytest.mark.parametrize("evaluates", matrix_but(True, of=(False, True)), ids=["", "evaluated"])
    @pytest.mark.parametrize(
        "precision",
        [
            pytest.param(None, marks=MORE_CASES),
            pytest.param(torch.bfloat16, marks=pytest.mark.requires("mixed precision")),
            pytest.param(torch.float16, marks=[pytest.mark.requires("mixed precision", "loss scaling"), MORE_CASES]),
        ],
        ids=["fp32", "bf16", "fp16"],
    )
    @on_every_rank
    def test_parts_that_are_frozen_in_some_steps(self, precision: torch.dtype | None, evaluates: bool) -> None:
        """Block 0 is frozen in the first forward, and trained later. Frameworks that cannot change it say so."""
        states: list[State] = []
        ended = ending(lambda: states.extend(train_frozen_parts(self, evaluates, precision)))
        if ended.error != "no error":
            ended.check(RuntimeError, "requires_grad of blocks.0.unused", "has changed since parallelize()")
            return
        check_moves(states, train_frozen_parts_alone(), 1e-5 if precision is None else 0.05, "frozen parts")

    @on_every_rank
    def test_gradients_before_parallelize_do_not_count(self) -> None:
        model = OneParameter().float()
        model.weight.grad = torch.full_like(model.weight, 5.0)
        state = self.parallelize(model)
        state.backward(state.loss(state.model(torch.ones(1)).sum(), 1, dist.get_world_size()))
        state.step()
        torch.testing.assert_close(weight_of(state), -1.0)

    @core
    @on_every_rank
    def test_an_argument_that_one_rank_refuses_is_reported(self) -> None:
        is_odd = dist.get_rank() == ODD_RANK
        bad = {"max_grad_norm": -1.0} if is_odd else {}
        ended = ending(self.parallelize, TwoLayers(), sgd, self.new_ring(TWO), **bad)
        ended.check(ValueError if is_odd else RingMismatchError, "max_grad_norm = -1.0", within=AT_ONCE)

    @core
    @on_every_rank
    def test_a_buffer_that_one_rank_has_removed_is_reported(self) -> None:
        model, is_odd = Normalized(), dist.get_rank() == ODD_RANK
        state = self.parallelize(model, sgd, self.new_ring(TWO))
        if is_odd:
            model.norm.running_mean = None
        ended = ending(state.full_state_dict)
        ended.check(ValueError if is_odd else RingMismatchError, "running_mean", within=AT_ONCE)

    @requires("gradient clipping")
    @pytest.mark.parametrize("kind", OPTIMIZERS)
    @on_every_rank
    def test_invalid_optimizers_are_refused(self, kind: str) -> None:
        error, message, make = OPTIMIZERS[kind]
        ending(self.parallelize, TwoLayers(), make, max_grad_norm=1.0).check(error, message)


EARLY = Recipe(dtype=torch.float32, accumulation_steps=4)

every_early_step = pytest.mark.parametrize("num_micro_batches", matrix_but(1, of=(1, 3)))


EARLY_STEPS: Steps = [[(1, None, 0, 1)], [(1, None, 0, 1), (None, 0, 1, 1)]]
"""The experts of an early step and of a full step. Rank 1 uses no expert in the first micro-batch."""


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


@requires("training")
class EarlyStepTests(TrainingSuite):
    @requires("gradient accumulation", "early steps")
    @every_early_step
    @pytest.mark.parametrize(
        "is_rescaled", matrix_but(True, of=(False, True)), ids=["own count", "count of a full step"]
    )
    def test_the_gradient_is_that_of_the_micro_batches_so_far(
        self, pair: World, num_micro_batches: int, is_rescaled: bool
    ) -> None:
        recipe = replace(EARLY, micro_batches=(num_micro_batches,), is_rescaled=is_rescaled)
        self.check_training(pair, TWO_OF_TWO, "zigzag", recipe, 1e-6)

    @MORE_CASES
    @requires("gradient accumulation", "early steps")
    @every_early_step
    def test_full_steps_follow(self, pair: World, num_micro_batches: int) -> None:
        recipe = replace(EARLY, micro_batches=(num_micro_batches, 4, num_micro_batches, 4), steps=4)
        recipe = replace(recipe, optimizer="momentum", rate=0.02, is_rescaled=True)
        self.check_training(pair, ONE_OF_TWO, "zigzag", recipe, 1e-4)

    @MORE_CASES
    @requires("gradient accumulation", "early steps", "gradient clipping")
    def test_the_gradient_is_rescaled_before_it_is_clipped(self, pair: World) -> None:
        for max_grad_norm in (0.01, 1e6):
            recipe = replace(EARLY, micro_batches=(1,), is_rescaled=True, max_grad_norm=max_grad_norm)
            self.check_training(pair, TWO_OF_TWO, "zigzag", recipe, 1e-5)

    @MORE_CASES
    @requires("gradient accumulation", "early steps", "save and load")
    @on_every_rank
    def test_a_checkpoint_after_an_early_step(self, tmp_path: Any) -> None:
        """Two steps, of which the second is early, precede the checkpoint. Five steps follow it."""
        recipe = replace(EARLY, micro_batches=(4, 3, 3, 4, 4, 3, 4, 4), optimizer="momentum", rate=0.02)
        path, options = str(tmp_path / "run"), self.framework_options
        uninterrupted, resumed = save_and_load(self.adapter, TWO, recipe, path, options)
        torch.testing.assert_close(resumed, uninterrupted, rtol=0, atol=0)

    @MORE_CASES
    @requires("gradient accumulation", "early steps", "parameters of some ranks")
    @pytest.mark.parametrize(
        "evaluate",
        [False, pytest.param(True, marks=pytest.mark.requires("evaluation within a step"))],
        ids=["", "evaluated"],
    )
    @on_every_rank
    def test_ranks_may_use_different_parameters_in_an_early_step(self, evaluate: bool) -> None:
        check_experts(self.adapter, WIDTHS, EARLY_STEPS, self.framework_options, evaluates=evaluate)

    @core
    @requires("gradient accumulation", "early steps")
    @on_every_rank
    def test_a_count_that_cannot_apply_is_refused(self) -> None:
        """The gradient of these steps cannot be rescaled, or the count is not a number of tokens."""
        state = self.parallelize(accumulation_steps=3)

        def backward(*count: int) -> None:
            out = state.model(torch.ones(1)).sum()
            state.backward(state.loss(out, 1, *count) if count else out)

        backward()
        ending(state.step, 4).check(ValueError, "step_token_count = 4: ", "(None)")
        state.step()
        backward(8)
        backward(4)
        ending(state.step, 4).check(ValueError, "different numbers of tokens (4, 8)")
        ending(state.step, -1).check(ValueError, "step_token_count = -1")
        state.step()
        backward(8)
        backward()  # no count of an earlier loss belongs to it
        ending(state.step, 4).check(ValueError, "different numbers of tokens (8, None)")
        state.step()

    @core
    @on_every_rank
    def test_a_loss_for_a_log_does_not_count(self) -> None:
        """The step has 8 times as many tokens as its loss was given."""
        state = self.parallelize()
        out = state.model(torch.ones(1)).sum()
        loss = state.loss(out, 1, 1)
        state.loss(out.detach(), 1, 8)
        state.backward(loss)
        state.step(8)
        torch.testing.assert_close(weight_of(state), -4 / 8)

    @requires("gradient accumulation")
    @MORE_CASES
    @pytest.mark.parametrize("name", DIFFERENCES)
    @on_every_rank
    def test_ranks_that_step_differently_are_reported(self, name: str) -> None:
        state = self.parallelize(ring=self.new_ring(TWO), accumulation_steps=4)
        field, usual, odd = DIFFERENCES[name]
        ending(odd if dist.get_rank() == ODD_RANK else usual, state).check(RingMismatchError, field, within=AT_ONCE)
