"""Training by a DeepSpeed engine: its configuration, the divisor of its reducer, its checkpoints.

The rule of this file: nothing is told to DeepSpeed twice. What ``parallelize`` has an argument for must not be said
otherwise in ``config``; everything else in there reaches DeepSpeed as it is.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator, Mapping
from typing import Any

import deepspeed
import deepspeed.comm as comm
import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils import groups
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor, nn

from ring_backends.rendezvous import start_world_of_one
from ring_backends.ring import Ring
from ring_backends.training import (
    MakeOptimizer,
    TrainingState,
    check_mixed_precision,
    measure_divisor,
    replace_folder,
)


def start_deepspeed() -> None:
    """Let ``deepspeed.comm`` use the process group there is.

    On CPU it would compile a shared-memory all-reduce, which takes minutes and a compiler; nothing here needs that.
    Whoever wants it starts ``deepspeed.init_distributed()`` beforehand. What is compiled is what stands in DeepSpeed's
    list of operators, made when first looked at; for the moment of starting an empty one takes its place.
    """
    if comm.is_initialized():
        return
    operators = vars(deepspeed.ops)
    found = operators.get("__compatible_ops__")
    operators["__compatible_ops__"] = {}
    try:
        comm.init_distributed(auto_mpi_discovery=False, verbose=False)
    finally:
        del operators["__compatible_ops__"]
        if found is not None:
            operators["__compatible_ops__"] = found


def engine_settings(
    model: nn.Module,
    config: Mapping[str, Any] | None,
    zero_stage: int | None,
    accumulation_steps: int,
    max_grad_norm: float | None,
    mixed_precision: torch.dtype | None,
) -> dict[str, Any]:
    """DeepSpeed's configuration from ours and the user's, which may not contradict each other."""
    if not isinstance(config, (Mapping, type(None))):
        raise TypeError(f"config = {config!r}: expected a dict, as deepspeed.initialize takes; read the file first.")
    settings = copy.deepcopy(dict(config or {}))
    if (settings.get("checkpoint") or {}).get("load_universal"):
        raise ValueError(
            "config has checkpoint.load_universal = True: DeepSpeed unpickles whatever such a checkpoint holds; leave "
            "it out, and load what save() wrote."
        )
    zero = settings.setdefault("zero_optimization", {})
    stage = zero.get("stage", 0) if zero_stage is None else zero_stage
    if not isinstance(stage, int) or isinstance(stage, bool) or stage not in range(4):
        raise ValueError(f"zero_stage = {stage!r}: expected 0, 1, 2 or 3.")
    check_mixed_precision(mixed_precision)
    for part, key, value, argument in (
        (settings, "gradient_accumulation_steps", accumulation_steps, f"accumulation_steps = {accumulation_steps}"),
        (settings, "gradient_clipping", float(max_grad_norm or 0), f"max_grad_norm = {max_grad_norm}"),
        (zero, "stage", stage, f"zero_stage = {zero_stage}"),
    ):
        if part.setdefault(key, value) != value:
            raise ValueError(f"config has {key} = {part[key]!r} and {argument}: leave {key} out of config.")
    said_elsewhere = {
        "optimizer": "make_optimizer makes it",
        "train_batch_size": "it is train_micro_batch_size_per_gpu × accumulation_steps × ranks, ring ranks included",
        "fp16": "a scaled loss skips steps; pass mixed_precision=torch.bfloat16",
    }
    if mixed_precision:
        said_elsewhere |= dict.fromkeys(("bf16", "torch_autocast"), f"mixed_precision = {mixed_precision} says it")
    for key, instead in said_elsewhere.items():
        if key in settings:
            raise ValueError(f"config has {key} = {settings[key]!r}: {instead}; leave {key} out of config.")
    if mixed_precision:
        # With modules listed here, DeepSpeed would reduce their gradients in bf16.
        settings["torch_autocast"] = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    _settle_dtype(settings, model)
    settings.setdefault("train_micro_batch_size_per_gpu", 1)
    settings.setdefault("zero_allow_untested_optimizer", True)
    return settings


def _settle_dtype(settings: dict[str, Any], model: nn.Module) -> None:
    """Let a model of bf16 be trained as such; refuse what DeepSpeed would cast without being told, or not at all."""
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if dtypes == {torch.bfloat16} and "torch_autocast" not in settings:
        settings.setdefault("bf16", {"enabled": True})
    own_bf16 = settings.get("bf16", {}).get("enabled", False)
    taken = (torch.float32, torch.bfloat16) if own_bf16 else (torch.float32,)
    for name, parameter in model.named_parameters():
        if parameter.dtype not in taken:
            raise ValueError(
                f"model has parameter {name} of {parameter.dtype}: DeepSpeed trains models all of fp32, under autocast "
                "or not, and models all of bf16 over fp32 masters; convert it with .float() or .bfloat16(), or use "
                "another adapter."
            )


class DeepSpeedTraining(TrainingState):
    """Training by a DeepSpeed engine, which is ``model``. A checkpoint is DeepSpeed's, a folder."""

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        ring: Ring,
        max_grad_norm: float | None,
        accumulation_steps: int,
        settings: dict[str, Any],
        mpu: Any,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(ring, max_grad_norm, accumulation_steps)
        start_world_of_one()
        if dist.get_world_size() == 1:
            os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed wants to be told which device is this process's
        start_deepspeed()
        self.divisor = _divisor(settings, mpu, options)
        self.optimizer = make_optimizer(model.parameters())
        self._engine, *_ = deepspeed.initialize(
            model=model, optimizer=self.optimizer, config=settings, mpu=mpu, **options
        )
        if type(self._engine.checkpoint_engine) is TorchCheckpointEngine:
            self._engine.checkpoint_engine.load = _load_tensors
        self.model = self._engine
        self._expect_micro_batch(ends_step=accumulation_steps == 1)

    def _backward(self, loss: Tensor) -> None:
        if self._backward_calls == self.accumulation_steps:
            raise RuntimeError(
                f"backward() after all {self.accumulation_steps} backward calls of a step: DeepSpeed has reduced its "
                "gradients; call step() first, or raise accumulation_steps."
            )
        # The loss is over the whole step already; by itself DeepSpeed divides it by the number of micro-batches.
        self._engine.backward(loss, scale_wrt_gas=False)

    def _step(self) -> None:
        self._engine.step()

    def _expect_micro_batch(self, *, ends_step: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(ends_step)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a folder with one of DeepSpeed's checkpoints; what is there already is replaced once it is whole."""
        tag, client_state = f"step{self.step_count}", {"step_count": self.step_count}
        replace_folder(path, lambda folder: self._engine.save_checkpoint(os.fspath(folder), tag, client_state))

    def _load(self, path: str | os.PathLike[str]) -> None:
        """Read the latest checkpoint of the folder ``path``, written by as many ranks at the same ZeRO stage.

        Raises:
            FileNotFoundError: there is none.
        """
        folder, client_state = self._engine.load_checkpoint(os.fspath(path))
        if folder is None:
            raise FileNotFoundError(f"path = {os.fspath(path)!r}: no DeepSpeed checkpoint there; save() writes one.")
        self.step_count = client_state["step_count"]

    def full_state_dict(self) -> dict[str, Tensor]:
        whole = {}
        for name, tensor in self._engine.module.state_dict(keep_vars=True).items():
            with deepspeed.zero.GatheredParameters([tensor]):  # what ZeRO 3 has not sharded is left as it is
                whole[name] = tensor.detach().cpu().clone()
        return whole


def _load_tensors(path: str, map_location: Any = None) -> Any:
    """Tensors and a few plain classes of DeepSpeed's; its own loading would run any code in a checkpoint."""
    with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
        return torch.load(path, map_location=map_location, weights_only=True)


_NO_PART_IN_REDUCING = (
    *("bf16", "torch_autocast", "scheduler", "gradient_accumulation_steps"),
    *("tensorboard", "wandb", "comet", "csv_monitor", "flops_profiler", "autotuning", "wall_clock_breakdown"),
)


def _divisor(settings: Mapping[str, Any], mpu: Any, options: Mapping[str, Any]) -> float:
    """What the engine's reducer divides by, from an engine of one parameter with the same groups."""
    probe_settings = {key: value for key, value in settings.items() if key not in _NO_PART_IN_REDUCING}
    probe_settings |= {
        "gradient_clipping": 0.0,  # without the key DeepSpeed clips at 1
        "zero_force_ds_cpu_optimizer": False,  # the probe's optimizer is plain SGD, offloaded or not
    }
    probe_options = {key: value for key, value in options.items() if key == "mesh_param"}

    def reduced(gradient: float) -> float:
        probe = nn.Linear(1, 1, bias=False, dtype=torch.float32)
        nn.init.zeros_(probe.weight)
        engine, *_ = deepspeed.initialize(
            model=probe,
            optimizer=torch.optim.SGD(probe.parameters(), lr=1.0),
            config=copy.deepcopy(probe_settings),
            mpu=mpu,
            **probe_options,
        )
        engine.backward(engine(torch.full((1, 1), gradient, device=engine.device)).sum())
        engine.step()
        with deepspeed.zero.GatheredParameters([probe.weight]):
            value: float = -probe.weight.item()
        engine.destroy()
        return value

    with _groups_left_alone():
        try:
            return measure_divisor(reduced)
        except RuntimeError as error:
            if groups.mesh_device is None:
                raise
            raise RuntimeError(
                f"{error} DeepSpeed has a mesh, from mesh_param= or from data_parallel_size and sequence_parallel_size "
                "in its config, and at this ZeRO stage reduces over the data axis alone. Leave the mesh out, since "
                "ring ranks are data ranks, or pass an mpu."
            ) from error


@contextlib.contextmanager
def _groups_left_alone() -> Iterator[None]:
    """DeepSpeed keeps an engine's mpu and mesh for whatever comes later in the process; a probe shall leave none."""
    mpu, mesh = groups.mpu, groups.mesh_device
    try:
        yield
    finally:
        groups.mpu, groups.mesh_device = mpu, mesh
