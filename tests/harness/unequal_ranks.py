"""Unequal ranks: parameters that only some ranks or none use, fractional token counts, and buffers that differ.

The results equal those of one process. If a framework cannot provide that, every rank raises before the step.
Frameworks that keep gradients in buffers must not reuse the gradient of an earlier step for an unused parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_backends.errors import RingMismatchError
from ring_backends.testing.capabilities import AdapterSuite, core, requires
from ring_backends.testing.failing_calls import ending
from ring_backends.testing.marks import MORE_CASES
from ring_backends.testing.models import BlocksOfExperts, Normalized, weight_of
from ring_backends.testing.rings import TWO, backend, ring_here
from ring_backends.testing.training_runs import State
from ring_backends.testing.world import World, on_every_rank

ROWS = 5


NUM_RANKS = 4

Experts = tuple[int | None, ...]
"""The expert of every rank in a micro-batch. None: the rank uses no expert."""

Steps = Sequence[Sequence[Experts]]
"""The micro-batches of each step."""

EXPERTS: tuple[Experts, ...] = ((0, 0, 0, 0), (0, 1, 0, 1), (1, 1, 0, None), (None, None, None, None), (1, 0, None, 1))
"""Micro-batches with equal experts, different experts, and none."""

MICRO_BATCHES: dict[str, Steps] = {
    "one": [[experts] for experts in EXPERTS],
    "two": [[experts, (*experts[1:], experts[0])] for experts in EXPERTS],
}
"""Steps of one and of two micro-batches, with different experts of the ranks."""


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, weight_decay=0.1)


def rows_of(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(2, ROWS, 4, generator=generator)


def train_experts(
    adapter: str,
    widths: tuple[int, ...],
    steps: Steps,
    options: Mapping[str, Any],
    *,
    evaluates: bool = False,
    make_model: Callable[[Sequence[int]], nn.Module] = BlocksOfExperts,
) -> list[State]:
    """Train. Returns the state after each step. A step with fewer micro-batches than the longest one is an early step.

    With ``evaluates``, the model is called in eval mode before each step.
    """
    ring, rank, accumulation_steps = ring_here(adapter, TWO), dist.get_rank(), max(map(len, steps))
    state = backend(adapter).parallelize(
        make_model(widths), sgd, ring, accumulation_steps=accumulation_steps, **options
    )
    states = []
    for step, micro_batches in enumerate(steps):
        count = NUM_RANKS * 2 * ROWS * len(micro_batches) if accumulation_steps > 1 else None
        for index, experts in enumerate(micro_batches):
            out = state.model(rows_of(rank, 10 * step + index), experts[rank])
            state.backward(state.loss(out.float().square().sum(), 2 * ROWS, count))
        if evaluates:
            state.model.eval()
            with torch.no_grad():
                state.model(rows_of(rank, 9), 0)
            state.model.train()
        state.step()
        states.append(state.full_state_dict())
    return states


def train_experts_alone(widths: tuple[int, ...], steps: Steps) -> list[State]:
    """The training of :func:`train_experts` in one process. Unused parameters have zero gradients."""
    model = BlocksOfExperts(widths)
    optimizer = sgd(model.parameters())
    states = []
    for step, micro_batches in enumerate(steps):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for index, experts in enumerate(micro_batches):
            for rank, expert in enumerate(experts):
                out = model(rows_of(rank, 10 * step + index), expert)
                (out.square().sum() / (NUM_RANKS * 2 * ROWS * len(micro_batches))).backward()
        optimizer.step()
        states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    return states


def check_experts(
    adapter: str, widths: tuple[int, ...], steps: Steps, options: Mapping[str, Any], tolerance: float = 1e-5, **how: Any
) -> None:
    """Check on a rank that it has the state of a single process after each step of :func:`train_experts`."""
    check_states(train_experts(adapter, widths, steps, options, **how), train_experts_alone(widths, steps), tolerance)


def check_states(states: Sequence[State], wanted: Sequence[State], tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(states, wanted, rtol=0, atol=tolerance)


BAD_COUNTS: dict[str, tuple[type[Exception], str, Any]] = {
    "below 0": (ValueError, "local_token_count = -1", -1),
    "not a number": (ValueError, "local_token_count = nan", math.nan),
    "several numbers": (ValueError, "local_token_count has shape [2]", torch.ones(2)),
    "string": (TypeError, "local_token_count = '3'", "3"),
}


def train_with_buffers(adapter: str, options: Mapping[str, Any], path: str) -> tuple[list[State], list[float]]:
    """The states after parallelize, a step, a forward and a load; and the non-persistent buffer of this rank."""
    torch.manual_seed(dist.get_rank())
    model = Normalized()
    cast(Tensor, model.norm.running_mean).add_(dist.get_rank())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    state = backend(adapter).parallelize(model, sgd, ring_here(adapter, TWO), **options)
    states = [state.full_state_dict()]
    buffers_of(state)["own"] += dist.get_rank()
    x = rows_of(dist.get_rank(), 0).flatten(0, 1)
    state.model.train()
    state.backward(state.loss(state.model(x).square().sum(), len(x)))
    state.step()
    states.append(state.full_state_dict())
    with torch.no_grad():
        state.model(x + 1)
    states.append(state.full_state_dict())
    state.save(path)
    with torch.no_grad():
        state.model(x + 7)
    state.load(path)
    states.append({name: x.detach().clone().cpu() for name, x in buffers_of(state).items()})
    return states, buffers_of(state)["own"].tolist()


def buffers_of(state: Any) -> State:
    """The buffers of this rank, keyed by the last part of their names."""
    return {name.rpartition(".")[2]: tensor for name, tensor in state.model.named_buffers()}


WINDOWS: dict[str, Steps] = {
    name: [[(expert,) * NUM_RANKS for expert in window] for window in windows]
    for name, windows in {
        "one micro-batch": ((0,), (1,), (None,), (0,)),
        "full steps": ((0, 0), (1, 1), (None, 0), (1, None), (None, None), (0, 1)),
        "early steps": ((0,), (1, 1), (1, 0), (None,), (0, None), (1,), (None,), (None, None), (0, 0)),
    }.items()
}
"""The steps of each case, in which all ranks use the same expert in a micro-batch, or none."""

WIDTHS = (4, 4)
"""The widths of the experts."""

BF16 = 0.01
"""Tolerance of parameters after steps in bf16. A gradient of an earlier step would move them by about 0.05."""

needs_accumulation = pytest.mark.requires("gradient accumulation")

every_window = pytest.mark.parametrize(
    "name",
    [
        pytest.param("one micro-batch", marks=MORE_CASES),
        pytest.param("full steps", marks=needs_accumulation),
        pytest.param("early steps", marks=[MORE_CASES, pytest.mark.requires("gradient accumulation", "early steps")]),
    ],
)


@requires("training")
class UnequalRankTests(AdapterSuite):
    @pytest.mark.parametrize("widths", [(8, 8), (8, 10)], ids=["one shape", "two shapes"])
    @pytest.mark.parametrize(
        "number", [pytest.param("one", marks=pytest.mark.core), pytest.param("two", marks=needs_accumulation)]
    )
    @on_every_rank
    def test_ranks_may_use_different_parameters(self, widths: tuple[int, ...], number: str) -> None:
        """The gradient includes all ranks. If a framework cannot provide that, every rank raises and no rank steps."""
        arguments = self.adapter, widths, MICRO_BATCHES[number], self.framework_options
        if "parameters of some ranks" in self.without:
            ending(train_experts, *arguments).check(RingMismatchError, "experts.0", "experts.1")
        else:
            check_experts(*arguments)

    @on_every_rank
    def test_an_extra_backward_is_refused(self) -> None:
        """The step is that of the first backward."""
        state = self.parallelize(ring=self.ring())

        def backward() -> None:
            state.backward(state.loss(state.model(torch.tensor([3.0])).sum(), 1))

        backward()
        ending(backward).check(RuntimeError, "after", "1 backward calls")
        state.step()
        torch.testing.assert_close(weight_of(state), -3.0)

    @on_every_rank
    def test_counts_may_be_fractions(self) -> None:
        """A weighted mean, with computed and given counts."""
        rank, weights = dist.get_rank(), (0.25, 2.7, 0.0, 1.5)
        weight, mean = weights[rank], (0.25 * 1 + 2.7 * 2 + 1.5 * 4) / 4.45
        for given in (None, 4.45):
            state = self.parallelize()
            out = weight * state.model(torch.tensor([rank + 1.0])).sum()
            state.backward(state.loss(out, torch.tensor(weight), given))
            state.step()
            torch.testing.assert_close(weight_of(state), -mean, rtol=1e-6, atol=0)
        ranks = state.global_count(rank)
        assert (ranks, type(ranks)) == (6, int), ranks
        torch.testing.assert_close(state.global_count(weight), 4.45, rtol=1e-7, atol=0)

    @core
    @pytest.mark.parametrize("name", BAD_COUNTS)
    @on_every_rank
    def test_bad_counts_are_refused_by_name(self, name: str) -> None:
        error, message, bad = BAD_COUNTS[name]
        state = self.parallelize(ring=self.ring())
        ending(state.loss, torch.tensor(1.0), bad).check(error, message.removeprefix("local_token_count"))
        assert state.global_count(1) == 4

    @requires("save and load")
    def test_all_ranks_have_the_buffers_of_rank_0(self, world: World, tmp_path: Any) -> None:
        path = str(tmp_path / "checkpoint")
        by_rank = world.run(train_with_buffers, self.adapter, self.framework_options, path)
        first = by_rank[0][0]
        own = rows_of(0, 0).flatten(0, 1)
        torch.testing.assert_close(first[0]["norm.running_mean"], torch.zeros(4))
        torch.testing.assert_close(first[1]["norm.running_mean"], 0.1 * own.mean(0))
        torch.testing.assert_close(first[2]["norm.running_mean"], 0.09 * own.mean(0) + 0.1 * (own + 1).mean(0))
        for rank, (states, buffer) in enumerate(by_rank):
            assert buffer == [rank, rank]  # not in the state_dict, so each rank keeps its own
            for got, right in zip(states[:3], first[:3], strict=True):
                for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
                    assert torch.equal(got[name], right[name]), (rank, name)
            for name in ("running_mean", "running_var", "num_batches_tracked"):
                assert torch.equal(states[3][name], first[2][f"norm.{name}"]), (rank, name)


@requires("training")
class UnusedParameterTests(AdapterSuite):
    @every_window
    @on_every_rank
    def test_no_rank_uses_a_parameter(self, name: str) -> None:
        check_experts(self.adapter, WIDTHS, WINDOWS[name], self.framework_options)

    @MORE_CASES
    @requires("mixed precision")
    @every_window
    @on_every_rank
    def test_no_rank_uses_a_parameter_in_mixed_precision(self, name: str) -> None:
        options = {**self.framework_options, "mixed_precision": torch.bfloat16}
        check_experts(self.adapter, WIDTHS, WINDOWS[name], options, BF16)
