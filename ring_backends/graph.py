"""Attention inside a compiled graph: hops as custom operators, and everything between them as plain tensor code.

Under ``torch.compile`` the walk of the plan is traced: the graph holds every gather, tile and merge as the aten
operators that they are, and besides them

- ``ring_backends::begin_walk``, once per direction: agrees with the other ranks before anything is sent;
- ``ring_backends::post_hop`` and ``ring_backends::wait_hop``, once for each hop that this rank takes part in: as many
  in the forward graph as the schedule has in forward, as many in the backward graph as it has in backward.

These operators are ordered effects, so that no pass drops, repeats or reorders them. Which attention they belong to is
an input of the graph and not a constant in it, so that blocks that are alike share one compiled graph. Sizes are
constants, since the plan depends on them: a sequence of another length is compiled anew.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._library.effects import EffectType
from torch.library import custom_op

from ring_backends.agreement import Configuration
from ring_backends.attention import Request, RingDilatedAttention, autocast, module_field, no_hops
from ring_backends.packing import PackedRows
from ring_backends.pattern import DilatedPattern
from ring_backends.plan import Message
from ring_backends.ring import Ring
from ring_backends.walk import NOTHING, Arrival, Hops, PendingHop

_attentions: WeakValueDictionary[int, CompilableRingDilatedAttention] = WeakValueDictionary()
_numbers = itertools.count()


class CompilableRingDilatedAttention(RingDilatedAttention):
    """Ring attention that ``torch.compile`` takes into one graph with what surrounds it (``fullgraph=True``).

    Outside of ``torch.compile`` it is :class:`RingDilatedAttention` and nothing else. Inside, arguments are checked
    while compiling, so that an error is torch's own with this package's as its text.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._enlist()

    def _enlist(self) -> None:
        """Take a number by which operators find this module; as a tensor, which makes it an input of the graph."""
        number = next(_numbers)
        _attentions[number] = self
        self._number = torch.tensor(number, device="cpu")
        self._walk_in_graph: _WalkInGraph | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_number": None, "_walk_in_graph": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._enlist()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool = False,
        seq_len: int | None = None,
        key_padding_mask: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        """As :meth:`RingDilatedAttention.forward`."""
        if not torch.compiler.is_compiling():
            return super().forward(
                query,
                key,
                value,
                is_causal=is_causal,
                seq_len=seq_len,
                key_padding_mask=key_padding_mask,
                return_lse=return_lse,
            )
        self.ring.check_connected()
        return _attend(
            self._number,
            query,
            key,
            value,
            key_padding_mask,
            is_causal,
            seq_len,
            return_lse,
            *self._constants(),
        )

    def _constants(self) -> tuple[Any, ...]:
        """What a graph depends on besides its inputs, in a form that torch.compile compares."""
        pattern, ring = self.pattern, self.ring
        return (
            pattern.segment_lengths,
            pattern.dilation_rates,
            pattern.head_mode,
            pattern.offset,
            pattern.padding,
            ring.size,
            ring.rank,
            ring.layout_kind,
            self.scale,
            self.kernel,
        )


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _attend(
    attention: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None,
    is_causal: bool,
    seq_len: int | None,
    return_lse: bool,
    segment_lengths: tuple[int, ...],
    dilation_rates: tuple[int, ...],
    head_mode: Any,
    offset: Any,
    padding: Any,
    ring_size: int,
    rank: int,
    layout: Any,
    scale: float | None,
    kernel: str,
) -> Any:
    """What the tracer runs, on tensors without numbers, in place of a call of attention."""
    query, key, value = map(_with_constant_sizes, autocast(query, key, value))
    mask = key_padding_mask if key_padding_mask is None else _with_constant_sizes(key_padding_mask)
    pattern = DilatedPattern(segment_lengths, dilation_rates, head_mode, offset, padding)
    ring = Ring(size=ring_size, rank=rank, ranks=tuple(range(ring_size)), layout_kind=layout)
    seq_len = seq_len if seq_len is None else int(seq_len)
    # The plan is made of real numbers, in a thread of its own: the modes by which torch traces are per thread.
    with ThreadPoolExecutor(1) as without_tracing:
        request = without_tracing.submit(
            Request.check, query, key, value, mask, pattern, ring, is_causal, seq_len, scale, kernel
        ).result()
    if ring_size == 1:
        return request.run(no_hops, return_lse)
    return request.run(partial(_TracedHops.begin, attention, request.configuration(0).text), return_lse)


