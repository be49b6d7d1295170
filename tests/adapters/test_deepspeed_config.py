"""DeepSpeed's configuration: accepted and refused options."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from ring_backends.testing.failing_calls import Ended, ending
from ring_backends.testing.models import OneParameter, unit_sgd
from ring_backends.testing.rings import TWO, ring_of
from ring_backends.testing.world import World

pytest.importorskip("deepspeed")

from deepspeed_cases import ADAPTER, SMALL_BUFFERS, parallelize_here, zero

from ring_backends.adapters import deepspeed as backend


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


def parallelize_a_scalar(stage: int) -> Ended:
    ring = ring_of(ADAPTER, TWO)
    return ending(lambda: backend.parallelize(Scalar(), unit_sgd, ring, **zero(stage)))


BAD_CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "stage 4": ("zero_stage = 4", {"zero_stage": 4}),
    "a stage that is no number": ("zero_stage = 'two'", {"zero_stage": "two"}),
    "two stages": ("stage = 2 and zero_stage = 3", {"zero_stage": 3, "config": {"zero_optimization": {"stage": 2}}}),
    "two norms": ("gradient_clipping = 1.0 and max_grad_norm = None", {"config": {"gradient_clipping": 1.0}}),
    "two accumulations": (
        "gradient_accumulation_steps = 4 and accumulation_steps = 1",
        {"config": {"gradient_accumulation_steps": 4}},
    ),
    "an optimizer": ("optimizer = {'type': 'AdamW'}", {"config": {"optimizer": {"type": "AdamW"}}}),
    "a batch size": ("train_batch_size = 8", {"config": {"train_batch_size": 8}}),
    "fp16": ("fp16 = {'enabled': True}", {"config": {"fp16": {"enabled": True}}}),
    "bf16 twice": (
        "bf16 = {'enabled': True}",
        {"mixed_precision": torch.bfloat16, "config": {"bf16": {"enabled": True}}},
    ),
}


def parallelize_badly(options: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> Ended:
    return ending(lambda: parallelize_here(options, OneParameter().to(dtype)))


def parallelize_with_a_mesh(options: dict[str, Any]) -> tuple[Ended, float]:
    """Call parallelize with a mesh, then without. Returns how the first ended, and the divisor of the second."""
    return parallelize_badly(options), parallelize_here(zero(options["zero_stage"])).divisor


def the_config_is_left_alone() -> bool:
    config = {"zero_optimization": {"stage": 1, **SMALL_BUFFERS}}
    before = copy.deepcopy(config)
    state = parallelize_here({"config": config})
    return config == before and state.model.zero_optimization_stage() == 1


def backward_too_often() -> list[Ended]:
    state = parallelize_here(zero(1))
    endings = [ending(lambda: state.backward(state.model(torch.ones(1)).sum())) for _ in range(2)]
    state.step()
    return [*endings, ending(lambda: state.backward(state.model(torch.ones(1)).sum()))]


class TestConfiguration:
    @pytest.mark.parametrize("name", BAD_CONFIGURATIONS)
    def test_contradictions_are_refused_by_name(self, world: World, name: str) -> None:
        message, options = BAD_CONFIGURATIONS[name]
        for ended in world.run(parallelize_badly, options):
            ended.check(ValueError, message)

    def test_a_config_that_is_no_dict_is_refused(self, world: World) -> None:
        for ended in world.run(parallelize_badly, {"config": "ds_config.json"}):
            ended.check(TypeError, "config = 'ds_config.json'")

    def test_a_bf16_model_with_mixed_precision_is_refused(self, world: World) -> None:
        for ended in world.run(parallelize_badly, zero(1, mixed_precision=torch.bfloat16), torch.bfloat16):
            ended.check(ValueError, "parameter weight of model is torch.bfloat16")

    @pytest.mark.parametrize("stage", range(4))
    def test_a_parameter_without_dimensions_is_refused_by_name(self, world: World, stage: int) -> None:
        for ended in world.run(parallelize_a_scalar, stage):
            ended.check(ValueError, "parameter scale of model is a scalar", "[1]")

    def test_an_fp64_model_is_refused(self, world: World) -> None:
        for ended in world.run(parallelize_badly, zero(1), torch.float64):
            ended.check(ValueError, "parameter weight of model is torch.float64")

    def test_the_users_config_passes_through_unchanged(self, world: World) -> None:
        assert world.run(the_config_is_left_alone) == [True] * 4

    @pytest.mark.parametrize("stage", [0, 1, 2])
    @pytest.mark.parametrize("how", ["mesh_param", "both sizes"])
    def test_setups_in_which_replicas_drift_are_refused(self, world: World, stage: int, how: str) -> None:
        """DeepSpeed reduces only over the data axis of such a mesh. The refusal does not affect later engines."""
        options = zero(stage)
        if how == "mesh_param":
            options["mesh_param"] = (2, 2)
        else:
            options["config"] |= {"data_parallel_size": 2, "sequence_parallel_size": 2}
        for ended, divisor in world.run(parallelize_with_a_mesh, options):
            ended.check(RuntimeError, "drift", "mesh_param")
            assert divisor == pytest.approx(4)


def test_too_many_backwards_in_a_step_are_refused(world: World) -> None:
    for first, second, next_step in world.run(backward_too_often):
        assert first.error == next_step.error == "no error"
        second.check(RuntimeError, "accumulation_steps")
