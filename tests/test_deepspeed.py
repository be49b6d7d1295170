"""The DeepSpeed adapter: everything that the shared suites ask of any adapter, and what is DeepSpeed's own.

What is marked slow completes matrices of which the rest runs always: every ZeRO stage, every set-up, each feature once.
"""

from __future__ import annotations

import copy
import math
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ring_backends.activation_checkpointing import remember_attention
from ring_backends.errors import RingMismatchError
from ring_backends.multihead import RingDilatedMultiheadAttention
from ring_backends.ring.topology import HOST_VARIABLE
from ring_backends.schedule.layout import LayoutKind
from ring_backends.testing.calls import Results, check_results, expected, local_call, whole
from ring_backends.testing.checkpoint_errors import sign
from ring_backends.testing.failing_calls import Ended, ending
from ring_backends.testing.models import OneParameter, TwoLayers
from ring_backends.testing.rings import BY_HOSTS, FOUR, TWO, RingSpec, ring_here, rows_of_ranks
from ring_backends.testing.strategies import AttentionCase
from ring_backends.testing.suite import AdapterTests, AllTrainingTests
from ring_backends.testing.traffic import planned_hops
from ring_backends.testing.training import train_in_bf16
from ring_backends.testing.training_checkpoints import save_and_load
from ring_backends.testing.training_runs import Recipe, State, check_moves, check_ranks, train, train_alone
from ring_backends.testing.training_steps import (
    check_states,
    train_two_layers,
    train_two_layers_alone,
    train_with_hooks,
)
from ring_backends.testing.unequal_ranks import check_experts, train_experts
from ring_backends.testing.world import World

ADAPTER = "ring_backends.adapters.deepspeed"
_FP32 = "DeepSpeed reduces gradients and keeps optimizer states in fp32"
WITHOUT = MappingProxyType(
    {
        "fp64 parameters": _FP32,
        "fp64 clipping": _FP32,
        "another ring size": "DeepSpeed's checkpoints hold the shards of so many ranks",
        "copies of a wrapped model": "an engine holds process groups",
    }
)
SMALL_BUFFERS = {"reduce_bucket_size": 10_000, "stage3_prefetch_bucket_size": 10_000, "sub_group_size": 100_000}
"""By default every ZeRO engine has buffers of gigabytes."""

pytest.importorskip("deepspeed")

slow = pytest.mark.slow


def slow_but(*quick: Any, of: Iterable[Any] = range(4)) -> list[Any]:
    """Values of a parameter, by default the ZeRO stages, of which all but a few are slow."""
    return [value if value in quick else pytest.param(value, marks=slow) for value in of]


def zero(stage: int, **options: Any) -> dict[str, Any]:
    """Options of ``parallelize``."""
    return {"zero_stage": stage, "config": {"zero_optimization": SMALL_BUFFERS}, **options}


class TestDeepSpeed(AdapterTests):
    adapter = ADAPTER
    core_in_matrix = True
    without = WITHOUT


def check_stage(
    world: World,
    rings: RingSpec,
    options: Mapping[str, Any],
    recipe: Recipe,
    tolerance: float,
    function: Any = train,
) -> None:
    """The same moves as in one process, and the very same numbers on all ranks."""
    by_rank = world.run(function, ADAPTER, rings, "zigzag", recipe, dict(options))
    check_ranks(by_rank, train_alone(rings, "zigzag", recipe), tolerance, f"{options} of {rings}")


@slow
class TestZeRO1(AllTrainingTests):
    adapter = ADAPTER
    without = WITHOUT
    framework_options = MappingProxyType(zero(1))


@slow
class TestZeRO2(AllTrainingTests):
    adapter = ADAPTER
    without = WITHOUT
    framework_options = MappingProxyType(zero(2))


@slow
class TestZeRO3(AllTrainingTests):
    adapter = ADAPTER
    without = MappingProxyType(
        {**WITHOUT, "parameters of some ranks": "ZeRO 3 gathers a module's parameters from all ranks when it is called"}
    )
    framework_options = MappingProxyType(zero(3))


