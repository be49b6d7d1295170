"""The FairScale adapter: everything that the shared suites ask of any adapter, and what is FairScale's own."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_backends.activation_checkpointing import remember_attention
from ring_backends.schedule.planner import rank_plan
from ring_backends.testing import training_runs
from ring_backends.testing.calls import local_call
from ring_backends.testing.failing_calls import Ended, ending
from ring_backends.testing.models import OneParameter, make_model
from ring_backends.testing.rings import FOUR, TWO, RingSpec, backend, ring_here
from ring_backends.testing.strategies import AttentionCase
from ring_backends.testing.suite import AdapterTests
from ring_backends.testing.traffic import schedule_of
from ring_backends.testing.training import reduced_and_promised
from ring_backends.testing.training_runs import (
    Recipe,
    State,
    Trainer,
    check_ranks,
    every_mesh,
    loss_sum,
    train,
    train_alone,
)
from ring_backends.testing.world import World

ADAPTER = "ring_backends.adapters.fairscale"

_CASE = AttentionCase(
    seq_len=61,
    segment_lengths=(7, 30, 61),
    dilation_rates=(1, 2, 3),
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    dtype=torch.float64,
)


class GroupedRecipe(Recipe):
    """Two parameter groups with rates and decays of their own."""

    def make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        matrices, vectors = [], []
        for parameter in parameters:
            (matrices if parameter.ndim > 1 else vectors).append(parameter)
        groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "lr": 3 * self.rate}]
        return torch.optim.SGD(groups, lr=self.rate, momentum=0.5, nesterov=True)


class ForgetfulSGD(torch.optim.SGD):
    """Keeps an argument to itself."""

    def __init__(self, parameters: Any, lr: float, slowness: float = 1.0) -> None:
        super().__init__(parameters, lr=lr / slowness)
        self.slowness = slowness


def train_here(*args: Any) -> list[State]:
    """As the suite does, with arguments of this module's classes."""
    return train(*args)


def carried(rings: RingSpec, case: AttentionCase) -> tuple[list[tuple[str, int, int, int, int]], int]:
    """(call, source, destination, bytes, tag) of every message that the transport is given, and what the ring counts.

    Each rank has made another number of messages before.
    """
    from fairscale.nn.pipe.messages import Transport
    from fairscale.nn.pipe.types import PipeMessage

    from ring_backends.adapters.fairscale import RingTransport

    assert issubclass(RingTransport, Transport)
    for _ in range(dist.get_rank()):
        PipeMessage(0, 0, 0, tensors=(torch.zeros(1),))
    ring = ring_here(ADAPTER, rings)
    assert ring is not None
    call = local_call(ADAPTER, ring, case)
    seen: list[tuple[str, int, int, int, int]] = []

    def watched(name: str) -> Any:
        original = getattr(RingTransport, name)

        def watch(self: Any, message: PipeMessage, *args: Any, **kwargs: Any) -> Any:
            (tensor,) = message.tensors
            seen.append((name, message.src, message.dest, tensor.nbytes, message.tag))
            return original(self, message, *args, **kwargs)

        return mock.patch.object(RingTransport, name, watch)

    ring.traffic.reset()
    with watched("send_message"), watched("recv_message_tensors"):
        torch.autograd.grad(call(), [call.query, call.key, call.value], call.grad_out)
    return seen, ring.traffic.messages


@contextlib.contextmanager
def model_parallel(*args: int, **kwargs: int) -> Iterator[Any]:
    """``fairscale.nn.model_parallel``, initialised."""
    from fairscale.nn.model_parallel import initialize

    with contextlib.redirect_stdout(None):
        initialize.initialize_model_parallel(*args, **kwargs)
    try:
        yield initialize
    finally:
        initialize.destroy_model_parallel()


