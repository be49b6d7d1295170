"""DeepSpeed's configuration: accepted and refused options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ring_backends.testing.failing_calls import ending
from ring_backends.testing.marks import THOROUGH
from ring_backends.testing.models import OneParameter
from ring_backends.testing.world import on_every_rank

pytest.importorskip("deepspeed")

from deepspeed_cases import parallelize_here, zero


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


BAD_CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "zero_stage = 4": {"zero_stage": 4},
    "zero_stage = 'two'": {"zero_stage": "two"},
    "stage = 2 and zero_stage = 3": {"zero_stage": 3, "config": {"zero_optimization": {"stage": 2}}},
    "gradient_clipping = 1.0 and max_grad_norm = None": {"config": {"gradient_clipping": 1.0}},
    "gradient_accumulation_steps = 4 and accumulation_steps = 1": {"config": {"gradient_accumulation_steps": 4}},
    "optimizer = {'type': 'AdamW'}": {"config": {"optimizer": {"type": "AdamW"}}},
    "train_batch_size = 8": {"config": {"train_batch_size": 8}},
    "fp16 = {'enabled': True}": {"config": {"fp16": {"enabled": True}}},
    "bf16 = {'enabled': True}": {"mixed_precision": torch.bfloat16, "config": {"bf16": {"enabled": True}}},
}


BF16, FP64 = (OneParameter().to(dtype) for dtype in (torch.bfloat16, torch.float64))

BAD_MODELS: dict[str, tuple[tuple[str, ...], nn.Module, dict[str, Any]]] = {
    "bf16 twice": (("parameter weight of model is torch.bfloat16",), BF16, zero(1, mixed_precision=torch.bfloat16)),
    "fp64": (("parameter weight of model is torch.float64",), FP64, zero(1)),
    **{f"scalar in ZeRO {n}": (("parameter scale of model is a scalar", "[1]"), Scalar(), zero(n)) for n in range(4)},
}


@pytest.mark.parametrize("message", BAD_CONFIGURATIONS)
@on_every_rank
def test_contradictions_are_refused_by_name(message: str) -> None:
    ending(parallelize_here, BAD_CONFIGURATIONS[message]).check(ValueError, message)


@on_every_rank
def test_a_config_that_is_no_dict_is_refused() -> None:
    ending(parallelize_here, {"config": "ds_config.json"}).check(TypeError, "config = 'ds_config.json'")


@THOROUGH
@pytest.mark.parametrize("name", BAD_MODELS)
@on_every_rank
def test_models_that_deepspeed_cannot_train_are_refused_by_name(name: str) -> None:
    texts, model, options = BAD_MODELS[name]
    ending(parallelize_here, options, model).check(ValueError, *texts)


@THOROUGH
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(
    "mesh",
    [{"mesh_param": (2, 2)}, {"config": {"data_parallel_size": 2, "sequence_parallel_size": 2}}],
    ids=["mesh_param", "both sizes"],
)
@on_every_rank
def test_setups_in_which_replicas_drift_are_refused(stage: int, mesh: dict[str, Any]) -> None:
    """DeepSpeed reduces only over the data axis of such a mesh. The refusal does not affect later engines."""
    options = zero(stage)
    config = options["config"] | mesh.get("config", {})
    ending(parallelize_here, {**options, **mesh, "config": config}).check(RuntimeError, "drift", "mesh_param")
    torch.testing.assert_close(parallelize_here(options).divisor, 4.0)
