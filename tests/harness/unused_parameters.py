"""Parameters that no rank uses in a step, or in some micro-batches of it, such as those of an expert without tokens.

Frameworks that keep gradients in buffers must not reuse the gradient of an earlier step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ring_backends.testing.capabilities import AdapterSuite, requires
from ring_backends.testing.models import BlocksOfExperts
from ring_backends.testing.rings import TWO, backend, ring_here
from ring_backends.testing.unequal_ranks import ROWS, State, rows_of, sgd
from ring_backends.testing.world import World

Window = tuple[int | None, ...]
"""The expert of every micro-batch of a step. All ranks use the same expert, or none."""

WINDOWS: Mapping[str, tuple[Window, ...]] = {
    "one micro-batch": ((0,), (1,), (None,), (0,)),
    "full steps": ((0, 0), (1, 1), (None, 0), (1, None), (None, None), (0, 1)),
    "early steps": ((0,), (1, 1), (1, 0), (None,), (0, None), (1,), (None,), (None, None), (0, 0)),
}
"""The steps of each case. A step with fewer micro-batches than the longest one is an early step."""

NUM_RANKS = 4


def _count(window: Window) -> int:
    return NUM_RANKS * 2 * ROWS * len(window)


def train_windows(adapter: str, windows: Iterable[Window], clears: bool, options: Mapping[str, Any]) -> list[State]:
    """Train. Returns the state after each step. With ``clears``, the program clears gradients after each step."""
    windows, rank = [*windows], dist.get_rank()
    state = backend(adapter).parallelize(
        BlocksOfExperts((4, 4)), sgd, ring_here(adapter, TWO), accumulation_steps=max(map(len, windows)), **options
    )
    states = []
    for step, window in enumerate(windows):
        for index, expert in enumerate(window):
            out = state.model(rows_of(rank, 10 * step + index), expert)
            state.backward(state.loss(out.float().square().sum(), 2 * ROWS, _count(window)))
        state.step()
        if clears:
            state.optimizer.zero_grad()
        states.append(state.full_state_dict())
    return states


def train_windows_alone(windows: Iterable[Window]) -> list[State]:
    """The training of :func:`train_windows` in one process. Unused parameters have zero gradients."""
    model = BlocksOfExperts((4, 4))
    optimizer = sgd(model.parameters())
    states = []
    for step, window in enumerate(windows):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for index, expert in enumerate(window):
            for rank in range(NUM_RANKS):
                (model(rows_of(rank, 10 * step + index), expert).square().sum() / _count(window)).backward()
        optimizer.step()
        states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    return states


def check_windows(by_rank: Iterable[list[State]], windows: Iterable[Window], tolerance: float) -> None:
    """Check that every rank has the state of a single process after each step."""
    wanted = train_windows_alone(windows)
    for rank, states in enumerate(by_rank):
        for step, (got, right) in enumerate(zip(states, wanted, strict=True)):
            for name, tensor in right.items():
                error = float((got[name] - tensor).abs().max())
                assert error <= tolerance, f"rank {rank} after step {step + 1}: {name} has error {error}"


BF16 = 0.01
"""Tolerance of parameters after steps in bf16. A gradient of an earlier step would move them by about 0.05."""

in_matrix = pytest.mark.matrix(reason="the quick command tests full steps")
every_window = pytest.mark.parametrize(
    "name", [name if name == "full steps" else pytest.param(name, marks=in_matrix) for name in WINDOWS]
)


class UnusedParameterTests(AdapterSuite):
    def _skip_accumulation(self, name: str) -> None:
        if name != "one micro-batch" and "gradient accumulation" in self.without:
            pytest.skip(self.without["gradient accumulation"])

    @requires("training")
    @every_window
    def test_no_rank_uses_a_parameter(self, world: World, name: str) -> None:
        self._skip_accumulation(name)
        by_rank = world.run(train_windows, self.adapter, WINDOWS[name], False, dict(self.framework_options))
        check_windows(by_rank, WINDOWS[name], 1e-5)

    @in_matrix
    @requires("training", "gradient accumulation")
    def test_the_program_clears_gradients_after_early_steps(self, world: World) -> None:
        windows, options = WINDOWS["early steps"], dict(self.framework_options)
        check_windows(world.run(train_windows, self.adapter, windows, True, options), windows, 1e-5)

    @in_matrix
    @requires("training", "mixed precision")
    @every_window
    def test_no_rank_uses_a_parameter_in_mixed_precision(self, world: World, name: str) -> None:
        self._skip_accumulation(name)
        options = {**self.framework_options, "mixed_precision": torch.bfloat16}
        check_windows(world.run(train_windows, self.adapter, WINDOWS[name], False, options), WINDOWS[name], BF16)
