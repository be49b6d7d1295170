"""Mismatches: if ranks make different calls, or one rank refuses a call, every rank raises in time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ring_backends.errors import RingMismatchError, RingPeerError
from ring_backends.kernels.score_mod import identity
from ring_backends.ring.collectives import agree
from ring_backends.schedule.layout import LayoutKind
from ring_backends.testing.calls import difference, expected, local_call, new_attention
from ring_backends.testing.capabilities import AdapterSuite, core
from ring_backends.testing.failing_calls import (
    A_MOMENT,
    AT_ONCE,
    ODD_RANK,
    SHORT,
    SMALL_CASE,
    Ended,
    attend_on_a_new_ring,
    ending,
)
from ring_backends.testing.marks import matrix_but
from ring_backends.testing.rings import FOUR, get_ready, new_ring, ring_of
from ring_backends.testing.score_functions import see_even_distances
from ring_backends.testing.world import World


@dataclass(frozen=True)
class Difference:
    """A difference of one rank. The error names the field, its usual value, and its value on this rank."""

    name: str
    usual: str
    odd: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    layout: LayoutKind = "contiguous"
    gradients: bool = True
    modules: tuple[int, int] = (0, 1)


def named(field: str, usual: str, odd: str) -> str:
    """The field and the values of all ranks, in the format of a RingMismatchError."""
    values = (f"rank {rank}: {odd if rank == ODD_RANK else usual}" for rank in range(FOUR.size))
    return f"{field} ({', '.join(values)})"


DIFFERENCES = {
    "batch": Difference("batch", "2", "3", {"batch": 3}),
    "heads": Difference("heads", "4", "8", {"num_heads": 8}),
    "key/value heads": Difference("key/value heads", "2", "1", {"num_kv_heads": 1}),
    "head_dim": Difference("head_dim", "8", "16", {"head_dim": 16}),
    "value_dim": Difference("value_dim", "8", "24", {"value_dim": 24}),
    "dtype": Difference("dtype", "torch.float64", "torch.float32", {"dtype": torch.float32}),
    "segment_lengths": Difference("segment_lengths", "[16]", "[8]", {"segment_lengths": (8,)}),
    "dilation_rates": Difference("dilation_rates", "[1]", "[2]", {"dilation_rates": (2,)}),
    "a branch more": Difference(
        "segment_lengths", "[16]", "[16, 8]", {"segment_lengths": (16, 8), "dilation_rates": (1, 1)}
    ),
    "head_mode": Difference("head_mode", "all", "grouped", {"head_mode": "grouped"}),
    "offset": Difference("offset", "None", "block", {"offset": "block"}),
    "padding": Difference("padding", "masked", "zeros", {"padding": "zeros"}),
    "window_lengths": Difference("window_lengths", "None", "[4]", {"window_lengths": (4,)}),
    "seq_len": Difference("seq_len", "16", "17", {"seq_len": 17}),
    "layout": Difference("layout", "contiguous", "zigzag", layout="zigzag"),
    "is_causal": Difference("is_causal", "False", "True", {"is_causal": True}),
    "scale": Difference("scale", str(8**-0.5), "0.5", {"scale": 0.5}),
    "mask": Difference("key_padding_mask", "none", "given", {"masked": "random"}),
    "sinks": Difference("sinks", "none", "given", {"sinks": True}),
    "score_mod": Difference(
        "score_mod", "none", "see_even_distances #" + identity(see_even_distances)[-8:], {"score_mod": "parity"}
    ),
    "documents": Difference("document_ids", "none", "given, torch.int64", {"documents": "some"}),
    "dropout": Difference("dropout_p", "0.0", "0.5", {"dropout_p": 0.5}),
    "gradients": Difference("gradients", "needed", "not needed", gradients=False),
    "order of two modules": Difference("order of calls", "attention 1", "attention 2", modules=(1, 0)),
}


def disagree(adapter: str, name: str) -> None:
    """The first call of one rank differs."""
    ring = new_ring(adapter, FOUR)
    case, difference = SMALL_CASE, DIFFERENCES[name]
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
"""Differences after agreed calls: (field, usual value, value on this rank), as the error names them."""


HUNDREDS = 300


def disagree_later(adapter: str, name: str, seconds: float) -> tuple[Ended, Ended]:
    """All ranks agree on two calls. Then one rank makes the difference ``name``. Then all ranks make an equal call."""
    ring = new_ring(adapter, FOUR, seconds)
    other_case = SMALL_CASE
    if name == "batch":
        other_case = replace(SMALL_CASE, batch=64)
    attention = new_attention(adapter, ring, SMALL_CASE)
    other_attention = attention
    if name in ("order of two modules", "a skipped call"):
        other_attention = new_attention(adapter, ring, SMALL_CASE)
    call = local_call(adapter, ring, SMALL_CASE, attention=attention)
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


def refuse_alone(adapter: str) -> tuple[Ended, Ended, Ended]:
    """One rank passes a bad argument in the first call. Then all ranks call, and compare earlier values."""
    ring = new_ring(adapter, FOUR)
    call = local_call(adapter, ring, SMALL_CASE)
    agree(ring, "first", values={"number": 1})
    refused = ending(lambda: call(is_causal=1 if ring.rank == ODD_RANK else True))
    return refused, ending(call), ending(lambda: agree(ring, "last"))


def refuse_alone_later(adapter: str) -> tuple[Ended, Ended, Tensor]:
    """One rank passes a bad argument in an agreed call. Then all ranks call again, and on a new ring."""
    ring = new_ring(adapter, FOUR)
    call = local_call(adapter, ring, SMALL_CASE)
    call()
    odd = ring.rank == ODD_RANK
    return ending(lambda: call(is_causal=1 if odd else False)), ending(call), attend_on_a_new_ring(adapter, FOUR)


def refuse_together(adapter: str) -> tuple[Ended, Tensor]:
    """All ranks pass a bad argument in an agreed call. Then all ranks make the call."""
    ring = new_ring(adapter, FOUR)
    call = local_call(adapter, ring, SMALL_CASE)
    call()
    return ending(lambda: call(is_causal=1)), call().detach()


UNSHARDED: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "dtype": ("dtype", lambda x: (x.int(), 8)),
    "sizes": ("sizes of the other dims", lambda x: (x[..., :1], 8)),
    "length": ("seq_len", lambda x: (x[:, :1], 4)),
    "gradients": ("gradients", lambda x: (x.requires_grad_(), 8)),
}


def unshard_differently(adapter: str, name: str) -> tuple[Ended, list[float]]:
    """One rank passes other arguments to unshard. Then all ranks pass equal ones."""
    ring = new_ring(adapter, FOUR)
    x = torch.full((1, 2, 3), float(ring.rank))
    mine, seq_len = UNSHARDED[name][1](x.clone()) if ring.rank == ODD_RANK else (x, 8)
    ended = ending(lambda: ring.unshard(mine, seq_len=seq_len))
    return ended, ring.unshard(x, seq_len=8)[0, :, 0].tolist()


def refuse_to_unshard(adapter: str) -> Ended:
    """One rank passes an invalid ``dim`` in an agreed call of unshard."""
    ring = new_ring(adapter, FOUR)
    x = torch.ones(1, 2)
    ring.unshard(x)
    return ending(lambda: ring.unshard(x, 7 if ring.rank == ODD_RANK else 1))


def differentiate_twice(adapter: str) -> Ended:
    ring = ring_of(adapter, FOUR)
    x = torch.ones(1, 2, requires_grad=True)
    (grad,) = torch.autograd.grad((ring.unshard(x) ** 3).sum(), x, create_graph=True)
    return ending(grad.square().sum().backward)


def unshard_or_attend(adapter: str, seconds: float) -> Ended:
    """One rank calls unshard while the others call attention. All ranks have made both calls before."""
    ring = new_ring(adapter, FOUR, seconds)
    call, x = local_call(adapter, ring, SMALL_CASE), torch.ones(1, 2)
    call()
    ring.unshard(x)
    return ending(lambda: ring.unshard(x) if ring.rank == ODD_RANK else call())


class MismatchTests(AdapterSuite):
    @core
    @pytest.mark.parametrize("name", DIFFERENCES)
    def test_ranks_that_disagree_are_reported_at_once(self, world: World, name: str) -> None:
        world.run(get_ready, self.adapter)
        start = time.monotonic()
        outcomes = world.run_collect(disagree, self.adapter, name)
        assert time.monotonic() - start < AT_ONCE
        different = DIFFERENCES[name]
        for outcome in outcomes:
            outcome.check(RingMismatchError, named(different.name, different.usual, different.odd))

    @core
    @pytest.mark.parametrize("name", matrix_but("batch", of=LATER))
    def test_ranks_that_disagree_later_are_reported_in_time(self, world: World, name: str) -> None:
        """The ranks have agreed on both calls before. Therefore no check precedes the first hop."""
        for first, again in world.run(disagree_later, self.adapter, name, SHORT):
            first.check(RingMismatchError, named(*LATER[name]), within=SHORT + A_MOMENT)
            again.check(RingPeerError, "initialize()")

    @core
    def test_a_refusal_on_one_rank_is_reported_to_the_others(self, world: World) -> None:
        for rank, (ended, *next_calls) in enumerate(world.run(refuse_alone, self.adapter)):
            assert ended.seconds < AT_ONCE, ended
            assert [ended_next.error for ended_next in next_calls] == ["no error"] * 2, next_calls
            if rank == ODD_RANK:
                ended.check(TypeError)
            else:
                ended.check(RingMismatchError, "is_causal = 1")

    @core
    def test_a_refusal_of_an_agreed_call_is_reported_to_the_others(self, world: World) -> None:
        outcomes = world.run(refuse_alone_later, self.adapter)
        for rank, (ended, ended_again, _) in enumerate(outcomes):
            assert ended.seconds < AT_ONCE, ended
            if rank == ODD_RANK:
                ended.check(TypeError)
                ended_again.check(RingMismatchError)
            else:
                ended.check(RingMismatchError, f"rank {ODD_RANK} refused its arguments with TypeError: is_causal = 1")
                ended_again.check(RingPeerError)
            assert ended_again.seconds < AT_ONCE, ended_again
            assert "initialize()" in ended_again.message, ended_again
        outs = [out for _, _, out in outcomes]
        assert difference(torch.cat(outs, 1), expected(SMALL_CASE, gradients=False).out) <= 1e-10

    @core
    def test_a_call_that_all_ranks_refuse_leaves_the_ring_as_it_is(self, world: World) -> None:
        endings, outs = zip(*world.run(refuse_together, self.adapter), strict=True)
        assert all(ended.is_a(TypeError) for ended in endings), endings
        assert difference(torch.cat(outs, 1), expected(SMALL_CASE, gradients=False).out) <= 1e-10

    @core
    @pytest.mark.parametrize("name", UNSHARDED)
    def test_ranks_that_unshard_differently_are_reported(self, world: World, name: str) -> None:
        for ended, afterwards in world.run(unshard_differently, self.adapter, name):
            ended.check(RingMismatchError, UNSHARDED[name][0], within=AT_ONCE)
            assert afterwards == [0, 0, 1, 1, 2, 2, 3, 3]

    @core
    def test_a_rank_that_refuses_to_unshard_is_reported(self, world: World) -> None:
        for rank, ended in enumerate(world.run(refuse_to_unshard, self.adapter)):
            ended.check(IndexError if rank == ODD_RANK else RingMismatchError)
            assert "Dimension out of range" in ended.message or "index out of range" in ended.message, ended
            assert ended.seconds < AT_ONCE, ended

    @core
    def test_second_derivatives_of_unshard_are_refused(self, world: World) -> None:
        for ended in world.run(differentiate_twice, self.adapter):
            ended.check(RuntimeError, "once_differentiable")

    @core
    def test_unsharding_and_attending_are_distinguished(self, world: World) -> None:
        for ended in world.run(unshard_or_attend, self.adapter, SHORT):
            ended.check(RingMismatchError, "order of calls", "unshard", within=SHORT + A_MOMENT)
