"""Hugging Face's Trainer with Liger's fused loss, in Triton's interpreter, equals the Trainer without Liger."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from native_ranks import world_of
from trainer_cases import Case, assert_equal, make_attached, measures_of, parameters_of

from ring_backends.testing.world import World

pytest.importorskip("liger_kernel")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET is not 1", allow_module_level=True)

pytestmark = pytest.mark.matrix(reason="only the environment for Triton has Liger's kernels")

PRELOAD = ("transformers.trainer", "ring_backends.integrations.trainer")
two = world_of(2)

KERNELS = {"rms_norm": False, "rope": False, "swiglu": False}
"""Those that the interpreter cannot run. They compute each row from this row alone."""


def run(ring_size: int | None, has_liger: bool) -> dict[str, Any]:
    """Train three steps, and evaluate."""
    arguments: dict[str, Any] = {"max_steps": 3, "gradient_accumulation_steps": 2}
    if has_liger:
        arguments |= {"use_liger_kernel": True, "liger_kernel_config": KERNELS}
    trainer = make_attached(Case(arguments=arguments), ring_size, "zigzag", prediction_loss_only=True)
    outputs: list[Any] = []
    trainer.model.register_forward_hook(lambda model, args, output: outputs.append(output))
    trainer.train()
    results = measures_of(trainer, "loss") | {"evaluated": torch.tensor(trainer.evaluate()["eval_loss"])}
    assert all((output.get("logits") is None) == has_liger for output in outputs)
    return results | parameters_of(trainer.accelerator, trainer.model)


@pytest.mark.timeout(600)
def test_two_ranks(two: World) -> None:
    assert_equal(two.run(run, 2, True, timeout=500), run(None, False))
