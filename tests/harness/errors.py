"""Errors: bad arguments are refused by name before anything is sent; ranks that disagree, and ranks that are gone, are
told from each other, on every rank and in time."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ring_backends.errors import RingMismatchError, RingPeerError
from ring_backends.schedule.layout import LayoutKind
from ring_backends.testing.calls import difference, expected, local_call, new_attention
from ring_backends.testing.capabilities import AdapterSuite, core, requires
from ring_backends.testing.rings import FOUR, TWO, RingSpec, backend, get_ready, new_ring, ring_here
from ring_backends.testing.strategies import AttentionCase
from ring_backends.testing.world import Outcome, World

_CASE = AttentionCase(
    seq_len=16,
    segment_lengths=(16,),
    dilation_rates=(1,),
    batch=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    dtype=torch.float64,
)
SHORT = 3.0
"""Seconds that a ring waits for its peers where the test waits it out. A call that all ranks make takes less."""

A_MOMENT = 3.0
"""Seconds that a busy machine may take beyond what it is told to wait."""

AT_ONCE = 20.0
"""Seconds. Far below the 60 that these rings wait for a peer, far above what a busy machine takes."""


@dataclass(frozen=True)
class Ended:
    """How something ended on a rank."""

    error: str = "no error"
    bases: tuple[str, ...] = ()
    message: str = ""
    seconds: float = 0.0

    def is_a(self, error_class: type[Exception]) -> bool:
        return error_class.__name__ in self.bases


def ending(function: Callable[..., Any]) -> Ended:
    start = time.monotonic()
    try:
        function()
    except Exception as error:
        bases = tuple(base.__name__ for base in type(error).__mro__)
        return Ended(type(error).__name__, bases, str(error), time.monotonic() - start)
    return Ended(seconds=time.monotonic() - start)


@dataclass(frozen=True)
class Bad:
    """A call that is wrong in one thing.

    Attributes:
        told: what the message has to contain: the argument's name and value.
        options: constructor arguments.
        arguments: call arguments, or functions of the right ones that make wrong ones.
    """

    error: type[Exception]
    told: tuple[str, ...]
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
    """A bad call: how it ended, what it sent, and the output of a good call after it."""
    ring, bad = ring_here(adapter, FOUR), BAD_CALLS[name]
    assert ring is not None
    good = local_call(adapter, ring, _CASE)
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


@dataclass(frozen=True)
class Difference:
    """What one rank does differently: the field that the error names, its value on the other ranks, and on this one."""

    name: str
    usual: str
    odd: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    layout: LayoutKind = "contiguous"
    gradients: bool = True
    modules: tuple[int, int] = (0, 1)


def named(field: str, usual: str, odd: str) -> str:
    """A field with the value of every rank, as in the message of a RingMismatchError."""
    values = (f"rank {rank}: {odd if rank == ODD_RANK else usual}" for rank in range(FOUR.size))
    return f"{field} ({', '.join(values)})"


DIFFERENCES = {
    "batch": Difference("batch", "2", "3", {"batch": 3}),
    "heads": Difference("heads", "4", "8", {"num_heads": 8}),
    "key/value heads": Difference("key/value heads", "2", "1", {"num_kv_heads": 1}),
    "head_dim": Difference("head_dim", "8", "16", {"head_dim": 16}),
    "dtype": Difference("dtype", "torch.float64", "torch.float32", {"dtype": torch.float32}),
    "segment_lengths": Difference("segment_lengths", "[16]", "[8]", {"segment_lengths": (8,)}),
    "dilation_rates": Difference("dilation_rates", "[1]", "[2]", {"dilation_rates": (2,)}),
    "a branch more": Difference(
        "segment_lengths", "[16]", "[16, 8]", {"segment_lengths": (16, 8), "dilation_rates": (1, 1)}
    ),
    "head_mode": Difference("head_mode", "all", "grouped", {"head_mode": "grouped"}),
    "offset": Difference("offset", "None", "block", {"offset": "block"}),
    "padding": Difference("padding", "masked", "zeros", {"padding": "zeros"}),
    "seq_len": Difference("seq_len", "16", "17", {"seq_len": 17}),
    "layout": Difference("layout", "contiguous", "zigzag", layout="zigzag"),
    "is_causal": Difference("is_causal", "False", "True", {"is_causal": True}),
    "scale": Difference("scale", str(8**-0.5), "0.5", {"scale": 0.5}),
    "mask": Difference("key_padding_mask", "none", "given", {"masked": "random"}),
    "documents": Difference("document_ids", "none", "given, torch.int64", {"documents": "some"}),
    "dropout": Difference("dropout_p", "0.0", "0.5", {"dropout_p": 0.5}),
    "gradients": Difference("gradients", "needed", "not needed", gradients=False),
    "order of two modules": Difference("order of calls", "attention 1", "attention 2", modules=(1, 0)),
}
ODD_RANK = 1


def disagree(adapter: str, name: str) -> None:
    """One rank's first call differs from the others'."""
    ring = new_ring(adapter, FOUR, timeout=timedelta(seconds=60))
    assert ring is not None
    case, difference = _CASE, DIFFERENCES[name]
    gradients, modules = True, (0, 1)
    if ring.rank == ODD_RANK:
        case = replace(case, **difference.changes)
        ring = ring.with_layout(difference.layout)
        gradients, modules = difference.gradients, difference.modules
    attentions = [new_attention(adapter, ring, case) for _ in range(2)]
    for module in modules:
        local_call(adapter, ring, case, gradients=gradients, attention=attentions[module])()


LATER = {
    "batch": ("batch", "2", "64"),
    "order of two modules": ("order of calls", "attention 1", "attention 2"),
    "backward before forward": ("direction", "backward of call 0", "forward"),
    "order of two backwards": ("direction", "backward of call 0", "backward of call 3"),
    "a skipped call": ("order of calls", "attention 1", "attention 2"),
    "after hundreds of calls": ("is_causal", "False", "True"),
}
"""What one rank does differently later, and the field and values that the error names."""
HUNDREDS = 300


def disagree_later(adapter: str, name: str, seconds: float) -> tuple[Ended, Ended]:
    """All ranks make two kinds of calls, and then one rank makes them the other way round. Then once more, alike."""
    ring = new_ring(adapter, FOUR, timeout=timedelta(seconds=seconds))
    assert ring is not None
    other_case = _CASE
    if name == "batch":
        other_case = replace(_CASE, batch=64)
    attention = new_attention(adapter, ring, _CASE)
    other_attention = attention
    if name in ("order of two modules", "a skipped call"):
        other_attention = new_attention(adapter, ring, _CASE)
    call = local_call(adapter, ring, _CASE, attention=attention)
    other_call = local_call(adapter, ring, other_case, attention=other_attention)
    outs = [call(), other_call()]
    outs[0].backward(call.grad_out, retain_graph=True)
    odd = ring.rank == ODD_RANK
    if name == "a skipped call":
        return ending(lambda: (None if odd else call(), other_call())), ending(call)
    if name == "after hundreds of calls":
        for _ in range(HUNDREDS):
            call()
        return ending(lambda: call(is_causal=odd)), ending(call)
    if name == "order of two backwards":
        again = call()
        return ending(lambda: (again if odd else outs[0]).backward(call.grad_out)), ending(call)
    if name == "backward before forward":
        return ending(call if odd else lambda: outs[0].backward(call.grad_out)), ending(call)
    return ending(other_call if odd else call), ending(call)


def refuse_alone(adapter: str) -> tuple[Ended, Ended]:
    """One rank's arguments are refused; the others go on to a call that is new to them. Then a call by all."""
    ring = new_ring(adapter, FOUR, timeout=timedelta(seconds=60))
    assert ring is not None
    call = local_call(adapter, ring, _CASE)
    return ending(lambda: call(is_causal=1 if ring.rank == ODD_RANK else True)), ending(call)