class TestZeRO:
    """A few cases of what the classes above do in full, and what is ZeRO's own."""

    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_gradients_are_those_of_the_whole_batch(self, world: World, stage: int) -> None:
        check_stage(world, TWO, zero(stage), Recipe(dtype=torch.float32), 1e-6)

    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_replicas_stay_the_same(self, world: World, stage: int) -> None:
        recipe = Recipe(dtype=torch.float32, optimizer="momentum", rate=0.02, steps=3)
        check_stage(world, FOUR, zero(stage), recipe, 1e-4)

    @pytest.mark.parametrize("stage", [2, 3])
    def test_clipped_micro_batches(self, world: World, stage: int) -> None:
        recipe = Recipe(dtype=torch.float32, accumulation_steps=3, max_grad_norm=0.01)
        check_stage(world, TWO, zero(stage), recipe, 1e-5)

    @pytest.mark.parametrize("stage", [1, 2])
    @pytest.mark.parametrize("accumulate", [False, True], ids=["one", "two"])
    def test_ranks_may_use_different_parameters(self, world: World, stage: int, accumulate: bool) -> None:
        check_experts(world.run(train_experts, ADAPTER, (8, 10), accumulate, zero(stage)), (8, 10), accumulate)

    def test_ranks_that_call_different_modules_are_reported(self, world: World) -> None:
        for outcome in world.run_collect(train_experts, ADAPTER, (8, 10), False, zero(3)):
            assert outcome.raised(RingMismatchError), outcome
            assert "experts.0" in outcome.message, outcome
            assert "experts.1" in outcome.message, outcome

    def test_ranks_that_use_different_parameters_of_a_module_are_reported(self, world: World) -> None:
        for outcome in world.run_collect(train_two_weights):
            assert outcome.raised(RingMismatchError), outcome
            told = (
                "parameters in the order of their gradients (rank 0: ['weights.0'], rank 1: ['weights.1'], rank 2: ['"
            )
            assert told in outcome.message, outcome

    @pytest.mark.parametrize("stage", [1, 2])
    def test_gradients_may_come_in_another_order(self, world: World, stage: int) -> None:
        by_rank = world.run(train_two_layers, ADAPTER, "nothing", True, zero(stage))
        check_states(by_rank, train_two_layers_alone("nothing"))

    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_other_parameters_in_a_reentrant_checkpoint_are_reported(self, world: World, stage: int) -> None:
        """They are behind no loss, and known when their gradients are there; with ZeRO 3, when they are gathered."""
        for outcome in world.run_collect(train_in_a_reentrant_checkpoint, stage):
            assert outcome.raised(RingMismatchError), outcome
            assert "layers.0" in outcome.message, outcome

    @pytest.mark.parametrize("stage", [0, 1, 2])
    def test_hooks_of_parameters_run_once(self, world: World, stage: int) -> None:
        for moved in world.run(train_with_hooks, ADAPTER, zero(stage)):
            assert moved == pytest.approx(12.0)

    @pytest.mark.parametrize("stage", [1, 2])
    def test_other_parameters_beside_a_reentrant_checkpoint_are_reported(self, world: World, stage: int) -> None:
        for outcome in world.run_collect(train_beside_a_reentrant_checkpoint, stage):
            assert outcome.raised(RingMismatchError), outcome
            assert "use_reentrant=False" in outcome.message, outcome

    @pytest.mark.parametrize("stage", [1, 2])
    def test_gradients_of_another_loss_are_reported(self, world: World, stage: int) -> None:
        for ended in world.run(train_through_another, stage, True):
            assert ended.error == "no error", ended
        for ended in world.run(train_through_another, stage, False):
            assert ended.is_a(RuntimeError), ended
            assert "came from a backward that was not this state's" in ended.message, ended

    def test_a_parameter_that_is_not_contiguous_is_refused_by_name(self, world: World) -> None:
        for ended in world.run(transpose_a_parameter):
            assert ended.is_a(ValueError), ended
            assert "parameter layers.0.weight of strides (1, 4)" in ended.message, ended

    @pytest.mark.parametrize("stage", range(4))
    def test_a_step_with_nan_is_counted_for_what_it_was(self, world: World, stage: int) -> None:
        for before, counts, told, after in world.run(step_with_nan, zero(stage)):
            if stage == 0:  # which takes it, as the other adapters do
                assert counts == (2, 0)
                assert math.isnan(after)
                assert told == []
            else:
                assert counts == (1, 1)
                assert after == before
                assert told in ([], [SKIPPED])
        assert stage == 0 or world.run(step_with_nan, zero(stage))[0][2] == [SKIPPED]

    @pytest.mark.parametrize("stage", range(4))
    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
    def test_another_default_dtype(self, world: World, stage: int, dtype: torch.dtype) -> None:
        for moved, default in world.run(train_under_default_dtype, zero(stage), dtype):
            assert moved == 3.0
            assert default == dtype

    def test_training_goes_on_from_a_checkpoint(self, world: World, tmp_path: Path) -> None:
        recipe = Recipe(dtype=torch.float32, optimizer="adam", rate=0.02)
        path = str(tmp_path / "checkpoint")
        for uninterrupted, resumed in world.run(save_and_load, ADAPTER, TWO, recipe, path, zero(3)):
            assert resumed.losses == uninterrupted.losses

    @slow
    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_offloaded_optimizer_states(self, world: World, stage: int) -> None:
        options = zero(stage)
        options["config"] = {
            "zero_optimization": SMALL_BUFFERS | {"offload_optimizer": {"device": "cpu"}},
            "zero_force_ds_cpu_optimizer": False,
        }
        check_stage(world, TWO, options, Recipe(dtype=torch.float32), 1e-6)

    @pytest.mark.parametrize("stage", slow_but(0, 3))
    @pytest.mark.parametrize("how", slow_but("non-reentrant", of=("reentrant", "non-reentrant", "deepspeed")))
    def test_activation_checkpointing(self, world: World, stage: int, how: str) -> None:
        for states in world.run(train_checkpointed, how, zero(stage)):
            wanted = [{rename(name): tensor for name, tensor in state.items()} for state in one_step_alone()]
            check_moves(states, wanted, 1e-6, f"ZeRO {stage}, {how}")

    def test_the_hops_of_activation_checkpointing(self, world: World) -> None:
        """DeepSpeed makes those of the forward twice; not where the attention is remembered."""
        ways = ("plain", "deepspeed", "remembered", "non-reentrant", "remembered, non-reentrant")
        plain, *others = (world.run(count_checkpointed, how) for how in ways)
        for rank, (wanted, forward, messages) in enumerate(plain):
            assert forward > 0
            for how, by_rank in zip(ways[1:], others, strict=True):
                grads, *sent = by_rank[rank]
                for grad, right in zip(grads, wanted, strict=True):
                    torch.testing.assert_close(grad, right, rtol=0, atol=1e-5)
                again = 0 if "remembered" in how else forward
                assert sent == [forward, messages + again], (how, rank)

    @pytest.mark.parametrize("told_by", slow_but("model", of=("config", "model")))
    @pytest.mark.parametrize("stage", slow_but(2))
    def test_bf16_parameters(self, world: World, stage: int, told_by: str) -> None:
        """Over fp32 masters, as DeepSpeed has it."""
        options = zero(stage)
        if told_by == "config":
            options["config"]["bf16"] = {"enabled": True}
        recipe = Recipe(dtype=torch.float32 if told_by == "config" else torch.bfloat16)
        rounded = [
            {name: tensor.bfloat16() for name, tensor in state.items()} for state in train_alone(TWO, "zigzag", recipe)
        ]
        for states, seen in world.run(train_in_bf16, ADAPTER, TWO, recipe, options):
            assert seen == {torch.bfloat16}
            check_moves(states, rounded, 0.05, f"ZeRO {stage}, bf16 by the {told_by}")


