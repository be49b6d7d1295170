"""The native adapter: the shared suites, its reducer, and hops through host memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from native_ranks import ADAPTER
from torch import Tensor, nn

from ring_backends.adapters import native
from ring_backends.ring import transfer
from ring_backends.ring.transfer import needs_host
from ring_backends.testing.calls import call_here
from ring_backends.testing.correctness import EDGE_CASES
from ring_backends.testing.failing_calls import ending
from ring_backends.testing.marks import THOROUGH, matrix_but
from ring_backends.testing.models import WithExtraState, unit_sgd
from ring_backends.testing.rings import FOUR, TWO, ring_here
from ring_backends.testing.suite import AdapterTests
from ring_backends.testing.training_checkpoints import check_extra_state
from ring_backends.testing.training_steps import check_hooks
from ring_backends.testing.unequal_ranks import WIDTHS, WINDOWS, check_experts
from ring_backends.testing.world import World, on_every_rank


class TestNative(AdapterTests):
    adapter = ADAPTER


@on_every_rank
def test_extra_states_of_modules(tmp_path: Path) -> None:
    model = WithExtraState({"seen": 3})
    check_extra_state(model, native.parallelize(model, unit_sgd, ring_here(ADAPTER, TWO)), tmp_path / "checkpoint")


@THOROUGH
def test_unused_parameters_after_an_early_step_with_find_unused_parameters(world: World) -> None:
    """DistributedDataParallel remembers the parameters that an early step has used."""
    steps, options = WINDOWS["early steps"], {"find_unused_parameters": True}
    world.run(check_experts, ADAPTER, WIDTHS, steps, options)


def test_hooks_of_parameters_run_once(world: World) -> None:
    world.run(check_hooks, ADAPTER, {})


class SparseTable(nn.Module):
    """Sums the requested rows of a table, and adds a second parameter."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table, self.more = table, nn.Parameter(torch.zeros(1))

    def forward(self, rows: Tensor) -> Tensor:
        return self.more + (self.table(rows).sum() if len(rows) else 0)


@pytest.mark.parametrize("accumulation_steps", matrix_but(1, of=(1, 2)))
@on_every_rank
def test_a_sparse_gradient_on_some_ranks(accumulation_steps: int) -> None:
    """One rank looks up no row of a table with sparse gradients. The step has one micro-batch."""
    table, ring = nn.Embedding(4, 2, sparse=True), ring_here(ADAPTER, TWO)
    nn.init.zeros_(table.weight)
    state = native.parallelize(SparseTable(table), unit_sgd, ring, accumulation_steps=accumulation_steps)
    rows = torch.tensor([] if dist.get_rank() == 1 else [dist.get_rank()], dtype=torch.int64)
    state.backward(state.loss(state.model(rows).sum(), 1, 1))
    state.step()
    weights = state.full_state_dict()["table.weight"][:, 0].tolist()
    assert weights == [-1, 0, -1, -1], weights


@on_every_rank
def test_a_backward_past_the_reducer_is_refused() -> None:
    """Call the module inside the wrapper that reduces gradients."""
    model = nn.Linear(1, 1)
    state = native.parallelize(model, unit_sgd, ring_here(ADAPTER, TWO))
    loss = state.loss(model(torch.ones(1)).sum(), 1)
    ending(state.backward, loss).check(RuntimeError, "call state.model(...)")


@on_every_rank
def test_gloo_takes_gpu_tensors_through_host_memory() -> None:
    found = [needs_host(dist.group.WORLD, torch.device(name)) for name in ("cpu", "cuda:0", "meta")]
    assert found == [False, True, False], found


@pytest.mark.parametrize("name", ["grouped queries", "random keys ignored"])
@on_every_rank
def test_attention_through_host_memory(name: str) -> None:
    call = call_here(ADAPTER, replace(EDGE_CASES[name], batch=3), FOUR, "zigzag")
    through_host_memory = mock.patch.object(transfer, "needs_host", return_value=True)
    with through_host_memory, pytest.warns(UserWarning, match="go over gloo, through host memory"):
        call.check()
