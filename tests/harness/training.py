"""Training: over any data × ring, parameters move exactly as they do in a single process that sees the whole batch.

Gradients are read off steps of plain SGD, so that nothing is asked of a framework but what ``parallelize`` promises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_backends.schedule.layout import LayoutKind
from ring_backends.testing.calls import new_attention
from ring_backends.testing.capabilities import AdapterSuite, requires
from ring_backends.testing.errors import Ended, ending
from ring_backends.testing.models import VOCABULARY, DenseAttention, OneParameter, make_model
from ring_backends.testing.rings import (
    FOUR,
    MESH_COLUMNS,
    ONE,
    ONE_OF_TWO,
    THREE,
    TWO,
    TWO_OF_TWO,
    RingSpec,
    backend,
    every_layout,
    ring_here,
    rows_of_ranks,
)
from ring_backends.testing.strategies import AttentionCase
from ring_backends.testing.world import World

CASE = AttentionCase(seq_len=26, segment_lengths=(8, 26), dilation_rates=(1, 2), num_heads=3, num_kv_heads=3)
IGNORED = -100
BATCH = 2
_LARGE_RATE = 1024.0
"""A step this large leaves the gradient with its full precision; a small one would lose it in the parameter's."""

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
        pytest.param(FOUR, id="1x4"),
        pytest.param(TWO, id="2x2"),
        pytest.param(ONE, id="4x1", marks=pytest.mark.slow),
        pytest.param(MESH_COLUMNS, id="2x2-columns", marks=pytest.mark.slow),
    ],
)
every_precision = pytest.mark.parametrize(
    "precision", [pytest.param(FP64, marks=pytest.mark.slow), pytest.param(FP32)], ids=str
)


@dataclass(frozen=True)
class Recipe:
    """A training run, but for where it runs."""

    model: str = "blocks"
    dtype: torch.dtype = torch.float64
    optimizer: str = "sgd"
    rate: float = _LARGE_RATE
    steps: int = 1
    accumulation_steps: int = 1
    max_grad_norm: float | None = None
    seed: int = 0

    def make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=self.rate)
        if self.optimizer == "momentum":
            return torch.optim.SGD(parameters, lr=self.rate, momentum=0.9)
        assert self.optimizer == "adam"
        return torch.optim.Adam(parameters, lr=self.rate)


class Trainer:
    """A training run on one rank; ``batches_of`` other rings than its own, of which there are as many."""

    def __init__(
        self,
        adapter: str,
        rings: RingSpec,
        layout: LayoutKind,
        recipe: Recipe,
        options: Mapping[str, Any],
        batches_of: RingSpec | None = None,
    ) -> None:
        ring, place = ring_here(adapter, rings), rings.place(dist.get_rank())
        assert ring is not None
        assert place is not None
        self.ring, (self.data_rank, ring_rank) = ring.with_layout(layout), place
        self.recipe, self.layout, self.batches_of = recipe, layout, batches_of or rings
        self.rows = rows_of_ranks(CASE.seq_len, rings.size, layout)[ring_rank]
        model = make_model(recipe.model, lambda: new_attention(adapter, self.ring, CASE), recipe.dtype, recipe.seed)
        self.state: Any = backend(adapter).parallelize(
            model,
            recipe.make_optimizer,
            self.ring,
            max_grad_norm=recipe.max_grad_norm,
            accumulation_steps=recipe.accumulation_steps,
            **options,
        )

    def micro_batches(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """This rank's (tokens, labels) of a step."""
        return [
            (tokens[self.data_rank][:, self.rows], labels[self.data_rank][:, self.rows])
            for tokens, labels in batches(self.batches_of, self.layout, step, self.recipe.accumulation_steps)
        ]

    def loss(self, tokens: Tensor, labels: Tensor, step_token_count: int | None) -> Tensor:
        logits = self.state.model(tokens, self.ring.positions(CASE.seq_len), CASE.seq_len)
        scaled: Tensor = self.state.loss(loss_sum(logits, labels), (labels != IGNORED).sum(), step_token_count)
        return scaled

    def step(self, step: int) -> float:
        """Take a step, and return the loss of the whole batch before it."""
        micro_batches = self.micro_batches(step)
        count = None
        if len(micro_batches) > 1:
            count = self.state.global_count(sum(int((labels != IGNORED).sum()) for _, labels in micro_batches))
        total = torch.zeros((), dtype=torch.float64)
        for tokens, labels in micro_batches:
            loss = self.loss(tokens, labels, count)
            total += loss.detach() / self.state.divisor
            self.state.backward(loss)
        self.state.step()
        dist.all_reduce(total)
        return float(total)

    def states(self) -> list[State]:
        """Take all steps; the whole state before the first and after each, as this rank sees it."""
        states = [self.state.full_state_dict()]
        for step in range(self.recipe.steps):
            self.step(step)
            states.append(self.state.full_state_dict())
        return states


def loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=IGNORED)