class TwoWeights(nn.Module):
    """Of which a rank uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weights[dist.get_rank() % 2]


def train_two_weights() -> None:
    from ring_backends.adapters import deepspeed as backend

    ring = ring_here(ADAPTER, TWO)
    state = backend.parallelize(TwoWeights(), lambda x: torch.optim.SGD(x, lr=1.0), ring, zero_stage=3)
    state.backward(state.loss(state.model(torch.ones(4)).sum(), 1))


def train_in_a_reentrant_checkpoint(stage: int) -> None:
    """Each rank uses one of two layers, in a part that is computed again in the backward."""
    state = parallelize_here(zero(stage), TwoLayers())

    def run(x: Tensor) -> Tensor:
        out: Tensor = state.model(x, 0, [dist.get_rank() % 2])
        return out

    x = torch.ones(2, 4, requires_grad=True)
    state.backward(state.loss(checkpoint(run, x, use_reentrant=True).sum(), 2))
    state.step()


def train_beside_a_reentrant_checkpoint(stage: int) -> None:
    """Each rank uses one of two layers, and all of them the other model's, which is computed again in the backward."""
    model = nn.ModuleDict({"own": TwoLayers(), "shared": nn.Linear(4, 4)})
    state = parallelize_here(zero(stage), model)
    x = torch.ones(2, 4, requires_grad=True)
    shared = checkpoint(state.model.module["shared"], x, use_reentrant=True)
    own = state.model.module["own"](x.detach(), 0, [dist.get_rank() % 2])
    state.backward(state.loss((shared + own).sum(), 2))


def train_through_another(stage: int, is_frozen: bool) -> Ended:
    """A loss of one state goes through the model of another one, which is trained by a loss of its own after it."""
    first, second = (parallelize_here(zero(stage), TwoLayers()) for _ in range(2))
    x = torch.ones(1, 4)
    second.model.requires_grad_(not is_frozen)
    first.backward(first.loss(second.model.module(first.model(x, 0), 0).sum(), 1))
    first.step()
    second.model.requires_grad_(True)
    return ending(lambda: second.backward(second.loss(second.model(x, 0).sum(), 1)))


def transpose_a_parameter() -> Ended:
    model = TwoLayers()
    weight = model.get_parameter("layers.0.weight")
    weight.data = weight.data.T
    return ending(lambda: parallelize_here(zero(1), model))


SKIPPED = (
    "DeepSpeed has skipped the step after step 1, since the gradient has a NaN or an infinity: the parameters are as "
    "before, and step_count stays 1; skipped_steps is 1."
)


def step_with_nan(options: Mapping[str, Any]) -> tuple[float, tuple[int, int], list[str], float]:
    """The parameter after a step, the counts after one more whose gradient is NaN, what was told, and the parameter."""
    state = parallelize_here(options)
    values, told = [], []
    for gradient in (1.0, math.nan):
        state.backward(state.loss(state.model(torch.tensor([gradient])).sum(), 1))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state.step()
        told += [str(warning.message) for warning in caught if warning.category is RuntimeWarning]
        values.append(float(state.full_state_dict()["weight"]))
    return values[0], (state.step_count, state.skipped_steps), told, values[1]


