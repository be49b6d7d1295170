"""Training runs with an adapter on its ranks, and with plain torch in one process, on the same batches.

With plain SGD, a step equals the scaled gradient. Tests of gradients therefore need only ``parallelize``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_backends.schedule.layout import LayoutKind
from ring_backends.testing.calls import new_attention
from ring_backends.testing.capabilities import AdapterSuite
from ring_backends.testing.marks import MORE_CASES, matrix_but
from ring_backends.testing.models import VOCABULARY, DenseAttention, make_model
from ring_backends.testing.rings import FOUR, MESH_COLUMNS, ONE, TWO, RingSpec, backend, ring_here, rows_of_ranks
from ring_backends.testing.strategies import AttentionCase
from ring_backends.testing.world import World

CASE = AttentionCase(seq_len=26, segment_lengths=(8, 26), dilation_rates=(1, 2), num_heads=3, num_kv_heads=3)


IGNORED = -100


BATCH = 2


_LARGE_RATE = 1024.0
"""A large learning rate. A small step would be rounded to the precision of the parameter, and lose gradient digits."""


State = dict[str, Tensor]


@dataclass(frozen=True)
class Precision:
    dtype: torch.dtype
    tolerance: float
    capability: str | None

    def __str__(self) -> str:
        return str(self.dtype)


FP64 = Precision(torch.float64, 1e-10, "fp64 parameters")


FP32 = Precision(torch.float32, 1e-6, None)


every_mesh = pytest.mark.parametrize(
    "rings",
    [
        pytest.param(FOUR, id="1x4", marks=pytest.mark.core),
        pytest.param(TWO, id="2x2"),
        pytest.param(ONE, id="4x1", marks=MORE_CASES),
        pytest.param(MESH_COLUMNS, id="2x2-columns", marks=MORE_CASES),
    ],
)


every_precision = pytest.mark.parametrize("precision", matrix_but(FP32, of=(FP64, FP32)), ids=str)


@dataclass(frozen=True)
class Recipe:
    """The settings of a training run, without ranks and layout.

    Attributes:
        micro_batches: the number of micro-batches of each step. Empty: every step has ``accumulation_steps``.
        is_rescaled: whether losses are scaled with the tokens of ``accumulation_steps`` micro-batches, and ``step`` is
            given the tokens of the micro-batches of the step.
    """

    model: str = "blocks"
    dtype: torch.dtype = torch.float64
    optimizer: str = "sgd"
    rate: float = _LARGE_RATE
    steps: int = 1
    accumulation_steps: int = 1
    max_grad_norm: float | None = None
    seed: int = 0
    micro_batches: tuple[int, ...] = ()
    is_rescaled: bool = False

    def num_micro_batches(self, step: int) -> int:
        return self.micro_batches[step] if self.micro_batches else self.accumulation_steps

    def make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=self.rate)
        if self.optimizer == "momentum":
            return torch.optim.SGD(parameters, lr=self.rate, momentum=0.9)
        assert self.optimizer == "adam"
        return torch.optim.Adam(parameters, lr=self.rate)


Prepare = Callable[[Any], nn.Module]
"""What a test does to a model before it is trained, such as wrapping its blocks. Returns the model to train."""


class Trainer:
    """A training run on one rank. ``batches_of`` selects the batches of equally many other rings."""

    def __init__(
        self,
        adapter: str,
        rings: RingSpec,
        layout: LayoutKind,
        recipe: Recipe,
        options: Mapping[str, Any],
        batches_of: RingSpec | None = None,
        prepare: Prepare | None = None,
    ) -> None:
        ring, place = ring_here(adapter, rings), rings.place(dist.get_rank())
        assert ring is not None
        assert place is not None
        self.ring, (self.data_rank, ring_rank) = ring.with_layout(layout), place
        self.recipe, self.layout, self.batches_of = recipe, layout, batches_of or rings
        self.rows = rows_of_ranks(CASE.seq_len, rings.size, layout)[ring_rank]
        model = make_model(recipe.model, lambda: new_attention(adapter, self.ring, CASE), recipe.dtype, recipe.seed)
        self.state: Any = backend(adapter).parallelize(
            model if prepare is None else prepare(model),
            recipe.make_optimizer,
            self.ring,
            max_grad_norm=recipe.max_grad_norm,
            accumulation_steps=recipe.accumulation_steps,
            **options,
        )

    def micro_batches(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """This rank's (tokens, labels) of a step."""
        return self._batches(step, self.recipe.num_micro_batches(step))

    def _batches(self, step: int, number: int) -> list[tuple[Tensor, Tensor]]:
        return [
            (tokens[self.data_rank][:, self.rows], labels[self.data_rank][:, self.rows])
            for tokens, labels in batches(self.batches_of, self.layout, step, number)
        ]

    def _count(self, micro_batches: list[tuple[Tensor, Tensor]]) -> int:
        count: int = self.state.global_count(sum(int((labels != IGNORED).sum()) for _, labels in micro_batches))
        return count

    def loss(self, tokens: Tensor, labels: Tensor, step_token_count: int | None) -> Tensor:
        logits = self.state.model(tokens, self.ring.positions(CASE.seq_len), CASE.seq_len)
        scaled: Tensor = self.state.loss(loss_sum(logits, labels), (labels != IGNORED).sum(), step_token_count)
        return scaled

    def step(self, step: int) -> float:
        """Take a step. Returns the loss of the whole batch before the step."""
        micro_batches = self.micro_batches(step)
        count = own_count = None
        if self.recipe.accumulation_steps > 1:
            count = self._count(micro_batches)
        if self.recipe.is_rescaled:
            own_count, count = count, self._count(self._batches(step, self.recipe.accumulation_steps))
        total = torch.zeros((), dtype=torch.float64)
        for tokens, labels in micro_batches:
            loss = self.loss(tokens, labels, count)
            total += loss.detach() / self.state.divisor
            self.state.backward(loss)
        self.state.step(own_count)
        dist.all_reduce(total)
        return float(total)

    def states(self) -> list[State]:
        """Take all steps. Returns the full state on this rank before the first step and after each step."""
        states = [self.state.full_state_dict()]
        for step in range(self.recipe.steps):
            self.step(step)
            states.append(self.state.full_state_dict())
        return states

    def check_state(self, state: State) -> None:
        """Check that the full state on this rank is bitwise equal to an earlier one."""
        torch.testing.assert_close(self.state.full_state_dict(), state, rtol=0, atol=0)


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED)


