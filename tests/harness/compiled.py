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
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx import GraphModule

import ring_backends
from ring_backends.multihead import RingDilatedMultiheadAttention
from ring_backends.ring.ring import Ring
from ring_backends.schedule.layout import LayoutKind
from ring_backends.testing.calls import (
    LocalCall,
    Results,
    call_here,
    check_results,
    expected,
    local_call,
    new_attention,
    whole,
)
from ring_backends.testing.capabilities import AdapterSuite, core
from ring_backends.testing.marks import MORE_CASES, matrix_but
from ring_backends.testing.rings import FOUR, LAYOUTS, ONE, RingSpec, ring_of
from ring_backends.testing.strategies import AttentionCase
from ring_backends.testing.world import World

_CASE = AttentionCase(
    seq_len=61, segment_lengths=(7, 30, 61), dilation_rates=(1, 2, 3), num_heads=4, num_kv_heads=2, dtype=torch.float64
)
CASES = {
    "all": _CASE,
    "causal": replace(_CASE, is_causal=True),
    "masked": replace(_CASE, masked="random"),
    "documents": replace(_CASE, documents="some", is_causal=True),
    "dropout": replace(_CASE, dropout_p=0.3),
    "sinks in a window": replace(_CASE, sinks=True, segment_lengths=(None, 30, 61), window_lengths=(9, None, None)),
    "wide values": replace(_CASE, value_dim=7, is_causal=True),
    "within shards": replace(_CASE, seq_len=64, segment_lengths=(4, 16), dilation_rates=(1, 2)),
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


def compiled_call(
    adapter: str, rings: RingSpec, layout: LayoutKind, case: AttentionCase
) -> tuple[Results, list[Counter[str]]]:
    """A compiled call's results and the operators of its graphs."""
    torch.compiler.reset()
    ring = ring_of(adapter, rings)
    call, graphs = local_call(adapter, ring.with_layout(layout), case), Graphs()
    attention = torch.compile(call.attention, fullgraph=True, backend=graphs.backend)
    return replace(call, attention=attention).results(), graphs.operators()


class Blocks(nn.Module):
    """Several attention modules in sequence."""

    def __init__(self, attentions: list[Any]) -> None:
        super().__init__()
        self.attentions = nn.ModuleList(attentions)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        for attention in self.attentions:
            query = attention(query, key, value, **options)
        return query


def several_blocks(adapter: str) -> tuple[int, list[float]]:
    """Compile three equal blocks. Returns the number of graphs, and the errors of calls with different inputs."""
    torch.compiler.reset()
    ring = ring_of(adapter, FOUR)
    attentions = [new_attention(adapter, ring, CASES["causal"]) for _ in range(3)]
    graphs = Graphs()
    compiled = [torch.compile(attention, fullgraph=True, backend=graphs.backend) for attention in attentions]
    errors = []
    for seed in range(3):
        case = replace(CASES["causal"], seed=seed)
        wanted = _out_and_grads(local_call(adapter, ring, case, attention=Blocks(attentions)))
        got = _out_and_grads(local_call(adapter, ring, case, attention=Blocks(compiled)))
        errors += [float((x - y).abs().max()) for x, y in zip(got, wanted, strict=True)]
    return len(graphs.forward), errors


def _out_and_grads(call: LocalCall) -> list[torch.Tensor]:
    out = call()
    return [out.detach(), *call.gradients(out)]


def without_gradients(adapter: str) -> tuple[float, list[Counter[str]]]:
    """Compile a call without gradients. Returns its error and its operators."""
    torch.compiler.reset()
    call, graphs = call_here(adapter, CASES["causal"], gradients=False), Graphs()
    wanted = call()
    got = replace(call, attention=torch.compile(call.attention, fullgraph=True, backend=graphs.backend))()
    return float((got - wanted).abs().max()), graphs.operators()


def backward_under_autocast(adapter: str) -> Results:
    """Run a compiled call outside autocast and its backward under autocast."""
    torch.compiler.reset()
    call = call_here(adapter, _SHORT)
    attention = torch.compile(call.attention, fullgraph=True, backend="aot_eager")
    out, lse = replace(call, attention=attention)(return_lse=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        grads = call.gradients(out)
    return Results(out.detach(), lse, *grads)


def compiled_by_inductor(adapter: str) -> Results:
    """Compile attention between other operations with Inductor."""
    torch.compiler.reset()
    call = call_here(adapter, _SHORT)

    @torch.compile(fullgraph=True)
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = call.attention(query * 2 / 2, key + 1 - 1, value * 4 / 4, **call.options, return_lse=True)
        return out * 2 / 2, lse

    out, lse = attend(*call.inputs)
    return Results(out.detach(), lse, *call.gradients(out))


def compiled_with_two_scales(adapter: str) -> list[float]:
    """The largest errors of the gradients, if a module gets another scale between a forward and its backward."""
    torch.compiler.reset()
    call = call_here(adapter, _SHORT)
    attention, grads = call.attention, []
    for attend in (attention, torch.compile(attention, backend="aot_eager")):
        outs = []
        for attention.scale in (0.5, 1.5):
            outs.append(attend(*call.inputs, **call.options))
        grads.append(torch.autograd.grad(outs, call.inputs, [torch.ones_like(out) for out in outs]))
    return [float((x - y).abs().max()) for x, y in zip(*grads, strict=True)]


class Decoder(nn.Module):
    """A decoder with two attention layers."""

    def __init__(self, adapter: str, ring: Ring) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 16, dtype=torch.float64)
        self.layers = nn.ModuleList(
            RingDilatedMultiheadAttention(
                16, 4, new_attention(adapter, ring, _CASE), num_kv_heads=2, rotary=True, dtype=torch.float64
            )
            for _ in range(2)
        )
        self.head = nn.Linear(16, 11, dtype=torch.float64)

    def forward(self, tokens: torch.Tensor, seq_len: int) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x, is_causal=True, seq_len=seq_len)
        logits: torch.Tensor = self.head(x)
        return logits


