"""Parameters that no rank uses in a step, or in some micro-batches of it, such as those of an expert without tokens.

Frameworks that keep gradients in buffers must not reuse the gradient of an earlier step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ring_backends.testing.capabilities import AdapterSuite, requires
from ring_backends.testing.marks import MORE_CASES, matrix_but
from ring_backends.testing.unequal_ranks import NUM_RANKS, Steps, check_experts, train_experts
from ring_backends.testing.world import World

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

every_window = pytest.mark.parametrize("name", matrix_but("full steps", of=WINDOWS))


@requires("training")
class UnusedParameterTests(AdapterSuite):
    def _skip_accumulation(self, name: str) -> None:
        if name != "one micro-batch" and "gradient accumulation" in self.without:
            pytest.skip(self.without["gradient accumulation"])

    def check_windows(self, world: World, name: str, tolerance: float, *, clears: bool = False, **options: Any) -> None:
        steps, options = WINDOWS[name], {**self.framework_options, **options}
        by_rank = world.run(train_experts, self.adapter, WIDTHS, steps, options, clears=clears)
        check_experts(by_rank, WIDTHS, steps, tolerance)

    @every_window
    def test_no_rank_uses_a_parameter(self, world: World, name: str) -> None:
        self._skip_accumulation(name)
        self.check_windows(world, name, 1e-5)

    @MORE_CASES
    @requires("gradient accumulation")
    def test_the_program_clears_gradients_after_early_steps(self, world: World) -> None:
        self.check_windows(world, "early steps", 1e-5, clears=True)

    @MORE_CASES
    @requires("mixed precision")
    @every_window
    def test_no_rank_uses_a_parameter_in_mixed_precision(self, world: World, name: str) -> None:
        self._skip_accumulation(name)
        self.check_windows(world, name, BF16, mixed_precision=torch.bfloat16)