def batches(rings: RingSpec, layout: LayoutKind, step: int, accumulation_steps: int) -> list[tuple[Tensor, Tensor]]:
    """Whole micro-batches of one step: tokens and labels, [data rank, batch, seq].

    Ranks have different numbers of labels. Between 5 % and 50 % of the labels are kept, depending on the data rank.
    One rank has no labels.
    """
    generator = torch.Generator().manual_seed(1000 + step)
    made = []
    for micro_batch in range(accumulation_steps):
        shape = (len(rings.rings), BATCH, CASE.seq_len)
        tokens = torch.randint(VOCABULARY, shape, generator=generator)
        labels = tokens.roll(-1, dims=-1)
        for data_rank in range(len(rings.rings)):
            share = 0.5 / (1 + 3 * ((data_rank + micro_batch) % 4))
            ignored = torch.rand(shape[1:], generator=generator) > share
            labels[data_rank].masked_fill_(ignored, IGNORED)
        emptied = rows_of_ranks(CASE.seq_len, rings.size, layout)[-1]
        labels[(step + micro_batch) % len(rings.rings)][:, emptied] = IGNORED
        made.append((tokens, labels))
    return made


def train(
    adapter: str,
    rings: RingSpec,
    layout: LayoutKind,
    recipe: Recipe,
    options: Mapping[str, Any],
    prepare: Prepare | None = None,
) -> list[State]:
    """Train. Returns the full state on this rank before the first step and after each step."""
    return Trainer(adapter, rings, layout, recipe, options, prepare=prepare).states()


def train_alone(
    rings: RingSpec, layout: LayoutKind, recipe: Recipe, prepare: Prepare | None = None, first_step: int = 0
) -> list[State]:
    """Train in one process with plain torch and the dense reference of attention."""
    model = make_model(recipe.model, lambda: DenseAttention(CASE), recipe.dtype, recipe.seed)
    model = model if prepare is None else prepare(model)
    optimizer = recipe.make_optimizer(model.parameters())
    states = [_copy(model.state_dict())]
    for step in range(first_step, first_step + recipe.steps):
        made = batches(rings, layout, step, recipe.num_micro_batches(step))
        tokens, labels = (torch.cat([part.flatten(0, 1) for part in parts]) for parts in zip(*made, strict=True))
        logits = model(tokens, torch.arange(CASE.seq_len), CASE.seq_len)
        (loss_sum(logits, labels) / (labels != IGNORED).sum()).backward()
        if recipe.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        states.append(_copy(model.state_dict()))
    return states


def _copy(state: Mapping[str, Tensor]) -> State:
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def check_moves(got: Sequence[State], wanted: Sequence[State], tolerance: float, what: object) -> None:
    """Check the change of every parameter. The tolerance is relative to the norm of the change."""
    assert len(got) == len(wanted)
    for step in range(len(wanted)):
        assert list(got[step]) == list(wanted[step]), f"{what}: names {list(got[step])}"
        for name, tensor in wanted[step].items():
            assert got[step][name].dtype == tensor.dtype, f"{what}: {name} is {got[step][name].dtype}"
            assert got[step][name].device.type == "cpu", f"{what}: {name} is on {got[step][name].device}"
            if step == 0:
                assert torch.equal(got[0][name], tensor), f"{what}: {name} differs before the first step"
                continue
            move = tensor.double() - wanted[0][name].double()
            error = float((got[step][name].double() - got[0][name].double() - move).norm())
            assert error <= tolerance * float(move.norm()), (
                f"{what}: after step {step} {name} has moved by {float(move.norm())}, with an error of {error}"
            )


def check_ranks(
    by_rank: Sequence[Sequence[State]], wanted: Sequence[State], tolerance: float, what: object = ""
) -> None:
    """Check that parameters change as in one process, and that all ranks have bitwise equal parameters."""
    for rank, states in enumerate(by_rank):
        check_moves(states, wanted, tolerance, f"{what} on rank {rank}")
        for state, first in zip(states, by_rank[0], strict=True):
            assert all(torch.equal(tensor, first[name]) for name, tensor in state.items()), (
                f"{what}: rank {rank} has other parameters than rank 0"
            )


class TrainingSuite(AdapterSuite):
    """Base of the suites that train by recipes."""

    def trainer(
        self, recipe: Recipe, rings: RingSpec = TWO, layout: LayoutKind = "contiguous", **options: Any
    ) -> Trainer:
        return Trainer(self.adapter, rings, layout, recipe, {**self.framework_options, **options})

    def check_training(
        self, world: World, rings: RingSpec, layout: LayoutKind, recipe: Recipe, tolerance: float
    ) -> None:
        """Train. Check that parameters change as in one process, and that all ranks have bitwise equal parameters."""
        by_rank = world.run(train, self.adapter, rings, layout, recipe, self.framework_options)
        check_ranks(by_rank, train_alone(rings, layout, recipe), tolerance, recipe)