def batches(rings: RingSpec, layout: LayoutKind, step: int, accumulation_steps: int) -> list[tuple[Tensor, Tensor]]:
    """Whole micro-batches of one step: tokens and labels, [data rank, batch, seq].

    Every rank has another number of labels, and one none at all: one label in two to twenty, by data rank, and all
    labels of one rank's rows ignored.
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


def train(adapter: str, rings: RingSpec, layout: LayoutKind, recipe: Recipe, options: Mapping[str, Any]) -> list[State]:
    """The whole state before the first step and after each, as this rank sees it."""
    return Trainer(adapter, rings, layout, recipe, options).states()


def train_in_bf16(
    adapter: str, rings: RingSpec, recipe: Recipe, options: Mapping[str, Any]
) -> tuple[list[State], set[torch.dtype]]:
    """The states, and the dtypes of what projections give."""
    trainer = Trainer(adapter, rings, "zigzag", recipe, options)
    seen: set[torch.dtype] = set()

    def look(module: nn.Module, args: Any, out: Tensor) -> None:
        seen.add(out.dtype)

    for name, module in trainer.state.model.named_modules():
        if name.endswith("projections"):
            module.register_forward_hook(look)
    return trainer.states(), seen


def train_alone(rings: RingSpec, layout: LayoutKind, recipe: Recipe) -> list[State]:
    """The same in one process, by plain torch, with the dense definition for attention."""
    model = make_model(recipe.model, lambda: DenseAttention(CASE), recipe.dtype, recipe.seed)
    optimizer = recipe.make_optimizer(model.parameters())
    states = [_copy(model.state_dict())]
    for step in range(recipe.steps):
        made = batches(rings, layout, step, recipe.accumulation_steps)
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
    """Every parameter moved as it should have: the difference of the moves, relative to the move."""
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
    """The same moves on every rank as alone, and the very same numbers on all of them."""
    for rank, states in enumerate(by_rank):
        check_moves(states, wanted, tolerance, f"{what} on rank {rank}")
        for state, first in zip(states, by_rank[0], strict=True):
            assert all(torch.equal(tensor, first[name]) for name, tensor in state.items()), (
                f"{what}: rank {rank} has drifted from rank 0"
            )


def steps_out_of_order(adapter: str, options: Mapping[str, Any]) -> list[Ended]:
    """step() with no, with one and with both micro-batches, and a loss whose step is not known."""
    trainer = Trainer(adapter, FOUR, "contiguous", Recipe(accumulation_steps=2, dtype=torch.float32), options)
    endings = [ending(trainer.state.step)]
    for tokens, labels in trainer.micro_batches(0):
        trainer.state.backward(trainer.loss(tokens, labels, 40))
        endings.append(ending(trainer.state.step))
    tokens, labels = trainer.micro_batches(0)[0]
    return [*endings, ending(lambda: trainer.loss(tokens, labels, None))]


def step_too_early(adapter: str, options: Mapping[str, Any]) -> Ended:
    trainer = Trainer(adapter, FOUR, "contiguous", Recipe(dtype=torch.float32), options)
    return ending(trainer.state.step)


def train_and_evaluate(
    adapter: str, rings: RingSpec, recipe: Recipe, options: Mapping[str, Any], evaluate: bool
) -> list[State]:
    """Train, with an evaluation before every backward and before every step, or without."""
    trainer = Trainer(adapter, rings, "contiguous", recipe, options)
    model = trainer.state.model

    def look_at(tokens: Tensor, labels: Tensor) -> None:
        if evaluate:
            model.eval()
            with torch.no_grad():
                trainer.loss(tokens, labels, 1)
            model.train()

    states = []
    for step in range(recipe.steps):
        for tokens, labels in trainer.micro_batches(step):
            look_at(tokens, labels)
            trainer.state.backward(trainer.loss(tokens, labels, 20))
            look_at(tokens, labels)
        trainer.state.step()
        states.append(trainer.state.full_state_dict())
    return states


def reduced_and_promised(adapter: str, rings: RingSpec, options: Mapping[str, Any]) -> tuple[float, float]:
    """What the framework makes of gradients 1, 2, 3 and 4, one per rank, and the factor that ``loss`` applies."""
    ring = ring_here(adapter, rings)
    assert ring is not None
    state = backend(adapter).parallelize(
        OneParameter(), lambda parameters: torch.optim.SGD(parameters, lr=1.0), ring, **options
    )
    state.backward(state.model(torch.tensor([dist.get_rank() + 1.0])).sum())
    state.step()
    return -float(state.full_state_dict()["weight"]), float(state.loss(torch.tensor(1.0), 1, step_token_count=1))


BAD_OPTIONS: dict[str, tuple[str, Any]] = {
    "no accumulation": ("accumulation_steps = 0", {"accumulation_steps": 0}),
    "half an accumulation": ("accumulation_steps = 1.5", {"accumulation_steps": 1.5}),
    "a precision by its name": ("mixed_precision = 'bf16'", {"mixed_precision": "bf16"}),
    "fp16": ("mixed_precision = torch.float16", {"mixed_precision": torch.float16}),
    "a negative norm": ("max_grad_norm = -1", {"max_grad_norm": -1}),
}


def parallelize_badly(adapter: str, rings: RingSpec, options: Mapping[str, Any]) -> Ended | None:
    ring = ring_here(adapter, rings)
    if ring is None:
        return None
    return ending(
        lambda: backend(adapter).parallelize(
            OneParameter(), lambda parameters: torch.optim.SGD(parameters, lr=1.0), ring, **options
        )
    )


class TrainingTests(AdapterSuite):
    def check_training(
        self, world: World, rings: RingSpec, layout: LayoutKind, recipe: Recipe, tolerance: float
    ) -> None:
        """Train on the ranks and alone: the same moves on every rank, and the very same numbers on all of them."""
        by_rank = world.run(train, self.adapter, rings, layout, recipe, dict(self.framework_options))
        wanted = train_alone(rings, layout, recipe)
        check_ranks(by_rank, wanted, tolerance, recipe)

    @requires("training")
    @every_precision
    @every_mesh
    @every_layout
    def test_gradients_are_those_of_the_whole_batch(
        self, world: World, rings: RingSpec, layout: LayoutKind, precision: Precision
    ) -> None:
        self.check_training(world, rings, layout, Recipe(dtype=precision.dtype), precision.tolerance)

    @requires("training")
    @pytest.mark.parametrize("rings", [TWO_OF_TWO, ONE_OF_TWO], ids=["1x2", "2x1"])
    def test_gradients_on_two_ranks(self, pair: World, rings: RingSpec) -> None:
        self.check_training(pair, rings, "zigzag", Recipe(dtype=torch.float32), 1e-6)

    @requires("training")
    @pytest.mark.parametrize(
        ("precision", "optimizer"),
        [pytest.param(FP64, "adam", marks=pytest.mark.slow), (FP32, "adam"), (FP32, "momentum")],
        ids=str,
    )
    @every_mesh
    def test_replicas_stay_the_same(self, world: World, rings: RingSpec, precision: Precision, optimizer: str) -> None:
        recipe = Recipe(dtype=precision.dtype, optimizer=optimizer, rate=0.02, steps=3)
        # Adam divides by the gradient's own size, so that rounding of a gradient near 0 becomes a whole step.
        tolerance = 1e-7 if precision is FP64 else 1e-2 if optimizer == "adam" else 1e-4
        self.check_training(world, rings, "zigzag", recipe, tolerance)

    @requires("training", "gradient accumulation")
    @every_precision
    @every_mesh
    def test_micro_batches_add_up_to_one_batch(self, world: World, rings: RingSpec, precision: Precision) -> None:
        recipe = Recipe(dtype=precision.dtype, accumulation_steps=3)
        self.check_training(world, rings, "contiguous", recipe, precision.tolerance)
        recipe = replace(recipe, steps=2, rate=0.02)
        tolerance = precision.tolerance if precision is FP64 else 1e-5
        self.check_training(world, rings, "contiguous", recipe, tolerance)

    @requires("training", "gradient clipping")
    @pytest.mark.parametrize("max_grad_norm", [0.01, 1e6])
    @pytest.mark.parametrize(
        "precision", [pytest.param(replace(FP64, capability="fp64 clipping"), marks=pytest.mark.slow), FP32], ids=str
    )
    @every_mesh
    def test_the_norm_of_the_whole_gradient_is_clipped(
        self, world: World, rings: RingSpec, precision: Precision, max_grad_norm: float
    ) -> None:
        recipe = Recipe(dtype=precision.dtype, max_grad_norm=max_grad_norm)
        tolerance = precision.tolerance if precision is FP64 else 1e-5
        self.check_training(world, rings, "zigzag", recipe, tolerance)

    @requires("training")
    @every_precision
    @every_mesh
    def test_a_model_without_blocks(self, world: World, rings: RingSpec, precision: Precision) -> None:
        self.check_training(world, rings, "contiguous", Recipe(model="odd", dtype=precision.dtype), precision.tolerance)

    @requires("training", "tied parameters")
    @every_mesh
    def test_a_parameter_in_two_places(self, world: World, rings: RingSpec) -> None:
        self.check_training(world, rings, "zigzag", Recipe(model="tied", dtype=torch.float32), 1e-6)

    @requires("training", "frozen parameters")
    @every_mesh
    def test_a_frozen_parameter(self, world: World, rings: RingSpec) -> None:
        self.check_training(world, rings, "zigzag", Recipe(model="frozen", dtype=torch.float32), 1e-6)

    @requires("training")
    @every_mesh
    def test_the_divisor_is_what_the_reducer_divides_by(self, world: World, rings: RingSpec) -> None:
        for reduced, divisor in world.run(reduced_and_promised, self.adapter, rings, dict(self.framework_options)):
            assert reduced * divisor == pytest.approx(1 + 2 + 3 + 4, rel=1e-6)

    @requires("training")
    def test_a_step_without_backward_is_refused(self, world: World) -> None:
        for ended in world.run(step_too_early, self.adapter, dict(self.framework_options)):
            assert ended.is_a(RuntimeError), ended
            assert "backward" in ended.message

    @requires("training", "gradient accumulation")
    def test_micro_batches_in_the_wrong_order_are_refused(self, world: World) -> None:
        for early, half, whole, unknown in world.run(steps_out_of_order, self.adapter, dict(self.framework_options)):
            assert early.is_a(RuntimeError), early
            assert half.is_a(RuntimeError), half
            assert "1 of 2" in half.message, half
            assert whole == Ended(seconds=whole.seconds), whole
            assert unknown.is_a(ValueError), unknown
            assert "step_token_count" in unknown.message, unknown

    @requires("training", "mixed precision")
    @pytest.mark.parametrize("rings", [TWO, pytest.param(FOUR, marks=pytest.mark.slow)], ids=str)
    def test_bf16(self, world: World, rings: RingSpec) -> None:
        """Forward and backward in bf16; parameters in fp32."""
        recipe = Recipe(dtype=torch.float32, optimizer="momentum", rate=0.02, steps=2)
        options = {**self.framework_options, "mixed_precision": torch.bfloat16}
        wanted = train_alone(rings, "zigzag", recipe)
        for states, seen in world.run(train_in_bf16, self.adapter, rings, recipe, options):
            assert seen == {torch.bfloat16}
            check_moves(states, wanted, 0.05, "bf16")

    @requires("training", "gradient accumulation", "evaluation within a step")
    @pytest.mark.parametrize("max_grad_norm", [None, 0.1])
    def test_evaluations_change_nothing(self, world: World, max_grad_norm: float | None) -> None:
        recipe = Recipe(dtype=torch.float32, accumulation_steps=2, steps=2, max_grad_norm=max_grad_norm)
        options = dict(self.framework_options)
        runs = [world.run(train_and_evaluate, self.adapter, TWO, recipe, options, evaluate) for evaluate in (0, 1)]
        for plain, evaluated in zip(*runs, strict=True):
            for state, other in zip(plain, evaluated, strict=True):
                for name, tensor in state.items():
                    assert torch.equal(other[name], tensor), f"{name} is off by {(other[name] - tensor).abs().max()}"

    @requires("training")
    @pytest.mark.parametrize("name", BAD_OPTIONS)
    def test_bad_options_are_refused_by_name(self, world: World, name: str) -> None:
        told, options = BAD_OPTIONS[name]
        for ended in world.run(parallelize_badly, self.adapter, FOUR, {**self.framework_options, **options}):
            assert ended.is_a(ValueError) or ended.is_a(TypeError), ended
            assert told in ended.message, ended

    @requires("training", "rings over chosen ranks")
    def test_rings_that_do_not_fill_the_world_are_refused(self, world: World) -> None:
        endings = world.run(parallelize_badly, self.adapter, THREE, dict(self.framework_options))
        assert endings[0] is None
        for ended in endings[1:]:
            assert ended.is_a(ValueError), ended
            assert "4" in ended.message
