"""A training loop of Hugging Face Accelerate on rings equals the loop on one process."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from native_ranks import world_of
from torch.utils.data import DataLoader
from trainer_cases import Accelerator, assert_equal, make_model, reset_accelerate, run_accelerate

from ring_backends import Ring
from ring_backends.integrations.accelerate import attach
from ring_backends.testing.marks import THOROUGH
from ring_backends.testing.world import World

LONG = pytest.mark.matrix(reason="trains more models")
PRELOAD = ["accelerate", "transformers.models.llama.modeling_llama", "ring_backends.integrations.accelerate"]


two, four = world_of(2), world_of(4)


@LONG
def test_two_ranks(two: World) -> None:
    """1 × 2 in both layouts, and 2 × 1."""
    expected = run_accelerate("lora", None)
    for ring_size, layout in ((2, "contiguous"), (2, "zigzag"), (1, "contiguous")):
        assert_equal(two.run(run_accelerate, "lora", ring_size, layout), expected)


@LONG
@pytest.mark.parametrize(("name", "ulysses_size"), [("qwen3-packed", 1), ("llama", 2)])
def test_two_by_two(four: World, name: str, ulysses_size: int) -> None:
    assert_equal(four.run(run_accelerate, name, 2, "zigzag", ulysses_size), run_accelerate(name, None))


def rates(ring_size: int | None) -> list[float]:
    """The learning rates of a prepared scheduler, over six steps."""
    reset_accelerate()
    accelerator, model = Accelerator(cpu=True), make_model("llama")
    if ring_size is not None:
        attach(accelerator, model, ring_size=ring_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=12)
    optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
    found = []
    for _ in range(6):
        optimizer.step()
        scheduler.step()
        found.append(scheduler.get_last_lr()[0])
    return found


@THOROUGH
def test_a_scheduler_takes_one_step_per_ring(two: World) -> None:
    assert two.run(rates, 2) == [rates(None)] * 2
    assert two.run(rates, 1) == two.run(rates, None)


def attached(ring_size: int) -> tuple[Accelerator, Ring]:
    reset_accelerate()
    accelerator = Accelerator(cpu=True)
    ring = attach(accelerator, make_model("llama"), ring_size=ring_size, timeout=77, buffer_bytes=4096)
    assert (ring.timeout, ring.buffer_bytes) == (timedelta(seconds=77), 4096), ring
    return accelerator, ring


def orders(ring_size: int) -> list[int]:
    """The batches of a shuffled data loader, on ranks with different random numbers."""
    accelerator, ring = attached(ring_size)
    torch.manual_seed(10 + ring.rank + 5 * ring.data_rank)
    loader = accelerator.prepare_data_loader(DataLoader(range(8), shuffle=True))  # type: ignore[arg-type]
    return [int(batch) for _ in range(2) for batch in loader]


def test_a_ring_reads_one_order(two: World) -> None:
    first, second = two.run(orders, 2)
    assert first == second
    assert sorted(first[:8]) == sorted(first[8:]) == list(range(8))
    assert first[:8] != first[8:]
    first, second = two.run(orders, 1)
    assert sorted(first[:4] + second[:4]) == list(range(8))


def attached_state() -> bool:
    """Whether ``attach`` leaves torch's random numbers as they are."""
    attached(2)
    state = torch.get_rng_state()
    make_model("llama")  # begins with the same seed as that of attached()
    return torch.equal(state, torch.get_rng_state())


@LONG
def test_attach_draws_no_random_numbers(two: World) -> None:
    assert two.run(attached_state) == [True, True]


def reduced(ring_size: int) -> list[Any]:
    """The sum and the mean over the rings of a number, and the sum of tensors of other dtypes."""
    accelerator, ring = attached(ring_size)
    own = torch.tensor(1.0 + ring.data_rank)
    others = {"half": torch.tensor([60000.0]).half(), "flag": torch.tensor(True), "number": torch.tensor([[3]])}
    results = [accelerator.reduce(own, "sum"), accelerator.reduce(own, "mean"), *accelerator.reduce(others).values()]
    return [result.tolist() for result in results]


def test_reduce_takes_one_value_per_ring(two: World) -> None:
    assert two.run(reduced, 2) == [[1.0, 1.0, [60000.0], True, [[3]]]] * 2
    assert [values[:2] for values in two.run(reduced, 1)] == [[3.0, 1.5]] * 2
