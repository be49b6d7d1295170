"""Training: on any data × ring mesh, parameters change as in one process that trains on the whole batch."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ring_backends.ring.watchdog import WATCHDOG
from ring_backends.schedule.layout import LayoutKind
from ring_backends.testing.capabilities import AdapterSuite, core, requires
from ring_backends.testing.failing_calls import ending
from ring_backends.testing.marks import MORE_CASES, matrix_but
from ring_backends.testing.models import ChunkedLoss, PlacedModel, unit_sgd, weight_of
from ring_backends.testing.rings import (
    FOUR,
    IN_GROUPS,
    ONE_OF_TWO,
    THREE,
    TWO,
    TWO_BY_HOSTS,
    TWO_OF_TWO,
    RingSpec,
    backend,
    every_layout,
    ring_here,
)
from ring_backends.testing.training_runs import (
    FP32,
    FP64,
    Precision,
    Recipe,
    State,
    Trainer,
    TrainingSuite,
    check_moves,
    every_mesh,
    every_precision,
    train_alone,
)
from ring_backends.testing.world import World, on_every_rank


def train_in_bf16(
    adapter: str, rings: RingSpec, recipe: Recipe, options: Mapping[str, Any]
) -> tuple[list[State], set[torch.dtype]]:
    """Train. Returns the states, and the dtypes of the outputs of the projections."""
    trainer = Trainer(adapter, rings, "zigzag", recipe, options)
    seen: set[torch.dtype] = set()
    for name, module in trainer.state.model.named_modules():
        if name.endswith("projections"):
            module.register_forward_hook(lambda module, args, out: seen.add(out.dtype))
    return trainer.states(), seen


COORDS = (1001.0, 4095.0, 3333.5, 257.0)
"""Coordinates that bf16 does not represent."""


def look_up_places(
    adapter: str, rings: RingSpec, with_features: bool, options: Mapping[str, Any], dtype: torch.dtype = torch.float32
) -> list[State]:
    """Take a step, in which each block looks up the right rows. Returns the states before and after the step."""
    model = PlacedModel().to(dtype)
    blocks: Any = list(model.blocks)
    state = backend(adapter).parallelize(model, unit_sgd, ring_here(adapter, rings), **options)
    states = [state.full_state_dict()]
    features = torch.ones(len(COORDS), 3) / 3 if with_features else None
    out = state.model(torch.tensor(COORDS), features)
    state.backward(state.loss(out.float().square().mul(torch.arange(4.0)).sum(), len(COORDS)))
    state.step()
    found = [block.places for block in blocks]
    assert found == [[int(number) for number in COORDS]] * 2, found
    return [*states, state.full_state_dict()]


def train_and_evaluate(trainer: Trainer, evaluates: bool) -> list[State]:
    """Train. With ``evaluates``, evaluate before every backward and before every step."""
    states, model = [], trainer.state.model

    def look_at(tokens: Tensor, labels: Tensor) -> None:
        if evaluates:
            model.eval()
            with torch.no_grad():
                trainer.loss(tokens, labels, 1)
            model.train()

    for step in range(trainer.recipe.steps):
        for tokens, labels in trainer.micro_batches(step):
            look_at(tokens, labels)
            trainer.state.backward(trainer.loss(tokens, labels, 20))
            look_at(tokens, labels)
        trainer.state.step()
        states.append(trainer.state.full_state_dict())
    return states


def check_divisor(suite: AdapterSuite, rings: RingSpec) -> None:
    """The ranks have the gradients 1, 2, 3 and 4. The reduced gradient times the factor of ``loss`` is their sum."""
    state = suite.parallelize(ring=suite.ring(rings))
    state.backward(state.model(torch.tensor([dist.get_rank() + 1.0])).sum())
    state.step()
    divisor = float(state.loss(torch.tensor(1.0), 1, step_token_count=1))
    torch.testing.assert_close(-weight_of(state) * divisor, 1.0 + 2 + 3 + 4, rtol=1e-6, atol=0)


BAD_OPTIONS: dict[str, tuple[str, Any]] = {
    "no accumulation": ("accumulation_steps = 0", {"accumulation_steps": 0}),
    "half an accumulation": ("accumulation_steps = 1.5", {"accumulation_steps": 1.5}),
    "a precision by its name": ("mixed_precision = 'bf16'", {"mixed_precision": "bf16"}),
    "fp64": ("mixed_precision = torch.float64", {"mixed_precision": torch.float64}),
    "a negative norm": ("max_grad_norm = -1", {"max_grad_norm": -1}),
}


def has_open_connections() -> bool:
    """Whether the process groups of the frameworks, and all rings that are still in use, are open."""

    def are_open() -> bool:
        return not any(getattr(ring, "has_failed", False) for ring in list(WATCHDOG._rings))

    if not are_open():
        gc.collect()  # rings of earlier tests
    dist.monitored_barrier(timeout=timedelta(seconds=5))
    return are_open()


def renew_closed_worlds(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start new ranks after a test that closed the process groups of its framework, or a ring that later tests use.

    Ranks do so if they wait in a collective of the framework that another rank does not call.
    """
    worlds = [request.getfixturevalue(name) for name in ("world", "pair") if name in request.fixturenames]
    yield
    for world in worlds:
        if world._processes and not all(outcome.value for outcome in world.run_collect(has_open_connections)):
            world.close()


