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
from ring_backends.testing.rings import backend, ring_of
from ring_backends.testing.world import World


@dataclass(frozen=True)
class Bad:
    """A call with one bad argument.

    Attributes:
        texts: parts of the message, such as the argument's name and value.
        options: constructor arguments, or arguments of ``initialize``.
        arguments: call arguments. A function computes the bad argument from the good one.
    """

    error: type[Exception]
    texts: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)


def _made(error: type[Exception], *texts: str, **options: Any) -> Bad:
    return Bad(error, texts, options)


def _called(error: type[Exception], *texts: str, **arguments: Any) -> Bad:
    return Bad(error, texts, {}, arguments)


_ELSEWHERE = torch.zeros(2, 4, device="meta")


BAD_CALLS = {
    "lengths and rates differ": _made(
        ValueError, "segment_lengths", "2", "dilation_rates", "1", segment_lengths=[4, 8], dilation_rates=[1]
    ),
    "no branch": _made(ValueError, "segment_lengths", segment_lengths=[], dilation_rates=[]),
    "w = 0": _made(ValueError, "segment_lengths[1] = 0", segment_lengths=[4, 0], dilation_rates=[1, 1]),
    "r = 0": _made(ValueError, "dilation_rates[0] = 0", dilation_rates=[0]),
    "r < 0": _made(ValueError, "dilation_rates[0] = -2", dilation_rates=[-2]),
    "w a float": _made(TypeError, "segment_lengths[0] = 4.0", segment_lengths=[4.0]),
    "w alone": _made(TypeError, "segment_lengths = 4", segment_lengths=4),
    "w a bool": _made(TypeError, "segment_lengths[1] = True", segment_lengths=[None, True], dilation_rates=[1, 1]),
    "w and more rates": _made(ValueError, "segment_lengths", "1", "2", segment_lengths=[None], dilation_rates=[1, 1]),
    "r a bool": _made(TypeError, "dilation_rates[0] = True", dilation_rates=[True]),
    "r None": _made(TypeError, "dilation_rates[0] = None", dilation_rates=[None]),
    "W = 0": _made(ValueError, "window_lengths[0] = 0", "at least 1", window_lengths=[0]),
    "W a float": _made(TypeError, "window_lengths[0] = 4.0", window_lengths=[4.0]),
    "W a bool": _made(TypeError, "window_lengths[0] = True", window_lengths=[True]),
    "W alone": _made(TypeError, "window_lengths = 4", window_lengths=4),
    "W a string": _made(TypeError, "window_lengths = '4'", window_lengths="4"),
    "a window without a branch": _made(
        ValueError, "window_lengths has 2 entries", "segment_lengths has 1", "None", window_lengths=[4, None]
    ),
    "no window of a branch": _made(ValueError, "window_lengths is empty", window_lengths=[]),
    "windows with zero padding": _made(
        ValueError, "window_lengths = (4,)", "padding='masked'", window_lengths=[4], padding="zeros"
    ),
    "head_mode": _made(ValueError, "head_mode = 'some'", "'grouped'", head_mode="some"),
    "offset": _made(ValueError, "offset = 'diagonal'", "'every'", offset="diagonal"),
    "padding": _made(ValueError, "padding = 'ones'", "'zeros'", padding="ones"),
    "kernel": _made(ValueError, "kernel = 'abacus'", "'auto'", kernel="abacus"),
    "kernel of another device": _made(ValueError, "kernel = 'aten_cuda_flash'", "cuda", kernel="aten_cuda_flash"),
    "dropout of everything": _made(ValueError, "dropout_p = 1", dropout_p=1),
    "dropout below 0": _made(ValueError, "dropout_p = -0.1", dropout_p=-0.1),
    "dropout by a kernel without": _made(
        ValueError, "kernel = 'aten_cpu_flash'", "dropout", "kernel='auto'", dropout_p=0.1, kernel="aten_cpu_flash"
    ),
    "dropout seed a float": _called(TypeError, "dropout_seed = 1.0", dropout_seed=1.0),
    "dropout seed below 0": _called(ValueError, "dropout_seed = -1", dropout_seed=-1),
    "documents a list": _called(TypeError, "document_ids = [", document_ids=[[0] * 4] * 2),
    "documents of floats": _called(ValueError, "document_ids", "float32", document_ids=torch.zeros(2, 4)),
    "documents of another shape": _called(
        ValueError, "document_ids", "[2, 5]", "[2, 4]", document_ids=torch.zeros(2, 5).int()
    ),
    "documents elsewhere": _called(ValueError, "document_ids", "meta", document_ids=_ELSEWHERE.int()),
    "documents with zero padding": Bad(
        ValueError,
        ("document_ids", "padding = 'zeros'"),
        {"padding": "zeros"},
        {"document_ids": torch.zeros(2, 4).int()},
    ),
    "sinks a list": _called(TypeError, "sinks = [", sinks=[0.0] * 4),
    "sinks of integers": _called(ValueError, "sinks", "int64", sinks=torch.zeros(4).long()),
    "sinks of the key heads": _called(ValueError, "sinks", "[2]", "[4]", sinks=torch.zeros(2)),
    "sinks elsewhere": _called(ValueError, "sinks", "meta", "cpu", sinks=torch.zeros(4, device="meta")),
    "gradients in fp16 on the wire": _made(
        ValueError, "grad_wire_dtype = torch.float16", grad_wire_dtype=torch.float16
    ),
    "gradients in a string on the wire": _made(TypeError, "grad_wire_dtype = 'bf16'", grad_wire_dtype="bf16"),
    "dropout a string": _made(TypeError, "dropout_p = 'no'", dropout_p="no"),
    "scale nan": _made(ValueError, "scale = nan", scale=float("nan")),
    "scale infinite": _made(ValueError, "scale = inf", scale=float("inf")),
    "scale a string": _made(TypeError, "scale = '0.1'", scale="0.1"),
    "ring a group": _made(TypeError, "ring = 'the ring'", "initialize()", ring="the ring"),
    "zero padding that torchscale misplaces": _made(
        ValueError, "padding='zeros'", "5", "2", segment_lengths=[5], dilation_rates=[2], padding="zeros"
    ),
    "more groups than heads": Bad(
        ValueError,
        ("head_mode='grouped'", "4 heads", "5 branches"),
        {"segment_lengths": [4] * 5, "dilation_rates": [1] * 5, "head_mode": "grouped"},
    ),
    "query of 3 dimensions": _called(ValueError, "query", "[2, 4, 32]", query=lambda x: x.flatten(2)),
    "key of 5 dimensions": _called(ValueError, "key", "[2, 4, 2, 8, 1]", key=lambda x: x.unsqueeze(-1)),
    "query of integers": _called(ValueError, "query", "torch.int64", query=lambda x: x.long()),
    "value of complex numbers": _called(ValueError, "value", "torch.complex", value=lambda x: x + 0j),
    "key of another dtype": _called(ValueError, "key", "float32", "float64", key=lambda x: x.float()),
    "value on another device": _called(ValueError, "value", "meta", "cpu", value=lambda x: x.to("meta")),
    "query a list": _called(TypeError, "query = [", query=lambda x: x.tolist()),
    "key None": _called(TypeError, "key = None", key=None),
    "key of another batch": _called(ValueError, "key", "[1, 4, 2, 8]", key=lambda x: x[:1]),
    "value of other rows": _called(ValueError, "value", "[2, 3, 2, 8]", value=lambda x: x[:, :3]),
    "key of another head_dim": _called(ValueError, "key", "[2, 4, 2, 7]", key=lambda x: x[..., :7]),
    "value of other heads": _called(ValueError, "value", "1", "2", value=lambda x: x[:, :, :1]),
    "heads that do not divide": _called(ValueError, "query has 3 heads", "key 2", query=lambda x: x[:, :, :3]),
    "no heads": _called(ValueError, "query has 0 heads", query=lambda x: x[:, :, :0]),
    "no components": _called(
        ValueError, "last dim", "query", **dict.fromkeys(("query", "key", "value"), lambda x: x[..., :0])
    ),
    "seq_len that does not fit": _called(ValueError, "seq_len = 1000", "4 rows", seq_len=1000),
    "seq_len 0": _called(ValueError, "seq_len = 0", seq_len=0),
    "seq_len a string": _called(TypeError, "seq_len = '16'", seq_len="16"),
    "mask of another shape": _called(
        ValueError, "key_padding_mask", "[2, 5]", "[2, 4]", key_padding_mask=torch.zeros(2, 5).bool()
    ),
    "mask of floats": _called(ValueError, "key_padding_mask", "float32", key_padding_mask=torch.zeros(2, 4)),
    "mask a list": _called(TypeError, "key_padding_mask = [", key_padding_mask=[[True] * 4] * 2),
    "mask on another device": _called(ValueError, "key_padding_mask", "meta", key_padding_mask=_ELSEWHERE.bool()),
    "is_causal a number": _called(TypeError, "is_causal = 1", is_causal=1),
    "return_lse a tensor": _called(TypeError, "return_lse = tensor", return_lse=torch.zeros(2)),
}


