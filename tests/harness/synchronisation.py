"""Usual steps need one exchange between the ranks, however many parts the model has. Unusual ones are still noticed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ring_backends.errors import RingMismatchError, RingPeerError
from ring_backends.ring import collectives
from ring_backends.ring.notices import Notices
from ring_backends.testing.capabilities import AdapterSuite, requires
from ring_backends.testing.failing_calls import A_MOMENT, AT_ONCE, ODD_RANK, SHORT, Ended, ending
from ring_backends.testing.models import BlocksOfExperts
from ring_backends.testing.rings import TWO, backend, new_ring
from ring_backends.testing.training_runs import Recipe, Trainer
from ring_backends.testing.unequal_ranks import rows_of, sgd
from ring_backends.testing.world import World

WARM_UP = 3
"""Steps after which no configuration is new: DistributedDataParallel makes its buckets again in the second one."""


_EXCHANGE = Notices.exchange_configurations


def count_exchanges(adapter: str, accumulation_steps: int, options: Mapping[str, Any]) -> list[int]:
    """The exchanges of each step after the first ones, besides those of attention."""
    recipe = Recipe(dtype=torch.float32, rate=1e-3, accumulation_steps=accumulation_steps)
    trainer, counts = Trainer(adapter, TWO, "contiguous", recipe, options), []
    for step in range(WARM_UP + 3):
        with (
            mock.patch.object(collectives, "_all_gather", wraps=collectives._all_gather) as gathered,
            mock.patch.object(Notices, "exchange_configurations", autospec=True, side_effect=_EXCHANGE) as compared,
        ):
            trainer.step(step)
        counts.append(gathered.call_count + compared.call_count)
    return counts[WARM_UP:]


Action = Callable[[Any], None]


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


UNUSUAL: dict[str, tuple[str, Action]] = {
    "learning rate": ("lr of parameter group 0", _change_learning_rate),
    "another call": ("order of calls", lambda state: state.full_state_dict()),
    "a count more": ("order of calls", _count_and_step),
}
"""What one rank does after usual steps, and the field that the error of every rank names."""


def leave_the_sequence(adapter: str, name: str, options: Mapping[str, Any]) -> Ended:
    state = _after_usual_steps(adapter, 60, options)
    action = UNUSUAL[name][1] if dist.get_rank() == ODD_RANK else _step
    return ending(lambda: (action(state), state.global_count(1)))


def stay_away(adapter: str, options: Mapping[str, Any]) -> Ended | None:
    state = _after_usual_steps(adapter, SHORT, options)
    return None if dist.get_rank() == ODD_RANK else ending(lambda: _step(state))


def _after_usual_steps(adapter: str, seconds: float, options: Mapping[str, Any]) -> Any:
    ring = new_ring(adapter, TWO, seconds)
    state = backend(adapter).parallelize(BlocksOfExperts((4, 4)), sgd, ring, **options)
    for _ in range(2):
        _step(state)
    return state


@requires("training")
class SynchronisationTests(AdapterSuite):
    def test_a_usual_step_has_one_exchange(self, world: World) -> None:
        for counts in world.run(count_exchanges, self.adapter, 1, self.framework_options):
            assert counts == [1, 1, 1]

    @requires("gradient accumulation")
    def test_a_usual_step_of_micro_batches_has_one_exchange(self, world: World) -> None:
        for counts in world.run(count_exchanges, self.adapter, 3, self.framework_options):
            assert counts == [1, 1, 1]

    @pytest.mark.parametrize("name", UNUSUAL)
    def test_a_rank_that_leaves_the_usual_sequence_is_reported(self, world: World, name: str) -> None:
        for ended in world.run(leave_the_sequence, self.adapter, name, self.framework_options):
            ended.check(RingMismatchError, UNUSUAL[name][0], f"rank {ODD_RANK}: ", within=AT_ONCE)

    def test_a_rank_that_stays_away_from_a_usual_step_is_reported_in_time(self, world: World) -> None:
        for rank, ended in enumerate(world.run(stay_away, self.adapter, self.framework_options)):
            assert rank == ODD_RANK or ended.is_a(RingPeerError), ended
            assert rank == ODD_RANK or ended.seconds < SHORT + A_MOMENT, ended
