"""ZeRO 0 to 3: what is specific to it. test_deepspeed.py runs the suites of training with every stage."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ring_backends.activation_checkpointing import remember_attention
from ring_backends.errors import RingMismatchError
from ring_backends.testing.calls import local_call
from ring_backends.testing.failing_calls import ending
from ring_backends.testing.marks import MORE_CASES, THOROUGH, matrix_but
from ring_backends.testing.models import TwoLayers, weight_of
from ring_backends.testing.rings import FOUR, TWO, ring_here, ring_of
from ring_backends.testing.training import renew_closed_worlds, train_in_bf16
from ring_backends.testing.training_runs import Recipe, State, check_moves, train_alone
from ring_backends.testing.training_steps import EARLY, check_hooks
from ring_backends.testing.world import World, on_every_rank

pytest.importorskip("deepspeed")

import deepspeed_cases as cases
from deepspeed_cases import ADAPTER, check_stage, offloaded, parallelize_here, zero

from ring_backends.adapters import deepspeed as backend


@pytest.fixture(autouse=True)
def renew_worlds(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from renew_closed_worlds(request)


OVERLAPPED = zero(1, config={"zero_optimization": cases.SMALL_BUFFERS | {"overlap_comm": True}})


class TestZeRO:
    @THOROUGH
    @pytest.mark.parametrize("stage", [1, 3])
    @on_every_rank
    def test_ranks_that_use_different_parameters_of_a_module_are_reported(self, stage: int) -> None:
        state = parallelize_here(zero(stage), TwoWeights())
        ended = ending(lambda: state.backward(state.loss(state.model(torch.ones(4)).sum(), 1)))
        names = "(rank 0: ['weights.0'], rank 1: ['weights.1'], rank 2: ['"
        ended.check(RingMismatchError, f"parameters in the order of their gradients {names}")

    @THOROUGH
    @pytest.mark.parametrize("stage", [1, 2, 3])
    @on_every_rank
    def test_different_parameters_in_a_reentrant_checkpoint_are_reported(self, stage: int) -> None:
        """The graph of the loss does not show these parameters. The check sees them when their gradients are ready.

        ZeRO 3 already sees them when it gathers them.
        """
        state = parallelize_here(zero(stage), TwoLayers())

        def step() -> None:
            x = torch.ones(2, 4, requires_grad=True)
            out: Any = checkpoint(state.model, x, 0, [dist.get_rank() % 2], use_reentrant=True)
            state.backward(state.loss(out.sum(), 2))
            state.step()

        ending(step).check(RingMismatchError, "layers.0")

    def test_hooks_of_parameters_run_once(self, world: World) -> None:
        world.run(check_hooks, ADAPTER, zero(0))

    @on_every_rank
    def test_different_parameters_beside_a_reentrant_checkpoint_are_reported(self) -> None:
        """Each rank uses one of two layers outside the checkpoint. All ranks use the shared layer within it."""
        model = nn.ModuleDict({"own": TwoLayers(), "shared": nn.Linear(4, 4)})
        state, x = parallelize_here(zero(1), model), torch.ones(2, 4, requires_grad=True)

        def backward() -> None:
            shared = checkpoint(state.model.module["shared"], x, use_reentrant=True)
            own = state.model.module["own"](x.detach(), 0, [dist.get_rank() % 2])
            state.backward(state.loss((shared + own).sum(), 2))

        ending(backward).check(RingMismatchError, "rank 0: ['own.layers.0.", "zero_stage=0")

    @THOROUGH
    @pytest.mark.parametrize("is_frozen", [True, False], ids=["frozen", ""])
    @on_every_rank
    def test_gradients_of_another_loss_are_reported(self, is_frozen: bool) -> None:
        """The loss of one state runs through the model of another state, which then trains with its own loss."""
        first, second = (parallelize_here(zero(1), TwoLayers()) for _ in range(2))
        x = torch.ones(1, 4)
        second.model.requires_grad_(not is_frozen)
        first.backward(first.loss(second.model.module(first.model(x, 0), 0).sum(), 1))
        first.step()
        second.model.requires_grad_(True)
        ended = ending(lambda: second.backward(second.loss(second.model(x, 0).sum(), 1)))
        if is_frozen:
            assert ended.error == "no error", ended
        else:
            ended.check(RuntimeError, "came from a backward other than state.backward()")

    @THOROUGH
    @pytest.mark.parametrize("stage", matrix_but(3, of=(1, 2, 3)))
    @on_every_rank
    def test_optimizers_that_zero_changes_are_refused_by_name(self, stage: int) -> None:
        parallelize = partial(backend.parallelize, TwoLayers(), ring=ring_here(ADAPTER, TWO), **zero(stage))
        adafactor = "Adafactor: it updates an element of a parameter by looking at other elements"
        for optimizer, texts in (
            (torch.optim.Adafactor, (adafactor, "zero_stage=0")),
            (torch.optim.Adagrad, (f"Adagrad: ZeRO {stage} replaces it",)),
        ):
            ending(parallelize, make_optimizer=optimizer).check(ValueError, *texts)

    @on_every_rank
    def test_a_parameter_that_is_not_contiguous_is_refused_by_name(self) -> None:
        model = TwoLayers()
        weight = model.get_parameter("layers.0.weight")
        weight.data = weight.data.T
        ended = ending(parallelize_here, zero(1), model)
        ended.check(ValueError, "parameter layers.0.weight of model has strides (1, 4)")

    @on_every_rank
    def test_bf16_parameters_in_another_order_are_refused(self, tmp_path: Path) -> None:
        """ZeRO 0 finds the fp32 master weights of a bf16 model by their order."""
        first, second = (parallelize_here(zero(0), TwoLayers(order).bfloat16()) for order in ((0, 1), (1, 0)))
        first.save(tmp_path / "checkpoint")
        places = "layers.0.weight (number 0 of parameter group 0, and number 2 of parameter group 0)"
        ending(second.load, tmp_path / "checkpoint").check(
            ValueError, places, "an engine with master weights stores flat parts"
        )

    @THOROUGH
    @pytest.mark.parametrize("stage", matrix_but(0, 3, of=range(4)))
    @on_every_rank
    def test_a_step_with_nan_is_counted_or_skipped(self, stage: int) -> None:
        """Rank 0 says that it is skipped. ZeRO 0 takes the step, like the other adapters."""
        state, is_skipped = parallelize_here(zero(stage)), stage > 0
        weights, warned = [], []
        for gradient in (1.0, math.nan):
            state.backward(state.loss(state.model(torch.tensor([gradient])).sum(), 1))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                state.step()
            warned += [str(warning.message) for warning in caught if warning.category is RuntimeWarning]
            weights.append(weight_of(state))
        assert warned == ([SKIPPED] if is_skipped and dist.get_rank() == 0 else []), warned
        assert (state.step_count, state.skipped_steps) == ((1, 1) if is_skipped else (2, 0)), state.step_count
        assert weights[1] == weights[0] if is_skipped else math.isnan(weights[1]), weights

    @THOROUGH
    @pytest.mark.parametrize("offloads", matrix_but(False, of=(False, True)), ids=["", "offloaded"])
    @pytest.mark.parametrize("stage", matrix_but(3, of=(1, 2, 3)))
    @on_every_rank
    def test_a_step_after_a_skipped_one_uses_other_parameters(self, stage: int, offloads: bool) -> None:
        """A step of both layers with a NaN gradient, which is skipped, and a step of the first layer."""
        state, states = parallelize_here(offloaded(stage) if offloads else zero(stage), TwoLayers()), []
        for value, layers in ((math.nan, (0, 1)), (1.0, (0,))):
            state.backward(state.loss(state.model(torch.full((1, 4), value), 0, layers).sum(), 1))
            state.step()
            states.append(state.full_state_dict())
        assert (state.step_count, state.skipped_steps) == (1, 1), (state.step_count, state.skipped_steps)
        before, after = states
        for name, tensor in after.items():
            assert torch.isfinite(tensor).all(), name
            assert torch.equal(tensor, before[name]) == ("layers.1" in name), name

    @THOROUGH
    @pytest.mark.parametrize("stage", matrix_but(3, of=range(4)))
    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
    @on_every_rank
    def test_another_default_dtype(self, stage: int, dtype: torch.dtype) -> None:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            state = parallelize_here(zero(stage))
            state.backward(state.loss(state.model(torch.tensor([3.0], dtype=torch.float32)).sum(), 1))
            state.step()
            assert (weight_of(state), torch.get_default_dtype()) == (-3.0, dtype), weight_of(state)
        finally:
            torch.set_default_dtype(before)

    @MORE_CASES
    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_offloaded_optimizer_states(self, world: World, stage: int) -> None:
        check_stage(world, TWO, offloaded(stage), Recipe(dtype=torch.float32), 1e-6)

    @pytest.mark.parametrize(
        "options",
        [OVERLAPPED, *(pytest.param(offloaded(stage), marks=MORE_CASES) for stage in (2, 3))],
        ids=["overlapped", "offloaded-2", "offloaded-3"],
    )
    def test_an_early_step(self, world: World, options: Mapping[str, Any]) -> None:
        recipe = replace(EARLY, micro_batches=(3,), is_rescaled=True, max_grad_norm=0.01)
        check_stage(world, TWO, options, recipe, 1e-5)

    @THOROUGH
    @pytest.mark.parametrize("stage", [1, 3])
    @pytest.mark.parametrize("how", ["reentrant", "deepspeed"])
    @on_every_rank
    def test_activation_checkpointing(self, stage: int, how: str) -> None:
        """A step on a ring of four ranks, with activation checkpointing of the attention layer."""
        ring = ring_of(ADAPTER, FOUR)
        model = cases.SmallModel(ring)
        model.layer = Checkpointed(model.layer, how)
        states = cases.one_step(model, ring, stage)
        alone = cases.one_step_alone()
        wanted = [{name.replace("layer.", "layer.layer.", 1): x for name, x in state.items()} for state in alone]
        check_moves(states, wanted, 1e-6, f"ZeRO {stage}, {how}")

    @on_every_rank
    def test_the_hops_of_activation_checkpointing(self) -> None:
        """DeepSpeed repeats the hops of the forward, unless ``remember_attention`` keeps the results."""
        wanted, forward, messages = count_checkpointed("plain")
        assert forward > 0
        for how in ("deepspeed", "remembered", "non-reentrant", "remembered, non-reentrant"):
            grads, *sent = count_checkpointed(how)
            torch.testing.assert_close(grads, wanted, rtol=0, atol=1e-5)
            again = 0 if "remembered" in how else forward
            assert sent == [forward, messages + again], (how, sent, forward, messages)

    @pytest.mark.parametrize("set_by", matrix_but("model", of=("config", "model")))
    @pytest.mark.parametrize("stage", matrix_but(2, of=range(4)))
    def test_bf16_parameters(self, world: World, stage: int, set_by: str) -> None:
        """DeepSpeed keeps fp32 master weights."""
        options = zero(stage)
        if set_by == "config":
            options["config"]["bf16"] = {"enabled": True}
        recipe = Recipe(dtype=torch.float32 if set_by == "config" else torch.bfloat16)
        for states, seen in world.run(train_in_bf16, ADAPTER, TWO, recipe, options):
            assert seen == {torch.bfloat16}
            check_moves(states, rounded_to_bf16(recipe), 0.05, f"ZeRO {stage}, bf16 by the {set_by}")


def rounded_to_bf16(recipe: Recipe) -> list[State]:
    states = train_alone(TWO, "zigzag", recipe)
    return [{name: tensor.bfloat16() for name, tensor in state.items()} for state in states]


class TwoWeights(nn.Module):
    """A model with two weights. Each rank uses one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weights[dist.get_rank() % 2]


SKIPPED = (
    "DeepSpeed has skipped step 2, because the gradient contains NaN or infinity: the parameters are unchanged, "
    "step_count stays 1, and skipped_steps is 1."
)


class Checkpointed(nn.Module):
    """A layer with activation checkpointing."""

    def __init__(self, layer: nn.Module, how: str) -> None:
        super().__init__()
        self.layer = layer
        self.how = how

    def forward(self, x: Tensor, **options: Any) -> Any:
        if self.how == "deepspeed":
            from deepspeed import checkpointing

            return checkpointing.checkpoint(partial(self.layer, **options), x)
        return checkpoint(partial(self.layer, **options), x, use_reentrant=True)


def count_checkpointed(how: str) -> tuple[list[Tensor], int, int]:
    """Two checkpointed calls of attention: gradients, messages of the forward, and messages of forward and backward."""
    from deepspeed import checkpointing
    from deepspeed.runtime.activation_checkpointing.checkpointing import non_reentrant_checkpoint

    ring = ring_of(ADAPTER, FOUR)
    call = local_call(ADAPTER, ring, cases.HOPS)
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
    return [x.grad for x in call.inputs], forward, ring.traffic.messages  # type: ignore[misc]