def refuse_alone_later(adapter: str) -> tuple[Ended, Ended, Tensor]:
    """The same of a call that all ranks have agreed on before. Then once more, and on a new ring."""
    ring = new_ring(adapter, FOUR, timeout=timedelta(seconds=60))
    assert ring is not None
    call = local_call(adapter, ring, _CASE)
    call()
    odd = ring.rank == ODD_RANK
    return ending(lambda: call(is_causal=1 if odd else False)), ending(call), attend_on_a_new_ring(adapter, FOUR)


def refuse_together(adapter: str) -> tuple[Ended, Tensor]:
    """All ranks' arguments are refused, of a call agreed on before; then all make it."""
    ring = new_ring(adapter, FOUR, timeout=timedelta(seconds=60))
    assert ring is not None
    call = local_call(adapter, ring, _CASE)
    call()
    return ending(lambda: call(is_causal=1)), call().detach()


UNSHARDED: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "dtype": ("dtype", lambda x: (x.int(), 8)),
    "sizes": ("sizes of the other dims", lambda x: (x[..., :1], 8)),
    "length": ("seq_len", lambda x: (x[:, :1], 4)),
    "gradients": ("gradients", lambda x: (x.requires_grad_(), 8)),
}


def unshard_otherwise(adapter: str, name: str) -> tuple[Ended, list[float]]:
    """One rank unshards something else. Then all the same."""
    ring = new_ring(adapter, FOUR, timeout=timedelta(seconds=60))
    assert ring is not None
    x = torch.full((1, 2, 3), float(ring.rank))
    mine, seq_len = UNSHARDED[name][1](x.clone()) if ring.rank == ODD_RANK else (x, 8)
    ended = ending(lambda: ring.unshard(mine, seq_len=seq_len))
    return ended, ring.unshard(x, seq_len=8)[0, :, 0].tolist()


