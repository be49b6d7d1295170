"""The DeepSpeed adapter passes the shared suites. comms_logger counts its hops. Checkpoints run no code.

The quick command runs every ZeRO stage, set-up and feature once, and the matrix the whole suites with stages 0, 2, 3.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
import torch.distributed as dist
from command_line import check_alone
from torch import Tensor

from ring_backends.schedule.layout import LayoutKind
from ring_backends.testing.calls import expected, local_call, new_attention
from ring_backends.testing.failing_calls import ending
from ring_backends.testing.marks import MORE_CASES, matrix_but
from ring_backends.testing.models import WithExtraState
from ring_backends.testing.rings import FOUR, LAYOUTS, MESH_COLUMNS, TWO, ring_here, ring_of
from ring_backends.testing.strategies import AttentionCase
from ring_backends.testing.suite import A_GRADIENT, EVERY_ADAPTER, AdapterTests, AllTrainingTests
from ring_backends.testing.traffic import planned_hops
from ring_backends.testing.training import TrainingTests
from ring_backends.testing.training_checkpoints import Intruder, check_extra_state, sign
from ring_backends.testing.training_steps import EarlyStepTests
from ring_backends.testing.unequal_ranks import UnusedParameterTests
from ring_backends.testing.world import World, on_every_rank

pytest.importorskip("deepspeed")

from deepspeed_cases import ADAPTER, HOPS, WITHOUT, WITHOUT_ZERO, parallelize_here, zero


class TestDeepSpeed(AdapterTests):
    adapter = ADAPTER
    core_in_matrix = True
    quick = EVERY_ADAPTER
    without = WITHOUT


class TestZeRO1(TrainingTests, EarlyStepTests, UnusedParameterTests):
    """Whole gradients are kept until the end of a step. Errors, comparisons and checkpoints are those of stage 2."""

    adapter = ADAPTER
    without = WITHOUT_ZERO
    framework_options = MappingProxyType(zero(1))
    quick, more_cases = A_GRADIENT, False


class TestZeRO2(AllTrainingTests):
    adapter = ADAPTER
    without = WITHOUT_ZERO
    framework_options = MappingProxyType(zero(2))
    quick, more_cases = A_GRADIENT, False


class TestZeRO3(TestZeRO1):
    framework_options = MappingProxyType(zero(3))


def count_hops(layout: LayoutKind, case: AttentionCase) -> tuple[int, int, int, int, int]:
    """Count the hops of a call.

    Returns:
        Hops, bytes sent and received, and other operations, as comms_logger counts them; messages and bytes, as the
        ring counts them.
    """
    import deepspeed.comm as comm

    ring = ring_of(ADAPTER, FOUR, layout)
    call = local_call(ADAPTER, ring, case)
    logger = comm.comm.comms_logger
    call.gradients(call())  # the ranks agree on this call
    logger.comms_dict.clear()
    ring.traffic.reset()
    comm.configure(enabled=True, prof_all=True)
    try:
        call.gradients(call())
    finally:
        comm.configure(enabled=False)
    hops = logger.comms_dict.pop("batch_isend_irecv", {})
    others = len(logger.comms_dict)
    logger.comms_dict.clear()
    count = sum(record[0] for record in hops.values())
    size = sum(size * record[0] for size, record in hops.items())
    return count, size, others, ring.traffic.messages, ring.traffic.bytes


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_comms_logger_counts_the_hops_of_the_schedule(world: World, layout: LayoutKind, is_causal: bool) -> None:
    """It shows each hop as one batch. deepspeed.comm does not log the isend and irecv within a batch."""
    case = replace(HOPS, is_causal=is_causal)
    counted = world.run(count_hops, layout, case)
    for rank, (hops, _, others, _, _) in enumerate(counted):
        directions = [planned_hops(case, FOUR, layout, rank, backward=backward) for backward in (False, True)]
        assert hops == sum(directions) > 0
        assert others == 0
    # comms_logger counts each message at the sender and at the receiver.
    assert sum(size for _, size, *_ in counted) == 2 * sum(sent for *_, sent in counted)


@pytest.mark.parametrize("layout", matrix_but("zigzag", of=LAYOUTS))
@on_every_rank
def test_a_module_within_the_attention_of_deepspeed(layout: LayoutKind) -> None:
    """DeepSpeed's class exchanges rows for heads outside of a module, whose ring has every second rank.

    It numbers the heads of each rank from 0. The pattern is the same for all heads.
    """
    from deepspeed.sequence.layer import DistributedAttention

    case = replace(HOPS, segment_lengths=(48,), dilation_rates=(1,), is_causal=True, dtype=torch.float64)
    case = replace(case, num_kv_heads=2, masked="random")
    ring, pair = ring_of(ADAPTER, MESH_COLUMNS, layout), ring_of(ADAPTER, TWO)

    def rows(whole: Tensor) -> Tensor:
        return ring.shard(whole).chunk(2, 1)[pair.rank]

    *tensors, grad_out, mask = case.tensors()
    assert mask is not None
    inputs = [rows(x).requires_grad_() for x in tensors]
    attention = DistributedAttention(new_attention(ADAPTER, ring, case), pair.group, scatter_idx=2, gather_idx=1)
    options = {"is_causal": True, "seq_len": case.seq_len, "key_padding_mask": ring.shard(mask)}
    out = attention(*inputs, 0, None, **options)
    got, wanted = [out, *torch.autograd.grad(out, inputs, rows(grad_out))], expected(case)
    exact = [rows(x) for x in (wanted.out, *wanted[2:5]) if x is not None]
    torch.testing.assert_close(got, exact, rtol=0, atol=1e-10)


@on_every_rank
def test_start_compiles_no_extension() -> None:
    """DeepSpeed's table of operators stays as it is."""
    import deepspeed
    import deepspeed.comm as comm

    assert ring_here(ADAPTER, FOUR) is not None
    assert comm.comm.cdb.shm_comm_op is None, "the shared-memory all-reduce was built"
    found = vars(deepspeed.ops).get("__compatible_ops__")
    assert found is None or "deepspeed_shm_comm" in found, found


@pytest.mark.parametrize(
    ("stage", "files"), [pytest.param(0, "*model_states.pt", marks=MORE_CASES), (2, "*optim_states.pt")]
)
@on_every_rank
def test_code_in_a_checkpoint_is_not_run(stage: int, files: str, tmp_path: Path) -> None:
    """DeepSpeed's own loader would run this code."""
    state, path, mark = parallelize_here(zero(stage)), tmp_path / "run", tmp_path / "mark"
    state.save(path)
    dist.barrier()
    for file in path.rglob(files):
        if dist.get_rank() == 0:
            torch.save({**torch.load(file, weights_only=False), "burglar": Intruder(str(mark))}, file)
            sign(path)
    dist.barrier()
    ending(state.load, path).check(ValueError, "UnpicklingError")
    assert not mark.exists()


@pytest.mark.parametrize("stage", [pytest.param(0, marks=MORE_CASES), 3])
@on_every_rank
def test_extra_states_of_modules(stage: int, tmp_path: Path) -> None:
    model = WithExtraState({"seen": 3})
    check_extra_state(model, parallelize_here(zero(stage), model), tmp_path / "run")


@pytest.mark.matrix(reason="starts a process that imports the framework")
def test_one_process_without_a_launcher(tmp_path: Path) -> None:
    """The process also needs no compiler. Its PATH has only Python."""
    keep = ("HOME", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
    environment = {name: os.environ[name] for name in keep if name in os.environ}
    check_alone(tmp_path, "deepspeed", {"zero_stage": 2}, environment={**environment, "PATH": str(tmp_path)})
