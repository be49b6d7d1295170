"""Training mismatches: if ranks train with different settings, every rank raises before the step.

Usual steps need one exchange between the ranks, however many parts the model has. Unusual ones are still noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ring_backends.errors import RingMismatchError, RingPeerError
from ring_backends.ring.ring import Ring
from ring_backends.ring.store import Notices
from ring_backends.testing.capabilities import AdapterSuite, core, requires
from ring_backends.testing.failing_calls import A_MOMENT, AT_ONCE, ODD_RANK, SHORT, ending, shorten
from ring_backends.testing.marks import MORE_CASES, THOROUGH, once_but
from ring_backends.testing.models import BlocksOfExperts, OneParameter, TwoLayers
from ring_backends.testing.rings import TWO
from ring_backends.testing.training_runs import Recipe, TrainingSuite
from ring_backends.testing.unequal_ranks import needs_accumulation, rows_of, sgd
from ring_backends.testing.world import on_every_rank

Action = Callable[[AdapterSuite, Ring], None]


@dataclass(frozen=True)
class Different:
    """A difference of one rank, and the field that the error names on every rank."""

    field: str
    usual: Action
    odd: Action


def _parallelize(model: Callable[[], nn.Module] = OneParameter, optimizer: Any = sgd, **more: Any) -> Action:
    def parallelize(suite: AdapterSuite, ring: Ring) -> None:
        suite.parallelize(model(), optimizer, ring, **more)

    return parallelize


def _backwards(parameters: Any) -> torch.optim.Optimizer:
    return sgd([*parameters][::-1])


def _experts(width: int = 4) -> nn.Module:
    return BlocksOfExperts((4, width))


def _frozen() -> nn.Module:
    model = BlocksOfExperts((4, 4))
    model.blocks[0].unused.requires_grad_(False)
    return model


def _train(lr: float = 0.5, step_token_count: int = 4, optimizer: Any = torch.optim.SGD, steps: int = 2) -> Action:
    def train(suite: AdapterSuite, ring: Ring) -> None:
        state = suite.parallelize(OneParameter(), lambda x: optimizer(x, lr=0.5), ring)
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


WARM_UP = 3
"""Steps after which no configuration is new: DistributedDataParallel makes its buckets again in the second one."""

_COMPARE = Notices.compare_configurations


def _step(state: Any, *, calls: int = 1) -> None:
    x = rows_of(dist.get_rank(), 0)
    for _ in range(calls):
        local_sum = state.model(x, 0).square().sum()
    state.backward(state.loss(local_sum, x.shape[0] * x.shape[1]))
    state.step()


def _change_learning_rate(state: Any) -> None:
    state.optimizer.param_groups[0]["lr"] = 0.01
    _step(state)


def _count_and_step(state: Any) -> None:
    state.global_count(1)
    _step(state)


UNUSUAL: dict[str, tuple[str, Callable[[Any], None]]] = {
    "learning rate": ("lr of parameter group 0", _change_learning_rate),
    "another call": ("order of calls", lambda state: state.full_state_dict()),
    "a count more": ("order of calls", _count_and_step),
}
"""What one rank does after usual steps, and the field that the error of every rank names."""


@requires("training")
class TrainingMismatchTests(TrainingSuite):
    @pytest.mark.parametrize("name", DIFFERENCES)
    @on_every_rank
    def test_ranks_that_train_differently_are_reported(self, name: str) -> None:
        ring, case = self.new_ring(TWO), DIFFERENCES[name]
        ended = ending(case.odd if dist.get_rank() == ODD_RANK else case.usual, self, ring)
        ended.check(RingMismatchError, case.field, f"rank {ODD_RANK}: ", within=AT_ONCE)

    @on_every_rank
    def test_a_rank_without_an_optimizer_is_reported(self) -> None:
        def make(parameters: Any) -> torch.optim.Optimizer:
            if dist.get_rank() == ODD_RANK:
                raise ZeroDivisionError("no optimizer today")
            return sgd(parameters)

        ended = ending(self.parallelize, make_optimizer=make, ring=self.new_ring(TWO))
        assert ended.error == ("ZeroDivisionError" if dist.get_rank() == ODD_RANK else "RuntimeError"), ended
        ended.check(Exception, "no optimizer today", within=AT_ONCE)

    @core
    @on_every_rank
    def test_a_refusal_on_one_rank_is_reported(self) -> None:
        """One rank calls step() without backward(). The other ranks call backward()."""
        state = self.parallelize(ring=self.new_ring(TWO))
        if dist.get_rank() == ODD_RANK:
            ended = ending(state.step)
            assert ended.error == "RuntimeError", ended
        else:
            ended = ending(lambda: state.backward(state.model(torch.ones(1)).sum()))
            ended.check(RingMismatchError, f"rank {ODD_RANK} refused", within=AT_ONCE)
        ended.check(RuntimeError, "step() after 0 of 1 backward calls")

    @THOROUGH
    @core
    @on_every_rank
    def test_a_rank_that_stays_away_from_a_count_is_reported_in_time(self) -> None:
        state = self.parallelize(ring=self.new_ring(TWO))
        shorten(state.ring, state._world)
        if dist.get_rank() != ODD_RANK:
            ending(state.global_count, 3).check(RingPeerError, "global_count", within=SHORT + A_MOMENT)

    def usual_steps(self) -> Any:
        state = self.parallelize(BlocksOfExperts((4, 4)), sgd, self.new_ring(TWO))
        for _ in range(2):
            _step(state)
        return state

    @pytest.mark.parametrize("accumulation_steps", [1, pytest.param(3, marks=[needs_accumulation, MORE_CASES])])
    @on_every_rank
    def test_a_usual_step_has_one_exchange(self, accumulation_steps: int) -> None:
        """Besides the exchanges of attention, once no configuration is new."""
        recipe = Recipe(dtype=torch.float32, rate=1e-3, accumulation_steps=accumulation_steps)
        trainer, counts = self.trainer(recipe), []
        for step in range(WARM_UP + 3):
            with (
                mock.patch.object(Ring, "all_gather", autospec=True, side_effect=Ring.all_gather) as gathered,
                mock.patch.object(Notices, "compare_configurations", autospec=True, side_effect=_COMPARE) as compared,
            ):
                trainer.step(step)
            counts.append(gathered.call_count + compared.call_count)
        assert counts[WARM_UP:] == [1, 1, 1], counts

    @pytest.mark.parametrize("name", once_but("another call", of=UNUSUAL))
    @on_every_rank
    def test_a_rank_that_leaves_the_usual_sequence_is_reported(self, name: str) -> None:
        state, (field, odd) = self.usual_steps(), UNUSUAL[name]
        ended = ending(lambda: ((odd if dist.get_rank() == ODD_RANK else _step)(state), state.global_count(1)))
        ended.check(RingMismatchError, field, f"rank {ODD_RANK}: ", within=AT_ONCE)

    @THOROUGH
    @on_every_rank
    def test_a_rank_that_stays_away_from_a_usual_step_is_reported_in_time(self) -> None:
        state = self.usual_steps()
        shorten(state.ring, state._world)
        if dist.get_rank() != ODD_RANK:
            ending(_step, state).check(RingPeerError, within=SHORT + A_MOMENT)
