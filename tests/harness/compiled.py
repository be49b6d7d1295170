"""``torch.compile``: one graph with the results of eager mode, and one operator per direction."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

import ring_backends
from ring_backends.testing.calls import LocalCall, Results, check_results, local_call
from ring_backends.testing.capabilities import AdapterSuite, core
from ring_backends.testing.marks import MORE_CASES, matrix_but
from ring_backends.testing.rings import FOUR, IN_GROUPS, ONE, RingSpec
from ring_backends.testing.strategies import AttentionCase
from ring_backends.testing.world import on_every_rank

_CASE = AttentionCase(61, (7, 30, 61), (1, 2, 3), num_heads=4, num_kv_heads=2, dtype=torch.float64)
CASES = {
    "all": _CASE,
    "causal": replace(_CASE, is_causal=True),
    "documents": replace(_CASE, documents="some", is_causal=True),
    "dropout": replace(_CASE, dropout_p=0.3),
    "sinks in a window": replace(_CASE, sinks=True, segment_lengths=(None, 30, 61), window_lengths=(9, None, None)),
}


_SHORT = replace(CASES["causal"], dtype=torch.float32)


@dataclass
class Graphs:
    """A torch.compile backend that runs graphs eagerly and records them."""

    forward: list[GraphModule] = field(default_factory=list)
    backward: list[GraphModule] = field(default_factory=list)

    @cached_property
    def backend(self) -> Any:
        """The backend. It is cached, because torch.compile reuses graphs only with the same backend object."""
        return aot_autograd(fw_compiler=partial(_keep, self.forward), bw_compiler=partial(_keep, self.backward))

    def operators(self) -> list[Counter[str]]:
        """The counts of this package's operators: first of each forward graph, then of each backward graph."""
        return [
            Counter(
                str(node.target).split(".")[1]
                for node in graph.graph.nodes
                if str(node.target).startswith(f"{ring_backends.__name__}.")
            )
            for graph in (*self.forward, *self.backward)
        ]


def _keep(graphs: list[GraphModule], graph: GraphModule, inputs: Any) -> Any:
    graphs.append(graph)
    return make_boxed_func(graph)


def compiled_in(call: LocalCall, backend: Any = "aot_eager") -> LocalCall:
    torch.compiler.reset()
    return replace(call, attention=torch.compile(call.attention, fullgraph=True, backend=backend))


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++ on the CPU")


class CompileTests(AdapterSuite):
    @pytest.mark.matrix(reason="compiles twice")
    @on_every_rank
    def test_the_backward_has_the_settings_of_the_forward(self) -> None:
        """A module gets another scale between a forward and its backward."""
        torch.compiler.reset()
        call = self.call(_SHORT)
        attention, grads = call.attention, []
        for attend in (attention, torch.compile(attention, backend="aot_eager")):
            outs = []
            for attention.scale in (0.5, 1.5):
                outs.append(attend(*call.inputs, **call.options))
            grads.append(torch.autograd.grad(outs, call.inputs, [torch.ones_like(out) for out in outs]))
        torch.testing.assert_close(*grads, rtol=0, atol=1e-10)

    @core
    @pytest.mark.parametrize("name", matrix_but("all", of=CASES))
    @pytest.mark.parametrize("rings", matrix_but(FOUR, of=(FOUR, IN_GROUPS, ONE)), ids=str)
    @on_every_rank
    def test_a_compiled_call_is_one_graph(self, rings: RingSpec, name: str) -> None:
        case, ring, graphs = CASES[name], self.ring(rings, "zigzag"), Graphs()
        compiled_in(local_call(self.adapter, ring, case), graphs.backend).check()
        prefix = "attend" if rings.size == 1 and not case.dropout_p else "ring"
        assert graphs.operators() == [{f"{prefix}_forward": 1}, {f"{prefix}_backward": 1}], graphs.operators()

    @core
    @MORE_CASES
    @needs_compiler
    @on_every_rank
    def test_a_call_compiled_by_inductor(self) -> None:
        """Attention is compiled between other operations."""
        torch.compiler.reset()
        call = self.call(_SHORT)

        @torch.compile(fullgraph=True)
        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            out, lse = call.attention(query * 2 / 2, key + 1 - 1, value * 4 / 4, **call.options, return_lse=True)
            return out * 2 / 2, lse

        out, lse = attend(*call.inputs)
        check_results(Results(out.detach(), lse, *call.gradients(out)), call.expected(), 1e-5)

    @core
    @MORE_CASES
    @on_every_rank
    def test_a_compiled_call_without_gradients(self) -> None:
        call, graphs = self.call(CASES["causal"], gradients=False), Graphs()
        torch.testing.assert_close(compiled_in(call, graphs.backend)(), call(), rtol=0, atol=1e-12)
        assert graphs.operators() == [{"ring_forward": 1}], graphs.operators()