def train_under_default_dtype(options: Mapping[str, Any], dtype: torch.dtype) -> tuple[float, torch.dtype]:
    """How far a parameter moves whose gradient is 3, and the default dtype afterwards."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        state = parallelize_here(options)
        state.backward(state.loss(state.model(torch.tensor([3.0], dtype=torch.float32)).sum(), 1))
        state.step()
        return -float(state.full_state_dict()["weight"]), torch.get_default_dtype()
    finally:
        torch.set_default_dtype(before)


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


def parallelize_a_scalar(stage: int) -> Ended:
    from ring_backends.adapters import deepspeed as backend

    ring = ring_here(ADAPTER, TWO)
    assert ring is not None
    return ending(lambda: backend.parallelize(Scalar(), lambda x: torch.optim.SGD(x, lr=1.0), ring, **zero(stage)))


HOPS = AttentionCase(seq_len=48, segment_lengths=(12, 48), dilation_rates=(1, 2), num_heads=4, num_kv_heads=4)


def count_hops(layout: LayoutKind, case: AttentionCase) -> tuple[int, int, int, int, int]:
    """What comms_logger counted of one call: hops, bytes sent and received, and other operations; and what the ring
    counted: messages and bytes."""
    import deepspeed.comm as comm

    ring = ring_here(ADAPTER, FOUR)
    assert ring is not None
    ring = ring.with_layout(layout)
    call = local_call(ADAPTER, ring, case)
    logger = comm.comm.comms_logger
    torch.autograd.grad(call(), [call.query, call.key, call.value], call.grad_out)  # now the ranks agree on this call
    logger.comms_dict.clear()
    ring.traffic.reset()
    comm.configure(enabled=True, prof_all=True)
    try:
        torch.autograd.grad(call(), [call.query, call.key, call.value], call.grad_out)
    finally:
        comm.configure(enabled=False)
    hops = logger.comms_dict.pop("batch_isend_irecv", {})
    others = len(logger.comms_dict)
    logger.comms_dict.clear()
    count = sum(record[0] for record in hops.values())
    size = sum(size * record[0] for size, record in hops.items())
    return count, size, others, ring.traffic.messages, ring.traffic.bytes


class TestCommsLogger:
    """Hops are one logged batch each; deepspeed.comm logs no single isend and irecv of a batch."""

    @pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
    @pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
    def test_counts_the_hops_of_the_schedule(self, world: World, layout: LayoutKind, is_causal: bool) -> None:
        case = replace(HOPS, is_causal=is_causal)
        counted = world.run(count_hops, layout, case)
        for rank, (hops, _, others, _, _) in enumerate(counted):
            directions = [planned_hops(case, FOUR, layout, rank, backward=backward) for backward in (False, True)]
            assert hops == sum(directions) > 0
            assert others == 0
        # Whatever is sent is received, and comms_logger counts both ends.
        assert sum(size for _, size, *_ in counted) == 2 * sum(sent for *_, sent in counted)

    def test_counts_one_message_per_hop_of_full_attention(self, world: World) -> None:
        """By hand: K and V of the three other ranks pass twice, and dK and dV thrice."""
        case = replace(HOPS, segment_lengths=(48,), dilation_rates=(1,))
        for hops, size, _, messages, sent in world.run(count_hops, "contiguous", case):
            assert hops == messages == 3 + 3 + 3
            assert size == 2 * sent


def what_deepspeed_built() -> tuple[bool, bool]:
    """Whether the shared-memory all-reduce was built, and whether its choice of operators is as DeepSpeed left it."""
    import deepspeed
    import deepspeed.comm as comm

    assert ring_here(ADAPTER, FOUR) is not None
    built = comm.comm.cdb.shm_comm_op is not None
    found = vars(deepspeed.ops).get("__compatible_ops__")
    return built, found is None or "deepspeed_shm_comm" in found


def test_nothing_is_compiled_to_start(world: World) -> None:
    for built, left_alone in world.run(what_deepspeed_built):
        assert not built
        assert left_alone


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


def parallelize_here(options: Mapping[str, Any], model: nn.Module | None = None) -> Any:
    from ring_backends.adapters import deepspeed as backend

    ring = ring_here(ADAPTER, TWO)
    assert ring is not None
    model = OneParameter().float() if model is None else model
    return backend.parallelize(model, lambda parameters: torch.optim.SGD(parameters, lr=1.0), ring, **options)


def parallelize_badly(options: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> Ended:
    return ending(lambda: parallelize_here(options, OneParameter().to(dtype)))


def parallelize_with_a_mesh(options: dict[str, Any]) -> tuple[Ended, float]:
    """A set-up with a mesh; and the divisor of one without, after it."""
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
        told, options = BAD_CONFIGURATIONS[name]
        for ended in world.run(parallelize_badly, options):
            assert ended.is_a(ValueError), ended
            assert told in ended.message, ended

    def test_a_config_that_is_no_dict_is_refused(self, world: World) -> None:
        for ended in world.run(parallelize_badly, {"config": "ds_config.json"}):
            assert ended.is_a(TypeError), ended
            assert "config = 'ds_config.json'" in ended.message

    def test_a_bf16_model_has_no_use_for_autocast(self, world: World) -> None:
        for ended in world.run(parallelize_badly, zero(1, mixed_precision=torch.bfloat16), torch.bfloat16):
            assert ended.is_a(ValueError), ended
            assert "parameter weight of torch.bfloat16" in ended.message

    @pytest.mark.parametrize("stage", range(4))
    def test_a_parameter_of_no_dimension_is_refused_by_name(self, world: World, stage: int) -> None:
        for ended in world.run(parallelize_a_scalar, stage):
            assert ended.is_a(ValueError), ended
            assert "parameter scale of no dimension" in ended.message, ended
            assert "[1]" in ended.message, ended

    def test_an_fp64_model_is_refused(self, world: World) -> None:
        for ended in world.run(parallelize_badly, zero(1), torch.float64):
            assert ended.is_a(ValueError), ended
            assert "parameter weight of torch.float64" in ended.message

    def test_the_users_config_passes_through_unchanged(self, world: World) -> None:
        assert world.run(the_config_is_left_alone) == [True] * 4

    @pytest.mark.parametrize("stage", [0, 1, 2])
    @pytest.mark.parametrize("how", ["mesh_param", "both sizes"])
    def test_setups_in_which_replicas_drift_are_refused(self, world: World, stage: int, how: str) -> None:
        """DeepSpeed reduces over the data axis of such a mesh alone. It leaves no trace for engines made later."""
        options = zero(stage)
        if how == "mesh_param":
            options["mesh_param"] = (2, 2)
        else:
            options["config"] |= {"data_parallel_size": 2, "sequence_parallel_size": 2}
        for ended, divisor in world.run(parallelize_with_a_mesh, options):
            assert ended.is_a(RuntimeError), ended
            assert "drift" in ended.message
            assert "mesh_param" in ended.message
            assert divisor == pytest.approx(4)


def test_more_backwards_than_a_step_has_are_refused(world: World) -> None:
    for first, second, next_step in world.run(backward_too_often):
        assert first.error == next_step.error == "no error"
        assert second.is_a(RuntimeError), second
        assert "accumulation_steps" in second.message


@cache
def mpu_here() -> Any:
    """DeepSpeed's own mpu, with sequence-parallel groups of two."""
    import deepspeed.runtime.sequence_parallel.parallel_state_sp as mpu

    assert ring_here(ADAPTER, TWO) is not None  # deepspeed.comm runs
    mpu.initialize_sequence_parallel(2)
    return mpu


