"""The exchange of rows for heads within a group of ranks, at the beginning and at the end of a forward or backward.

:mod:`ring_backends.schedule.exchange` says which rows and heads. Tensors are [batch, local seq, heads, …].
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_backends.engine.call import AttentionInputs
from ring_backends.engine.wire import Hops, PostedHop
from ring_backends.engine.wire_buffers import ALIGNMENT
from ring_backends.kernels.rows import Rows, gather_many, row_view, scatter_many
from ring_backends.schedule.exchange import HeadExchange, Kind, moves
from ring_backends.schedule.rows import DilatedRows

Part = tuple[Tensor, Kind]
"""A tensor that is exchanged, and which heads it has."""

_Format = tuple[Kind, int, tuple[int, ...], torch.dtype]
"""The kind of a part, its batch size, its dims after the heads, and its dtype."""


@dataclass
class Exchanged:
    """An exchange that was posted. The results are filled by :meth:`wait`.

    Attributes:
        results: a tensor for each part.
        posted: the hop; None if it is over, or if no message has bytes.
        sent, received: the buffers by ring rank of the other members.
        arriving: the rows of the results by the member that sends them.
        is_sum: whether arriving rows are added to the results.
    """

    hops: Hops
    results: list[Tensor]
    posted: PostedHop | None
    sent: dict[int, Tensor]
    received: dict[int, Tensor]
    arriving: list[list[Rows]]
    is_sum: bool

    def wait(self) -> list[Tensor]:
        """Wait until the messages have arrived, fill the results, and return them. A second call only returns them."""
        if not self.arriving:
            return self.results
        if self.posted is not None:
            self.posted.wait()
        if self.is_sum:
            for of_member in self.arriving:
                scatter_many(added=of_member)
        else:
            scatter_many([rows for of_member in self.arriving for rows in of_member])
        self.hops.memory.give_back(*self.sent.values(), *self.received.values())
        self.posted, self.sent, self.received, self.arriving = None, {}, {}, []
        return self.results


@dataclass(frozen=True)
class GroupInputs:
    """What a rank computes in place of its own rows: the rows of its group, of its own heads.

    Attributes:
        inputs: the inputs of the call.
        of_queries: further tensors with the rows and heads of the query.
        keys, queries: the exchanges that fill key, value and marks, and query with ``of_queries``.
    """

    inputs: AttentionInputs
    of_queries: list[Tensor]
    keys: Exchanged
    queries: Exchanged


@dataclass(frozen=True)
class Exchange:
    """The exchanges of one forward or backward of this rank."""

    plan: HeadExchange
    hops: Hops
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def begin(self, inputs: AttentionInputs, *of_queries: Tensor) -> GroupInputs:
        """Post the exchanges of the inputs, and of further tensors with the rows and heads of the query."""
        marks = {
            name: getattr(inputs, name).unsqueeze(2)
            for name in ("key_padding_mask", "document_ids")
            if getattr(inputs, name) is not None
        }
        keys = self.to_heads([(inputs.key, "keys"), (inputs.value, "keys"), *((x, "marks") for x in marks.values())])
        queries = self.to_heads([(x, "queries") for x in (inputs.query, *of_queries)])
        key, value, *of_group = keys.results
        heads = self.plan.heads_of("queries", self.plan.member)
        sinks = None if inputs.sinks is None else inputs.sinks[heads.start : heads.stop]
        changed: dict[str, Any] = {name: x.squeeze(2) for name, x in zip(marks, of_group, strict=True)}
        query, *others = queries.results
        inputs = replace(inputs, query=query, key=key, value=value, sinks=sinks, **changed)
        return GroupInputs(inputs, others, keys, queries)

    def to_heads(self, parts: Sequence[Part]) -> Exchanged:
        """Send this rank's rows, and collect those of the group: of own heads, in order of position."""
        plan = self.plan
        results = [
            x.new_empty(x.shape[0], plan.group_len, len(plan.heads_of(kind, plan.member)), *x.shape[3:])
            for x, kind in parts
        ]
        return self._post(parts, results, to_heads=True, is_sum=False)

    def to_rows(self, parts: Sequence[Part]) -> Exchanged:
        """Send the rows of the group back, of own heads, and collect this rank's rows, of all heads.

        Rows of the same head from several members are added.
        """
        plan = self.plan
        is_sum = plan.shares_kv_heads and any(kind == "keys" for _, kind in parts)
        num_heads = {"queries": plan.num_heads, "keys": plan.num_kv_heads}
        shapes = [(x.shape[0], plan.local_len, num_heads[kind], *x.shape[3:]) for x, kind in parts]
        results = [
            x.new_zeros(shape) if is_sum else x.new_empty(shape) for shape, (x, _) in zip(shapes, parts, strict=True)
        ]
        return self._post(parts, results, to_heads=False, is_sum=is_sum)

    def _post(self, parts: Sequence[Part], results: list[Tensor], *, to_heads: bool, is_sum: bool) -> Exchanged:
        plan, memory = self.plan, self.hops.memory
        formats = tuple((kind, x.shape[0], x.shape[3:], x.dtype) for x, kind in parts)
        sent: dict[int, Tensor] = {}
        received: dict[int, Tensor] = {}
        leaving: list[Rows] = []
        arriving: list[list[Rows]] = []
        num_bytes = 0
        for member, rank in enumerate(plan.members):
            outgoing = _message(plan, formats, plan.member, member, to_heads=to_heads)
            incoming = _message(plan, formats, member, plan.member, to_heads=to_heads)
            if rank == plan.rank:  # no message, but one copy
                for x in outgoing.slices:
                    result = row_view(results[x.part], x.at_destination)
                    assert result is not None
                    leaving.append(Rows(parts[x.part][0], x.at_source, result))
                continue
            sent[rank], received[rank] = memory.take(outgoing.size), memory.take(incoming.size)
            num_bytes += outgoing.payload
            leaving += [Rows(parts[x.part][0], x.at_source, x.of(sent[rank])) for x in outgoing.slices]
            arriving.append([Rows(results[x.part], x.at_destination, x.of(received[rank])) for x in incoming.slices])
        gather_many(leaving)
        # Neither end posts an empty message.
        by_peer = [{rank: buffer for rank, buffer in of_all.items() if len(buffer)} for of_all in (sent, received)]
        posted = None
        if any(by_peer):
            number = next(self.numbers)
            posted = self.hops.post_exchange(number, by_peer[0], by_peer[1], num_bytes, to_heads=to_heads)
        return Exchanged(self.hops, results, posted, sent, received, arriving, is_sum)


