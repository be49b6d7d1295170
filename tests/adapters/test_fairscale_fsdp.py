"""FairScale's FullyShardedDataParallel trains on GPUs. On a CPU, it raises an error with the reason."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fairscale.nn.data_parallel import FullyShardedDataParallel, fully_sharded_data_parallel
from fairscale_cases import ADAPTER
from torch import nn

from ring_backends.adapters import fairscale
from ring_backends.adapters.fairscale import training
from ring_backends.testing.capabilities import AdapterSuite
from ring_backends.testing.failing_calls import Ended, ending
from ring_backends.testing.marks import needs_gpu
from ring_backends.testing.models import TwoLayers
from ring_backends.testing.rings import RingSpec
from ring_backends.testing.training_runs import CASE, Recipe, State, Trainer, check_ranks, loss_sum, train_alone
from ring_backends.testing.world import World, on_every_rank


def train_fully_sharded(path: str, rings: RingSpec, recipe: Recipe) -> tuple[list[State], list[State]]:
    """Train with FairScale's FSDP, one GPU per rank. Returns the states, and those of a run resumed after step 1."""
    torch.cuda.set_device(dist.get_rank())
    group = dist.new_group(backend="nccl")
    options = {"strategy": "fsdp", "process_group": group, "process_group_reduce_scatter": group}

    trainer = Trainer(ADAPTER, rings, "contiguous", recipe, options, prepare=nn.Module.cuda)
    other = Trainer(ADAPTER, rings, "contiguous", replace(recipe, seed=99), options, prepare=nn.Module.cuda)
    states = [trainer.state.full_state_dict(), step_on_gpu(trainer, 0)]
    trainer.state.save(path)
    states.append(step_on_gpu(trainer, 1))
    other.state.load(path)
    return states, [other.state.full_state_dict(), step_on_gpu(other, 1)]


def step_on_gpu(trainer: Trainer, step: int) -> State:
    micro_batches = [(tokens.cuda(), labels.cuda()) for tokens, labels in trainer.micro_batches(step)]
    positions = trainer.ring.positions(CASE.seq_len).cuda()
    count = trainer._count(micro_batches)
    for tokens, labels in micro_batches:
        logits = trainer.state.model(tokens, positions, CASE.seq_len)
        trainer.state.backward(trainer.state.loss(loss_sum(logits, labels), 0, step_token_count=count))
    trainer.state.step()
    state: State = trainer.state.full_state_dict()
    return state


class OneStream(dict[str, Any]):
    """Stands for CUDA's streams: a CPU does one thing after another."""

    __hash__ = object.__hash__

    def __missing__(self, name: str) -> OneStream:
        return self

    def __eq__(self, other: object) -> bool:
        return True

    def wait_stream(self, other: OneStream) -> None:
        pass

    synchronize = wait_event = wait_stream


@contextlib.contextmanager
def without_a_gpu() -> Iterator[dict[str, Any]]:
    """Let one rank train on its CPU. Yields the options of ``parallelize``."""
    stream, wrapper = OneStream(), FullyShardedDataParallel

    def set_up_streams(self: Any) -> None:
        self._streams, self._reducer = stream, fully_sharded_data_parallel.ReduceScatterBucketer()

    replaced = {"Stream": lambda: stream, "current_stream": lambda: stream, "synchronize": lambda: None}
    with (
        mock.patch.multiple(torch.cuda, stream=lambda chosen: contextlib.nullcontext(), **replaced),
        mock.patch.object(torch.Tensor, "cpu", torch.Tensor.clone),  # of a GPU's tensor, it is a copy
        mock.patch.object(torch.Tensor, "record_stream"),
        mock.patch.object(wrapper, "_setup_streams", set_up_streams),
        mock.patch.object(training, "fsdp_not_supported_reasons", return_value=[]),
    ):
        yield {"strategy": "fsdp", "compute_device": torch.device("cpu")}


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1)


def resume_without_a_gpu(path: str) -> tuple[State, State, State]:
    """The parameters after three steps: by torch's Adam, by one rank, and by one that resumes after the second step."""

    def new_model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))

    def step(state: Any, index: int) -> None:
        state.backward(state.loss(state.model(inputs[index]).square().sum(), 6))
        state.step()

    inputs = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(2))
    with without_a_gpu() as options:
        ring = fairscale.initialize()
        first, second = (fairscale.parallelize(new_model(seed), adam, ring, **options) for seed in (0, 1))
        step(first, 0)
        step(first, 1)
        first.save(path)
        second.load(path)
        step(first, 2)
        step(second, 2)
        trained = first.full_state_dict(), second.full_state_dict()
    model = new_model(0)
    optimizer = adam(model.parameters())
    for x in inputs:
        optimizer.zero_grad()
        (model(x).square().sum() / 6).backward()
        optimizer.step()
    return dict(model.state_dict()), *trained


def load_in_another_order(path: str) -> Ended:
    with without_a_gpu() as options:
        ring = fairscale.initialize()
        first, second = (fairscale.parallelize(TwoLayers(order), adam, ring, **options) for order in ((0, 1), (1, 0)))
        first.save(path)
        return ending(second.load, path)


class TestFairScaleFSDP(AdapterSuite):
    adapter = ADAPTER

    @on_every_rank
    def test_fsdp_says_why_it_does_not_run_on_a_cpu(self) -> None:
        ended = ending(self.parallelize, ring=self.ring(), strategy="fsdp")
        ended.check(ValueError, "strategy = 'fsdp'", "parameters on cpu", "strategy='sharded_ddp'")
        assert torch.cuda.is_available() or "torch.cuda.stream" in ended.message, ended

    def test_one_rank_resumes(self, tmp_path: Path) -> None:
        with World(1) as alone:
            ((wanted, first, second),) = alone.run(resume_without_a_gpu, str(tmp_path / "checkpoint.pt"))
        for name, parameter in wanted.items():
            torch.testing.assert_close(first[name], parameter)
            assert torch.equal(second[name], first[name]), name

    def test_another_order_of_parameters_is_refused(self, tmp_path: Path) -> None:
        with World(1) as alone:
            (ended,) = alone.run(load_in_another_order, str(tmp_path / "checkpoint.pt"))
        places = "layers.0.weight (number 0 of parameter group 0, and number 2 of parameter group 0)"
        ended.check(ValueError, places, "FairScale's FSDP stores")

    @needs_gpu
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
            torch.testing.assert_close(resumed, states[1:], rtol=0, atol=0)
