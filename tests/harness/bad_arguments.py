"""Bad arguments: every rank raises an error that names the argument, before any communication."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ring_backends.testing.capabilities import AdapterSuite, core
from ring_backends.testing.failing_calls import SMALL_CASE, ending
from ring_backends.testing.rings import backend
from ring_backends.testing.world import on_every_rank


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


def _made(*texts: str, error: type[Exception] = ValueError, **options: Any) -> Bad:
    return Bad(error, texts, options)


def _called(*texts: str, error: type[Exception] = ValueError, **arguments: Any) -> Bad:
    return Bad(error, texts, {}, arguments)


_ELSEWHERE = torch.zeros(2, 4, device="meta")


BAD_CALLS = {
    "lengths and rates differ": _made(
        "segment_lengths", "2", "dilation_rates", "1", segment_lengths=[4, 8], dilation_rates=[1]
    ),
    "no branch": _made("segment_lengths", segment_lengths=[], dilation_rates=[]),
    "w = 0": _made("segment_lengths[1] = 0", segment_lengths=[4, 0], dilation_rates=[1, 1]),
    "r = 0": _made("dilation_rates[0] = 0", dilation_rates=[0]),
    "r < 0": _made("dilation_rates[0] = -2", dilation_rates=[-2]),
    "w a float": _made("segment_lengths[0] = 4.0", error=TypeError, segment_lengths=[4.0]),
    "w alone": _made("segment_lengths = 4", error=TypeError, segment_lengths=4),
    "w a bool": _made(
        "segment_lengths[1] = True", error=TypeError, segment_lengths=[None, True], dilation_rates=[1, 1]
    ),
    "w and more rates": _made("segment_lengths", "1", "2", segment_lengths=[None], dilation_rates=[1, 1]),
    "r a bool": _made("dilation_rates[0] = True", error=TypeError, dilation_rates=[True]),
    "r None": _made("dilation_rates[0] = None", error=TypeError, dilation_rates=[None]),
    "W = 0": _made("window_lengths[0] = 0", "at least 1", window_lengths=[0]),
    "W a float": _made("window_lengths[0] = 4.0", error=TypeError, window_lengths=[4.0]),
    "W a bool": _made("window_lengths[0] = True", error=TypeError, window_lengths=[True]),
    "W alone": _made("window_lengths = 4", error=TypeError, window_lengths=4),
    "W a string": _made("window_lengths = '4'", error=TypeError, window_lengths="4"),
    "a window without a branch": _made(
        "window_lengths has 2 entries", "segment_lengths has 1", "None", window_lengths=[4, None]
    ),
    "no window of a branch": _made("window_lengths is empty", window_lengths=[]),
    "windows with zero padding": _made(
        "window_lengths = (4,)", "padding='masked'", window_lengths=[4], padding="zeros"
    ),
    "head_mode": _made("head_mode = 'some'", "'grouped'", head_mode="some"),
    "offset": _made("offset = 'diagonal'", "'every'", offset="diagonal"),
    "padding": _made("padding = 'ones'", "'zeros'", padding="ones"),
    "kernel": _made("kernel = 'abacus'", "'auto'", kernel="abacus"),
    "kernel of another device": _made("kernel = 'aten_cuda_flash'", "cuda", kernel="aten_cuda_flash"),
    "dropout of everything": _made("dropout_p = 1", dropout_p=1),
    "dropout below 0": _made("dropout_p = -0.1", dropout_p=-0.1),
    "dropout by a kernel without": _made(
        "kernel = 'aten_cpu_flash'", "dropout", "kernel='auto'", dropout_p=0.1, kernel="aten_cpu_flash"
    ),
    "dropout seed a float": _called("dropout_seed = 1.0", error=TypeError, dropout_seed=1.0),
    "dropout seed below 0": _called("dropout_seed = -1", dropout_seed=-1),
    "documents a list": _called("document_ids = [", error=TypeError, document_ids=[[0] * 4] * 2),
    "documents of floats": _called("document_ids", "float32", document_ids=torch.zeros(2, 4)),
    "documents of another shape": _called("document_ids", "[2, 5]", "[2, 4]", document_ids=torch.zeros(2, 5).int()),
    "documents elsewhere": _called("document_ids", "meta", document_ids=_ELSEWHERE.int()),
    "documents with zero padding": Bad(
        ValueError,
        ("document_ids", "padding = 'zeros'"),
        {"padding": "zeros"},
        {"document_ids": torch.zeros(2, 4).int()},
    ),
    "sinks a list": _called("sinks = [", error=TypeError, sinks=[0.0] * 4),
    "sinks of integers": _called("sinks", "int64", sinks=torch.zeros(4).long()),
    "sinks of the key heads": _called("sinks", "[2]", "[4]", sinks=torch.zeros(2)),
    "sinks elsewhere": _called("sinks", "meta", "cpu", sinks=torch.zeros(4, device="meta")),
    "gradients in fp16 on the wire": _made("grad_wire_dtype = torch.float16", grad_wire_dtype=torch.float16),
    "gradients in a string on the wire": _made("grad_wire_dtype = 'bf16'", error=TypeError, grad_wire_dtype="bf16"),
    "dropout a string": _made("dropout_p = 'no'", error=TypeError, dropout_p="no"),
    "scale nan": _made("scale = nan", scale=float("nan")),
    "scale infinite": _made("scale = inf", scale=float("inf")),
    "scale a string": _made("scale = '0.1'", error=TypeError, scale="0.1"),
    "ring a group": _made("ring = 'the ring'", "initialize()", error=TypeError, ring="the ring"),
    "zero padding that torchscale misplaces": _made(
        "padding='zeros'", "5", "2", segment_lengths=[5], dilation_rates=[2], padding="zeros"
    ),
    "more groups than heads": Bad(
        ValueError,
        ("head_mode='grouped'", "4 heads", "5 branches"),
        {"segment_lengths": [4] * 5, "dilation_rates": [1] * 5, "head_mode": "grouped"},
    ),
    "query of 3 dimensions": _called("query", "[2, 4, 32]", query=lambda x: x.flatten(2)),
    "key of 5 dimensions": _called("key", "[2, 4, 2, 8, 1]", key=lambda x: x.unsqueeze(-1)),
    "query of integers": _called("query", "torch.int64", query=lambda x: x.long()),
    "value of complex numbers": _called("value", "torch.complex", value=lambda x: x + 0j),
    "key of another dtype": _called("key", "float32", "float64", key=lambda x: x.float()),
    "value on another device": _called("value", "meta", "cpu", value=lambda x: x.to("meta")),
    "query a list": _called("query = [", error=TypeError, query=lambda x: x.tolist()),
    "key None": _called("key = None", error=TypeError, key=None),
    "key of another batch": _called("key", "[1, 4, 2, 8]", key=lambda x: x[:1]),
    "value of other rows": _called("value", "[2, 3, 2, 8]", value=lambda x: x[:, :3]),
    "key of another head_dim": _called("key", "[2, 4, 2, 7]", key=lambda x: x[..., :7]),
    "value of other heads": _called("value", "1", "2", value=lambda x: x[:, :, :1]),
    "heads that do not divide": _called("query has 3 heads", "key 2", query=lambda x: x[:, :, :3]),
    "no heads": _called("query has 0 heads", query=lambda x: x[:, :, :0]),
    "no components": Bad(
        ValueError, ("last dim", "query"), {}, dict.fromkeys(("query", "key", "value"), lambda x: x[..., :0])
    ),
    "seq_len that does not fit": _called("seq_len = 1000", "4 rows", seq_len=1000),
    "seq_len 0": _called("seq_len = 0", seq_len=0),
    "seq_len a string": _called("seq_len = '16'", error=TypeError, seq_len="16"),
    "mask of another shape": _called("key_padding_mask", "[2, 5]", "[2, 4]", key_padding_mask=torch.zeros(2, 5).bool()),
    "mask of floats": _called("key_padding_mask", "float32", key_padding_mask=torch.zeros(2, 4)),
    "mask a list": _called("key_padding_mask = [", error=TypeError, key_padding_mask=[[True] * 4] * 2),
    "mask on another device": _called("key_padding_mask", "meta", key_padding_mask=_ELSEWHERE.bool()),
    "is_causal a number": _called("is_causal = 1", error=TypeError, is_causal=1),
    "return_lse a tensor": _called("return_lse = tensor", error=TypeError, return_lse=torch.zeros(2)),
}


def _whole_world(_: Any) -> Any:
    return dist.group.WORLD


def _mesh(_: Any) -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "ring"))


_AUTO = {"ring_size": "auto", "seq_len": 16, "segment_lengths": [16], "dilation_rates": [1]}
_AUTO |= {"num_heads": 4, "head_dim": 8}


def _chosen(*texts: str, error: type[Exception] = ValueError, **options: Any) -> Bad:
    """A ring whose size is chosen for a call, unless ``options`` say otherwise."""
    return Bad(error, texts, {**_AUTO, **options})


BAD_RINGS = {
    "ring_size that does not divide the world": _made("ring_size = 3", "4", ring_size=3),
    "ring_size above the world": _made("ring_size = 8", "4", ring_size=8),
    "ring_size 0": _made("ring_size = 0", ring_size=0),
    "ring_size a float": _made("ring_size = 2.0", error=TypeError, ring_size=2.0),
    "layout": _made("layout = 'spiral'", "'zigzag'", layout="spiral"),
    "timeout a text": _made("timeout = '5'", "timedelta", error=TypeError, timeout="5"),
    "timeout True": _made("timeout = True", "timedelta", error=TypeError, timeout=True),
    "timeout -1": _made("timeout = -1", timeout=-1),
    "timeout infinite": _made("timeout = inf", "finite", timeout=float("inf")),
    "timeout 0": _made("timeout = 0:00:00", timeout=timedelta(0)),
    "group a list": _made("group = [0, 1]", error=TypeError, group=[0, 1]),
    "group of two axes": _made("group", "'data', 'ring'", group=_mesh),
    "ring_size auto of nothing": _made("ring_size = 'auto'", "seq_len", "head_dim", ring_size="auto"),
    "ring_size auto of half": _chosen("ring_size = 'auto'", "num_heads and head_dim", num_heads=..., head_dim=...),
    "ring_size auto of a bad pattern": _chosen("dilation_rates[0] = 0", dilation_rates=[0]),
    "ring_size auto of a bad window": _chosen("window_lengths[0] = 0", window_lengths=[0]),
    "ring_size auto of no head_dim": _chosen("head_dim = 0", head_dim=0),
    "ring_size auto without memory": _chosen("memory_bytes = 0", memory_bytes=0),
    "ring_size auto and group": _chosen("ring_size = 'auto'", "group", group=_whole_world),
    "seq_len without auto": _chosen("seq_len = 16", "ring_size = 2", ring_size=2),
    "ring_order": _made("ring_order = 'name'", "'topology'", ring_order="name"),
    "ring_order and group": _made("ring_order = 'topology'", "group", ring_order="topology", group=_whole_world),
    "an unknown argument": _chosen("num_head = 8", error=TypeError, num_head=8),
    "ring_size and group": _made("ring_size = 2", "4", ring_size=2, group=_whole_world),
}


@core
class BadArgumentTests(AdapterSuite):
    @pytest.mark.parametrize("name", BAD_CALLS)
    @on_every_rank
    def test_bad_arguments_are_refused_by_name(self, name: str) -> None:
        """The bad call sends nothing. A good call follows."""
        bad, good = BAD_CALLS[name], self.call(SMALL_CASE)
        ring = good.attention.ring
        options = {"segment_lengths": [8], "dilation_rates": [1], "ring": ring, **bad.options}
        arguments: dict[str, Any] = {"query": good.query, "key": good.key, "value": good.value, **good.options}
        for argument, value in bad.arguments.items():
            arguments[argument] = value(arguments[argument]) if callable(value) else value
        ring.traffic.reset()
        ended = ending(lambda: backend(self.adapter).RingDilatedAttention(**options)(**arguments))
        ended.check(bad.error, *bad.texts)
        assert (ring.traffic.messages, ring.traffic.bytes) == (0, 0), ring.traffic
        good.check()

    @pytest.mark.parametrize("name", BAD_RINGS)
    @on_every_rank
    def test_bad_rings_are_refused_by_name(self, name: str) -> None:
        bad = BAD_RINGS[name]
        options = {option: value for option, value in bad.options.items() if value is not ...}
        made = {option: value(None) if callable(value) else value for option, value in options.items()}
        ending(backend(self.adapter).initialize, **made).check(bad.error, *bad.texts)

    @on_every_rank
    def test_unshard_refuses_a_wrong_length(self) -> None:
        ended = ending(self.ring().unshard, torch.zeros(1, 5, 2), dim=1, seq_len=16)
        ended.check(ValueError, "5 rows", "16")
