"""Training mismatches: if ranks train with different settings, every rank raises before the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ring_backends.errors import RingMismatchError, RingPeerError
from ring_backends.ring.ring import Ring
from ring_backends.testing.capabilities import AdapterSuite, core, requires
from ring_backends.testing.failing_calls import AT_ONCE, ODD_RANK, SHORT, Ended, ending
from ring_backends.testing.models import BlocksOfExperts, OneParameter, TwoLayers
from ring_backends.testing.rings import TWO, backend, new_ring
from ring_backends.testing.unequal_ranks import parallelize_one, sgd
from ring_backends.testing.world import World


@dataclass(frozen=True)
class Different:
    """A difference of one rank, and the field that the error names on every rank."""

    field: str
    usual: Callable[[str, Ring, Mapping[str, Any]], None]
    odd: Callable[[str, Ring, Mapping[str, Any]], None]


def _parallelize(model: Callable[[], nn.Module] = OneParameter, optimizer: Any = sgd, **more: Any) -> Any:
    def parallelize(adapter: str, ring: Ring, options: Mapping[str, Any]) -> None:
        backend(adapter).parallelize(model(), optimizer, ring, **{**options, **more})

    return parallelize


def _backwards(parameters: Any) -> torch.optim.Optimizer:
    return sgd([*parameters][::-1])


def _experts(width: int = 4) -> nn.Module:
    return BlocksOfExperts((4, width))


def _frozen() -> nn.Module:
    model = BlocksOfExperts((4, 4))
    model.blocks[0].unused.requires_grad_(False)
    return model


def _train(lr: float = 0.5, step_token_count: int = 4, optimizer: Any = torch.optim.SGD, steps: int = 2) -> Any:
    def train(adapter: str, ring: Ring, options: Mapping[str, Any]) -> None:
        state = backend(adapter).parallelize(OneParameter(), lambda x: optimizer(x, lr=0.5), ring, **options)
        for step in range(2):
            state.backward(state.loss(state.model(torch.ones(1)).sum(), 1, step_token_count))
            state.optimizer.param_groups[0]["lr"] = lr
            if step < steps:
                state.step()
        state.full_state_dict()

    return train


DIFFERENCES: dict[str, Different] = {
    "accumulation": Different("accumulation_steps", _parallelize(), _parallelize(accumulation_steps=2)),
    "clipping": Different("max_grad_norm", _parallelize(), _parallelize(max_grad_norm=1.0)),
    "precision": Different("mixed_precision", _parallelize(), _parallelize(mixed_precision=torch.bfloat16)),
    "order of parameters": Different(
        "parameter layers.0.weight", _parallelize(TwoLayers), _parallelize(lambda: TwoLayers((1, 0)))
    ),
    "order in the optimizer": Different(
        "number 0 of parameter group 0", _parallelize(TwoLayers), _parallelize(TwoLayers, optimizer=_backwards)
    ),
    "shape": Different(
        "blocks.0.experts.1.0.weight",
        _parallelize(lambda: BlocksOfExperts((4, 4))),
        _parallelize(lambda: BlocksOfExperts((4, 5))),
    ),
    "dtype": Different("weight", _parallelize(), _parallelize(lambda: OneParameter().bfloat16())),
    "frozen": Different("parameter blocks.0.unused", _parallelize(_experts), _parallelize(_frozen)),
    "learning rate": Different("lr of parameter group 0", _train(), _train(lr=0.25)),
    "optimizer": Different("optimizer", _train(), _train(optimizer=torch.optim.Adagrad)),
    "tokens of the step": Different("step_token_count", _train(), _train(step_token_count=5)),
    "a step left out": Different("order of calls", _train(), _train(steps=1)),
}


def train_differently(adapter: str, name: str, options: Mapping[str, Any]) -> Ended:
    ring = new_ring(adapter, TWO)
    case = DIFFERENCES[name]
    action = case.odd if dist.get_rank() == ODD_RANK else case.usual
    return ending(lambda: action(adapter, ring, options))


def fail_to_make_an_optimizer(adapter: str, options: Mapping[str, Any]) -> Ended:
    def make(parameters: Any) -> torch.optim.Optimizer:
        if dist.get_rank() == ODD_RANK:
            raise ZeroDivisionError("no optimizer today")
        return sgd(parameters)

    ring = new_ring(adapter, TWO)
    return ending(lambda: backend(adapter).parallelize(OneParameter(), make, ring, **options))


def refuse_alone(adapter: str, options: Mapping[str, Any]) -> Ended:
    """One rank calls step() without backward(). The other ranks call backward()."""
    ring = new_ring(adapter, TWO)
    state = parallelize_one(adapter, ring, options)
    if dist.get_rank() == ODD_RANK:
        return ending(state.step)
    return ending(lambda: state.backward(state.model(torch.ones(1)).sum()))


def stay_away(adapter: str, options: Mapping[str, Any]) -> Ended | None:
    """One rank does not call global_count()."""
    ring = new_ring(adapter, TWO, SHORT)
    state = parallelize_one(adapter, ring, options)
    return None if dist.get_rank() == ODD_RANK else ending(lambda: state.global_count(3))


@requires("training")
class TrainingMismatchTests(AdapterSuite):
    @pytest.mark.parametrize("name", DIFFERENCES)
    def test_ranks_that_train_differently_are_reported(self, world: World, name: str) -> None:
        for ended in world.run(train_differently, self.adapter, name, self.framework_options):
            ended.check(RingMismatchError, DIFFERENCES[name].field, f"rank {ODD_RANK}: ", within=AT_ONCE)

    def test_a_rank_without_an_optimizer_is_reported(self, world: World) -> None:
        endings = world.run(fail_to_make_an_optimizer, self.adapter, self.framework_options)
        for rank, ended in enumerate(endings):
            assert ended.error == ("ZeroDivisionError" if rank == ODD_RANK else "RuntimeError"), ended
            assert "no optimizer today" in ended.message, ended
            assert ended.seconds < AT_ONCE, ended

    @core
    def test_a_refusal_on_one_rank_is_reported(self, world: World) -> None:
        endings = world.run(refuse_alone, self.adapter, self.framework_options)
        assert endings[ODD_RANK].error == "RuntimeError"
        for rank in {0, 2, 3}:
            endings[rank].check(
                RingMismatchError, f"rank {ODD_RANK} refused", "step() after 0 of 1 backward calls", within=AT_ONCE
            )

    @core
    def test_a_rank_that_stays_away_from_a_count_is_reported_in_time(self, world: World) -> None:
        endings = world.run(stay_away, self.adapter, self.framework_options)
        for rank in {0, 2, 3}:
            endings[rank].check(RingPeerError, "global_count", within=SHORT + 2)
