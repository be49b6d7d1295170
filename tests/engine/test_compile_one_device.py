"""Compiled calls on one device: one operator per direction, and graphs that a CUDA graph can contain."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch._inductor.config
from native_ranks import assert_near
from torch import Tensor, nn
from torch._dynamo.backends import cudagraphs
from torch._inductor import cudagraph_utils
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils.checkpoint import checkpoint

from ring_backends.activation_checkpointing import keep_attention
from ring_backends.adapters.native import RingDilatedAttention
from ring_backends.engine import binding, operators
from ring_backends.engine.call import AttentionInputs
from ring_backends.testing.compiled import Graphs
from ring_backends.testing.marks import THOROUGH, matrix_but
from ring_backends.testing.reference import reference_attention
from ring_backends.torch_internals import internal

SEQ_LEN, HEADS, HEAD_DIM = 40, 4, 8
WIDTH = HEADS * HEAD_DIM
PATTERN: dict[str, Any] = {"segment_lengths": (8, 40), "dilation_rates": (1, 2)}
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "key mask": {"key_padding_mask": torch.arange(SEQ_LEN).expand(2, -1) % 5 == 0},
    "documents": {"document_ids": (torch.arange(SEQ_LEN) // 11).expand(2, -1), "is_causal": True},
}


class Block(nn.Module):
    """A transformer block: norm, projections, attention and MLP."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = attention
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.projections = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.double()

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        normed = self.norms[0](x)
        query, key, value = (project(normed).unflatten(-1, (HEADS, HEAD_DIM)) for project in self.projections[:3])
        x = x + self.projections[3](self.attention(query, key, value, **options).flatten(-2))
        return x + self.mlp(self.norms[1](x))


class Reference(nn.Module):
    """The dense fp64 reference."""

    def forward(self, *tensors: Tensor, **options: Any) -> Tensor:
        out, _ = reference_attention(*tensors, **PATTERN, **options)
        return out


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def tensors(seq_len: int = SEQ_LEN, *, batch: int = 1, **options: Any) -> list[Tensor]:
    """query, key and value."""
    return [torch.randn(batch, seq_len, HEADS, HEAD_DIM, **{"dtype": torch.float64, **options}) for _ in range(3)]


def results(block: Any, **options: Any) -> list[Tensor]:
    """out, and the gradients of the input and of all parameters."""
    x = torch.randn(2, SEQ_LEN, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    out = block(x.requires_grad_(), **options)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *block.parameters()])]