def compiled_model(
    adapter: str, layout: LayoutKind, compiler: str, lengths: tuple[int, ...]
) -> list[tuple[int, float]]:
    """Call a compiled model with different tokens. Returns (number of graphs so far, largest error) of each call."""
    torch.compiler.reset()
    ring = ring_of(adapter, FOUR, layout)
    model, counter = Decoder(adapter, ring), CompileCounterWithBackend(compiler)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    found = []
    for seed, seq_len in enumerate(lengths):
        tokens = ring.shard(torch.randint(11, (2, seq_len), generator=torch.Generator().manual_seed(seed)))
        results = []
        for attend in (model, compiled):
            logits = attend(tokens, seq_len)
            results.append([logits, *torch.autograd.grad(logits.square().sum(), list(model.parameters()))])
        error = max(float((x - y).detach().abs().max()) for x, y in zip(*results, strict=True))
        found.append((counter.frame_count, error))
    return found


class CompileTests(AdapterSuite):
    @pytest.mark.matrix(reason="compiles twice")
    def test_the_backward_has_the_settings_of_the_forward(self, world: World) -> None:
        for errors in world.run(compiled_with_two_scales, self.adapter):
            assert max(errors) < 1e-10

    @pytest.mark.parametrize("name", matrix_but("all", of=CASES))
    @pytest.mark.parametrize("layout", matrix_but("contiguous", of=LAYOUTS))
    @pytest.mark.parametrize("rings", matrix_but(FOUR, of=(FOUR, ONE)), ids=str)
    def test_a_compiled_call_is_one_graph(self, world: World, rings: RingSpec, layout: LayoutKind, name: str) -> None:
        case = CASES[name]
        by_rank = world.run(compiled_call, self.adapter, rings, layout, case)
        for index, ranks in enumerate(rings.rings):
            got = whole([by_rank[rank][0] for rank in ranks], case.seq_len, layout)
            check_results(got, expected(replace(case, replica=index)), 1e-10, case)
            prefix = "attend" if rings.size == 1 and not case.dropout_p else "ring"
            for rank in ranks:
                assert by_rank[rank][1] == [{f"{prefix}_forward": 1}, {f"{prefix}_backward": 1}]

    @core
    def test_a_compiled_model_is_one_graph(self, world: World) -> None:
        """There is no graph break and no recompilation for other tokens."""
        for found in world.run(compiled_model, self.adapter, "contiguous", "aot_eager", (61, 61)):
            assert [graphs for graphs, _ in found] == [1, 1]
            assert max(error for _, error in found) < 1e-9

    @core
    @MORE_CASES
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_a_compiled_model_has_a_graph_per_length(self, world: World, layout: LayoutKind) -> None:
        for found in world.run(compiled_model, self.adapter, layout, "aot_eager", (61, 61, 30, 30, 61)):
            assert [graphs for graphs, _ in found] == [1, 1, 2, 2, 2]
            assert max(error for _, error in found) < 1e-9

    @core
    @MORE_CASES
    @pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++ on the CPU")
    def test_a_model_compiled_by_inductor(self, world: World) -> None:
        for found in world.run(compiled_model, self.adapter, "zigzag", "inductor", (61, 61), timeout=280):
            assert [graphs for graphs, _ in found] == [1, 1]
            assert max(error for _, error in found) < 1e-9

    @core
    @MORE_CASES
    def test_equal_blocks_share_one_graph(self, world: World) -> None:
        for num_graphs, errors in world.run(several_blocks, self.adapter):
            assert num_graphs == 1
            assert max(errors) < 1e-12

    @core
    def test_a_backward_under_autocast_keeps_the_dtype_of_the_forward(self, world: World) -> None:
        got = whole(world.run(backward_under_autocast, self.adapter), _SHORT.seq_len, "contiguous")
        check_results(got, expected(_SHORT), 1e-5, _SHORT)

    @core
    @MORE_CASES
    @pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++ on the CPU")
    def test_a_call_compiled_by_inductor(self, world: World) -> None:
        got = whole(world.run(compiled_by_inductor, self.adapter), _SHORT.seq_len, "contiguous")
        check_results(got, expected(_SHORT), 1e-5, _SHORT)

    @core
    @MORE_CASES
    def test_a_compiled_call_without_gradients(self, world: World) -> None:
        for error, operators in world.run(without_gradients, self.adapter):
            assert error < 1e-12
            assert operators == [{"ring_forward": 1}]