def make_bad_call(adapter: str, name: str) -> tuple[Ended, tuple[int, int], Tensor]:
    """Make a bad call, then a good one. Returns how the bad one ended, its traffic, and the output of the good one."""
    ring, bad = ring_of(adapter), BAD_CALLS[name]
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


_AUTO = {"ring_size": "auto", "seq_len": 16, "segment_lengths": [16], "dilation_rates": [1]}
_AUTO |= {"num_heads": 4, "head_dim": 8}


def _chosen(error: type[Exception], *texts: str, **options: Any) -> Bad:
    """A ring whose size is chosen for a call, unless ``options`` say otherwise."""
    return Bad(error, texts, {**_AUTO, **options})


BAD_RINGS = {
    "ring_size that does not divide the world": _made(ValueError, "ring_size = 3", "4", ring_size=3),
    "ring_size above the world": _made(ValueError, "ring_size = 8", "4", ring_size=8),
    "ring_size 0": _made(ValueError, "ring_size = 0", ring_size=0),
    "ring_size a float": _made(TypeError, "ring_size = 2.0", ring_size=2.0),
    "layout": _made(ValueError, "layout = 'spiral'", "'zigzag'", layout="spiral"),
    "timeout a text": _made(TypeError, "timeout = '5'", "timedelta", timeout="5"),
    "timeout True": _made(TypeError, "timeout = True", "timedelta", timeout=True),
    "timeout -1": _made(ValueError, "timeout = -1", timeout=-1),
    "timeout infinite": _made(ValueError, "timeout = inf", "finite", timeout=float("inf")),
    "timeout 0": _made(ValueError, "timeout = 0:00:00", timeout=timedelta(0)),
    "group a list": _made(TypeError, "group = [0, 1]", group=[0, 1]),
    "group of two axes": _made(ValueError, "group", "'data', 'ring'", group=_mesh),
    "ring_size auto of nothing": _made(ValueError, "ring_size = 'auto'", "seq_len", "head_dim", ring_size="auto"),
    "ring_size auto of half": _chosen(
        ValueError, "ring_size = 'auto'", "num_heads and head_dim", num_heads=..., head_dim=...
    ),
    "ring_size auto of a bad pattern": _chosen(ValueError, "dilation_rates[0] = 0", dilation_rates=[0]),
    "ring_size auto of a bad window": _chosen(ValueError, "window_lengths[0] = 0", window_lengths=[0]),
    "ring_size auto of no head_dim": _chosen(ValueError, "head_dim = 0", head_dim=0),
    "ring_size auto without memory": _chosen(ValueError, "memory_bytes = 0", memory_bytes=0),
    "ring_size auto and group": _chosen(ValueError, "ring_size = 'auto'", "group", group=_whole_world),
    "seq_len without auto": _chosen(ValueError, "seq_len = 16", "ring_size = 2", ring_size=2),
    "ring_order": _made(ValueError, "ring_order = 'name'", "'topology'", ring_order="name"),
    "ring_order and group": _made(
        ValueError, "ring_order = 'topology'", "group", ring_order="topology", group=_whole_world
    ),
    "an unknown argument": _chosen(TypeError, "num_head = 8", num_head=8),
    "ring_size and group": _made(ValueError, "ring_size = 2", "4", ring_size=2, group=_whole_world),
}