def rings_of_fairscale() -> dict[str, tuple[int, ...]]:
    """The ranks of the ring that ``initialize`` makes of each of FairScale's set-ups."""
    initialize = backend(ADAPTER).initialize
    found = {"no set-up": initialize().ranks}
    with model_parallel(1, pipeline_length=2):
        found["pipeline of 2"] = initialize().ranks
        found["pipeline of 2, size given"] = initialize(2).ranks
        chosen = dist.new_group([0, 1, 2, 3])
        found["pipeline of 2, group given"] = initialize(group=chosen).ranks
    with model_parallel(2, pipeline_length=2):
        found["layers on 2, pipeline of 2"] = initialize().ranks
    return found


def wrong_size_for_fairscale() -> Ended:
    with model_parallel(1, pipeline_length=2):
        return ending(lambda: backend(ADAPTER).initialize(4))


def other_order_than_fairscales() -> list[Ended]:
    needs = {"seq_len": 16, "segment_lengths": [16], "dilation_rates": [1], "num_heads": 2, "head_dim": 4}
    with model_parallel(1, pipeline_length=2):
        return [
            ending(lambda: backend(ADAPTER).initialize(ring_order="topology")),
            ending(lambda: backend(ADAPTER).initialize("auto", **needs)),
        ]


def train_on_a_pipeline_group(options: Mapping[str, Any]) -> tuple[float, float]:
    with model_parallel(1, pipeline_length=2):
        ring_here.cache_clear()
        reduced = reduced_and_promised(ADAPTER, TWO, options)
    ring_here.cache_clear()
    return reduced


def parallelize_a_split_model() -> list[Ended]:
    endings = []
    for sizes in ({"model_parallel_size_": 2, "pipeline_length": 2}, {"model_parallel_size_": 1, "pipeline_length": 2}):
        ring = ring_here(ADAPTER, FOUR)
        with model_parallel(**sizes):
            endings.append(parallelize_one_parameter(ring))
    return endings


def parallelize_one_parameter(ring: Any, make_optimizer: Any = None, model: Any = None, **options: Any) -> Ended:
    if make_optimizer is None:
        make_optimizer = sgd
    model = OneParameter() if model is None else model
    return ending(lambda: backend(ADAPTER).parallelize(model, make_optimizer, ring, **options))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def parallelize_with(options: Mapping[str, Any]) -> Ended:
    return parallelize_one_parameter(ring_here(ADAPTER, FOUR), **options)


def parallelize_over_data_alone() -> list[Ended]:
    """Reduced over the data ranks of each ring rank: by both parts of FairScale, and by one of them."""
    ring = ring_here(ADAPTER, TWO)
    assert ring is not None
    group = [dist.new_group([0, 2]), dist.new_group([1, 3])][ring.rank]
    options = [{"group": group, "process_group": group}, {"group": group}, {"process_group": group}]
    return [parallelize_one_parameter(ring, **chosen) for chosen in options]


def optimizers_that_cannot_be_sharded() -> dict[str, Ended]:
    ring = ring_here(ADAPTER, FOUR)
    mixed = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).bfloat16())
    return {
        "an argument lost": parallelize_one_parameter(ring, lambda parameters: ForgetfulSGD(parameters, 0.1, 3.0)),
        "no optimizer": parallelize_one_parameter(ring, lambda parameters: "SGD"),
        "two dtypes": parallelize_one_parameter(ring, model=mixed),
    }


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.5},
    "Adam": {"lr": 0.1, "betas": (0.5, 0.6), "amsgrad": True},
    "AdamW": {"lr": 0.1, "weight_decay": 0.3},
    "Adagrad": {"lr": 0.1, "initial_accumulator_value": 0.2},
    "Adafactor": {"lr": 0.1, "beta2_decay": -0.5},
    "NAdam": {"lr": 0.1, "decoupled_weight_decay": True},
    "RMSprop": {"lr": 0.1, "centered": True},
}