def refuse_to_unshard(adapter: str) -> Ended:
    """One rank names a dimension that there is not, in a call that all have made before."""
    ring = new_ring(adapter, FOUR, timeout=timedelta(seconds=60))
    assert ring is not None
    x = torch.ones(1, 2)
    ring.unshard(x)
    return ending(lambda: ring.unshard(x, 7 if ring.rank == ODD_RANK else 1))


def differentiate_twice(adapter: str) -> Ended:
    ring = ring_here(adapter, FOUR)
    assert ring is not None
    x = torch.ones(1, 2, requires_grad=True)
    (grad,) = torch.autograd.grad((ring.unshard(x) ** 3).sum(), x, create_graph=True)
    return ending(grad.square().sum().backward)


def backward_alone(adapter: str, seconds: float) -> Ended | None:
    """One rank alone differentiates what all have unsharded."""
    ring = new_ring(adapter, FOUR, timeout=timedelta(seconds=seconds))
    assert ring is not None
    whole = ring.unshard(torch.ones(1, 2, requires_grad=True))
    return ending(whole.sum().backward) if ring.rank == ODD_RANK else None


def unshard_or_attend(adapter: str, seconds: float) -> Ended:
    """One rank unshards while the others attend, both as before."""
    ring = new_ring(adapter, FOUR, timeout=timedelta(seconds=seconds))
    assert ring is not None
    call, x = local_call(adapter, ring, _CASE), torch.ones(1, 2)
    call()
    ring.unshard(x)
    return ending(lambda: ring.unshard(x) if ring.rank == ODD_RANK else call())


def stay_away(adapter: str, seconds: float) -> tuple[Ended, Ended] | None:
    """Rank 2 of 4 stays away from a call like one before; then the others try again."""
    ring = new_ring(adapter, FOUR, timeout=timedelta(seconds=seconds))
    assert ring is not None
    call = local_call(adapter, ring, _CASE)
    call()
    if ring.rank == 2:
        return None
    return ending(call), ending(call)


def stay_away_otherwise(adapter: str, seconds: float) -> Ended | None:
    """In one ring of two a rank stays away from the first call, in the other from the backward of it."""
    ring, place = new_ring(adapter, TWO, timeout=timedelta(seconds=seconds)), TWO.place(dist.get_rank())
    assert ring is not None
    assert place is not None
    call = local_call(adapter, ring, _CASE)
    if place[0] == 0:
        return None if ring.rank == 1 else ending(call)
    out = call()
    return None if ring.rank == 1 else ending(lambda: out.backward(call.grad_out))


def die(adapter: str) -> None:
    """Rank 3 of 4 is killed while the others call."""
    ring = new_ring(adapter, FOUR, timeout=timedelta(seconds=60))
    assert ring is not None
    call = local_call(adapter, ring, _CASE)
    call()
    if ring.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    call()


