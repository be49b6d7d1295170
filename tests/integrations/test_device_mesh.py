"""A model whose attention parallelize_module has put on a mesh axis equals the model on one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest
import torch
from device_mesh_cases import HEADS, InnerAttention, Kind, N, make_model, mesh_of, put, run
from native_ranks import assert_near, world_of
from torch import Tensor, nn
from torch.autograd import grad
from torch.utils.checkpoint import checkpoint

from ring_backends import dilated_attention
from ring_backends.adapters import native
from ring_backends.integrations.device_mesh import RingDilated, context_parallel, ring_of
from ring_backends.multihead import RingDilatedMultiheadAttention
from ring_backends.testing.marks import THOROUGH, matrix_but
from ring_backends.testing.world import World

PATTERN = ([8, 24], [1, 3])


two, four = world_of(2), world_of(4)


def assert_equal(of_ranks: list[Any], expected: Any) -> None:
    for found in of_ranks:
        assert_near(found, expected, 1e-5)


LONG = pytest.mark.matrix(reason="trains a model")
KINDS, STRATEGIES = ("encoder", "decoder"), ("ddp", "fsdp2-world", "fsdp2-mesh")
CASES = matrix_but(("decoder", "fsdp2-mesh"), of=product(KINDS, STRATEGIES), reason="trains a model")
every_model = pytest.mark.parametrize("case", CASES, ids="-".join)


@every_model
def test_training_on_two_ranks(two: World, case: tuple[Kind, str]) -> None:
    """1 × 2 in both layouts, once in a group of two, and 2 × 1."""
    kind, strategy = case
    expected = run(kind)
    for shape, layout, ulysses_size in (
        ((1, 2), "contiguous", "auto"),
        ((1, 2), "zigzag", 1),
        ((2, 1), "contiguous", 1),
    ):
        assert_equal(two.run(run, kind, shape, strategy, layout, ulysses_size=ulysses_size), expected)


@THOROUGH
@every_model
def test_training_on_two_by_two(four: World, case: tuple[Kind, str]) -> None:
    kind, strategy = case
    assert_equal(four.run(run, kind, (2, 2), strategy, "zigzag"), run(kind))


@LONG
@pytest.mark.parametrize("kind", KINDS)
def test_training_of_a_compiled_model(two: World, kind: Kind) -> None:
    """The decoder is one graph. The encoder's layers make a float mask, whose values break the graph."""
    assert_equal(two.run(run, kind, (1, 2), "ddp", "zigzag", compiled=True), run(kind))


