"""Bad arguments: every rank raises an error that names the argument, before any communication."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ring_backends.testing.calls import difference, expected, local_call
from ring_backends.testing.capabilities import AdapterSuite, core
from ring_backends.testing.failing_calls import SMALL_CASE, Ended, ending
from ring_backends.testing.rings import FOUR, backend, ring_here
from ring_backends.testing.world import World


@dataclass(frozen=True)
class Bad:
    """A call with one bad argument.

    Attributes:
        message_parts: texts that the message has to contain, such as the argument's name and value.
        options: constructor arguments.
        arguments: call arguments. A function computes the bad argument from the good one.
    """

    error: type[Exception]
    message_parts: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)


def _int64(tensor: Tensor) -> Tensor:
    return tensor.detach().long()


BAD_CALLS = {
    "lengths and rates differ": Bad(
        ValueError, ("segment_lengths", "2", "dilation_rates", "1"), {"segment_lengths": [4, 8], "dilation_rates": [1]}
    ),
    "no branch": Bad(ValueError, ("segment_lengths",), {"segment_lengths": [], "dilation_rates": []}),
    "w = 0": Bad(ValueError, ("segment_lengths[1] = 0",), {"segment_lengths": [4, 0], "dilation_rates": [1, 1]}),
    "r = 0": Bad(ValueError, ("dilation_rates[0] = 0",), {"dilation_rates": [0]}),
    "r < 0": Bad(ValueError, ("dilation_rates[0] = -2",), {"dilation_rates": [-2]}),
    "w a float": Bad(TypeError, ("segment_lengths[0] = 4.0",), {"segment_lengths": [4.0]}),
    "w alone": Bad(TypeError, ("segment_lengths = 4",), {"segment_lengths": 4}),
    "r a bool": Bad(TypeError, ("dilation_rates[0] = True",), {"dilation_rates": [True]}),
    "head_mode": Bad(ValueError, ("head_mode = 'some'", "'grouped'"), {"head_mode": "some"}),
    "offset": Bad(ValueError, ("offset = 'diagonal'", "'block'"), {"offset": "diagonal"}),
    "padding": Bad(ValueError, ("padding = 'ones'", "'zeros'"), {"padding": "ones"}),
    "kernel": Bad(ValueError, ("kernel = 'abacus'", "'auto'"), {"kernel": "abacus"}),
    "kernel of another device": Bad(ValueError, ("kernel = 'aten_cuda_flash'", "cuda"), {"kernel": "aten_cuda_flash"}),
    "dropout of everything": Bad(ValueError, ("dropout_p = 1",), {"dropout_p": 1}),
    "dropout below 0": Bad(ValueError, ("dropout_p = -0.1",), {"dropout_p": -0.1}),
    "dropout by a kernel without": Bad(
        ValueError,
        ("kernel = 'aten_cpu_flash'", "dropout", "kernel='auto'"),
        {"dropout_p": 0.1, "kernel": "aten_cpu_flash"},
    ),
    "dropout seed a float": Bad(TypeError, ("dropout_seed = 1.0",), {}, {"dropout_seed": 1.0}),
    "dropout seed below 0": Bad(ValueError, ("dropout_seed = -1",), {}, {"dropout_seed": -1}),
    "documents a list": Bad(TypeError, ("document_ids = [",), {}, {"document_ids": [[0] * 4] * 2}),
    "documents of floats": Bad(ValueError, ("document_ids", "float32"), {}, {"document_ids": torch.zeros(2, 4)}),
    "documents of another shape": Bad(
        ValueError, ("document_ids", "[2, 5]", "[2, 4]"), {}, {"document_ids": torch.zeros(2, 5).int()}
    ),
    "documents elsewhere": Bad(
        ValueError, ("document_ids", "meta"), {}, {"document_ids": torch.zeros(2, 4, device="meta").int()}
    ),
    "documents with zero padding": Bad(
        ValueError,
        ("document_ids", "padding = 'zeros'"),
        {"padding": "zeros"},
        {"document_ids": torch.zeros(2, 4).int()},
    ),
    "gradients in fp16 on the wire": Bad(
        ValueError, ("grad_wire_dtype = torch.float16",), {"grad_wire_dtype": torch.float16}
    ),
    "gradients in a string on the wire": Bad(TypeError, ("grad_wire_dtype = 'bf16'",), {"grad_wire_dtype": "bf16"}),
    "dropout a string": Bad(TypeError, ("dropout_p = 'no'",), {"dropout_p": "no"}),
    "scale nan": Bad(ValueError, ("scale = nan",), {"scale": float("nan")}),
    "scale infinite": Bad(ValueError, ("scale = inf",), {"scale": float("inf")}),
    "scale a string": Bad(TypeError, ("scale = '0.1'",), {"scale": "0.1"}),
    "ring a group": Bad(TypeError, ("ring = 'the ring'", "initialize()"), {"ring": "the ring"}),
    "zero padding that torchscale misplaces": Bad(
        ValueError, ("padding='zeros'", "5", "2"), {"segment_lengths": [5], "dilation_rates": [2], "padding": "zeros"}
    ),
    "more groups than heads": Bad(
        ValueError,
        ("head_mode='grouped'", "4 heads", "5 branches"),
        {"segment_lengths": [4] * 5, "dilation_rates": [1] * 5, "head_mode": "grouped"},
    ),
    "query of 3 dimensions": Bad(ValueError, ("query", "[2, 4, 32]"), {}, {"query": lambda x: x.flatten(2)}),
    "key of 5 dimensions": Bad(ValueError, ("key", "[2, 4, 2, 8, 1]"), {}, {"key": lambda x: x.unsqueeze(-1)}),
    "query of integers": Bad(ValueError, ("query", "torch.int64"), {}, {"query": _int64}),
    "value of complex numbers": Bad(ValueError, ("value", "torch.complex"), {}, {"value": lambda x: x + 0j}),
    "key of another dtype": Bad(ValueError, ("key", "float32", "float64"), {}, {"key": lambda x: x.float()}),
    "value on another device": Bad(ValueError, ("value", "meta", "cpu"), {}, {"value": lambda x: x.to("meta")}),
    "query a list": Bad(TypeError, ("query = [",), {}, {"query": lambda x: x.tolist()}),
    "key None": Bad(TypeError, ("key = None",), {}, {"key": None}),
    "key of another batch": Bad(ValueError, ("key", "[1, 4, 2, 8]"), {}, {"key": lambda x: x[:1]}),
    "value of other rows": Bad(ValueError, ("value", "[2, 3, 2, 8]"), {}, {"value": lambda x: x[:, :3]}),
    "key of another head_dim": Bad(ValueError, ("key", "[2, 4, 2, 7]"), {}, {"key": lambda x: x[..., :7]}),
    "value of other heads": Bad(ValueError, ("value", "1", "2"), {}, {"value": lambda x: x[:, :, :1]}),
    "heads that do not divide": Bad(ValueError, ("query has 3 heads", "key 2"), {}, {"query": lambda x: x[:, :, :3]}),
    "no heads": Bad(ValueError, ("query has 0 heads",), {}, {"query": lambda x: x[:, :, :0]}),
    "no components": Bad(
        ValueError,
        ("head_dim", "query"),
        {},
        {name: lambda x: x[..., :0] for name in ("query", "key", "value")},
    ),
    "seq_len that does not fit": Bad(ValueError, ("seq_len = 1000", "4 rows"), {}, {"seq_len": 1000}),
    "seq_len 0": Bad(ValueError, ("seq_len = 0",), {}, {"seq_len": 0}),
    "seq_len a string": Bad(TypeError, ("seq_len = '16'",), {}, {"seq_len": "16"}),
    "mask of another shape": Bad(
        ValueError, ("key_padding_mask", "[2, 5]", "[2, 4]"), {}, {"key_padding_mask": torch.zeros(2, 5).bool()}
    ),
    "mask of floats": Bad(ValueError, ("key_padding_mask", "float32"), {}, {"key_padding_mask": torch.zeros(2, 4)}),
    "mask a list": Bad(TypeError, ("key_padding_mask = [",), {}, {"key_padding_mask": [[True] * 4] * 2}),
    "mask on another device": Bad(
        ValueError, ("key_padding_mask", "meta"), {}, {"key_padding_mask": torch.zeros(2, 4, device="meta").bool()}
    ),
    "is_causal a number": Bad(TypeError, ("is_causal = 1",), {}, {"is_causal": 1}),
    "return_lse a tensor": Bad(TypeError, ("return_lse = tensor",), {}, {"return_lse": torch.zeros(2)}),
}


def make_bad_call(adapter: str, name: str) -> tuple[Ended, tuple[int, int], Tensor]:
    """Make a bad call, then a good one. Returns how the bad one ended, its traffic, and the output of the good one."""
    ring, bad = ring_here(adapter, FOUR), BAD_CALLS[name]
    assert ring is not None
    good = local_call(adapter, ring, SMALL_CASE)
    options = {"segment_lengths": [8], "dilation_rates": [1], "ring": ring, **bad.options}
    arguments: dict[str, Any] = {"query": good.query, "key": good.key, "value": good.value, **good.options}
    for argument, value in bad.arguments.items():
        arguments[argument] = value(arguments[argument]) if callable(value) else value
    ring.traffic.reset()
    ended = ending(lambda: backend(adapter).RingDilatedAttention(**options)(**arguments))
    sent = (ring.traffic.messages, ring.traffic.bytes)
    return ended, sent, good().detach()


def _whole_world(_: Any) -> Any:
    return dist.group.WORLD


def _mesh(_: Any) -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "ring"))


_AUTO = {
    "ring_size": "auto",
    "seq_len": 16,
    "segment_lengths": [16],
    "dilation_rates": [1],
    "num_heads": 4,
    "head_dim": 8,
}


BAD_RINGS = {
    "ring_size that does not divide the world": Bad(ValueError, ("ring_size = 3", "4"), {"ring_size": 3}),
    "ring_size above the world": Bad(ValueError, ("ring_size = 8", "4"), {"ring_size": 8}),
    "ring_size 0": Bad(ValueError, ("ring_size = 0",), {"ring_size": 0}),
    "ring_size a float": Bad(TypeError, ("ring_size = 2.0",), {"ring_size": 2.0}),
    "layout": Bad(ValueError, ("layout = 'spiral'", "'zigzag'"), {"layout": "spiral"}),
    "timeout a number": Bad(TypeError, ("timeout = 5", "timedelta"), {"timeout": 5}),
    "timeout 0": Bad(ValueError, ("timeout = 0:00:00",), {"timeout": timedelta(0)}),
    "group a list": Bad(TypeError, ("group = [0, 1]",), {"group": [0, 1]}),
    "group of two axes": Bad(ValueError, ("group", "'data', 'ring'"), {"group": _mesh}),
    "ring_size auto of nothing": Bad(ValueError, ("ring_size = 'auto'", "seq_len", "head_dim"), {"ring_size": "auto"}),
    "ring_size auto of half": Bad(
        ValueError, ("ring_size = 'auto'", "num_heads and head_dim"), {**_AUTO, "num_heads": ..., "head_dim": ...}
    ),
    "ring_size auto of a bad pattern": Bad(ValueError, ("dilation_rates[0] = 0",), {**_AUTO, "dilation_rates": [0]}),
    "ring_size auto of no head_dim": Bad(ValueError, ("head_dim = 0",), {**_AUTO, "head_dim": 0}),
    "ring_size auto without memory": Bad(ValueError, ("memory_bytes = 0",), {**_AUTO, "memory_bytes": 0}),
    "ring_size auto and group": Bad(ValueError, ("ring_size = 'auto'", "group"), {**_AUTO, "group": _whole_world}),
    "seq_len without auto": Bad(ValueError, ("seq_len = 16", "ring_size = 2"), {**_AUTO, "ring_size": 2}),
    "ring_order": Bad(ValueError, ("ring_order = 'name'", "'topology'"), {"ring_order": "name"}),
    "ring_order and group": Bad(
        ValueError, ("ring_order = 'topology'", "group"), {"ring_order": "topology", "group": _whole_world}
    ),
    "an unknown argument": Bad(TypeError, ("num_head = 8",), {**_AUTO, "num_head": 8}),
    "ring_size and group": Bad(ValueError, ("ring_size = 2", "4"), {"ring_size": 2, "group": _whole_world}),
}


def make_bad_ring(adapter: str, name: str) -> Ended:
    options = BAD_RINGS[name].options
    made = {option: value(None) if callable(value) else value for option, value in options.items() if value is not ...}
    return ending(lambda: backend(adapter).initialize(**made))


def unshard_a_wrong_length(adapter: str) -> Ended:
    ring = ring_here(adapter, FOUR)
    assert ring is not None
    return ending(lambda: ring.unshard(torch.zeros(1, 5, 2), dim=1, seq_len=16))


class BadArgumentTests(AdapterSuite):
    @core
    @pytest.mark.parametrize("name", BAD_CALLS)
    def test_bad_arguments_are_refused_by_name(self, world: World, name: str) -> None:
        bad = BAD_CALLS[name]
        endings, sent, outs = zip(*world.run(make_bad_call, self.adapter, name), strict=True)
        for ended in endings:
            assert ended.is_a(bad.error), ended
            for text in bad.message_parts:
                assert text in ended.message, ended
        assert set(sent) == {(0, 0)}
        assert difference(torch.cat(outs, 1), expected(SMALL_CASE, gradients=False).out) <= 1e-10

    @core
    @pytest.mark.parametrize("name", BAD_RINGS)
    def test_bad_rings_are_refused_by_name(self, world: World, name: str) -> None:
        bad = BAD_RINGS[name]
        for ended in world.run(make_bad_ring, self.adapter, name):
            assert ended.is_a(bad.error), ended
            for text in bad.message_parts:
                assert text in ended.message, ended

    @core
    def test_unshard_refuses_a_wrong_length(self, world: World) -> None:
        for ended in world.run(unshard_a_wrong_length, self.adapter):
            assert ended.is_a(ValueError), ended
            assert "5 rows" in ended.message
            assert "16" in ended.message