@pytest.fixture(scope="class")
def mpu_world(world: World) -> Iterator[World]:
    """The ranks, for engines with an mpu or a mesh; DeepSpeed would keep it for the engines of later tests."""
    yield world
    world.run(forget_groups)


def forget_groups() -> None:
    from deepspeed.utils import groups

    groups.mpu = groups.mesh_device = None


def rings_of_mpu() -> list[tuple[Any, ...]]:
    """Rings from the mpu, from its group, and with no such thing; each has sent something around."""
    from ring_backends.adapters import deepspeed as backend

    mpu = mpu_here()
    rings = [
        backend.initialize(mpu=mpu),
        backend.initialize(mpu=mpu.get_sequence_parallel_group()),
        backend.initialize(group=mpu.get_sequence_parallel_group()),
    ]
    seen = []
    for ring in rings:
        local_call(ADAPTER, ring, HOPS)()
        seen.append((ring.ranks, ring.data_size, ring.data_rank, ring.traffic.messages, ring.group is None))
    return seen


def train_with_mpu(
    adapter: str, rings: RingSpec, layout: LayoutKind, recipe: Recipe, options: dict[str, Any]
) -> list[State]:
    return train(adapter, rings, layout, recipe, {**options, "mpu": mpu_here()})


def divisor_with_mpu(options: dict[str, Any]) -> float:
    divisor: float = parallelize_here({**options, "mpu": mpu_here()}).divisor
    return divisor


NEEDS: Any = {"seq_len": 16, "segment_lengths": [16], "dilation_rates": [1], "num_heads": 2, "head_dim": 4}
"""What ``ring_size="auto"`` wants to know."""


def bad_groups() -> list[Ended]:
    from ring_backends.adapters import deepspeed as backend

    mpu = mpu_here()
    return [
        ending(lambda: backend.initialize(mpu=mpu, group=dist.group.WORLD)),
        ending(lambda: backend.initialize(mpu="Megatron")),
        ending(lambda: backend.initialize(4, mpu=mpu)),
        ending(lambda: backend.initialize(mpu=mpu, ring_order="topology")),
        ending(lambda: backend.initialize("auto", mpu=mpu, **NEEDS)),
    ]