def make_tensors(num_kv_heads: int = HEADS) -> list[Tensor]:
    """Query, key, value and the gradient of the output: [2, heads, N, 8]."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, heads, N, 8, generator=generator) for heads in (HEADS, num_kv_heads, num_kv_heads, HEADS)]


def on_ring(module: nn.Module, tensors: list[Tensor], dim: int, **options: Any) -> list[Tensor]:
    """The whole output, and the whole gradients of query, key and value."""
    mesh = mesh_of((1, 2))["ring"]
    buffers = [tensor.clone() for tensor in tensors]
    masks = [value for value in options.values() if isinstance(value, Tensor)]
    dims = [dim] * len(tensors) + [1] * len(masks)
    with context_parallel(mesh, buffers=[*buffers, *masks], buffer_seq_dims=dims):
        results = alone(module, buffers, **options)
    return [ring_of(mesh).unshard(result, dim, N) for result in results]


def alone(module: Callable[..., Any], tensors: Iterable[Tensor], *args: Any, **options: Any) -> list[Tensor]:
    """The output, and the gradients of query, key and value. The last tensor is the gradient of the output."""
    *inputs, grad_out = tensors
    rows = [tensor.detach().requires_grad_() for tensor in inputs]
    out = module(*rows, *args, **options)
    out = out[0] if isinstance(out, tuple) else out
    return [out.detach(), *grad(out, rows, grad_out)]


IS_LATER = torch.arange(N) >= torch.tensor([[10], [30]])
PADDING = {"key_padding_mask": IS_LATER}
WINDOWS = {"window_lengths": [None, 20], "offset": "every"}


def pattern_here(seq_dim: int, style: dict[str, Any], options: dict[str, Any]) -> list[Tensor]:
    attention = put(InnerAttention(), RingDilated(*PATTERN, seq_dim=seq_dim, layout="zigzag", **style))
    tensors = [tensor.transpose(1, 2).transpose(1, seq_dim) for tensor in make_tensors(num_kv_heads=2)]
    results = on_ring(attention, tensors, seq_dim, enable_gqa=True, scale=8**-0.5, **options)
    return [result.transpose(1, seq_dim) for result in results]


@pytest.mark.parametrize(
    ("seq_dim", "style", "options"),
    [
        (1, {"is_causal": True}, {"document_ids": IS_LATER.long()}),
        (2, {"is_causal": False}, PADDING),
        (2, {"is_causal": True, "dropout_p": 0.3}, {"dropout_seed": 3}),
        (2, {"is_causal": True, **WINDOWS}, {}),
    ],
    ids=["documents", "padding", "dropout", "windows"],
)
def test_a_dilated_pattern(two: World, seq_dim: int, style: dict[str, Any], options: dict[str, Any]) -> None:
    """Equals ``dilated_attention`` of the whole sequence, also with the options of a ring attention."""
    tensors = [tensor.transpose(1, 2) for tensor in make_tensors(num_kv_heads=2)]
    expected = alone(dilated_attention, tensors, *PATTERN, **style, **options)
    assert_equal(two.run(pattern_here, seq_dim, style, options), expected)


MULTIHEAD: list[dict[str, Any]] = [{"batch_first": True}, {"kdim": 12, "vdim": 20, "bias": False}]


def make_multihead(options: dict[str, Any]) -> tuple[nn.MultiheadAttention, list[Tensor], dict[str, Any]]:
    """A module, its inputs and the gradient of its output, and options of its calls."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(16, HEADS, **options)
    shape = (2, N) if module.batch_first else (N, 2)
    tensors = [torch.randn(*shape, width) for width in (16, module.kdim, module.vdim, 16)]
    return module, tensors, {**PADDING, "need_weights": False}


def multihead_here(options: dict[str, Any], is_causal: bool) -> list[Tensor]:
    module, tensors, call = make_multihead(options)
    module = put(module, RingDilated([N], [1], layout="zigzag"))
    return on_ring(module, tensors, int(module.batch_first), is_causal=is_causal, **call)


