"""Helpers of the tests of the FairScale adapter."""

from __future__ import annotations

from typing import Any

import torch

from ring_backends.testing.strategies import AttentionCase
from ring_backends.testing.training_runs import Recipe

ADAPTER = "ring_backends.adapters.fairscale"


CASE = AttentionCase(61, (7, 30, 61), (1, 2, 3), num_heads=8, num_kv_heads=4, head_dim=8, dtype=torch.float64)


class GroupedRecipe(Recipe):
    """A recipe with two parameter groups that have different learning rates and weight decays."""

    def make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        matrices, vectors = [], []
        for parameter in parameters:
            (matrices if parameter.ndim > 1 else vectors).append(parameter)
        groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "lr": 3 * self.rate}]
        return torch.optim.SGD(groups, lr=self.rate, momentum=0.5, nesterov=True)