def make_bad_ring(adapter: str, name: str) -> Ended:
    options = BAD_RINGS[name].options
    made = {option: value(None) if callable(value) else value for option, value in options.items() if value is not ...}
    return ending(lambda: backend(adapter).initialize(**made))


def unshard_a_wrong_length(adapter: str) -> Ended:
    return ending(lambda: ring_of(adapter).unshard(torch.zeros(1, 5, 2), dim=1, seq_len=16))


@core
class BadArgumentTests(AdapterSuite):
    @pytest.mark.parametrize("name", BAD_CALLS)
    def test_bad_arguments_are_refused_by_name(self, world: World, name: str) -> None:
        endings, sent, outs = zip(*world.run(make_bad_call, self.adapter, name), strict=True)
        for ended in endings:
            ended.check(BAD_CALLS[name].error, *BAD_CALLS[name].texts)
        assert set(sent) == {(0, 0)}
        assert difference(torch.cat(outs, 1), expected(SMALL_CASE, gradients=False).out) <= 1e-10

    @pytest.mark.parametrize("name", BAD_RINGS)
    def test_bad_rings_are_refused_by_name(self, world: World, name: str) -> None:
        for ended in world.run(make_bad_ring, self.adapter, name):
            ended.check(BAD_RINGS[name].error, *BAD_RINGS[name].texts)

    def test_unshard_refuses_a_wrong_length(self, world: World) -> None:
        for ended in world.run(unshard_a_wrong_length, self.adapter):
            ended.check(ValueError, "5 rows", "16")
