"""Contiguity: results do not depend on how inputs lie in memory, and inputs are not modified."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ring_backends.schedule.layout import LayoutKind
from ring_backends.testing.calls import LocalCall, Results, check_results
from ring_backends.testing.capabilities import AdapterSuite, core
from ring_backends.testing.failing_calls import ending
from ring_backends.testing.marks import matrix_but
from ring_backends.testing.rings import FOUR, IN_GROUPS, RingSpec, in_every_layout
from ring_backends.testing.strategies import AttentionCase
from ring_backends.testing.world import on_every_rank

_CASE = AttentionCase(
    45, (12, 45), (3, 2), batch=2, num_heads=6, num_kv_heads=3, head_dim=8, masked="random", dtype=torch.float64
)

Shape = tuple[int, ...]


def _random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


VIEWS: dict[str, Callable[[torch.Generator, Shape], Tensor]] = {
    "heads before sequence": lambda g, s: _random(g, s[0], s[2], s[1], s[3]).transpose(1, 2),
    "components before all": lambda g, s: _random(g, s[3], s[2], s[1], s[0]).permute(3, 2, 1, 0),
    "a slice of packed projections": lambda g, s: _random(g, s[0], s[1], 3, s[2], s[3])[:, :, 1],
    "every second element of all dims": lambda g, s: _random(g, *(2 * size for size in s))[1::2, ::2, 1::2, ::2],
    "one number, expanded": lambda g, s: _random(g, 1, 1, 1, 1).expand(s),
}


def check_view(call: LocalCall, name: str) -> None:
    """Check that a view of the inputs has the results of contiguous copies, and is not modified."""
    generator = torch.Generator().manual_seed(call.attention.ring.rank)
    tensors = [VIEWS[name](generator, tuple(x.shape)) for x in (*call.inputs, call.grad_out)]
    mask = _mask_view(call.options["key_padding_mask"])
    memory = [torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()) for x in [*tensors, mask]]
    before = [numbers.clone() for numbers in memory]
    as_views = _results(call, tensors, mask)
    assert all(map(torch.equal, memory, before)), "attention wrote to its inputs"
    copies = _results(call, [x.clone(memory_format=torch.contiguous_format) for x in tensors], mask.contiguous())
    check_results(as_views, copies, 1e-12, name)


def _mask_view(mask: Tensor) -> Tensor:
    """The same mask as a strided view in which the sequence is the outermost dim."""
    wider = torch.zeros(mask.shape[1], mask.shape[0] + 1, dtype=torch.bool)
    view = wider.T[1:]
    view.copy_(mask)
    return view


def _results(call: LocalCall, tensors: list[Tensor], mask: Tensor) -> Results:
    query, key, value = (x.detach().requires_grad_() for x in tensors[:3])
    options = {**call.options, "key_padding_mask": mask}
    return replace(call, query=query, key=key, value=value, grad_out=tensors[3], options=options).results()


@core
class ContiguityTests(AdapterSuite):
    @pytest.mark.parametrize("rings", matrix_but(FOUR, of=(FOUR, IN_GROUPS)), ids=str)
    @in_every_layout("view", VIEWS, quick_every=6)
    @on_every_rank
    def test_views_give_the_results_of_contiguous_copies(self, layout: LayoutKind, view: str, rings: RingSpec) -> None:
        check_view(self.call(_CASE, rings, layout, gradients=False), view)

    @pytest.mark.parametrize("name", ["query", "key", "value", "key_padding_mask", "out"])
    @on_every_rank
    def test_a_change_in_place_before_backward_is_an_error(self, name: str) -> None:
        call = self.call(_CASE)
        out = call()
        tensors = {**vars(call), **call.options, "out": out}
        with torch.no_grad():
            tensors[name].logical_not_() if name == "key_padding_mask" else tensors[name].mul_(2)
        ending(lambda: out.backward(call.grad_out)).check(RuntimeError, "modified by an inplace operation")
        replace(self.call(_CASE), attention=call.attention).check()
