"""Training by a DeepSpeed engine: the divisor of its reducer, the order of its gradients, its checkpoints."""

from __future__ import annotations

import contextlib
import copy
import os
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils import groups
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor, nn

from ring_backends.adapters.deepspeed.ring_pass import start_deepspeed
from ring_backends.ring.collectives import do_on_all
from ring_backends.ring.rendezvous import start_world_of_one
from ring_backends.ring.ring import Ring
from ring_backends.training.checkpoint_files import StrPath, as_loadable, read_manifest
from ring_backends.training.contents import Groups, check_contents, in_groups, with_names, with_numbers
from ring_backends.training.events import ORDER
from ring_backends.training.reducer import measure_divisor, parameters_in_backward, probe
from ring_backends.training.state import MakeOptimizer, TrainingState, copied, refuse_copies


class DeepSpeedTraining(TrainingState):
    """Training by a DeepSpeed engine, the attribute ``model``. A checkpoint is a folder that DeepSpeed writes."""

    _mixed_precisions = (torch.bfloat16,)

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
        mixed_precision: torch.dtype | None,
    ) -> None:
        compared = {**options, **settings, "mixed_precision": mixed_precision}
        super().__init__(model, ring, max_grad_norm, accumulation_steps, compared)
        start_world_of_one()
        if dist.get_world_size() == 1:
            os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed reads the index of this process's device from it
        start_deepspeed()
        self._is_in_backward = False
        self._arrived: list[str] = []
        self._foreign_gradients: set[str] = set()
        self._parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.divisor = _divisor(self._world, settings, mpu, options)
        self._zero_stage: int = settings["zero_optimization"]["stage"]
        if self._zero_stage:
            self._flattens = f"ZeRO {self._zero_stage} gives it flat parts of the parameters; use zero_stage=0"
        self.optimizer = self._make_optimizer(make_optimizer, model)
        # DeepSpeed removes groups without parameters, and ZeRO replaces the parameters in the groups.
        self._groups = [names for names in super()._group_names() if names]
        if self._zero_stage and isinstance(self.optimizer, torch.optim.Adagrad):
            raise ValueError(
                f"make_optimizer returned {type(self.optimizer).__name__}: ZeRO {self._zero_stage} replaces it by an "
                "Adagrad of its own, which no learning rate schedule reaches; use zero_stage=0, or another optimizer."
            )
        with _default_dtype(torch.float32):
            self._engine, *_ = deepspeed.initialize(
                model=model, optimizer=self.optimizer, config=settings, mpu=mpu, **options
            )
        if type(self._engine.checkpoint_engine) is TorchCheckpointEngine:
            self._engine.checkpoint_engine.load = _load_tensors
        if self._engine.optimizer is not self.optimizer:
            what = f"ZeRO {self._zero_stage} stores" if self._zero_stage else "an engine with master weights stores"
            self._saves_flat = (
                f"{what} flat parts of the trained parameters in this order. Or use zero_stage=0 and fp32 parameters "
                "for both runs"
            )
        self.model, self._num_groups = self._engine, len(self.optimizer.param_groups)
        refuse_copies(self.model, "it is a DeepSpeed engine, which holds process groups and the optimizer")
        self._is_offloaded = self._zero_stage > 0 and self._engine.zero_cpu_offload()
        if self._zero_stage:
            for name, parameter in self._parameters.items():
                parameter.register_post_accumulate_grad_hook(partial(self._record_gradient, name))
        if self._zero_stage == 3:
            modules = self._engine.module.named_modules()
            with_parameters = ((name, part) for name, part in modules if any(True for _ in part.parameters(False)))
            self._events.watch_calls(self._engine, with_parameters)
        self._expect_micro_batch(ends_step=accumulation_steps == 1)

    def _describe_graph(self, loss: Tensor) -> Mapping[str, object]:
        """The order in which the backward reaches the parameters.

        ZeRO 1 to 3 put gradients into buckets in the order in which they arrive, and reduce the buckets over the ranks.
        """
        graph = super()._describe_graph(loss)
        if not self._zero_stage:
            return graph
        if self._foreign_gradients:
            raise RuntimeError(
                f"gradients of {', '.join(sorted(self._foreign_gradients)[:8])} came from a backward other than "
                "state.backward(), and ZeRO has already reduced them: restart the processes from the last checkpoint. "
                "To differentiate another loss, freeze the model with requires_grad_(False) and call "
                "state.model.module."
            )
        if self._world.size == 1:
            return graph
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        return {**graph, ORDER: parameters_in_backward(loss, names)}

    def _check_optimizer(self) -> None:
        # DeepSpeed has replaced the parameters in the groups, so only the number of groups can be compared.
        if len(self.optimizer.param_groups) != self._num_groups:
            raise RuntimeError(
                f"optimizer has {len(self.optimizer.param_groups)} parameter groups, and had {self._num_groups} in "
                "parallelize(): DeepSpeed does not know parameters added later; add them to the model and to the "
                "optimizer before parallelize()."
            )

    def _describe_gradients(self) -> Mapping[str, object]:
        # Reentrant checkpointing recomputes parts that the graph of the loss does not contain, so compare afterwards.
        return {ORDER: self._arrived} if self._zero_stage else {}

    def _backward(self, loss: Tensor) -> None:
        # The loss is scaled for the whole step already. By default DeepSpeed divides it by accumulation_steps.
        self._is_in_backward = True
        self._engine.backward(loss, scale_wrt_gas=False)
        self._is_in_backward = False

    def _record_gradient(self, name: str, *_: object) -> None:
        if self._is_in_backward:
            self._arrived.append(name)
        else:
            self._foreign_gradients.add(name)

    def _reduce_accumulated(self) -> None:
        if self._zero_stage >= 2:  # every backward has reduced its gradients
            self._engine.optimizer.finalize_gradient_accumulation_boundary()
        elif self._zero_stage and self._engine.zero_overlap_comm():
            with self._engine.coalesce_grad_reduction():  # reduces all gradients at its end
                pass
        else:
            self._engine.allreduce_gradients()

    def _scale_gradients(self, factor: float) -> None:
        optimizer = self._engine.optimizer
        if isinstance(optimizer, BF16_Optimizer):
            for gradients in optimizer.fp32_groups_gradients_flat:
                gradients.mul_(factor)
        elif self._zero_stage:  # step() divides the gradients by the loss scale, wherever they are
            optimizer.override_loss_scale(1 / factor)
        else:
            super()._scale_gradients(factor)

    def _step(self) -> bool:
        self._arrived.clear()
        if self._is_offloaded:
            # The last backward has copied only the gradients of parameters that it used. This copies all of the step.
            self._engine.optimizer.finalize_gradient_accumulation_boundary()
        self._engine.step()
        self._engine.optimizer.custom_loss_scaler = False
        self._clear_partitions()
        applied: bool = self._engine.was_step_applied()
        if not applied and self._world.rank == 0:
            warnings.warn(
                f"DeepSpeed has skipped step {self.step_count + 1}, because the gradient contains NaN or infinity: the "
                f"parameters are unchanged, step_count stays {self.step_count}, and skipped_steps is "
                f"{self.skipped_steps + 1}.",
                RuntimeWarning,
                stacklevel=3,
            )
        return applied

    def _clear_partitions(self) -> None:
        """Clear the gradients of ZeRO 3 and of offloaded ZeRO 1 and 2, also after a step that DeepSpeed has skipped.

        They keep this rank's part of the gradients in buffers, and offloading copies it to the master parameters. They
        overwrite only gradients of parameters that a backward uses: in the buffers, that of the first micro-batch. The
        other parameters would keep the gradient of the last step that used them.
        """
        optimizer = self._engine.optimizer
        if self._zero_stage == 3:
            optimizer.grad_partitions_flat_buffer.zero_()
            masters = optimizer.fp32_partitioned_groups_flat
        elif self._is_offloaded:
            for gradient in optimizer.accumulated_grads_in_cpu.values():
                gradient.zero_()
            masters = optimizer.single_partition_of_fp32_groups
        else:
            return
        for master in masters:
            if master.grad is not None:
                master.grad.zero_()

    def _expect_micro_batch(self, *, ends_step: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(ends_step)

    _is_sharded, _format = True, "DeepSpeed"

    def _save(self, path: StrPath) -> None:
        tag, client_state = f"step{self.step_count}", {"step_count": self.step_count}
        model = self._model_state()
        contents = {**self._contents(model), **self._layout}
        do_on_all(self._world, "saving a checkpoint", lambda: as_loadable(model, "the model's state_dict"), ValueError)

        def write(folder: Path) -> None:
            self._engine.save_checkpoint(os.fspath(folder), tag, client_state)

        self._replace_folder(path, write, contents)

    @property
    def _layout(self) -> dict[str, object]:
        """The properties in which a DeepSpeed checkpoint must match the run that reads it."""
        return {"ranks": self._world.size, "zero_stage": self._zero_stage}

    def _check(self, path: Path) -> str:
        digest, contents = super()._check(path), read_manifest(path)["contents"]
        for name, here in self._layout.items():
            is_whole = name == "ranks" and not self._zero_stage  # without ZeRO, every rank reads the same file
            if contents[name] != here and not is_whole:
                raise ValueError(f"it was written with {name} = {contents[name]!r}, but this run has {name} = {here!r}")
        return digest

    def _load(self, path: Path) -> None:
        """Read the latest checkpoint in the folder ``path``. Its ranks and ZeRO stage must match this run.

        Raises:
            ValueError: the folder has no DeepSpeed checkpoint.
        """
        saved = read_manifest(path)["contents"]
        check_contents(saved, self._contents(self._model_state()), self._saves_flat)

        def reorder(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
            return with_numbers(in_groups(with_names(state, saved["groups"]), self._groups))

        hook = self.optimizer.register_load_state_dict_pre_hook(reorder) if self._saves_flat is None else None
        folder, client_state = self._engine.load_checkpoint(os.fspath(path))
        if hook is not None:
            hook.remove()
        if folder is None:
            raise ValueError("there is no DeepSpeed checkpoint in it")
        self.step_count = client_state["step_count"]

    def _model_state(self) -> dict[str, Any]:
        state = self._engine.module.state_dict(keep_vars=True)
        for name, tensor in state.items():
            if hasattr(tensor, "ds_shape"):  # ZeRO 3 keeps an empty tensor in place of a parameter
                state[name] = torch.empty(tensor.ds_shape, dtype=tensor.dtype, device="meta")
        return dict(state)

    def _group_names(self) -> Groups:
        return self._groups

    def _full_state_dict(self) -> dict[str, Any]:
        whole = {}
        for name, value in self._engine.module.state_dict(keep_vars=True).items():
            # Only ZeRO 3 shards tensors.
            with deepspeed.zero.GatheredParameters([value] if isinstance(value, Tensor) else []):
                whole[name] = copied(value)
        return whole


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set the default dtype temporarily. DeepSpeed creates buffers in the default dtype and expects fp32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _load_tensors(path: str, map_location: Any = None) -> Any:
    """Load only tensors and a few classes of DeepSpeed. DeepSpeed's ``load`` would run any code in a checkpoint."""
    with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
        return torch.load(path, map_location=map_location, weights_only=True)


_NOT_FOR_THE_PROBE = (
    *("bf16", "torch_autocast", "scheduler", "gradient_accumulation_steps"),
    *("tensorboard", "wandb", "comet", "csv_monitor", "flops_profiler", "autotuning", "wall_clock_breakdown"),
)


def _divisor(world: Ring, settings: Mapping[str, Any], mpu: Any, options: Mapping[str, Any]) -> float:
    """Measure the reducer's divisor with an engine of one parameter that uses the same process groups."""
    probe_settings = {key: value for key, value in settings.items() if key not in _NOT_FOR_THE_PROBE}
    probe_settings |= {
        "gradient_clipping": 0.0,  # without the key DeepSpeed clips at 1
        "zero_force_ds_cpu_optimizer": False,  # the probe uses plain SGD, even with offloading
    }
    probe_options = {key: value for key, value in options.items() if key == "mesh_param"}

    def reduced(gradient: float) -> float:
        module, x = probe(torch.device("cpu"), gradient)
        engine, *_ = deepspeed.initialize(
            model=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
            config=copy.deepcopy(probe_settings),
            mpu=mpu,
            **probe_options,
        )
        engine.backward(engine(x.to(engine.device)).sum())
        engine.step()
        with deepspeed.zero.GatheredParameters([module.weight]):
            value: float = -module.weight.item()
        engine.destroy()
        return value

    with _restored_groups(), _default_dtype(torch.float32):
        try:
            return measure_divisor(world, reduced)
        except RuntimeError as error:
            if groups.mesh_device is None:
                raise
            raise RuntimeError(
                f"{error} DeepSpeed has a mesh, from mesh_param= or from data_parallel_size and sequence_parallel_size "
                "in its config. At this ZeRO stage it reduces over the mesh's data axis only. Leave the mesh out, "
                "because ring ranks count as data ranks, or pass an mpu."
            ) from error


@contextlib.contextmanager
def _restored_groups() -> Iterator[None]:
    """Restore the process-wide mpu and mesh, which DeepSpeed sets for each engine, including the probe's."""
    mpu, mesh = groups.mpu, groups.mesh_device
    try:
        yield
    finally:
        groups.mpu, groups.mesh_device = mpu, mesh
