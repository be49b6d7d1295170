"""A ring from the groups of a model-parallel unit (mpu)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ring_backends.schedule.layout import LayoutKind
from ring_backends.testing.calls import local_call
from ring_backends.testing.failing_calls import ending
from ring_backends.testing.marks import MORE_CASES, matrix_but
from ring_backends.testing.rings import TWO, RingSpec, ring_here
from ring_backends.testing.training_runs import Recipe, State, train
from ring_backends.testing.world import World, on_every_rank

pytest.importorskip("deepspeed")

from deepspeed_cases import ADAPTER, HOPS, NEEDS, check_stage, parallelize_here, zero

from ring_backends.adapters import deepspeed as backend


@cache
def mpu_here() -> Any:
    """DeepSpeed's own mpu, with sequence-parallel groups of two."""
    import deepspeed.runtime.sequence_parallel.parallel_state_sp as mpu

    assert ring_here(ADAPTER, TWO) is not None  # deepspeed.comm runs
    mpu.initialize_sequence_parallel(2)
    return mpu


@pytest.fixture(scope="class")
def forgotten_groups(world: World) -> Iterator[None]:
    """Afterwards, reset the groups of an mpu or a mesh, which DeepSpeed keeps globally."""
    yield
    world.run(forget_groups)


def forget_groups() -> None:
    from deepspeed.utils import groups

    groups.mpu = groups.mesh_device = None


def train_with_mpu(
    adapter: str, rings: RingSpec, layout: LayoutKind, recipe: Recipe, options: dict[str, Any]
) -> list[State]:
    return train(adapter, rings, layout, recipe, {**options, "mpu": mpu_here()})


@pytest.mark.usefixtures("forgotten_groups")
class TestMpu:
    @on_every_rank
    def test_a_ring_from_an_mpu(self) -> None:
        """From an mpu, and from its group as ``mpu`` and as ``group``."""
        mpu, rank = mpu_here(), dist.get_rank()
        group = mpu.get_sequence_parallel_group()
        for options in ({"mpu": mpu}, {"mpu": group}, {"group": group}):
            ring = backend.initialize(**options)
            local_call(ADAPTER, ring, HOPS)()
            first = rank // 2 * 2
            assert (ring.ranks, ring.data_size, ring.data_rank) == ((first, first + 1), 2, rank // 2), ring
            assert ring.traffic.messages == 1, ring.traffic
            assert ring.group is not None

    @pytest.mark.parametrize("stage", matrix_but(2, 3, of=range(4)))
    def test_gradients_are_those_of_the_whole_batch(self, world: World, stage: int) -> None:
        check_stage(world, TWO, zero(stage), Recipe(dtype=torch.float32), 1e-6, train_with_mpu)

    @MORE_CASES
    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    def test_clipping_and_micro_batches(self, world: World, stage: int) -> None:
        recipe = Recipe(dtype=torch.float32, accumulation_steps=2, max_grad_norm=0.01)
        check_stage(world, TWO, zero(stage), recipe, 1e-5, train_with_mpu)

    @pytest.mark.parametrize(("stage", "divisor"), [(0, 2.0), (1, 2.0), (2, 2.0), (3, 4.0)])
    @on_every_rank
    def test_the_reducer_divides_by_data_or_by_all_ranks(self, stage: int, divisor: float) -> None:
        torch.testing.assert_close(parallelize_here(zero(stage, mpu=mpu_here())).divisor, divisor)

    @on_every_rank
    def test_invalid_groups_are_refused(self) -> None:
        mpu, initialize = mpu_here(), backend.initialize
        ending(initialize, mpu=mpu, group=dist.group.WORLD).check(ValueError, "group", "mpu")
        ending(initialize, mpu="Megatron").check(TypeError, "mpu = 'Megatron'")
        ending(initialize, 4, mpu=mpu).check(ValueError, "ring_size = 4")
        fixes = ": mpu already fixes"
        ending(initialize, mpu=mpu, ring_order="topology").check(ValueError, f"ring_order = 'topology'{fixes}")
        ending(initialize, "auto", mpu=mpu, **NEEDS).check(ValueError, f"ring_size = 'auto'{fixes}")
