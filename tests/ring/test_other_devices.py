"""Accelerators other than CUDA: attention with the ``math`` kernel, and rings whose hops go through host memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from unittest import mock

import fake_device
import pytest
import torch
import torch.distributed as dist
from torch import nn

from ring_backends import dilated_attention
from ring_backends.adapters import native
from ring_backends.kernels import KernelInputs, select_kernel
from ring_backends.ring.rendezvous import connect
from ring_backends.schedule.layout import LayoutKind
from ring_backends.testing.calls import call_here, check_results, expected, join, run_cases
from ring_backends.testing.correctness import EDGE_CASES
from ring_backends.testing.failing_calls import ending
from ring_backends.testing.marks import matrix_but
from ring_backends.testing.models import unit_sgd
from ring_backends.testing.rings import LAYOUTS, ONE_OF_TWO, TWO_OF_TWO, ring_of
from ring_backends.testing.world import World, on_every_rank
from ring_backends.training.reducer import check_device

ADAPTER = "ring_backends.adapters.native"
CASES = [
    EDGE_CASES[name]
    for name in (
        "a branch twice",
        "zero keys at the end",
        "documents, causal, masked",
        "dropout in a window",
        "sinks, causal, masked",
        "groups of two",
    )
]

needs_fake_device = pytest.mark.skipif(not fake_device.can_start, reason="this torch has no devices in Python")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Two ranks with a device of the fake type."""
    with World(2, preload=[ADAPTER], prepare=fake_device.start) as ranks:
        yield ranks


@needs_fake_device
@pytest.mark.parametrize("layout", matrix_but("zigzag", of=LAYOUTS))
def test_a_ring_matches_the_definition(world: World, layout: LayoutKind) -> None:
    answers = run_cases(world, ADAPTER, TWO_OF_TWO, layout, CASES, device=fake_device.NAME)
    for case, (of_ring,) in zip(CASES, answers, strict=True):
        check_results(join(of_ring, case.seq_len, layout), expected(case), 1e-10, case)


@needs_fake_device
def test_one_device_matches_the_definition(world: World) -> None:
    cases = [replace(case, ulysses_size=1) for case in CASES]
    answers = run_cases(world, ADAPTER, ONE_OF_TWO, "contiguous", cases, device=fake_device.NAME)
    for case, (of_first, _) in zip(cases, answers, strict=True):
        check_results(join(of_first, case.seq_len), expected(case), 1e-10, case)


@needs_fake_device
@on_every_rank
def test_fp32_needs_no_fp64() -> None:
    """MPS has no fp64."""
    fake_device.dtypes.clear()
    for name in ("documents, causal, masked", "dropout in a window", "a soft cap"):
        case = replace(EDGE_CASES[name], dtype=torch.float32)
        call_here(ADAPTER, case, TWO_OF_TWO, device=fake_device.NAME)().sum().backward()
    assert torch.float32 in fake_device.dtypes
    assert torch.float64 not in fake_device.dtypes


@needs_fake_device
@on_every_rank
def test_collectives_of_a_ring() -> None:
    ring, whole = ring_of(ADAPTER, TWO_OF_TWO), torch.arange(10.0).view(1, 5, 2)
    x = whole.to(fake_device.NAME).requires_grad_()
    local = ring.shard(x)
    with pytest.warns(UserWarning, match="hops of FAKE tensors go over gloo, through host memory"):
        again = ring.unshard(local, seq_len=5)
    again.square().sum().backward()
    of_rank = torch.zeros_like(whole)
    of_rank[:, ring.positions(5)] = 2 * 2 * whole[:, ring.positions(5)]  # the sum over two ranks
    found = [again, x.grad, ring.pool(local, seq_len=5), ring.halo(local, 1, seq_len=5)]
    wanted = [whole, of_rank, whole.mean(1), whole[:, 2:3] * ring.rank]
    assert {tensor.device for tensor in found} == {x.device}
    for tensor, values in zip(found, wanted, strict=True):
        torch.testing.assert_close(tensor.detach().cpu(), values)


@needs_fake_device
@on_every_rank
def test_decoding() -> None:
    attention = native.RingDilatedAttention([4, 8], [1, 2], ring=ring_of(ADAPTER, TWO_OF_TWO))
    rows = torch.randn(1, 8, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = dilated_attention(rows, rows, rows, [4, 8], [1, 2], is_causal=True)
    local, new = (x.to(fake_device.NAME) for x in (attention.ring.shard(rows[:, :7]), rows[:, 7:]))
    cache = attention.new_cache()
    attention.prefill(local, local, local, cache, seq_len=7)
    torch.testing.assert_close(attention.decode(new, new, new, cache).cpu(), whole[:, 7:])


@needs_fake_device
@on_every_rank
def test_training_needs_a_backend_for_gradients() -> None:
    model = nn.Linear(1, 1).to(fake_device.NAME)
    parallelize = ending(native.parallelize, model, unit_sgd, ring_of(ADAPTER, TWO_OF_TWO))
    parallelize.check(ValueError, "model is on fake:0", "cannot reduce gradients there: train on CPUs or CUDA")


@pytest.mark.parametrize(
    ("device", "config", "told"),
    [
        ("xpu", "cpu:gloo,cuda:gloo", r'cpu:gloo,cuda:gloo, cannot .*init_process_group\("cpu:gloo,xpu:xccl"\)'),
        ("hpu", "cpu:gloo,cuda:gloo", r"cpu:gloo,hpu:hccl"),
        ("mps", "cpu:gloo,mps:gloo", r"train on CPUs or CUDA, or on one rank"),
        ("xpu", "cpu:gloo,xpu:xccl", None),
        ("cuda", "cpu:gloo", None),
        ("cpu", "cpu:gloo", None),
    ],
)
def test_backends_for_gradients(device: str, config: str, told: str | None) -> None:
    world = {"is_initialized": lambda: True, "get_world_size": lambda: 2, "get_backend_config": lambda: config}
    with mock.patch.multiple(dist, **world):
        if told is None:
            check_device(torch.device(device))
        else:
            with pytest.raises(ValueError, match=told):
                check_device(torch.device(device))


def test_a_world_without_gloo_and_nccl_is_refused() -> None:
    world = {"is_initialized": lambda: True, "get_world_size": lambda: 2, "get_backend_config": lambda: "xpu:xccl"}
    with (
        mock.patch.multiple(dist, **world),
        pytest.raises(RuntimeError, match=r'xpu:xccl alone: .*init_process_group\("cpu:gloo,xpu:xccl"\)'),
    ):
        connect((0, 1), "contiguous", timedelta(seconds=9))


@pytest.mark.parametrize("device", ["xpu", "mps", "hpu"])
def test_auto_takes_the_math_kernel(device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        inputs = KernelInputs(torch.device(device), dtype, 64, has_dropout=True, has_documents=True)
        assert select_kernel("auto", inputs).name == "math"
    with pytest.raises(ValueError, match="it runs on cuda tensors only"):
        select_kernel("triton_dilated", inputs)