@pytest.mark.parametrize("options", MULTIHEAD, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_multihead_attention(two: World, options: dict[str, Any], is_causal: bool) -> None:
    module, tensors, call = make_multihead(options)
    later = torch.ones(N, N, dtype=torch.bool).triu(1) if is_causal else None
    assert_equal(two.run(multihead_here, options, is_causal), alone(module, tensors, attn_mask=later, **call))


def make_own(kind: str) -> tuple[Any, list[Tensor]]:
    """An attention of this package, its inputs and the gradient of its output, [2, N, …]."""
    torch.manual_seed(0)
    attention = native.RingDilatedAttention(*PATTERN)
    if kind == "attention":
        return attention, [tensor.transpose(1, 2) for tensor in make_tensors(num_kv_heads=2)]
    return RingDilatedMultiheadAttention(32, HEADS, attention, rotary=True), [torch.randn(2, N, 32) for _ in range(2)]


def own_here(kind: str, copied: bool) -> list[Tensor]:
    module, tensors = make_own(kind)
    module = put(module, RingDilated(layout="zigzag"))
    module = copy.deepcopy(module) if copied else module
    return on_ring(module, tensors, 1, is_causal=True, **PADDING)


@pytest.mark.parametrize("kind", ["attention", "multihead"])
@pytest.mark.parametrize("copied", [False, True])
def test_attention_of_this_package(two: World, kind: str, copied: bool) -> None:
    """It takes the ring of the axis, and the length of the sequence from the context."""
    module, tensors = make_own(kind)
    assert_equal(two.run(own_here, kind, copied), alone(module, tensors, is_causal=True, **PADDING))


def sharded_before_here(seq_len: int) -> list[Tensor]:
    attention = put(InnerAttention(), RingDilated(*PATTERN, layout="zigzag"))
    ring = ring_of(mesh_of((1, 2))["ring"])
    *rows, grad_out = (ring.shard(x, dim=2).requires_grad_() for x in make_tensors(num_kv_heads=HEADS))
    with context_parallel(mesh_of((1, 2))["ring"], seq_len=seq_len):
        out = attention(*rows)
    return [ring.unshard(x, dim=2, seq_len=seq_len).detach() for x in (out, *grad(out, rows, grad_out))]


def test_rows_that_are_sharded_already(two: World) -> None:
    tensors = [x.transpose(1, 2) for x in make_tensors(num_kv_heads=HEADS)]
    expected = alone(dilated_attention, tensors, *PATTERN, is_causal=True)
    assert_equal(two.run(sharded_before_here, N), [x.transpose(1, 2) for x in expected])


def copies_here() -> list[Tensor]:
    """Logits of a converted model, of a deep copy, with activation checkpointing, and with parameters that a plain
    model loads. The ranks share a host, so they form a group.
    """
    model, plain = make_model("decoder"), make_model("decoder")
    names = [*model.state_dict()]
    style = RingDilated([N], [1], ulysses_size="auto")
    mesh, model = mesh_of((1, 2))["ring"], put(model, style, "layers.*.inner_attention")
    with torch.no_grad():
        model.head.weight.mul_(2)
    assert [*model.state_dict()] == names
    assert type(model.layers["0"].inner_attention) is type(model.layers["1"].inner_attention)
    copied = copy.deepcopy(model)
    plain.load_state_dict(model.state_dict())
    tokens, results = torch.arange(N)[None] % 23, []
    whole, whole_freqs = tokens.clone(), model.freqs.clone()
    with context_parallel(mesh, buffers=[tokens, model.freqs, copied.freqs], buffer_seq_dims=[1, 0, 0]):
        results += [model(tokens, tokens), copied(tokens, tokens)]
        layer = model.layers["0"]
        x = model.embedding(tokens).requires_grad_()
        outs = [layer(x, model.freqs), checkpoint(layer, x, model.freqs, use_reentrant=False)]
        dout = torch.randn_like(x)
        gradients = [grad(out, [x, *layer.parameters()], dout) for out in outs]
    assert_equal([gradients[0]], gradients[1])
    ring = ring_of(mesh)
    assert ring.ulysses_size == 2
    assert torch.equal(tokens, whole)
    assert torch.equal(model.freqs, whole_freqs)
    return [*(ring.unshard(logits, seq_len=N).detach() for logits in results), plain(whole, whole).detach()]


def test_copies_and_state_dicts(two: World) -> None:
    for first, *others in two.run(copies_here):
        assert_equal(others, first)


def buffers_here() -> None:
    """The buffers inside and after a context."""
    put(InnerAttention(), RingDilated([N], [1], layout="zigzag"))
    mesh = mesh_of((1, 2))["ring"]
    ring = ring_of(mesh)
    batch = torch.arange(2 * (N + 1)).view(2, N + 1)
    tokens, labels = batch[:, :-1], batch[:, 1:]  # views of one tensor
    table, kept = torch.randn(3, N), torch.randn(N)
    buffers, dims = [tokens, labels, table, kept], [1, 1, -1, 0]
    wholes = [buffer.clone() for buffer in buffers]
    addresses = [buffer.data_ptr() for buffer in buffers]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims, no_restore_buffers={kept}):
        for buffer, whole, dim in zip(buffers, wholes, dims, strict=True):
            assert torch.equal(buffer, ring.shard(whole, dim))
    assert torch.equal(batch, torch.arange(2 * (N + 1)).view(2, N + 1))
    for buffer, whole, address in zip(buffers[:3], wholes, addresses, strict=False):
        assert torch.equal(buffer, whole)
        assert buffer.data_ptr() == address
    assert torch.equal(kept, ring.shard(wholes[3], 0))
    with pytest.raises(KeyError), context_parallel(mesh, buffers=[table], buffer_seq_dims=[1]):
        raise KeyError
    assert torch.equal(table, wholes[2])
    with torch.inference_mode(), context_parallel(mesh, buffers=[made := torch.ones(N)], buffer_seq_dims=[0]):
        assert len(made) < N
    assert len(made) == N
    with context_parallel(mesh):
        pass


def test_buffers(two: World) -> None:
    two.run(buffers_here)
