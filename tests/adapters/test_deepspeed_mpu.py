"""A ring from the groups of a model-parallel unit (mpu)."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ring_backends.schedule.layout import LayoutKind
from ring_backends.testing.calls import local_call
from ring_backends.testing.failing_calls import Ended, ending
from ring_backends.testing.marks import MORE_CASES, matrix_but
from ring_backends.testing.rings import TWO, RingSpec, ring_here
from ring_backends.testing.training_runs import Recipe, State, train
from ring_backends.testing.world import World

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
def mpu_world(world: World) -> Iterator[World]:
    """A world for engines with an mpu or a mesh. Afterwards it resets the groups that DeepSpeed keeps globally."""
    yield world
    world.run(forget_groups)


def forget_groups() -> None:
    from deepspeed.utils import groups

    groups.mpu = groups.mesh_device = None


def rings_of_mpu() -> list[tuple[Any, ...]]:
    """Rings from an mpu, and from its group as ``mpu`` and as ``group``. Returns their properties after a call."""
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


def bad_groups() -> list[Ended]:
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

    @pytest.mark.parametrize("stage", matrix_but(2, 3, of=range(4)))
    def test_gradients_are_those_of_the_whole_batch(self, mpu_world: World, stage: int) -> None:
        check_stage(mpu_world, TWO, zero(stage), Recipe(dtype=torch.float32), 1e-6, train_with_mpu)

    @MORE_CASES
    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    def test_clipping_and_micro_batches(self, mpu_world: World, stage: int) -> None:
        recipe = Recipe(dtype=torch.float32, accumulation_steps=2, max_grad_norm=0.01)
        check_stage(mpu_world, TWO, zero(stage), recipe, 1e-5, train_with_mpu)

    @pytest.mark.parametrize(("stage", "divisor"), [(0, 2), (1, 2), (2, 2), (3, 4)])
    def test_the_reducer_divides_by_data_or_by_all_ranks(self, mpu_world: World, stage: int, divisor: int) -> None:
        assert mpu_world.run(divisor_with_mpu, zero(stage)) == pytest.approx([divisor] * 4)

    @MORE_CASES
    def test_zero_3_reduces_over_all_ranks_of_a_mesh(self, mpu_world: World) -> None:
        """ZeRO 3 is therefore accepted with a mesh. The other stages would let replicas drift apart."""
        check_stage(mpu_world, TWO, zero(3, mesh_param=(2, 2)), Recipe(dtype=torch.float32, steps=3, rate=0.02), 1e-4)
        mpu_world.run(forget_groups)

    def test_invalid_groups_are_refused(self, mpu_world: World) -> None:
        for two, unknown, size, *arranged in mpu_world.run(bad_groups):
            two.check(ValueError, "group", "mpu")
            unknown.check(TypeError, "mpu = 'Megatron'")
            size.check(ValueError, "ring_size = 4")
            for ended, option in zip(arranged, ("ring_order = 'topology'", "ring_size = 'auto'"), strict=True):
                ended.check(ValueError)
                assert ended.message.startswith(f"{option}: mpu already fixes"), ended


class LazyMpu:
    """An mpu that creates its group on request. This needs a started world."""

    def get_sequence_parallel_group(self) -> dist.ProcessGroup:
        assert dist.is_initialized()
        assert dist.group.WORLD is not None
        return dist.group.WORLD


def test_the_world_is_started_before_an_mpu_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(timeout: timedelta) -> int:
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return 1

    monkeypatch.setattr(backend, "start_world", start)
    monkeypatch.setattr(backend, "start_deepspeed", lambda: None)
    try:
        assert backend.initialize(mpu=LazyMpu()).size == 1
    finally:
        dist.destroy_process_group()
