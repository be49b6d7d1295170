"""Training steps: losses, changes between steps, and steps that fail on one rank.

If a framework cannot execute the step of a rank, every rank raises and no rank steps.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_backends.errors import RingMismatchError, RingPeerError
from ring_backends.testing.capabilities import AdapterSuite, core, requires
from ring_backends.testing.failing_calls import AT_ONCE, ODD_RANK, Ended, ending
from ring_backends.testing.models import Normalized, OneParameter, TwoLayers, unit_sgd
from ring_backends.testing.rings import TWO, backend, new_ring, ring_here
from ring_backends.testing.training_runs import State
from ring_backends.testing.unequal_ranks import NUM_RANKS, check_states, rows_of, sgd
from ring_backends.testing.world import World

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


def train_two_layers(adapter: str, change: str, other_order: bool, options: Mapping[str, Any]) -> list[State]:
    """Train. Returns the state after each step. With ``other_order``, some ranks call the layers in another order."""
    ring, rank = ring_here(adapter, TWO), dist.get_rank()
    state = backend(adapter).parallelize(TwoLayers(), sgd, ring, **options)
    states = []
    for step in range(STEPS):
        CHANGES[change](state.model, state.optimizer, step)
        out = state.model(rows_of(rank, step), rank % 2 if other_order else 0)
        state.backward(state.loss(out.square().sum(), COUNT))
        state.step()
        states.append(state.full_state_dict())
    return states


def train_two_layers_alone(change: str) -> list[State]:
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


def freeze_later(adapter: str, options: Mapping[str, Any]) -> tuple[Ended, list[State]]:
    states: list[State] = []
    return ending(lambda: states.extend(train_two_layers(adapter, "frozen", False, options))), states


def add_parameters_later(adapter: str, options: Mapping[str, Any]) -> Ended:
    state = backend(adapter).parallelize(TwoLayers(), sgd, ring_here(adapter, TWO), **options)
    state.backward(state.loss(state.model(torch.ones(1, 4), 0).sum(), 1))
    state.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    return ending(state.step)


LOSSES: dict[str, tuple[type[Exception], str, Callable[[Tensor], Any]]] = {
    "a constant": (ValueError, "loss depends on no parameter", lambda out: torch.zeros(())),
    "many numbers": (ValueError, "loss has shape [2, 5, 4]", lambda out: out),
    "a number": (TypeError, "loss is a float", lambda out: 0.0),
}


def pass_invalid_loss(adapter: str, kind: str, options: Mapping[str, Any]) -> Ended:
    """One rank passes an invalid loss."""
    ring = new_ring(adapter, TWO)
    state = backend(adapter).parallelize(TwoLayers(), sgd, ring, **options)
    out = state.model(rows_of(dist.get_rank(), 0), 0)
    loss = LOSSES[kind][2](out) if dist.get_rank() == ODD_RANK else state.loss(out.sum(), 1, 4)
    return ending(lambda: state.backward(loss))


def raise_in_backward(adapter: str, options: Mapping[str, Any]) -> tuple[Ended, Ended, Ended]:
    """One rank raises during backward. Then all ranks call step() and backward() again.

    The rank raises before the backward of attention. The other rank of its ring then waits for its hops. The ranks of
    the other ring continue to the reduction of gradients.
    """

    def fail(grad: Tensor) -> None:
        raise ZeroDivisionError("on purpose")

    ring = new_ring(adapter, TWO)
    state = backend(adapter).parallelize(TwoLayers(), sgd, ring, **options)
    attention = backend(adapter).RingDilatedAttention([10], [1], ring=ring)
    x = state.model(rows_of(dist.get_rank(), 0), 0).unflatten(2, (2, 2))
    out = attention(x, x, x)
    if dist.get_rank() == ODD_RANK:
        out.register_hook(fail)
    ended = ending(lambda: state.backward(state.loss(out.sum(), 1, 4)))
    return ended, ending(state.step), ending(lambda: state.backward(out.sum()))


def die_in_backward(adapter: str, options: Mapping[str, Any]) -> None:
    """A rank is killed in backward, so that the others wait for it, or lose it, in the reduction of gradients."""
    state = backend(adapter).parallelize(TwoLayers(), sgd, new_ring(adapter, TWO), **options)
    out = state.model(rows_of(dist.get_rank(), 0), 0)
    if dist.get_rank() == ODD_RANK:
        out.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
    state.backward(state.loss(out.sum(), 1, 4))


def train_with_an_old_gradient(adapter: str, options: Mapping[str, Any]) -> float:
    """The first step of a parameter that has a gradient before parallelize()."""
    model = OneParameter().float()
    model.weight.grad = torch.full_like(model.weight, 5.0)
    state = backend(adapter).parallelize(model, unit_sgd, ring_here(adapter, TWO), **options)
    before = float(state.full_state_dict()["weight"])
    state.backward(state.loss(state.model(torch.ones(1)).sum(), 1, dist.get_world_size()))
    state.step()
    return before - float(state.full_state_dict()["weight"])


def _of_another_parameter(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([*parameters, nn.Parameter(torch.zeros(3))], lr=1.0)


def _of_the_first(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([next(iter(parameters))], lr=1.0)


OPTIMIZERS: dict[str, tuple[type[Exception], str, Any]] = {
    "another parameter": (ValueError, "1 parameters that the model does not have", _of_another_parameter),
    "left out": (ValueError, "make_optimizer leaves out", _of_the_first),
    "none": (TypeError, "make_optimizer returned None", lambda parameters: None),
}


def parallelize_with_invalid_optimizer(adapter: str, kind: str, options: Mapping[str, Any]) -> Ended:
    parallelize = partial(backend(adapter).parallelize, TwoLayers(), OPTIMIZERS[kind][2], ring_here(adapter, TWO))
    return ending(lambda: parallelize(max_grad_norm=1.0, **options))


def train_with_hooks(adapter: str, options: Mapping[str, Any]) -> float:
    """The step of a parameter with gradient 3 on rank 0 only, and with a hook that doubles the gradient."""
    model = TwoLayers()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    model.get_parameter("layers.1.bias").register_hook(lambda grad: 2 * grad)
    state = backend(adapter).parallelize(model, unit_sgd, ring_here(adapter, TWO), **options)
    layers = [0, 1] if dist.get_rank() == 0 else [0]
    state.backward(state.loss(3 * state.model(torch.zeros(1, 4), 0, layers).sum(), 1, 1))
    state.step()
    return -float(state.full_state_dict()["layers.1.bias"][0])


def refuse_to_parallelize(adapter: str, options: Mapping[str, Any]) -> Ended:
    """One rank passes an invalid argument."""
    ring = new_ring(adapter, TWO)
    bad = {"max_grad_norm": -1.0} if dist.get_rank() == ODD_RANK else {}
    return ending(lambda: backend(adapter).parallelize(TwoLayers(), sgd, ring, **bad, **options))


def remove_a_buffer(adapter: str, options: Mapping[str, Any]) -> Ended:
    """A buffer becomes None on one rank."""
    ring = new_ring(adapter, TWO)
    model = Normalized()
    state = backend(adapter).parallelize(model, sgd, ring, **options)
    if dist.get_rank() == ODD_RANK:
        model.norm.running_mean = None
    return ending(state.full_state_dict)


@requires("training")
class TrainingStepTests(AdapterSuite):
    def test_gradients_may_be_computed_in_another_order(self, world: World) -> None:
        arguments = train_two_layers, self.adapter, "nothing", True, self.framework_options
        if "parameters of some ranks" in self.without:
            for outcome in world.run_collect(*arguments):
                outcome.check(RingMismatchError)
            return
        check_states(world.run(*arguments), train_two_layers_alone("nothing"))

    def test_the_program_may_clear_gradients(self, world: World) -> None:
        arguments = self.adapter, "cleared gradients", False, self.framework_options
        check_states(world.run(train_two_layers, *arguments), train_two_layers_alone("cleared gradients"))

    @requires("frozen parameters")
    def test_parameters_frozen_later_are_refused_or_handled(self, world: World) -> None:
        by_rank = world.run(freeze_later, self.adapter, self.framework_options)
        if by_rank[0][0].error == "no error":
            check_states([states for _, states in by_rank], train_two_layers_alone("frozen"))
            return
        for ended, states in by_rank:
            ended.check(RuntimeError, "requires_grad of ")
            assert states == []

    def test_parameters_that_are_added_later_are_refused(self, world: World) -> None:
        for ended in world.run(add_parameters_later, self.adapter, self.framework_options):
            ended.check(RuntimeError, "in parallelize()", "added later")

    @pytest.mark.parametrize("kind", LOSSES)
    def test_invalid_losses_are_reported(self, world: World, kind: str) -> None:
        error, message, _ = LOSSES[kind]
        for rank, ended in enumerate(world.run(pass_invalid_loss, self.adapter, kind, self.framework_options)):
            ended.check(error if rank == ODD_RANK else RingMismatchError, message, within=AT_ONCE)

    def test_an_error_in_a_backward_is_reported(self) -> None:
        """This test uses its own world, because the error closes the connections of the framework's groups."""
        with World(4, preload=[self.adapter]) as ranks:
            endings = ranks.run(raise_in_backward, self.adapter, self.framework_options)
        for rank, (ended, step, backward) in enumerate(endings):
            ended.check(ZeroDivisionError if rank == ODD_RANK else RingPeerError, "on purpose", within=AT_ONCE)
            for later in (step, backward):
                later.check(RuntimeError, within=AT_ONCE)
            assert "backward() raised" in backward.message, backward

    @requires("a lost rank")
    def test_a_rank_that_dies_in_a_backward_is_reported(self) -> None:
        with World(4, preload=[self.adapter]) as ranks:
            outcomes = ranks.run_collect(die_in_backward, self.adapter, self.framework_options)
        assert outcomes.pop(ODD_RANK).status == "died"
        for outcome in outcomes:
            assert outcome.raised(RingPeerError), outcome

    def test_gradients_before_parallelize_do_not_count(self, world: World) -> None:
        for gradient in world.run(train_with_an_old_gradient, self.adapter, self.framework_options):
            assert gradient == pytest.approx(1.0)

    @core
    @pytest.mark.parametrize("what", [refuse_to_parallelize, remove_a_buffer])
    def test_a_refusal_by_one_rank_is_reported(self, world: World, what: Callable[..., Ended]) -> None:
        for rank, ended in enumerate(world.run(what, self.adapter, self.framework_options)):
            ended.check(
                ValueError if rank == ODD_RANK else RingMismatchError,
                "max_grad_norm = -1.0" if what is refuse_to_parallelize else "running_mean",
                within=AT_ONCE,
            )

    @requires("gradient clipping")
    @pytest.mark.parametrize("kind", OPTIMIZERS)
    def test_invalid_optimizers_are_refused(self, world: World, kind: str) -> None:
        error, message, _ = OPTIMIZERS[kind]
        for ended in world.run(parallelize_with_invalid_optimizer, self.adapter, kind, self.framework_options):
            ended.check(error, message)
