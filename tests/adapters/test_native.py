"""The native adapter: the shared suites, its reducer, and hops through host memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_backends.adapters import native
from ring_backends.ring import rendezvous, transfer
from ring_backends.ring.transfer import Transfer, needs_host, through_host
from ring_backends.testing.calls import RankResult, check_results, expected, run_case_here, whole
from ring_backends.testing.correctness import EDGE_CASES
from ring_backends.testing.failing_calls import Ended, ending
from ring_backends.testing.marks import matrix_but
from ring_backends.testing.models import unit_sgd
from ring_backends.testing.rings import FOUR, TWO, ring_here
from ring_backends.testing.suite import AdapterTests
from ring_backends.testing.training_steps import check_hooks
from ring_backends.testing.unequal_ranks import WIDTHS, WINDOWS, check_experts
from ring_backends.testing.world import World


class TestNative(AdapterTests):
    adapter = "ring_backends.adapters.native"


@pytest.mark.parametrize("clears", matrix_but(False, of=(False, True)), ids=["", "cleared"])
def test_unused_parameters_after_an_early_step_with_find_unused_parameters(world: World, clears: bool) -> None:
    """DistributedDataParallel remembers the parameters that an early step has used."""
    steps, options = WINDOWS["early steps"], {"find_unused_parameters": True}
    world.run(check_experts, TestNative.adapter, WIDTHS, steps, options, clears=clears)


def test_hooks_of_parameters_run_once(world: World) -> None:
    world.run(check_hooks, TestNative.adapter, {})


class SparseTable(nn.Module):
    """Sums the requested rows of a table, and adds a second parameter."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table, self.more = table, nn.Parameter(torch.zeros(1))

    def forward(self, rows: Tensor) -> Tensor:
        return self.more + (self.table(rows).sum() if len(rows) else 0)


def embed_on_some_ranks(accumulation_steps: int) -> Tensor:
    """One rank looks up no row of a table with sparse gradients. The step has one micro-batch."""
    table = nn.Embedding(4, 2, sparse=True)
    nn.init.zeros_(table.weight)
    model = SparseTable(table)
    state = native.parallelize(
        model, unit_sgd, ring_here(TestNative.adapter, TWO), accumulation_steps=accumulation_steps
    )
    rows = torch.tensor([] if dist.get_rank() == 1 else [dist.get_rank()], dtype=torch.int64)
    state.backward(state.loss(state.model(rows).sum(), 1, 1))
    state.step()
    return state.full_state_dict()["table.weight"][:, 0]


@pytest.mark.parametrize("accumulation_steps", matrix_but(1, of=(1, 2)))
def test_a_sparse_gradient_on_some_ranks(world: World, accumulation_steps: int) -> None:
    for weights in world.run(embed_on_some_ranks, accumulation_steps):
        assert weights.tolist() == [-1, 0, -1, -1]


def call_the_model_inside() -> Ended:
    """Call the module inside the wrapper that reduces gradients."""
    model = nn.Linear(1, 1)
    state = native.parallelize(model, unit_sgd, ring_here(TestNative.adapter, TWO))
    return ending(lambda: state.backward(state.loss(model(torch.ones(1)).sum(), 1)))


def test_a_backward_past_the_reducer_is_refused(world: World) -> None:
    for ended in world.run(call_the_model_inside):
        ended.check(RuntimeError, "call state.model(...)")


@dataclass
class Echo(Transfer):
    """A transport that copies the data sent to each peer into the receive buffer of that peer."""

    outgoing: Mapping[int, Tensor]
    incoming: Mapping[int, Tensor]
    waits: list[timedelta] = field(default_factory=list)

    def wait(self, timeout: timedelta) -> None:
        self.waits.append(timeout)
        for peer, buffer in self.incoming.items():
            buffer.copy_(self.outgoing[peer])


def test_a_hop_through_host_memory_arrives_when_it_is_waited_for():
    outgoing = {3: torch.arange(5, dtype=torch.uint8), 1: torch.full((7,), 9, dtype=torch.uint8)}
    incoming = {peer: torch.zeros_like(buffer) for peer, buffer in outgoing.items()}
    posted = []

    def post(host_outgoing, host_incoming):
        posted.append(Echo(host_outgoing, host_incoming))
        return posted[0]

    transfer = through_host(post, outgoing, incoming)
    (echo,) = posted
    for given, staged in ((outgoing, echo.outgoing), (incoming, echo.incoming)):
        assert list(staged) == [3, 1]
        for peer, buffer in staged.items():
            assert buffer.device.type == "cpu"
            assert (buffer.shape, buffer.dtype) == (given[peer].shape, torch.uint8)
            assert buffer.data_ptr() != given[peer].data_ptr()
    outgoing[1].zero_()  # the data is already copied
    assert not any(buffer.any() for buffer in incoming.values())
    transfer.wait(timedelta(seconds=7))
    assert echo.waits == [timedelta(seconds=7)]
    assert torch.equal(incoming[3], torch.arange(5, dtype=torch.uint8))
    assert torch.equal(incoming[1], torch.full((7,), 9, dtype=torch.uint8))


def needs_host_memory() -> list[bool]:
    assert dist.group.WORLD is not None
    return [needs_host(dist.group.WORLD, torch.device(name)) for name in ("cpu", "cuda:0", "meta")]


def attend_through_host(name: str) -> RankResult | None:
    case = replace(EDGE_CASES[name], batch=3)
    through_host_memory = mock.patch.object(transfer, "needs_host", return_value=True)
    with through_host_memory, pytest.warns(UserWarning, match="go over gloo, through host memory"):
        return run_case_here(TestNative.adapter, FOUR, "zigzag", case)


def open_connections_as_over_nccl() -> tuple[list[str], list[float]]:
    """Make a ring whose group passes for one of NCCL. Returns the group's first operations, and an unshard."""
    operations: list[str] = []

    def recorded(name: str) -> Any:
        operation = getattr(dist, name)

        def record(*args: Any, **options: Any) -> Any:
            operations.append(name)
            return operation(*args, **options)

        return mock.patch.object(dist, name, record)

    with (
        mock.patch.object(rendezvous, "_nccl_device", return_value=torch.device("cpu")),
        recorded("barrier"),
        recorded("all_reduce"),
        recorded("batch_isend_irecv"),
    ):
        ring = native.initialize(ring_size=4, timeout=timedelta(seconds=60))
    return operations, ring.unshard(torch.tensor([[float(ring.rank)]]), dim=1).flatten().tolist()


def test_the_connections_of_a_group_are_open_before_its_first_hop(world):
    for operations, gathered in world.run(open_connections_as_over_nccl):
        assert operations == ["barrier", "all_reduce", "batch_isend_irecv"]
        assert gathered == [0.0, 1.0, 2.0, 3.0]


def test_gloo_takes_gpu_tensors_through_host_memory(world):
    assert world.run(needs_host_memory) == [[False, True, False]] * 4


def test_attention_through_host_memory(world):
    for name in ("grouped queries", "random keys ignored"):
        case = replace(EDGE_CASES[name], batch=3)
        answers = world.run(attend_through_host, name)
        assert all(answer.forward[0] > 0 for answer in answers)
        got = whole([answer.results for answer in answers], case.seq_len, "zigzag")
        check_results(got, expected(case), 1e-10, case)


def test_a_timeout_in_seconds():
    assert native.initialize(timeout=2.5).timeout == native.initialize(timeout=timedelta(seconds=2.5)).timeout
