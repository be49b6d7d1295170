"""Mismatches: if ranks make different calls, or one rank refuses a call, every rank raises in time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ring_backends.errors import RingMismatchError, RingPeerError
from ring_backends.kernels.score_mod import identity
from ring_backends.ring.collectives import agree
from ring_backends.schedule.layout import LayoutKind
from ring_backends.testing.calls import local_call, new_attention
from ring_backends.testing.capabilities import AdapterSuite, core
from ring_backends.testing.failing_calls import A_MOMENT, AT_ONCE, ODD_RANK, SHORT, SMALL_CASE, ending, shorten
from ring_backends.testing.marks import matrix_but
from ring_backends.testing.rings import FOUR, IN_GROUPS, RingSpec
from ring_backends.testing.score_functions import see_even_distances
from ring_backends.testing.world import on_every_rank


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
    "head_mode": Difference("head_mode", "all", "grouped", {"head_mode": "grouped"}),
    "offset": Difference("offset", "None", "block", {"offset": "block"}),
    "padding": Difference("padding", "masked", "zeros", {"padding": "zeros"}),
    "window_lengths": Difference("window_lengths", "None", "[4]", {"window_lengths": (4,)}),
    "seq_len": Difference("seq_len", "16", "17", {"seq_len": 17}),
    "layout": Difference("layout", "contiguous", "zigzag", layout="zigzag"),
    "is_causal": Difference("is_causal", "False", "True", {"is_causal": True}),
    "scale": Difference("scale", str(8**-0.5), "0.5", {"scale": 0.5}),
    "buffers": Difference("buffer_bytes", "0", "4096", {"buffer_bytes": 4096}),
    "groups": Difference("ulysses_size", "1", "2", {"ulysses_size": 2}),
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


LATER = {
    "batch": ("batch", "2", "64"),
    "order of two modules": ("order of calls", "attention 1", "attention 2"),
    "backward before forward": ("direction", "backward of call 0", "forward"),
    "order of two backwards": ("direction", "backward of call 0", "backward of call 3"),
}
"""Differences after agreed calls: (field, usual value, value on this rank), as the error names them."""


UNSHARDED: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "dtype": ("dtype", lambda x: (x.int(), 8)),
    "length": ("seq_len", lambda x: (x[:, :1], 4)),
    "gradients": ("gradients", lambda x: (x.requires_grad_(), 8)),
}


@core
class MismatchTests(AdapterSuite):
    @pytest.mark.parametrize("name", DIFFERENCES)
    @on_every_rank
    def test_ranks_that_disagree_are_reported_at_once(self, name: str) -> None:
        """The first call of one rank differs."""
        ring, case, different = self.new_ring(), SMALL_CASE, DIFFERENCES[name]
        gradients, modules = True, (0, 1)
        if ring.rank == ODD_RANK:
            case = replace(case, **different.changes)
            ring = ring.with_layout(different.layout)
            gradients, modules = different.gradients, different.modules
        attentions = [new_attention(self.adapter, ring, case) for _ in range(2)]

        def attend() -> None:
            for module in modules:
                local_call(self.adapter, ring, case, gradients=gradients, attention=attentions[module])()

        text = named(different.name, different.usual, different.odd)
        ending(attend).check(RingMismatchError, text, within=AT_ONCE)

    @pytest.mark.parametrize("name", matrix_but("batch", of=LATER))
    @pytest.mark.parametrize("rings", matrix_but(FOUR, of=(FOUR, IN_GROUPS)), ids=str)
    @on_every_rank
    def test_ranks_that_disagree_later_are_reported_in_time(self, rings: RingSpec, name: str) -> None:
        """The ranks have agreed on both calls before. Therefore no check precedes the first hop.

        Then one rank makes the difference, and then all ranks make an equal call.
        """
        ring = self.new_ring(rings)
        other_case = replace(SMALL_CASE, batch=64) if name == "batch" else SMALL_CASE
        attention = other_attention = new_attention(self.adapter, ring, SMALL_CASE)
        if name == "order of two modules":
            other_attention = new_attention(self.adapter, ring, SMALL_CASE)
        call = local_call(self.adapter, ring, SMALL_CASE, attention=attention)
        other_call = local_call(self.adapter, ring, other_case, attention=other_attention)
        outs = [call(), other_call()]
        outs[0].backward(call.grad_out, retain_graph=True)
        odd = ring.rank == ODD_RANK
        shorten(ring)
        differ: Callable[[], Any] = other_call if odd else call
        if name == "order of two backwards":
            again = call()
            differ = partial((again if odd else outs[0]).backward, call.grad_out)
        elif name == "backward before forward" and not odd:
            differ = partial(outs[0].backward, call.grad_out)
        ending(differ).check(RingMismatchError, named(*LATER[name]), within=SHORT + A_MOMENT)
        ending(call).check(RingPeerError, "initialize()")

    @on_every_rank
    def test_a_refusal_on_one_rank_is_reported_to_the_others(self) -> None:
        """One rank passes a bad argument in the first call. Then all ranks call, and compare earlier values."""
        call = self.new_call()
        ring = call.attention.ring
        agree(ring, "first", values={"number": 1})
        refused = ending(call, is_causal=1 if ring.rank == ODD_RANK else True)
        if ring.rank == ODD_RANK:
            refused.check(TypeError, within=AT_ONCE)
        else:
            refused.check(RingMismatchError, "is_causal = 1", within=AT_ONCE)
        call()
        agree(ring, "last")

    @on_every_rank
    def test_a_refusal_of_an_agreed_call_is_reported_to_the_others(self) -> None:
        """One rank passes a bad argument in an agreed call. Then all ranks call again, and on a new ring."""
        call = self.new_call()
        call()
        odd = call.attention.ring.rank == ODD_RANK
        refused, again = ending(call, is_causal=1 if odd else False), ending(call)
        text = "is_causal = 1" if odd else f"rank {ODD_RANK} refused its arguments with TypeError: is_causal = 1"
        refused.check(TypeError if odd else RingMismatchError, text, within=AT_ONCE)
        again.check(RingMismatchError if odd else RingPeerError, "initialize()", within=AT_ONCE)
        self.new_call().check()

    @pytest.mark.parametrize("name", UNSHARDED)
    @on_every_rank
    def test_ranks_that_unshard_differently_are_reported(self, name: str) -> None:
        """One rank passes other arguments to unshard. Then all ranks pass equal ones."""
        ring, (field, change) = self.new_ring(), UNSHARDED[name]
        x = torch.full((1, 2, 3), float(ring.rank))
        mine, seq_len = change(x.clone()) if ring.rank == ODD_RANK else (x, 8)
        ending(ring.unshard, mine, seq_len=seq_len).check(RingMismatchError, field, within=AT_ONCE)
        afterwards = ring.unshard(x, seq_len=8)[0, :, 0].tolist()
        assert afterwards == [0, 0, 1, 1, 2, 2, 3, 3], afterwards

    @on_every_rank
    def test_unsharding_and_attending_are_distinguished(self) -> None:
        """One rank calls unshard while the others call attention. All ranks have made both calls before."""
        call, x = self.new_call(), torch.ones(1, 2)
        ring = call.attention.ring
        call()
        ring.unshard(x)
        shorten(ring)
        ended = ending(partial(ring.unshard, x) if ring.rank == ODD_RANK else call)
        ended.check(RingMismatchError, "order of calls", "unshard", within=SHORT + A_MOMENT)

    @pytest.mark.matrix(reason="waits for a timeout of which the ranks use a quarter to tell where they are")
    @on_every_rank
    def test_calls_of_two_rings_in_another_order(self) -> None:
        """One rank calls the module of one ring first, and the others that of another ring of the same ranks."""
        calls = self.new_call(), self.new_call()
        for call in calls:
            call()
        shorten(*(call.attention.ring for call in calls), seconds=8.0)
        rank = calls[0].attention.ring.rank
        ended = ending(calls[int(rank == ODD_RANK)])
        others = [other for other in range(calls[0].attention.ring.size) if (other == ODD_RANK) != (rank == ODD_RANK)]
        places = [f"rank {other} waits in attention 1 (call 1)" for other in others]
        ended.check(RingPeerError, *places, "of another ring", "in the same order", within=8 + A_MOMENT)