class TestMpu:
    def test_a_ring_from_an_mpu(self, mpu_world: World) -> None:
        for rank, seen in enumerate(mpu_world.run(rings_of_mpu)):
            first = rank // 2 * 2
            assert seen == [((first, first + 1), 2, rank // 2, 1, False)] * 3

    @pytest.mark.parametrize("stage", slow_but(2, 3))
    def test_gradients_are_those_of_the_whole_batch(self, mpu_world: World, stage: int) -> None:
        check_stage(mpu_world, TWO, zero(stage), Recipe(dtype=torch.float32), 1e-6, train_with_mpu)

    @slow
    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    def test_clipping_and_micro_batches(self, mpu_world: World, stage: int) -> None:
        recipe = Recipe(dtype=torch.float32, accumulation_steps=2, max_grad_norm=0.01)
        check_stage(mpu_world, TWO, zero(stage), recipe, 1e-5, train_with_mpu)

    @pytest.mark.parametrize(("stage", "divisor"), [(0, 2), (1, 2), (2, 2), (3, 4)])
    def test_the_reducer_divides_by_data_or_by_all_ranks(self, mpu_world: World, stage: int, divisor: int) -> None:
        assert mpu_world.run(divisor_with_mpu, zero(stage)) == pytest.approx([divisor] * 4)

    @slow
    def test_zero_3_reduces_over_all_ranks_of_a_mesh(self, mpu_world: World) -> None:
        """So that this stage is right where the others drift."""
        check_stage(mpu_world, TWO, zero(3, mesh_param=(2, 2)), Recipe(dtype=torch.float32, steps=3, rate=0.02), 1e-4)
        mpu_world.run(forget_groups)

    def test_groups_without_a_ring_are_refused(self, mpu_world: World) -> None:
        for two, unknown, size, *arranged in mpu_world.run(bad_groups):
            assert two.is_a(ValueError), two
            assert "group" in two.message
            assert "mpu" in two.message
            assert unknown.is_a(TypeError), unknown
            assert "mpu = 'Megatron'" in unknown.message
            assert size.is_a(ValueError), size
            assert "ring_size = 4" in size.message
            for ended, told in zip(arranged, ("ring_order = 'topology'", "ring_size = 'auto'"), strict=True):
                assert ended.is_a(ValueError), ended
                assert ended.message.startswith(f"{told}: mpu is given"), ended


class Burglar:
    """What a pickle must not be able to do."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.mark,)


def load_a_poisoned_checkpoint(path: str, stage: int, files: str, mark: str) -> Ended:
    state = parallelize_here(zero(stage))
    state.save(path)
    dist.barrier()
    for file in Path(path).rglob(files):
        if dist.get_rank() == 0:
            torch.save({**torch.load(file, weights_only=False), "burglar": Burglar(mark)}, file)
            sign(Path(path))
    dist.barrier()
    return ending(lambda: state.load(path))


def load_nothing(path: str) -> Ended:
    state = parallelize_here(zero(0))
    return ending(lambda: state.load(path))


class TestCheckpoints:
    @pytest.mark.parametrize(("stage", "files"), [(0, "*model_states.pt"), (2, "*optim_states.pt")])
    def test_code_in_a_checkpoint_is_not_run(self, world: World, stage: int, files: str, tmp_path: Path) -> None:
        """DeepSpeed's own loading would run it."""
        mark = tmp_path / "mark"
        for ended in world.run(load_a_poisoned_checkpoint, str(tmp_path / "run"), stage, files, str(mark)):
            assert ended.is_a(ValueError), ended
            assert "UnpicklingError" in ended.message, ended
        assert not mark.exists()

    def test_a_folder_without_one_is_named(self, world: World, tmp_path: Path) -> None:
        for ended in world.run(load_nothing, str(tmp_path / "nothing")):
            assert ended.is_a(FileNotFoundError), ended
            assert str(tmp_path / "nothing") in ended.message


ALONE = """
import torch
from ring_backends.adapters import deepspeed as backend

ring = backend.initialize()
attention = backend.RingDilatedAttention([4, 8], [1, 2], ring=ring)
x = torch.randn(1, 8, 2, 4)
print(attention(x, x, x).shape, torch.distributed.is_initialized())
model = torch.nn.Linear(2, 1)
state = backend.parallelize(model, lambda p: torch.optim.SGD(p, lr=0.1), ring, zero_stage=2)
state.backward(state.loss(state.model(torch.ones(1, 2)).sum(), 1))
state.step()
print(state.divisor, sorted(state.full_state_dict()))
"""


def test_one_process_without_a_launcher(tmp_path: Path) -> None:
    """Nor a compiler: there is no program to be found but Python."""
    keep = ("HOME", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
    environment = {name: os.environ[name] for name in keep if name in os.environ} | {"PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", ALONE], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "torch.Size([1, 8, 2, 4]) False" in done.stdout
    assert "1.0 ['bias', 'weight']" in done.stdout


@cache
def ulysses_ring(ring_size: int, ulysses_size: int) -> Any:
    from ring_backends.adapters import deepspeed as backend

    return backend.initialize(ring_size, timeout=timedelta(seconds=60), ulysses_size=ulysses_size)


TRADES = pytest.mark.parametrize(
    ("ring_size", "ulysses_size"),
    [(4, 2), pytest.param(4, 4, marks=slow), pytest.param(2, 2, marks=slow)],
    ids=["ring 2 x 2", "ring 1 x 4", "data 2 x ring 1 x 2"],
)
WITH_TRADES = AttentionCase(
    seq_len=48,
    segment_lengths=(16, 48),
    dilation_rates=(2, 4),
    batch=2,
    num_heads=8,
    num_kv_heads=4,
    dtype=torch.float64,
)
TRADED: dict[str, dict[str, Any]] = {
    "mod": {},
    "a rate above the share of heads": {"dilation_rates": (3, 5), "is_causal": True},
    "block": {"offset": "block", "is_causal": True},
    "branch": {"offset": "branch"},
    "grouped": {"head_mode": "grouped", "is_causal": True},
    "grouped unevenly": {"head_mode": "grouped", "segment_lengths": (8, 16, 48), "dilation_rates": (1, 2, 3)},
    "phantoms": {"offset": "block", "padding": "zeros", "segment_lengths": (16, 48)},
    "mask": {"masked": "random"},
    "causal mask": {"masked": "random", "is_causal": True},
    "fp32": {"dtype": torch.float32},
}


def attend_with_trades(ring_size: int, ulysses_size: int, layout: LayoutKind, case: AttentionCase) -> Results:
    ring = ulysses_ring(ring_size, ulysses_size).with_layout(layout)
    call = local_call(ADAPTER, ring, case)
    out, lse = call(return_lse=True)
    grads = torch.autograd.grad(out, [call.query, call.key, call.value], call.grad_out)
    again = call()
    assert torch.equal(again, out)
    return Results(out.detach(), lse, *grads)


@cache
def ulysses_ring_by_hosts() -> Any:
    from ring_backends.adapters import deepspeed as backend

    with mock.patch.dict(os.environ, {HOST_VARIABLE: BY_HOSTS.hosts[dist.get_rank()]}):
        return backend.initialize(timeout=timedelta(seconds=60), ulysses_size=2, ring_order="topology")


def attend_with_trades_by_hosts(layout: LayoutKind, case: AttentionCase) -> tuple[int, tuple[int, ...], Results]:
    """Ring rank, ranks of the hop ring, results."""
    ring = ulysses_ring_by_hosts().with_layout(layout)
    call = local_call(ADAPTER, ring, case)
    out, lse = call(return_lse=True)
    grads = torch.autograd.grad(out, [call.query, call.key, call.value], call.grad_out)
    return ring.rank, ring.hop_ring.ranks, Results(out.detach(), lse, *grads)


def sizes_with_trades(ring_size: int, ulysses_size: int) -> tuple[Any, ...]:
    ring = ulysses_ring(ring_size, ulysses_size)
    ring.traffic.reset()
    local_call(ADAPTER, ring, replace(WITH_TRADES, segment_lengths=(48,), dilation_rates=(1,)))()
    x = torch.arange(48.0).view(1, 48)
    shard = ring.shard(x)
    assert torch.equal(shard[0].long(), ring.positions(48))
    assert torch.equal(ring.unshard(shard, seq_len=48), x)
    return ring.size, ring.rank, ring.data_size, ring.data_rank, ring.hop_ring.ranks, ring.traffic.messages


class SmallModel(nn.Module):
    """Tokens [batch, local seq] to logits, with rotary positions."""

    def __init__(self, ring: Any) -> None:
        super().__init__()
        from ring_backends.adapters import deepspeed as backend

        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 32)
        attention = backend.RingDilatedAttention([8, 32], [1, 3], ring=ring)
        self.layer = RingDilatedMultiheadAttention(32, 4, attention, num_kv_heads=2, rotary=True)
        self.head = nn.Linear(32, 11)

    def forward(self, tokens: Tensor, seq_len: int) -> Tensor:
        logits: Tensor = self.head(self.layer(self.embedding(tokens), is_causal=True, seq_len=seq_len))
        return logits


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1024.0)


def train_with_trades(options: dict[str, Any]) -> list[State]:
    """One step on a ring of four ranks that trade in pairs."""
    from ring_backends.adapters import deepspeed as backend

    ring = ulysses_ring(4, 2)
    return one_step(backend.parallelize(SmallModel(ring), sgd, ring, **options), ring)


def one_step(state: Any, ring: Any) -> list[State]:
    states = [state.full_state_dict()]
    tokens, labels = (ring.shard(x) for x in a_batch())
    state.backward(state.loss(loss_sum(state.model(tokens, 32), labels), (labels >= 0).sum()))
    state.step()
    return [*states, state.full_state_dict()]


def one_step_alone() -> list[State]:
    model = SmallModel(None)
    states = [copy.deepcopy(model.state_dict())]
    optimizer = sgd(model.parameters())
    tokens, labels = a_batch()
    (loss_sum(model(tokens, 32), labels) / (labels >= 0).sum()).backward()
    optimizer.step()
    return [*states, model.state_dict()]


def a_batch() -> tuple[Tensor, Tensor]:
    """Tokens and labels [2, 32]; the last quarter has no labels."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(11, (2, 32), generator=generator)
    labels = tokens.roll(-1, 1)
    labels[:, 24:] = -100
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    return tokens, labels


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)


def bad_trades() -> list[Ended]:
    from ring_backends.adapters import deepspeed as backend

    ring = ulysses_ring(4, 2)

    def attend(**changes: Any) -> Any:
        layout: LayoutKind = changes.pop("layout", "contiguous")
        return local_call(ADAPTER, ring.with_layout(layout), replace(WITH_TRADES, **changes))()

    return [
        ending(lambda: backend.initialize(ulysses_size=0)),
        ending(lambda: backend.initialize(ulysses_size=3)),
        ending(lambda: backend.initialize(ulysses_size=2.0)),
        ending(lambda: backend.initialize("auto", ulysses_size=2, **NEEDS)),
        ending(lambda: attend(num_heads=3, num_kv_heads=3)),
        ending(lambda: attend(num_heads=4, num_kv_heads=1)),
        ending(lambda: attend(seq_len=46)),
        ending(lambda: attend(seq_len=44, layout="zigzag")),
        ending(lambda: attend(segment_lengths=(8,) * 5, dilation_rates=(1,) * 5, num_heads=4, head_mode="grouped")),
    ]


def disagree_with_trades() -> list[Ended]:
    """Rank 3 comes with a larger batch, and then without the others' autocast."""
    from ring_backends.adapters import deepspeed as backend

    ring = backend.initialize(timeout=timedelta(seconds=30), ulysses_size=2)
    case = replace(WITH_TRADES, batch=3 if ring.rank == 3 else 2, dtype=torch.float32)
    call = local_call(ADAPTER, ring, replace(WITH_TRADES, dtype=torch.float32))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=ring.rank != 3):
        return [ending(local_call(ADAPTER, ring, case)), ending(call)]