def attend_on_a_new_ring(adapter: str, rings: RingSpec) -> Tensor:
    ring = new_ring(adapter, rings, timeout=timedelta(seconds=60))
    assert ring is not None
    out: Tensor = local_call(adapter, ring, _CASE)()
    return out.detach()


class ErrorTests(AdapterSuite):
    @core
    @pytest.mark.parametrize("name", BAD_CALLS)
    def test_bad_arguments_are_refused_by_name(self, world: World, name: str) -> None:
        bad = BAD_CALLS[name]
        endings, sent, outs = zip(*world.run(make_bad_call, self.adapter, name), strict=True)
        for ended in endings:
            assert ended.is_a(bad.error), ended
            for text in bad.told:
                assert text in ended.message, ended
        assert set(sent) == {(0, 0)}
        assert difference(torch.cat(outs, 1), expected(_CASE, gradients=False).out) <= 1e-10

    @pytest.mark.parametrize("name", BAD_RINGS)
    def test_bad_rings_are_refused_by_name(self, world: World, name: str) -> None:
        bad = BAD_RINGS[name]
        for ended in world.run(make_bad_ring, self.adapter, name):
            assert ended.is_a(bad.error), ended
            for text in bad.told:
                assert text in ended.message, ended

    @core
    def test_unshard_refuses_a_wrong_length(self, world: World) -> None:
        for ended in world.run(unshard_a_wrong_length, self.adapter):
            assert ended.is_a(ValueError), ended
            assert "5 rows" in ended.message
            assert "16" in ended.message

    @pytest.mark.parametrize("name", DIFFERENCES)
    def test_ranks_that_disagree_are_told_at_once(self, world: World, name: str) -> None:
        world.run(get_ready, self.adapter)
        start = time.monotonic()
        outcomes = world.run_collect(disagree, self.adapter, name)
        assert time.monotonic() - start < AT_ONCE
        different = DIFFERENCES[name]
        for outcome in outcomes:
            assert outcome.raised(RingMismatchError), outcome
            assert named(different.name, different.usual, different.odd) in outcome.message, outcome

    @pytest.mark.parametrize("name", ["batch", *(pytest.param(name, marks=pytest.mark.slow) for name in [*LATER][1:])])
    def test_ranks_that_disagree_later_are_told_in_time(self, world: World, name: str) -> None:
        """What they disagree on was agreed on before, so that no check stands before the first hop."""
        for first, again in world.run(disagree_later, self.adapter, name, SHORT):
            assert first.is_a(RingMismatchError), first
            assert first.seconds < SHORT + A_MOMENT, first
            assert named(*LATER[name]) in first.message, first
            assert again.is_a(RingPeerError), again
            assert "initialize()" in again.message

    def test_a_refusal_on_one_rank_is_told_to_the_others(self, world: World) -> None:
        for rank, (ended, ended_next) in enumerate(world.run(refuse_alone, self.adapter)):
            assert ended.seconds < AT_ONCE, ended
            assert ended_next.error == "no error", ended_next
            if rank == ODD_RANK:
                assert ended.is_a(TypeError), ended
            else:
                assert ended.is_a(RingMismatchError), ended
                assert "is_causal = 1" in ended.message, ended

    def test_a_refusal_of_an_agreed_call_is_told_to_the_others(self, world: World) -> None:
        outcomes = world.run(refuse_alone_later, self.adapter)
        for rank, (ended, ended_again, _) in enumerate(outcomes):
            assert ended.seconds < AT_ONCE, ended
            if rank == ODD_RANK:
                assert ended.is_a(TypeError), ended
                assert ended_again.is_a(RingMismatchError), ended_again
            else:
                assert ended.is_a(RingMismatchError), ended
                assert f"rank {ODD_RANK} refused its arguments with TypeError: is_causal = 1" in ended.message, ended
                assert ended_again.is_a(RingPeerError), ended_again
            assert ended_again.seconds < AT_ONCE, ended_again
            assert "initialize()" in ended_again.message, ended_again
        outs = [out for _, _, out in outcomes]
        assert difference(torch.cat(outs, 1), expected(_CASE, gradients=False).out) <= 1e-10

    @core
    def test_a_call_that_all_ranks_refuse_leaves_the_ring_as_it_is(self, world: World) -> None:
        endings, outs = zip(*world.run(refuse_together, self.adapter), strict=True)
        assert all(ended.is_a(TypeError) for ended in endings), endings
        assert difference(torch.cat(outs, 1), expected(_CASE, gradients=False).out) <= 1e-10

    @core
    @pytest.mark.parametrize("name", UNSHARDED)
    def test_ranks_that_unshard_otherwise_are_told(self, world: World, name: str) -> None:
        for ended, afterwards in world.run(unshard_otherwise, self.adapter, name):
            assert ended.is_a(RingMismatchError), ended
            assert UNSHARDED[name][0] in ended.message, ended
            assert ended.seconds < AT_ONCE, ended
            assert afterwards == [0, 0, 1, 1, 2, 2, 3, 3]

    @core
    def test_a_rank_that_refuses_to_unshard_is_told(self, world: World) -> None:
        for rank, ended in enumerate(world.run(refuse_to_unshard, self.adapter)):
            assert ended.is_a(IndexError if rank == ODD_RANK else RingMismatchError), ended
            assert "Dimension out of range" in ended.message or "index out of range" in ended.message, ended
            assert ended.seconds < AT_ONCE, ended

    @core
    def test_what_was_unsharded_is_not_differentiated_twice(self, world: World) -> None:
        for ended in world.run(differentiate_twice, self.adapter):
            assert ended.is_a(RuntimeError), ended
            assert "once_differentiable" in ended.message, ended

    @core
    def test_a_rank_that_differentiates_alone_is_told_in_time(self, world: World) -> None:
        ended = world.run(backward_alone, self.adapter, SHORT)[ODD_RANK]
        assert ended.is_a(RingPeerError), ended
        assert "unshard (backward of call" in ended.message, ended
        assert ended.seconds < SHORT + A_MOMENT, ended

    @core
    def test_unsharding_and_attending_are_told_from_each_other(self, world: World) -> None:
        for ended in world.run(unshard_or_attend, self.adapter, SHORT):
            assert ended.is_a(RingMismatchError), ended
            assert "order of calls" in ended.message, ended
            assert "unshard" in ended.message, ended
            assert ended.seconds < SHORT + A_MOMENT, ended

    def test_a_rank_that_stays_away_is_told_in_time(self, world: World) -> None:
        endings = world.run(stay_away, self.adapter, SHORT)
        for rank in (0, 1, 3):
            first, again = endings[rank]
            assert first.is_a(RingPeerError), first
            assert first.seconds < SHORT + A_MOMENT, first
            assert re.search(rf"rank {rank} waited in step \d+ of forward", first.message), first
            assert re.search(r"from rank \[\d", first.message), first
            assert re.search(r"to rank \[\d", first.message), first
            assert again.is_a(RingPeerError), again
            assert again.seconds < 1, again
            assert "initialize()" in again.message
        outs = world.run(attend_on_a_new_ring, self.adapter, FOUR)
        assert difference(torch.cat(outs, 1), expected(_CASE, gradients=False).out) <= 1e-10

    @requires("several rings per world")
    def test_a_rank_may_stay_away_at_any_time(self, world: World) -> None:
        first_call, _, backward, _ = world.run(stay_away_otherwise, self.adapter, SHORT)
        for ended in (first_call, backward):
            assert ended.is_a(RingPeerError), ended
            assert ended.seconds < SHORT + A_MOMENT, ended
        assert "[1]" in first_call.message, first_call
        assert re.search(r"step \d+ of backward .* from rank \[1\] and to rank \[1\]", backward.message), backward

    @requires("a lost rank")
    def test_a_rank_that_dies_is_told_at_once(self, world: World) -> None:
        world.run(get_ready, self.adapter)
        start = time.monotonic()
        *survivors, dead = world.run_collect(die, self.adapter)
        assert time.monotonic() - start < 5 + AT_ONCE
        assert dead.status == "died"
        for outcome in survivors:
            assert outcome.raised(RingPeerError), _all(survivors)
        outs = world.run(attend_on_a_new_ring, self.adapter, FOUR)
        assert difference(torch.cat(outs, 1), expected(_CASE, gradients=False).out) <= 1e-10


def _all(outcomes: list[Outcome]) -> str:
    return "\n".join(map(str, outcomes))
