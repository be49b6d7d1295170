"""Copies: of attention modules, whose calls are told from the original's."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ring_backends.errors import RingMismatchError
from ring_backends.testing.calls import difference, expected, local_call, new_attention
from ring_backends.testing.capabilities import AdapterSuite
from ring_backends.testing.errors import A_MOMENT, SHORT, Ended, ending
from ring_backends.testing.rings import FOUR, new_ring
from ring_backends.testing.strategies import AttentionCase
from ring_backends.testing.world import World

ODD_RANK = 1
CASE = AttentionCase(
    seq_len=16, segment_lengths=(16,), dilation_rates=(1,), num_heads=2, num_kv_heads=2, dtype=torch.float64
)


def _through_pickle(attention: Any) -> Any:
    """As into another process, which assigns its own ring."""
    made = pickle.loads(pickle.dumps(attention))
    made.ring = attention.ring
    return made


def _layers_of_a_transformer(attention: nn.Module) -> Any:
    """As nn.TransformerEncoder clones the layer that it is given."""
    layer = nn.Sequential(attention)
    return nn.ModuleList(copy.deepcopy(layer) for _ in range(2))[1][0]  # type: ignore[index]


COPIES: dict[str, Callable[[Any], Any]] = {
    "deep": copy.deepcopy,
    "shallow": copy.copy,
    "of a copy": lambda attention: copy.deepcopy(copy.deepcopy(attention)),
    "pickled": _through_pickle,
    "layers": _layers_of_a_transformer,
}


def swap_calls(adapter: str, how: str) -> tuple[Tensor, Ended]:
    """The output of a copy; and how it ends where one rank calls original and copy in the other order."""
    ring = new_ring(adapter, FOUR, timeout=timedelta(seconds=SHORT))
    assert ring is not None
    attention = new_attention(adapter, ring, CASE)
    attentions = [attention, COPIES[how](attention)]
    calls = [local_call(adapter, ring, CASE, gradients=False, attention=attention) for attention in attentions]
    outs = [call() for call in calls]
    if ring.rank == ODD_RANK:
        calls.reverse()
    return outs[1], ending(lambda: [call() for call in calls])


def copy_on_one_rank(adapter: str) -> Tensor:
    """One rank copies, as for a moving average that it alone keeps; then all make a module, and call it."""
    ring = new_ring(adapter, FOUR, timeout=timedelta(seconds=60))
    assert ring is not None
    attention = new_attention(adapter, ring, CASE)
    if ring.rank == ODD_RANK:
        copy.deepcopy(attention)
    out: Tensor = local_call(adapter, ring, CASE, gradients=False)()
    return out


class CopyTests(AdapterSuite):
    @pytest.mark.parametrize("how", COPIES)
    def test_copies_of_a_module_are_told_apart(self, world: World, how: str) -> None:
        outs, endings = zip(*world.run(swap_calls, self.adapter, how), strict=True)
        assert difference(torch.cat(outs, 1), expected(CASE, gradients=False).out) <= 1e-10
        for ended in endings:
            assert ended.is_a(RingMismatchError), ended
            assert "order of calls" in ended.message, ended
            assert ended.seconds < SHORT + A_MOMENT, ended

    def test_a_copy_on_one_rank_is_its_own_business(self, world: World) -> None:
        outs = world.run(copy_on_one_rank, self.adapter)
        assert difference(torch.cat(outs, 1), expected(CASE, gradients=False).out) <= 1e-10