def copies_with_trades() -> tuple[list[bool], Ended]:
    """A deep copy attends alike; a pickled one says that it is not connected, until it is given a ring."""
    ring = ulysses_ring(4, 2)
    call = local_call(ADAPTER, ring, WITH_TRADES)
    out = call()
    twin = replace(call, attention=copy.deepcopy(call.attention))
    pickled = replace(call, attention=pickle.loads(pickle.dumps(call.attention)))
    unconnected = ending(pickled)
    pickled.attention.ring = ring
    return [torch.equal(copied(), out) for copied in (twin, pickled)], unconnected


class Checkpointed(nn.Module):
    """A layer that is computed again in backward."""

    def __init__(self, layer: nn.Module, how: str) -> None:
        super().__init__()
        self.layer = layer
        self.how = how

    def forward(self, x: Tensor, **options: Any) -> Any:
        if self.how == "deepspeed":
            from deepspeed import checkpointing

            return checkpointing.checkpoint(partial(self.layer, **options), x)
        return checkpoint(partial(self.layer, **options), x, use_reentrant=self.how == "reentrant")


def count_checkpointed(how: str) -> tuple[list[Tensor], int, int]:
    """Gradients of two checkpointed calls of attention, and the messages of this rank in the forward, and in all."""
    from deepspeed import checkpointing
    from deepspeed.runtime.activation_checkpointing.checkpointing import non_reentrant_checkpoint

    ring = ring_here(ADAPTER, FOUR)
    assert ring is not None
    call = local_call(ADAPTER, ring, HOPS)
    inputs = [call.query, call.key, call.value]
    run = non_reentrant_checkpoint if "non-reentrant" in how else checkpointing.checkpoint
    ring.traffic.reset()
    out = call.query
    for _ in range(2):
        region: Any = partial(call.attention, **call.options)
        if "remembered" in how:
            region = remember_attention(region)
        out = region(out, call.key, call.value) if how == "plain" else run(region, out, call.key, call.value)
    forward = ring.traffic.messages
    out.backward(call.grad_out)
    return [x.grad for x in inputs], forward, ring.traffic.messages  # type: ignore[misc]