def refusal(graph: GraphModule) -> str | None:
    """Why Inductor would put this graph into no CUDA graph if the model and its inputs were on a GPU.

    Handles and seeds, which are the only vectors of int64, stay on the CPU.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        inputs = [
            torch.empty_like(node.meta["val"], device="cpu" if is_vector_of_int64(node.meta["val"]) else "cuda")
            for node in graph.graph.find_nodes(op="placeholder")
        ]
    FakeTensorProp(graph, mode).propagate_dont_convert_inputs(*inputs)
    devices = internal(cudagraphs, "get_device_node_mapping", "this test")(graph)
    check = internal(cudagraph_utils, "check_multiple_devices_or_any_cpu_nodes", "this test")
    with torch._inductor.config.patch(graph_partition=False):
        return check(devices)


@pytest.mark.parametrize("name", matrix_but("documents", of=OPTIONS))
def test_a_compiled_block_has_one_operator_per_direction(name: str) -> None:
    graphs, block, options = Graphs(), Block(RingDilatedAttention(**PATTERN)), OPTIONS[name]
    got = results(torch.compile(block, fullgraph=True, backend=graphs.backend), **options)
    assert_near(got, results(Block(Reference()), **options), 1e-9)
    assert graphs.operators() == [{"attend_forward": 1}, {"attend_backward": 1}]
    for graph in (*graphs.forward, *graphs.backward):
        assert not [node for node in graph.graph.nodes if is_vector_of_int64(node.meta.get("val"))]
        assert refusal(graph) is None


def is_vector_of_int64(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.int64 and value.dim() == 1


@THOROUGH
def test_a_call_with_dropout_keeps_its_seed_on_the_cpu() -> None:
    """Inductor refuses it, and its partitions of a graph leave it out of CUDA graphs."""
    graphs, block = Graphs(), Block(RingDilatedAttention(**PATTERN, dropout_p=0.2))
    results(torch.compile(block, fullgraph=True, backend=graphs.backend))
    for graph, direction in zip((*graphs.forward, *graphs.backward), ("forward", "backward"), strict=True):
        assert "cpu device" in str(refusal(graph))
        of_call = [node.target for node in graph.graph.nodes if "ring_backends." in str(node.target)]
        assert len(of_call) == 1, direction
        assert all(torch.Tag.cudagraph_unsafe in operator.tags for operator in of_call)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pattern", [([40], [1]), ([8, 40], [1, 2])], ids=["full attention", "dilated"])
@pytest.mark.parametrize("kernel", ["auto", "math"])
def test_operators_keep_the_rules_of_torch(kernel: str, pattern: Any, dtype: torch.dtype) -> None:
    """No result shares memory with another or with an input, and fake results have the strides of real ones."""
    attention = RingDilatedAttention(*pattern, kernel=kernel)
    query, key, value = tensors(batch=2, dtype=dtype)
    inputs = AttentionInputs(query, key, value, is_causal=True, seq_len=SEQ_LEN)
    settings = operators.settings_of(attention.pattern, attention.ring, None, kernel)
    options = json.dumps(inputs.options | settings | {"needs_gradients": True})
    checks = "test_schema", "test_faketensor"
    forward, backward = torch.ops.ring_backends.attend_forward, torch.ops.ring_backends.attend_backward
    torch.library.opcheck(forward.default, (None, inputs.tensors, options), test_utils=checks)
    out, lse, _ = forward(None, inputs.tensors, options)
    of_backward = [*inputs.tensors, out, lse, torch.randn_like(out)]
    torch.library.opcheck(backward.default, (None, of_backward, options), test_utils=checks)
    grads = backward(None, of_backward, options)
    held = [x.untyped_storage().data_ptr() for x in (query, key, value, of_backward[-1], out, lse, *grads)]
    assert len({*held}) == len(held)
    assert all(x.is_contiguous() for x in (out, lse, *grads))


def test_numbers_that_torch_makes_symbols() -> None:
    """Modules with other numbers share one compiled function. After the first, torch makes symbols of numbers."""

    def attend(attention: Any, *inputs: Tensor) -> Any:
        return attention(*inputs)

    function, inputs = torch.compile(attend, fullgraph=True, backend="aot_eager"), tensors()
    for width, rate, scale in ((8, 1, 0.5), (10, 2, -0.25), (20, 4, 0.75)):
        attention = RingDilatedAttention([width, 40], [1, rate], scale=scale)
        wanted, _ = reference_attention(*inputs, (width, 40), (1, rate), scale=scale)
        assert_near(function(attention, *inputs), wanted)


@pytest.mark.parametrize("how", matrix_but("kept", of=("recomputed", "kept")))
def test_activation_checkpointing(how: str) -> None:
    context = {"context_fn": keep_attention} if how == "kept" else {}
    graphs, block = Graphs(), Block(RingDilatedAttention(**PATTERN))

    class Checkpointed(Block):
        def forward(self, x: Tensor, **options: Any) -> Any:
            return checkpoint(partial(super().forward, **options), x, use_reentrant=False, **context)

    block.__class__ = Checkpointed
    got = results(torch.compile(block, fullgraph=True, backend=graphs.backend), is_causal=True)
    assert_near(got, results(Block(Reference()), is_causal=True), 1e-9)
    forward, backward = graphs.operators()
    assert forward == {"attend_forward": 1}
    assert backward["attend_backward"] == 1
    assert backward["attend_forward"] == (how == "recomputed")


def test_a_call_does_not_need_its_module_any_more() -> None:
    inputs = tensors(requires_grad=True)
    attention = RingDilatedAttention(**PATTERN)
    out, lse = torch.compile(attention, fullgraph=True, backend="aot_eager")(*inputs, return_lse=True)
    assert not lse.requires_grad
    wanted = torch.autograd.grad(reference_attention(*inputs, **PATTERN)[0].sum(), inputs)
    with mock.patch.dict(binding._bound.data, clear=True):
        assert_near(torch.autograd.grad(out.sum(), inputs), wanted)


def test_errors_quote_the_message_of_the_check() -> None:
    query, _, _ = tensors()
    function = torch.compile(RingDilatedAttention(**PATTERN), fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"ValueError.*key has shape \[1, 3, 4, 8\]"):
        function(query, query[:, :3], query)
