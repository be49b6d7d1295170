"""DeepSpeed's configuration, from the arguments of ``parallelize`` and the user's ``config``.

``config`` must not contradict an argument of ``parallelize``. All other entries reach DeepSpeed unchanged.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def engine_settings(
    model: nn.Module,
    config: Mapping[str, Any] | None,
    zero_stage: int | None,
    accumulation_steps: int,
    max_grad_norm: float | None,
    mixed_precision: torch.dtype | None,
) -> dict[str, Any]:
    """Merge the user's ``config`` with the arguments of ``parallelize``.

    Raises:
        ValueError, TypeError: an entry contradicts an argument, or DeepSpeed cannot train the model.
    """
    if not isinstance(config, (Mapping, type(None))):
        raise TypeError(f"config = {config!r}: expected a dict; read a configuration file with json.load().")
    settings = copy.deepcopy(dict(config or {}))
    if (settings.get("checkpoint") or {}).get("load_universal"):
        raise ValueError(
            "config has checkpoint.load_universal = True: DeepSpeed unpickles such a checkpoint, which can run any "
            "code in it; leave load_universal out, and load a checkpoint that save() wrote."
        )
    zero = settings.setdefault("zero_optimization", {})
    stage = zero.get("stage", 0) if zero_stage is None else zero_stage
    if not isinstance(stage, int) or isinstance(stage, bool) or stage not in range(4):
        raise ValueError(f"zero_stage = {stage!r}: expected 0, 1, 2 or 3.")
    for part, key, value, argument in (
        (settings, "gradient_accumulation_steps", accumulation_steps, f"accumulation_steps = {accumulation_steps}"),
        (settings, "gradient_clipping", float(max_grad_norm or 0), f"max_grad_norm = {max_grad_norm}"),
        (zero, "stage", stage, f"zero_stage = {zero_stage}"),
    ):
        if part.setdefault(key, value) != value:
            raise ValueError(
                f"config has {key} = {part[key]!r} and {argument}, which contradict each other; leave {key} out of "
                "config."
            )
    reserved = {
        "optimizer": "make_optimizer returns the optimizer",
        "train_batch_size": "DeepSpeed computes it as train_micro_batch_size_per_gpu × accumulation_steps × ranks",
        "fp16": "loss scaling would skip steps; pass mixed_precision=torch.bfloat16",
    }
    if mixed_precision:
        reserved |= dict.fromkeys(("bf16", "torch_autocast"), f"mixed_precision = {mixed_precision} sets it")
    for key, instead in reserved.items():
        if key in settings:
            raise ValueError(f"config has {key} = {settings[key]!r}: {instead}; leave {key} out of config.")
    if mixed_precision:
        # DeepSpeed reduces the gradients of the modules listed here in bf16, so none is listed.
        settings["torch_autocast"] = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    _choose_dtype(settings, model)
    settings.setdefault("train_micro_batch_size_per_gpu", 1)
    settings.setdefault("zero_allow_untested_optimizer", True)
    return settings


def _choose_dtype(settings: dict[str, Any], model: nn.Module) -> None:
    """Enable bf16 for a bf16 model. Refuse parameters that DeepSpeed would cast silently or cannot train."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if dtypes == {torch.bfloat16} and "torch_autocast" not in settings:
        settings.setdefault("bf16", {"enabled": True})
    own_bf16 = settings.get("bf16", {}).get("enabled", False)
    accepted = (torch.float32, torch.bfloat16) if own_bf16 else (torch.float32,)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise ValueError(
                f"parameter {name} of model is a scalar: DeepSpeed cannot flatten it; give it the shape [1], or use "
                "another adapter."
            )
        if not parameter.is_contiguous():
            raise ValueError(
                f"parameter {name} of model has strides {parameter.stride()}: DeepSpeed needs contiguous parameters; "
                "assign parameter.data.contiguous(), or use another adapter."
            )
        if parameter.dtype not in accepted:
            raise ValueError(
                f"parameter {name} of model is {parameter.dtype}: DeepSpeed trains models whose parameters are all "
                "fp32 or all bf16; convert the model with .float() or .bfloat16(), or use another adapter."
            )
