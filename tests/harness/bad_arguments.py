"""Bad arguments: every rank raises an error that names the argument, before any communication."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from inspect import signature
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ring_backends.attention import RingDilatedAttention
from ring_backends.testing.capabilities import AdapterSuite, core
from ring_backends.testing.failing_calls import SMALL_CASE, ending
from ring_backends.testing.marks import matrix_but
from ring_backends.testing.rings import backend
from ring_backends.testing.world import on_every_rank


class Bad(NamedTuple):
    """A call with bad arguments.

    Attributes:
        texts: parts of the message, such as the argument's name and value.
        arguments: arguments of the constructor and of the call, or of ``initialize``. A function computes the bad
            argument from the good one.
    """

    error: type[Exception]
    texts: tuple[str, ...]
    arguments: dict[str, Any]


def _bad(*texts: str, error: type[Exception] = ValueError, **arguments: Any) -> Bad:
    return Bad(error, texts, arguments)


_ELSEWHERE = torch.zeros(2, 4, device="meta")
_FIVE_GROUPS: dict[str, Any] = {"segment_lengths": [4] * 5, "dilation_rates": [1] * 5, "head_mode": "grouped"}
_NO_COMPONENTS: dict[str, Any] = dict.fromkeys(("query", "key", "value"), lambda x: x[..., :0])


BAD_CALLS = {
    "lengths and rates differ": _bad(
        "segment_lengths", "2", "dilation_rates", "1", segment_lengths=[4, 8], dilation_rates=[1]
    ),
    "no branch": _bad("segment_lengths", segment_lengths=[], dilation_rates=[]),
    "w = 0": _bad("segment_lengths[1] = 0", segment_lengths=[4, 0], dilation_rates=[1, 1]),
    "r = 0": _bad("dilation_rates[0] = 0", dilation_rates=[0]),
    "w a float": _bad("segment_lengths[0] = 4.0", error=TypeError, segment_lengths=[4.0]),
    "w and more rates": _bad("segment_lengths", "1", "2", segment_lengths=[None], dilation_rates=[1, 1]),
    "r = 2**62": _bad("dilation_rates[0] = 4611686018427387904: must be below 2**62", dilation_rates=[2**62]),
    "W = 0": _bad("window_lengths[0] = 0", "at least 1", window_lengths=[0]),
    "W alone": _bad("window_lengths = 4", error=TypeError, window_lengths=4),
    "a window without a branch": _bad(
        "window_lengths has 2 entries", "segment_lengths has 1", "None", window_lengths=[4, None]
    ),
    "windows with zero padding": _bad("window_lengths = (4,)", "padding='masked'", window_lengths=[4], padding="zeros"),
    "head_mode": _bad("head_mode = 'some'", "'grouped'", head_mode="some"),
    "offset": _bad("offset = 'diagonal'", "'every'", offset="diagonal"),
    "padding": _bad("padding = 'ones'", "'zeros'", padding="ones"),
    "kernel": _bad("kernel = 'abacus'", "'auto'", kernel="abacus"),
    "kernel of another device": _bad("kernel = 'aten_cuda_flash'", "cuda", kernel="aten_cuda_flash"),
    "dropout of everything": _bad("dropout_p = 1", dropout_p=1),
    "dropout by a kernel without": _bad(
        "kernel = 'aten_cpu_flash'", "dropout", "kernel='auto'", dropout_p=0.1, kernel="aten_cpu_flash"
    ),
    "dropout seed below 0": _bad("dropout_seed = -1", dropout_seed=-1),
    "documents of floats": _bad("document_ids", "float32", document_ids=torch.zeros(2, 4)),
    "documents of another shape": _bad("document_ids", "[2, 5]", "[2, 4]", document_ids=torch.zeros(2, 5).int()),
    "documents elsewhere": _bad("document_ids", "meta", document_ids=_ELSEWHERE.int()),
    "documents with zero padding": _bad(
        "document_ids", "padding = 'zeros'", padding="zeros", document_ids=torch.zeros(2, 4).int()
    ),
    "sinks of integers": _bad("sinks", "int64", sinks=torch.zeros(4).long()),
    "sinks of the key heads": _bad("sinks", "[2]", "[4]", sinks=torch.zeros(2)),
    "sinks elsewhere": _bad("sinks", "meta", "cpu", sinks=torch.zeros(4, device="meta")),
    "gradients in fp16 on the wire": _bad("grad_wire_dtype = torch.float16", grad_wire_dtype=torch.float16),
    "gradients in a string on the wire": _bad("grad_wire_dtype = 'bf16'", error=TypeError, grad_wire_dtype="bf16"),
    "scale nan": _bad("scale = nan", scale=float("nan")),
    "scale a string": _bad("scale = '0.1'", error=TypeError, scale="0.1"),
    "ring a group": _bad("ring = 'the ring'", "initialize()", error=TypeError, ring="the ring"),
    "zero padding that torchscale misplaces": _bad(
        "padding='zeros'", "5", "2", segment_lengths=[5], dilation_rates=[2], padding="zeros"
    ),
    "more groups than heads": _bad("head_mode='grouped'", "4 heads", "5 branches", **_FIVE_GROUPS),
    "query of 3 dimensions": _bad("query", "[2, 4, 32]", query=lambda x: x.flatten(2)),
    "query of integers": _bad("query", "torch.int64", query=lambda x: x.long()),
    "key of another dtype": _bad("key", "float32", "float64", key=lambda x: x.float()),
    "value on another device": _bad("value", "meta", "cpu", value=lambda x: x.to("meta")),
    "query a list": _bad("query = [", error=TypeError, query=lambda x: x.tolist()),
    "key None": _bad("key = None", error=TypeError, key=None),
    "key of another batch": _bad("key", "[1, 4, 2, 8]", key=lambda x: x[:1]),
    "value of other rows": _bad("value", "[2, 3, 2, 8]", value=lambda x: x[:, :3]),
    "key of another head_dim": _bad("key", "[2, 4, 2, 7]", key=lambda x: x[..., :7]),
    "value of other heads": _bad("value", "1", "2", value=lambda x: x[:, :, :1]),
    "heads that do not divide": _bad("query has 3 heads", "key 2", query=lambda x: x[:, :, :3]),
    "no heads": _bad("query has 0 heads", query=lambda x: x[:, :, :0]),
    "no components": _bad("last dim", "query", **_NO_COMPONENTS),
    "seq_len that does not fit": _bad("seq_len = 1000", "4 rows", seq_len=1000),
    "seq_len 0": _bad("seq_len = 0", seq_len=0),
    "seq_len a string": _bad("seq_len = '16'", error=TypeError, seq_len="16"),
    "mask of another shape": _bad("key_padding_mask", "[2, 5]", "[2, 4]", key_padding_mask=torch.zeros(2, 5).bool()),
    "mask of floats": _bad("key_padding_mask", "float32", key_padding_mask=torch.zeros(2, 4)),
    "mask on another device": _bad("key_padding_mask", "meta", key_padding_mask=_ELSEWHERE.bool()),
    "is_causal a number": _bad("is_causal = 1", error=TypeError, is_causal=1),
    "return_lse a tensor": _bad("return_lse = tensor", error=TypeError, return_lse=torch.zeros(2)),
    "heads that groups do not divide": _bad(
        "ulysses_size = 4", "2 query heads", ring=lambda x: replace(x, ulysses_size=4), query=lambda x: x[:, :, :2]
    ),
}


def _whole_world() -> Any:
    return dist.group.WORLD


def _mesh() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "ring"))


_HALF: dict[str, Any] = {"ring_size": "auto", "seq_len": 16, "segment_lengths": [16], "dilation_rates": [1]}
_AUTO = _HALF | {"num_heads": 4, "head_dim": 8}


def _chosen(*texts: str, error: type[Exception] = ValueError, **arguments: Any) -> Bad:
    """A ring whose size is chosen for a call, unless ``arguments`` say otherwise."""
    return Bad(error, texts, _AUTO | arguments)


BAD_RINGS = {
    "ring_size that does not divide the world": _bad("ring_size = 3", "4", ring_size=3),
    "ring_size above the world": _bad("ring_size = 8", "4", ring_size=8),
    "layout": _bad("layout = 'spiral'", "'zigzag'", layout="spiral"),
    "timeout a text": _bad("timeout = '5'", "timedelta", error=TypeError, timeout="5"),
    "timeout infinite": _bad("timeout = inf", "finite", timeout=float("inf")),
    "timeout 0": _bad("timeout = 0:00:00", timeout=timedelta(0)),
    "buffer_bytes below 0": _bad("buffer_bytes = -1", buffer_bytes=-1),
    "buffer_bytes a float": _bad("buffer_bytes = 1.5", error=TypeError, buffer_bytes=1.5),
    "ulysses_size 0": _bad("ulysses_size = 0", ulysses_size=0),
    "ulysses_size a float": _bad("ulysses_size = 2.0", error=TypeError, ulysses_size=2.0),
    "ulysses_size that does not divide the ring": _bad("ulysses_size = 4", "2 ranks", ring_size=2, ulysses_size=4),
    "ulysses_size that does not divide the world": _bad("ulysses_size = 3", "4 ranks", ulysses_size=3),
    "group a list": _bad("group = [0, 1]", error=TypeError, group=[0, 1]),
    "group of two axes": _bad("group", "'data', 'ring'", group=_mesh),
    "ring_size auto of nothing": _bad("ring_size = 'auto'", "seq_len", "head_dim", ring_size="auto"),
    "ring_size auto of a bad pattern": _chosen("dilation_rates[0] = 0", dilation_rates=[0]),
    "ring_size auto without memory": _chosen("memory_bytes = 0", memory_bytes=0),
    "ring_size auto and group": _chosen("ring_size = 'auto'", "group", group=_whole_world),
    "seq_len without auto": _chosen("seq_len = 16", "ring_size = 2", ring_size=2),
    "ring_order": _bad("ring_order = 'name'", "'topology'", ring_order="name"),
    "ring_order and group": _bad("ring_order = 'topology'", "group", ring_order="topology", group=_whole_world),
    "ulysses_size that does not divide the heads": _chosen("ulysses_size = 8", "4 query heads", ulysses_size=8),
    "ring_size auto of no such groups": _chosen("ulysses_size = 3", "4 ranks", ulysses_size=3, num_heads=6),
    "an unknown argument": _chosen("num_head = 8", error=TypeError, num_head=8),
    "ring_size and group": _bad("ring_size = 2", "4", ring_size=2, group=_whole_world),
}


@core
class BadArgumentTests(AdapterSuite):
    @pytest.mark.parametrize("name", matrix_but(*[*BAD_CALLS][::6], of=BAD_CALLS))
    @on_every_rank
    def test_bad_arguments_are_refused_by_name(self, name: str) -> None:
        """The bad call sends nothing. A good call follows."""
        bad, good = BAD_CALLS[name], self.call(SMALL_CASE)
        ring = good.attention.ring
        options = {"segment_lengths": [8], "dilation_rates": [1], "ring": ring}
        arguments: dict[str, Any] = {"query": good.query, "key": good.key, "value": good.value, **good.options}
        for argument, value in bad.arguments.items():
            given = arguments if argument in signature(RingDilatedAttention.forward).parameters else options
            given[argument] = value(given[argument]) if callable(value) else value
        ring.traffic.reset()
        ended = ending(lambda: backend(self.adapter).RingDilatedAttention(**options)(**arguments))
        ended.check(bad.error, *bad.texts)
        assert (ring.traffic.messages, ring.traffic.bytes) == (0, 0), ring.traffic
        good.check()

    @pytest.mark.parametrize("name", BAD_RINGS)
    @on_every_rank
    def test_bad_rings_are_refused_by_name(self, name: str) -> None:
        bad = BAD_RINGS[name]
        arguments = {argument: value() if callable(value) else value for argument, value in bad.arguments.items()}
        ending(backend(self.adapter).initialize, **arguments).check(bad.error, *bad.texts)

    @on_every_rank
    def test_unshard_refuses_a_wrong_length(self) -> None:
        ended = ending(self.ring().unshard, torch.zeros(1, 5, 2), dim=1, seq_len=16)
        ended.check(ValueError, "5 rows", "16")