@requires("training")
class TrainingTests(TrainingSuite):
    @pytest.fixture(autouse=True)
    def _renew_closed_worlds(self, request: pytest.FixtureRequest) -> Iterator[None]:
        yield from renew_closed_worlds(request)

    @every_precision
    @every_mesh
    @every_layout
    def test_gradients_are_those_of_the_whole_batch(
        self, world: World, rings: RingSpec, layout: LayoutKind, precision: Precision
    ) -> None:
        self.check_training(world, rings, layout, Recipe(dtype=precision.dtype), precision.tolerance)

    @every_precision
    def test_gradients_in_groups(self, world: World, precision: Precision) -> None:
        self.check_training(world, IN_GROUPS, "zigzag", Recipe(dtype=precision.dtype), precision.tolerance)

    @pytest.mark.parametrize("rings", [TWO_OF_TWO, ONE_OF_TWO], ids=["1x2", "2x1"])
    def test_gradients_on_two_ranks(self, pair: World, rings: RingSpec) -> None:
        self.check_training(pair, rings, "zigzag", Recipe(dtype=torch.float32), 1e-6)

    @pytest.mark.parametrize(
        ("precision", "optimizer"),
        [
            pytest.param(FP64, "adam", marks=MORE_CASES),
            (FP32, "adam"),
            pytest.param(FP32, "momentum", marks=[pytest.mark.core, MORE_CASES]),
        ],
        ids=str,
    )
    @every_mesh
    def test_replicas_stay_the_same(self, world: World, rings: RingSpec, precision: Precision, optimizer: str) -> None:
        recipe = Recipe(dtype=precision.dtype, optimizer=optimizer, rate=0.02, steps=3)
        # Adam divides by the size of the gradient, so the rounding of a gradient near 0 can change a whole step.
        tolerance = 1e-7 if precision is FP64 else 1e-2 if optimizer == "adam" else 1e-4
        self.check_training(world, rings, "zigzag", recipe, tolerance)

    @requires("gradient accumulation")
    @every_precision
    @every_mesh
    def test_micro_batches_add_up_to_one_batch(self, world: World, rings: RingSpec, precision: Precision) -> None:
        recipe = Recipe(dtype=precision.dtype, accumulation_steps=3)
        self.check_training(world, rings, "contiguous", recipe, precision.tolerance)
        recipe = replace(recipe, steps=2, rate=0.02)
        tolerance = precision.tolerance if precision is FP64 else 1e-5
        self.check_training(world, rings, "contiguous", recipe, tolerance)

    @requires("gradient clipping")
    @pytest.mark.parametrize("max_grad_norm", [0.01, pytest.param(1e6, marks=pytest.mark.core)])
    @pytest.mark.parametrize(
        "precision", matrix_but(FP32, of=(replace(FP64, capability="fp64 clipping"), FP32)), ids=str
    )
    @every_mesh
    def test_the_norm_of_the_whole_gradient_is_clipped(
        self, world: World, rings: RingSpec, precision: Precision, max_grad_norm: float
    ) -> None:
        recipe = Recipe(dtype=precision.dtype, max_grad_norm=max_grad_norm)
        tolerance = precision.tolerance if precision is FP64 else 1e-5
        self.check_training(world, rings, "zigzag", recipe, tolerance)

    @every_precision
    @every_mesh
    def test_a_model_without_blocks(self, world: World, rings: RingSpec, precision: Precision) -> None:
        self.check_training(world, rings, "contiguous", Recipe(model="odd", dtype=precision.dtype), precision.tolerance)

    @core
    @requires("rings by topology")
    def test_rings_in_the_order_of_hosts(self, world: World) -> None:
        self.check_training(world, TWO_BY_HOSTS, "zigzag", Recipe(dtype=torch.float32), 1e-6)

    @requires("tied parameters")
    @every_mesh
    def test_a_parameter_in_two_places(self, world: World, rings: RingSpec) -> None:
        self.check_training(world, rings, "zigzag", Recipe(model="tied", dtype=torch.float32), 1e-6)

    @requires("frozen parameters")
    @every_mesh
    def test_a_frozen_parameter(self, world: World, rings: RingSpec) -> None:
        self.check_training(world, rings, "zigzag", Recipe(model="frozen", dtype=torch.float32), 1e-6)

    @every_mesh
    @on_every_rank
    def test_the_divisor_equals_that_of_the_reducer(self, rings: RingSpec) -> None:
        check_divisor(self, rings)

    @requires("gradient accumulation")
    @on_every_rank
    def test_micro_batches_in_the_wrong_order_are_refused(self) -> None:
        """step() after zero and two of two micro-batches, then loss() without ``step_token_count``."""
        trainer = self.trainer(Recipe(accumulation_steps=2, dtype=torch.float32), FOUR)
        ending(trainer.state.step).check(RuntimeError, "0 of 2")
        for tokens, labels in trainer.micro_batches(0):
            trainer.state.backward(trainer.loss(tokens, labels, 40))
        trainer.state.step()
        ending(trainer.loss, *trainer.micro_batches(0)[0], None).check(ValueError, "step_token_count")

    @requires("mixed precision")
    @pytest.mark.parametrize("rings", matrix_but(TWO, of=(TWO, FOUR)), ids=str)
    @on_every_rank
    def test_bf16(self, rings: RingSpec) -> None:
        """Forward and backward run in bf16. Parameters are fp32."""
        recipe = Recipe(dtype=torch.float32, optimizer="momentum", rate=0.02, steps=2)
        options = {**self.framework_options, "mixed_precision": torch.bfloat16}
        states, seen = train_in_bf16(self.adapter, rings, recipe, options)
        assert seen == {torch.bfloat16}, seen
        check_moves(states, train_alone(rings, "zigzag", recipe), 0.05, "bf16")

    @requires("mixed precision")
    @on_every_rank
    def test_gradients_in_bf16_are_added_in_fp32(self) -> None:
        """In bf16, 256 + 1 is 256."""
        state = self.parallelize(mixed_precision=torch.bfloat16)
        state.backward(state.loss(state.model(torch.tensor([(256.0, 1.0, 1.0, 1.0)[dist.get_rank()]])).sum(), 1, 1))
        state.step()
        assert weight_of(state) == -259.0, weight_of(state)

    @requires("mixed precision")
    @on_every_rank
    def test_gradients_of_chunks_are_added_in_fp32(self) -> None:
        """The gradient of a head from 512 chunks of rows is as near to that of fp64 as from one chunk, or as bf16."""
        every_rows = [torch.randn(1, 512, 8, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
        model = ChunkedLoss().double()
        torch.stack([model(rows.double(), 512) for rows in every_rows]).sum().backward()
        wanted = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        errors = []
        for chunk_rows in (512, 1):
            state = self.parallelize(ChunkedLoss(), mixed_precision=torch.bfloat16)
            before = state.full_state_dict()
            state.backward(state.loss(state.model(every_rows[dist.get_rank()], chunk_rows), 512, 1))
            state.step()
            found = [before[name].double() - after for name, after in state.full_state_dict().items()]
            errors.append([(got - grad).norm() / grad.norm() for got, grad in zip(found, wanted, strict=True)])
        assert all(many < 2 * max(one, 2**-9) for one, many in zip(*errors, strict=True)), errors

    @requires("mixed precision", "loss scaling")
    @pytest.mark.parametrize("rings", matrix_but(TWO, of=(TWO, FOUR)), ids=str)
    @on_every_rank
    def test_fp16(self, tmp_path: Path, rings: RingSpec) -> None:
        """The loss is scaled. All ranks leave out a first step, in which the loss of one rank is infinite."""
        recipe, path = Recipe(dtype=torch.float32, optimizer="momentum", rate=0.02, steps=2), tmp_path / "checkpoint"
        trainer = self.trainer(recipe, rings, "zigzag", mixed_precision=torch.float16)
        ((tokens, labels),) = trainer.micro_batches(0)
        loss = trainer.loss(tokens, labels, None)
        trainer.state.backward(loss * (math.inf if dist.get_rank() == 1 else 1.0))
        trainer.state.step()
        assert trainer.state.skipped_steps == 1
        states = [trainer.state.full_state_dict()]
        for step in range(recipe.steps):
            while trainer.state.step_count == step and trainer.state.skipped_steps < 20:  # the scale begins with 65,536
                trainer.step(step)
            states.append(trainer.state.full_state_dict())
            if step == 0:
                trainer.state.save(path)
        check_moves(states, train_alone(rings, "zigzag", recipe), 0.01, "fp16")
        resumed = self.trainer(replace(recipe, seed=99), rings, "zigzag", mixed_precision=torch.float16)
        resumed.state.load(path)
        loaded = resumed.state.full_state_dict()
        resumed.step(recipe.steps - 1)
        torch.testing.assert_close([loaded, resumed.state.full_state_dict()], states[-2:])
        assert resumed.state.skipped_steps == 0

    @requires("mixed precision")
    @pytest.mark.parametrize(
        "with_features",
        [
            pytest.param(True, id="features", marks=pytest.mark.matrix(reason="without features, FSDP casts less")),
            pytest.param(False, id="coordinates"),
        ],
    )
    @on_every_rank
    def test_bf16_does_not_round_coordinates(self, with_features: bool) -> None:
        options = [{**self.framework_options, "mixed_precision": dtype} for dtype in (torch.bfloat16, None)]
        states, wanted = (look_up_places(self.adapter, TWO, with_features, more) for more in options)
        check_moves(states, wanted, 0.05, "bf16")

    @requires("gradient accumulation", "evaluation within a step")
    @pytest.mark.parametrize("max_grad_norm", [pytest.param(None, marks=[pytest.mark.core, MORE_CASES]), 0.1])
    @on_every_rank
    def test_evaluations_change_nothing(self, max_grad_norm: float | None) -> None:
        """Evaluations precede and follow every backward."""
        recipe = Recipe(dtype=torch.float32, accumulation_steps=2, steps=2, max_grad_norm=max_grad_norm)
        plain, evaluated = (train_and_evaluate(self.trainer(recipe), evaluates) for evaluates in (False, True))
        torch.testing.assert_close(evaluated, plain, rtol=0, atol=0)

    @core
    @pytest.mark.parametrize("name", BAD_OPTIONS)
    @on_every_rank
    def test_bad_options_are_refused_by_name(self, name: str) -> None:
        message, options = BAD_OPTIONS[name]
        ended = ending(self.parallelize, ring=self.ring(), **options)
        assert ended.error in ("ValueError", "TypeError"), ended
        assert message in ended.message, ended

    @requires("rings over chosen ranks")
    @on_every_rank
    def test_rings_that_do_not_fill_the_world_are_refused(self) -> None:
        ring = ring_here(self.adapter, THREE)
        assert (ring is None) == (dist.get_rank() == 0)
        if ring is not None:
            ending(self.parallelize, ring=ring).check(ValueError, "4")