def _with_constant_sizes(tensor: Tensor) -> Tensor:
    return tensor.view([int(size) for size in tensor.shape])


@dataclass(frozen=True)
class _TracedHops:
    """Puts the hops of one walk into the graph."""

    walk: Tensor

    @classmethod
    def begin(cls, attention: Tensor, configuration: str, direction: str) -> _TracedHops:
        return cls(begin_walk(attention, configuration, direction))

    def post(
        self, index: int, name: str, outgoing: Mapping[int, Tensor], sends: tuple[Message, ...], incoming: PackedRows
    ) -> Arrival:
        if not outgoing and not incoming.by_peer:
            return NOTHING
        sizes = [len(buffer) for buffer in incoming.by_peer.values()]
        payload = incoming.row_format.payload_bytes(parcel for message in sends for parcel in message.parcels)
        device = incoming.buffer.device
        hop = post_hop(
            self.walk, [*outgoing.values()], [*outgoing], sizes, [*incoming.by_peer], index, name, payload, device
        )
        return _TracedArrival(hop, incoming)


@dataclass(frozen=True)
class _TracedArrival:
    hop: Tensor
    incoming: PackedRows

    def wait(self) -> PackedRows:
        buffer = self.incoming.buffer
        return self.incoming.in_buffer(wait_hop(self.hop, len(buffer), buffer.device))


@dataclass
class _WalkInGraph:
    """A walk that a graph is making: its hops under way, by index, each with the buffer that it fills."""

    hops: Hops
    under_way: dict[int, tuple[PendingHop, Tensor]] = field(default_factory=dict)


@custom_op("ring_backends::begin_walk", mutates_args=())
def begin_walk(attention: Tensor, configuration: str, direction: str) -> Tensor:
    """Agree with the other ranks on a walk. ``configuration`` is that of any module; the number is filled in here."""
    module = _attentions[int(attention)]
    hops = module._hops(_configuration(configuration, module.module_number), direction)
    module._walk_in_graph = _WalkInGraph(hops)
    return attention.clone()


@custom_op("ring_backends::post_hop", mutates_args=())
def post_hop(
    walk: Tensor,
    outgoing: list[Tensor],
    destinations: list[int],
    sizes: list[int],
    sources: list[int],
    index: int,
    name: str,
    payload_bytes: int,
    device: torch.device,
) -> Tensor:
    """Post one hop: ``outgoing`` to ``destinations``, and ``sizes`` bytes from ``sources``; all are ring ranks."""
    in_graph = _walk_in_graph(walk)
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    sent = {peer: part.contiguous() for peer, part in zip(destinations, outgoing, strict=True)}
    received = dict(zip(sources, buffer.split(sizes), strict=True))
    pending = in_graph.hops.post_buffers(index, name, sent, received, payload_bytes)
    in_graph.under_way[index] = pending, buffer
    return torch.stack([walk, torch.tensor(index, device="cpu")])


@custom_op("ring_backends::wait_hop", mutates_args=())
def wait_hop(hop: Tensor, num_bytes: int, device: torch.device) -> Tensor:
    """Wait for a hop; returns what arrived, flat: uint8 [num_bytes]."""
    walk, index = hop.unbind()
    pending, buffer = _walk_in_graph(walk).under_way.pop(int(index))
    pending.wait()
    return buffer


@begin_walk.register_fake
def _(attention: Tensor, configuration: str, direction: str) -> Tensor:
    return torch.empty_like(attention)


@post_hop.register_fake
def _(walk: Tensor, *args: Any) -> Tensor:
    return walk.new_empty(2)


@wait_hop.register_fake
def _(hop: Tensor, num_bytes: int, device: torch.device) -> Tensor:
    return hop.new_empty(num_bytes, dtype=torch.uint8, device=device)


for _operator in (begin_walk, post_hop, wait_hop):
    _operator.register_effect(EffectType.ORDERED)


def _walk_in_graph(walk: Tensor) -> _WalkInGraph:
    in_graph = _attentions[int(walk)]._walk_in_graph
    assert in_graph is not None
    return in_graph


@lru_cache(maxsize=256)
def _configuration(text: str, module_number: int) -> Configuration:
    """The configuration with the number of the module that is really called."""
    fields = cast(dict[str, object], json.loads(text))
    return Configuration(fields | module_field(module_number))