def step_of(name: str) -> tuple[str, list[Tensor]]:
    """The class that OSS shards, and a model of three layers after two steps."""
    ring = ring_here(ADAPTER, FOUR)
    model = three_layers()
    state = backend(ADAPTER).parallelize(
        model, lambda parameters: getattr(torch.optim, name)(parameters, **OPTIMIZERS[name]), ring
    )
    for _ in range(2):
        state.backward(state.loss(state.model(torch.ones(2, 5)).square().sum(), 1))
        state.step()
    return type(state.optimizer.optim).__name__, list(state.full_state_dict().values())


def three_layers() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def train_checkpointed(rings: RingSpec, recipe: Recipe, what: str) -> list[State]:
    """Train with FairScale's activation checkpointing around every block, every block and the head, or the model."""
    from fairscale.nn import checkpoint_wrapper

    def checkpointed(*args: Any) -> nn.Module:
        model: Any = make_model(*args)
        blocks = [model] if what == "model" else [*model.blocks]
        for module in [*blocks, model.head] if what == "blocks and head" else blocks:
            checkpoint_wrapper(module)
        return model

    with mock.patch.object(training_runs, "make_model", checkpointed):
        return train(ADAPTER, rings, "zigzag", recipe, {})


class Remembering(nn.Module):
    """A block whose attention is kept by FairScale's activation checkpointing, which computes it again: it hands on its
    arguments as they are, and so a function made for the one call."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.inner = CallsWhatItGets(block)

    def forward(self, *args: Any) -> Any:
        return self.inner(remember_attention(self.inner.block), *args)


class CallsWhatItGets(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, function: Any, *args: Any) -> Any:
        return function(*args)


def count_checkpointed(how: str) -> tuple[list[Tensor], int, int]:
    """Gradients of two blocks, and the messages of this rank in the forward, and in forward and backward."""
    from fairscale.nn import checkpoint_wrapper

    ring = ring_here(ADAPTER, FOUR)
    assert ring is not None
    call = local_call(ADAPTER, ring, _CASE)
    attention, options = call.attention, call.options

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=_CASE.dtype))

        def forward(self, query: Tensor) -> Any:
            return attention(query * self.scale, call.key.detach(), call.value.detach(), **options)

    blocks: list[nn.Module] = [Attends(), Attends()]
    if how == "fairscale":
        blocks = [checkpoint_wrapper(block) for block in blocks]
    if how == "remembered":
        blocks = [Remembering(block) for block in blocks]
        for block in blocks:
            checkpoint_wrapper(block.inner)  # type: ignore[arg-type]
    ring.traffic.reset()
    out = call.query
    for block in blocks:
        out = block(out)
    forward = ring.traffic.messages
    out.backward(call.grad_out)
    grads = [call.query.grad, *(parameter.grad for block in blocks for parameter in block.parameters())]
    return grads, forward, ring.traffic.messages  # type: ignore[return-value]


def clip_one_parameter(dtype: torch.dtype) -> tuple[float, float]:
    """How far a parameter moves whose gradient is clipped to 0.5, and one that is not clipped; three ranks own none."""
    moved = []
    for max_grad_norm in (0.5, 100.0):
        ring = ring_here(ADAPTER, FOUR)
        state = backend(ADAPTER).parallelize(OneParameter().to(dtype), sgd, ring, max_grad_norm=max_grad_norm)
        state.backward(state.loss(state.model(torch.tensor([3.0], dtype=dtype)).sum(), 1))
        state.step()
        moved.append(-float(state.full_state_dict()["weight"]))
    return moved[0], moved[1]


def backward_in_eval_mode() -> Ended:
    trainer = Trainer(ADAPTER, TWO, "contiguous", Recipe(dtype=torch.float32), {})
    trainer.state.model.eval()
    ((tokens, labels),) = trainer.micro_batches(0)
    return ending(lambda: trainer.state.backward(trainer.loss(tokens, labels, 20)))


def unused_on_some_ranks() -> tuple[list[float], list[float]]:
    """The moves of two parameters, of which rank 0 uses the first alone."""
    ring = ring_here(ADAPTER, FOUR)
    model = nn.ModuleList([OneParameter(), OneParameter()])
    state = backend(ADAPTER).parallelize(_Branching(model), sgd, ring, reduce_buffer_size=0)
    state.backward(state.model(torch.tensor([1.0])).sum())
    state.step()
    moved = [-float(tensor) for tensor in state.full_state_dict().values()]
    return moved, [1.0, 3 / 4]


class _Branching(nn.Module):
    def __init__(self, branches: nn.ModuleList) -> None:
        super().__init__()
        self.branches = branches

    def forward(self, x: Tensor) -> Tensor:
        used = self.branches[:1] if dist.get_rank() == 0 else self.branches
        return torch.stack([branch(x) for branch in used]).sum(0)


def save_one_step(path: str, recipe: Recipe) -> State:
    trainer = Trainer(ADAPTER, TWO, "contiguous", recipe, {})
    trainer.step(0)
    trainer.state.save(path)
    trainer.step(1)
    return trainer.state.full_state_dict()


def train_fully_sharded(path: str, rings: RingSpec, recipe: Recipe) -> tuple[list[State], list[State]]:
    """FairScale's FSDP over all ranks, a GPU each: states of a run, and of one that went on from its first step."""
    torch.cuda.set_device(dist.get_rank())
    group = dist.new_group(backend="nccl")
    options = {"strategy": "fsdp", "process_group": group, "process_group_reduce_scatter": group}

    def on_gpu(*args: Any) -> nn.Module:
        return make_model(*args).cuda()

    with mock.patch.object(training_runs, "make_model", on_gpu):
        trainer = Trainer(ADAPTER, rings, "contiguous", recipe, options)
        other = Trainer(ADAPTER, rings, "contiguous", replace(recipe, seed=99), options)
    states = [trainer.state.full_state_dict()]
    step_on_gpu(trainer, 0)
    states.append(trainer.state.full_state_dict())
    trainer.state.save(path)
    step_on_gpu(trainer, 1)
    states.append(trainer.state.full_state_dict())
    other.state.load(path)
    resumed = [other.state.full_state_dict()]
    step_on_gpu(other, 1)
    return states, [*resumed, other.state.full_state_dict()]