def rename(name: str) -> str:
    return name.replace("layer.", "layer.layer.", 1)


def train_checkpointed(how: str, options: dict[str, Any]) -> list[State]:
    """One step on a ring of four ranks, with the attention layer computed twice."""
    from ring_backends.adapters import deepspeed as backend

    ring = ring_here(ADAPTER, FOUR)
    model = SmallModel(ring)
    model.layer = Checkpointed(model.layer, how)  # type: ignore[assignment]
    return one_step(backend.parallelize(model, sgd, ring, **options), ring)


class TestUlysses:
    @pytest.mark.parametrize("name", TRADED)
    @pytest.mark.parametrize("layout", slow_but("zigzag", of=("contiguous", "zigzag")))
    @TRADES
    def test_output_and_gradients_are_those_of_one_process(
        self, world: World, ring_size: int, ulysses_size: int, layout: LayoutKind, name: str
    ) -> None:
        case = replace(WITH_TRADES, **TRADED[name])
        by_rank = world.run(attend_with_trades, ring_size, ulysses_size, layout, case)
        tolerance = 1e-10 if case.dtype == torch.float64 else 1e-4
        for first in range(0, 4, ring_size):
            got = whole(by_rank[first : first + ring_size], case.seq_len, layout)
            check_results(got, expected(case), tolerance, case)

    @pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
    def test_neighbours_by_hosts_trade(self, world: World, layout: LayoutKind) -> None:
        case = replace(WITH_TRADES, is_causal=True, masked="random")
        by_rank = world.run(attend_with_trades_by_hosts, layout, case)
        hop_rings = [(0, 1), (3, 2), (0, 1), (3, 2)]
        found = [by_rank[rank] for rank in BY_HOSTS.rings[0]]
        assert [answer[:2] for answer in found] == [(rank, hop_rings[rank]) for rank in range(4)]
        check_results(whole([answer[2] for answer in found], case.seq_len, layout), expected(case), 1e-10, case)

    @TRADES
    def test_sizes_positions_and_hops(self, world: World, ring_size: int, ulysses_size: int) -> None:
        """Ring size, data size, shards and positions are those without trades; hops are fewer."""
        hop_ring_size = ring_size // ulysses_size
        for rank, seen in enumerate(world.run(sizes_with_trades, ring_size, ulysses_size)):
            first = rank // ring_size * ring_size
            hop_ring = tuple(range(first + rank % ulysses_size, first + ring_size, ulysses_size))
            assert seen == (ring_size, rank - first, 4 // ring_size, rank // ring_size, hop_ring, hop_ring_size - 1)

    @pytest.mark.parametrize("stage", slow_but(3))
    def test_training(self, world: World, stage: int) -> None:
        for states in world.run(train_with_trades, zero(stage)):
            check_moves(states, one_step_alone(), 1e-6, f"ZeRO {stage}")

    def test_unsupported_exchanges_are_refused(self, world: World) -> None:
        told = (
            (ValueError, "ulysses_size = 0"),
            (ValueError, "ulysses_size = 3"),
            (TypeError, "ulysses_size = 2.0"),
            (ValueError, "ring_size = 'auto': ulysses_size = 2"),
            (ValueError, "query has 3 heads with ulysses_size = 2"),
            (ValueError, "key has 1 heads with ulysses_size = 2"),
            (ValueError, "seq_len = 46 with ulysses_size = 2"),
            (ValueError, "a zigzag ring of 4 needs a multiple of 8"),
            (ValueError, "head_mode='grouped' with 4 heads and 5 branches"),
        )
        for endings in world.run(bad_trades):
            for ended, (error, text) in zip(endings, told, strict=True):
                assert ended.is_a(error), ended
                assert text in ended.message, ended

    def test_ranks_that_disagree_are_reported_at_once(self, world: World) -> None:
        for batch, autocast in world.run(disagree_with_trades):
            assert batch.error == autocast.error == "RingMismatchError", (batch, autocast)
            assert "batch (rank 0: 2, rank 1: 2, rank 2: 2, rank 3: 3)" in batch.message
            assert "dtype (rank 0: torch.bfloat16" in autocast.message
            assert "rank 3: torch.float32" in autocast.message

    def test_copies(self, world: World) -> None:
        for same, pickled in world.run(copies_with_trades):
            assert same == [True, True]
            assert pickled.is_a(RuntimeError), pickled
            assert "initialize()" in pickled.message


def test_rows_are_where_the_layout_says() -> None:
    """Why zigzag needs a multiple of 2 × ring size: only then do a group's rows make up a shard of the hop ring."""
    for ranks in ((0, 1), (2, 3)):
        group = torch.cat([rows_of_ranks(48, 4, "zigzag")[rank] for rank in ranks]).sort().values
        assert torch.equal(group, rows_of_ranks(48, 2, "zigzag")[ranks[0] // 2])