class _Slice(NamedTuple):
    """Some rows of a part in a message, [batch, heads, rows, …].

    Attributes:
        part: number of the part.
        at_source, at_destination: the rows in the tensor of either rank.
        start, stop: the bytes of the slice in the message.
    """

    part: int
    at_source: DilatedRows
    at_destination: DilatedRows
    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def of(self, message: Tensor) -> Tensor:
        return message[self.start : self.stop].view(self.dtype).view(self.shape)


class _Message(NamedTuple):
    """What one rank sends to another in an exchange: its slices, its size, and its bytes without padding."""

    slices: tuple[_Slice, ...]
    size: int
    payload: int


@lru_cache(maxsize=4096)
def _message(
    plan: HeadExchange, formats: tuple[_Format, ...], source: int, destination: int, *, to_heads: bool
) -> _Message:
    slices: list[_Slice] = []
    size = payload = 0
    for part, (kind, batch, rest, dtype) in enumerate(formats):
        for at_source, at_destination in moves(plan, source, destination, kind, to_heads=to_heads):
            shape = batch, at_source.num_heads, at_source.rows, *rest
            num_bytes = math.prod(shape) * dtype.itemsize
            slices.append(_Slice(part, at_source, at_destination, size, size + num_bytes, shape, dtype))
            size += -(-num_bytes // ALIGNMENT) * ALIGNMENT
            payload += num_bytes
    return _Message(tuple(slices), size, payload)