def step_on_gpu(trainer: Trainer, step: int) -> None:
    micro_batches = [(tokens.cuda(), labels.cuda()) for tokens, labels in trainer.micro_batches(step)]
    positions = trainer.ring.positions(training_runs.CASE.seq_len).cuda()
    count = trainer.state.global_count(sum(int((labels != training_runs.IGNORED).sum()) for _, labels in micro_batches))
    for tokens, labels in micro_batches:
        logits = trainer.state.model(tokens, positions, training_runs.CASE.seq_len)
        trainer.state.backward(trainer.state.loss(loss_sum(logits, labels), 0, step_token_count=count))
    trainer.state.step()


class TestFairScale(AdapterTests):
    adapter = ADAPTER
    core_in_matrix = True
    without = MappingProxyType({"copies of a wrapped model": "ShardedDataParallel holds a process group"})

    @pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
    @pytest.mark.parametrize("rings", [FOUR, TWO], ids=str)
    def test_every_hop_is_carried_by_the_transport(self, world: World, rings: RingSpec, is_causal: bool) -> None:
        """As many messages as the plan has, between global ranks, with one tag for both ends."""
        case = replace(_CASE, is_causal=is_causal)
        schedule = schedule_of(case, rings, "contiguous")
        by_rank = world.run(carried, rings, case)
        sent, received = set(), set()
        for rank, (messages, counted) in enumerate(by_rank):
            place = rings.place(rank)
            assert place is not None
            sizes = {"batch": case.batch, "head_dim": case.head_dim, "itemsize": 8}
            forward, backward = (rank_plan(schedule, place[1], **sizes, backward=back) for back in (False, True))
            planned = sum(len(step.sends) for plan in (forward, backward) for _, step in plan.steps)
            planned += sum(len(step.grad_sends) for _, step in backward.steps)
            mine = [message for message in messages if message[0] == "send_message"]
            assert len(mine) == planned == counted
            assert all(source == rank for _, source, *_ in mine)
            sent |= {tuple(rest) for _, *rest in mine}
            received |= {tuple(rest) for name, *rest in messages if name != "send_message"}
        assert sent == received
        assert len(sent) == sum(counted for _, counted in by_rank) > 0

    def test_the_ring_is_fairscales_own_group(self, world: World) -> None:
        for rank, found in enumerate(world.run(rings_of_fairscale)):
            assert found == {
                "no set-up": (0, 1, 2, 3),
                "pipeline of 2": ((0, 1), (2, 3))[rank // 2],
                "pipeline of 2, size given": ((0, 1), (2, 3))[rank // 2],
                "pipeline of 2, group given": (0, 1, 2, 3),
                "layers on 2, pipeline of 2": ((0, 2), (1, 3))[rank % 2],
            }

    def test_a_ring_size_that_is_not_fairscales_is_refused(self, world: World) -> None:
        for ended in world.run(wrong_size_for_fairscale):
            assert ended.is_a(ValueError), ended
            assert "ring_size = 4" in ended.message
            assert "2 ranks" in ended.message

    def test_an_order_that_is_not_fairscales_is_refused(self, world: World) -> None:
        for endings in world.run(other_order_than_fairscales):
            for ended, told in zip(endings, ("ring_order = 'topology'", "ring_size = 'auto'"), strict=True):
                assert ended.is_a(ValueError), ended
                assert ended.message.startswith(f"{told}: fairscale.nn.model_parallel"), ended

    def test_training_on_a_pipeline_group(self, world: World) -> None:
        for reduced, divisor in world.run(train_on_a_pipeline_group, {}):
            assert reduced * divisor == pytest.approx(1 + 2 + 3 + 4)

    def test_a_model_split_by_fairscale_is_refused(self, world: World) -> None:
        for layers, stages in world.run(parallelize_a_split_model):
            assert layers.is_a(ValueError), layers
            assert "2 ranks per layer" in layers.message
            assert stages.is_a(ValueError), stages
            assert "2 pipeline stages" in stages.message

    @pytest.mark.parametrize("reduce_buffer_size", [0, pytest.param(200, marks=pytest.mark.slow)])
    @every_mesh
    def test_gradients_outside_of_buckets(self, world: World, rings: RingSpec, reduce_buffer_size: int) -> None:
        """All reduced one by one, or the small ones in buckets: fp32 gradients, and fp64 steps of micro-batches."""
        options = {"reduce_buffer_size": reduce_buffer_size, "broadcast_buffers": False}
        for recipe, tolerance in (
            (Recipe(dtype=torch.float32), 1e-6),
            (Recipe(accumulation_steps=2, max_grad_norm=0.1, rate=1.0, steps=3), 1e-9),
        ):
            by_rank = world.run(train, self.adapter, rings, "zigzag", recipe, options)
            check_ranks(by_rank, train_alone(rings, "zigzag", recipe), tolerance)

    @pytest.mark.parametrize("what", ["blocks", pytest.param("blocks and head", marks=pytest.mark.slow), "model"])
    @pytest.mark.parametrize("rings", [pytest.param(FOUR, marks=pytest.mark.slow), TWO], ids=str)
    def test_activation_checkpointing(self, world: World, rings: RingSpec, what: str) -> None:
        for recipe, tolerance in (
            (Recipe(dtype=torch.float32), 1e-6),
            (Recipe(accumulation_steps=2, rate=0.1, steps=2), 1e-9),
        ):
            by_rank = world.run(train_checkpointed, rings, recipe, what)
            check_ranks(by_rank, train_alone(rings, "zigzag", recipe), tolerance)

    def test_the_hops_of_activation_checkpointing(self, world: World) -> None:
        """FairScale makes those of the forward twice; not where the attention is remembered."""
        plain, twice, kept = (world.run(count_checkpointed, how) for how in ("plain", "fairscale", "remembered"))
        for rank, (wanted, forward, messages) in enumerate(plain):
            for way in (twice, kept):
                for grad, right in zip(way[rank][0], wanted, strict=True):
                    torch.testing.assert_close(grad, right, rtol=0, atol=1e-12)
            assert kept[rank][1:] == (forward, messages)
            assert twice[rank][1:] == (forward, messages + forward)
            assert forward > 0

    def test_parameter_groups_stay_as_they_are(self, world: World) -> None:
        recipe = GroupedRecipe(rate=0.01, steps=3)
        by_rank = world.run(train_here, self.adapter, TWO, "zigzag", recipe, {})
        check_ranks(by_rank, train_alone(TWO, "zigzag", recipe), 1e-10)

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_optimizers_are_built_again(self, world: World, name: str) -> None:
        model = three_layers()
        optimizer = getattr(torch.optim, name)(model.parameters(), **OPTIMIZERS[name])
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 5)).square().sum().backward()
            optimizer.step()
        for made_by, parameters in world.run(step_of, name):
            assert made_by == name
            for got, wanted in zip(parameters, model.parameters(), strict=True):
                torch.testing.assert_close(got, wanted.detach(), rtol=1e-5, atol=1e-6)

    def test_optimizers_that_cannot_be_built_again_are_refused(self, world: World) -> None:
        for endings in world.run(optimizers_that_cannot_be_sharded):
            assert endings["an argument lost"].is_a(ValueError), endings
            assert "takes slowness" in endings["an argument lost"].message
            assert endings["no optimizer"].is_a(TypeError), endings
            assert endings["two dtypes"].is_a(ValueError), endings
            assert "torch.bfloat16 and torch.float32" in endings["two dtypes"].message

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            ({"strategy": "zero"}, "strategy = 'zero'"),
            ({"find_unused_parameters": True}, "find_unused_parameters"),
            ({"bucket_cap_mb": 25}, "bucket_cap_mb"),
        ],
    )
    def test_unknown_options_are_refused(self, world: World, options: dict[str, Any], told: str) -> None:
        for ended in world.run(parallelize_with, options):
            assert ended.is_a(ValueError), ended
            assert told in ended.message

    def test_a_reducer_that_lets_replicas_drift_is_refused(self, world: World) -> None:
        for both, *one in world.run(parallelize_over_data_alone):
            assert both.is_a(RuntimeError), both
            assert "drift" in both.message
            for ended in one:
                assert ended.is_a(ValueError), ended
                assert "group and process_group differ" in ended.message

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
    def test_clipping_where_some_ranks_own_no_parameter(self, world: World, dtype: torch.dtype) -> None:
        for clipped, whole in world.run(clip_one_parameter, dtype):
            assert clipped == pytest.approx(0.5, rel=1e-2 if dtype == torch.bfloat16 else 1e-5)
            assert whole == pytest.approx(3.0)

    def test_a_backward_in_eval_mode_is_refused(self, world: World) -> None:
        for ended in world.run(backward_in_eval_mode):
            assert ended.is_a(RuntimeError), ended
            assert "eval mode" in ended.message

    def test_a_parameter_that_a_rank_does_not_use(self, world: World) -> None:
        for moved, wanted in world.run(unused_on_some_ranks):
            assert moved == pytest.approx(wanted)

    def test_a_checkpoint_is_one_of_plain_torch(self, world: World, tmp_path: Path) -> None:
        """A single process without FairScale goes on from it."""
        recipe = Recipe(optimizer="adam", rate=0.02, steps=1)
        wanted = world.run(save_one_step, str(tmp_path / "checkpoint.pt"), recipe)[0]
        state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
        assert state["step"] == 1

        class FromCheckpoint(Recipe):
            def make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
                optimizer = super().make_optimizer(parameters)
                optimizer.load_state_dict(state["optimizer"])
                return optimizer

        def loaded(*args: Any) -> nn.Module:
            model = make_model(*args)
            model.load_state_dict(state["model"])
            return model

        def second_batches(rings: RingSpec, layout: Any, step: int, accumulation_steps: int) -> Any:
            return batches(rings, layout, step + 1, accumulation_steps)

        batches = training_runs.batches
        with (
            mock.patch.object(training_runs, "make_model", loaded),
            mock.patch.object(training_runs, "batches", second_batches),
        ):
            states = train_alone(TWO, "contiguous", FromCheckpoint(optimizer="adam", rate=0.02, steps=1))
        for name, tensor in states[-1].items():
            torch.testing.assert_close(wanted[name], tensor, rtol=1e-9, atol=1e-9)

    def test_fsdp_says_why_it_does_not_run_on_a_cpu(self, world: World) -> None:
        for ended in world.run(parallelize_with, {"strategy": "fsdp"}):
            assert ended.is_a(ValueError), ended
            assert "strategy = 'fsdp'" in ended.message
            assert "parameters on cpu" in ended.message
            assert "strategy='sharded_ddp'" in ended.message
            assert torch.cuda.is_available() or "torch.cuda.stream" in ended.message

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="FairScale's FSDP needs a GPU")
    @pytest.mark.parametrize(
        ("recipe", "tolerance"),
        [
            (Recipe(dtype=torch.float32, steps=2, rate=0.05), 1e-4),
            (Recipe(dtype=torch.float32, steps=2, rate=0.05, accumulation_steps=2, max_grad_norm=0.1), 1e-4),
            (Recipe(model="tied", dtype=torch.float32, steps=2, rate=0.05, optimizer="momentum"), 1e-4),
            (Recipe(model="odd", dtype=torch.float32, steps=2, rate=0.02, optimizer="adam"), 1e-2),
        ],
        ids=["sgd", "accumulated and clipped", "tied", "adam"],
    )
    def test_fsdp_on_gpus(self, tmp_path: Path, recipe: Recipe, tolerance: float) -> None:
        size = min(4, torch.cuda.device_count())
        rings = RingSpec("all", (tuple(range(size)),), "size")
        with World(size) as gpus:
            by_rank = gpus.run(train_fully_sharded, str(tmp_path / "checkpoint.pt"), rings, recipe)
        check_ranks([states for states, _ in by_rank], train_alone(rings, "contiguous", recipe), tolerance)
        for states, resumed in by_rank:
            for state, other in zip(states[1:], resumed, strict=True):
                assert all(torch.equal(tensor, other[name]) for name, tensor in state.items())


def test_one_process_needs_no_launcher(tmp_path: Path) -> None:
    """A ring of one attends without a process group, and trains."""
    program = """
import torch, torch.distributed as dist
from ring_backends.adapters import fairscale as backend

ring = backend.initialize()
attention = backend.RingDilatedAttention([4, 8], [1, 2], ring=ring)
model = torch.nn.Linear(4, 4, bias=False)
x = torch.randn(1, 8, 1, 4)
out = attention(model(x), x, x)
assert not dist.is_initialized()
state = backend.parallelize(model, lambda parameters: torch.optim.SGD(parameters, lr=1.0), ring, max_grad_norm=0.25)
before = model.weight.detach().clone()
state.backward(state.loss(attention(state.model(x), x, x).square().sum(), 1))
state.step()
state.save("checkpoint.pt")
state.load("checkpoint.pt")
assert state.divisor == 1
assert abs(float((model.weight - before).norm()) - 0.25) < 1e-5
"""
    pytest.importorskip("fairscale")
    subprocess.run([sys.executable, "-W", "error::DeprecationWarning", "-c", program], cwd=tmp_path, check=True)
