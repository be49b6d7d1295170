"""Posts the hops of one forward or backward, and waits for them.

A computation pauses before every hop that it posts (:data:`ByHops`). In a compiled graph, one operator per hop resumes
the computation up to the next hop. Outside of a graph, :func:`finish` runs it to its end.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from torch import Tensor
from torch.profiler import record_function

from ring_backends.engine.local_rows import LocalRows
from ring_backends.engine.wire_buffers import RowFormat, WireBuffer
from ring_backends.kernels.gather_rows import gather_many
from ring_backends.kernels.triton_rows_launch import Rows
from ring_backends.ring.agreement import Agreement
from ring_backends.ring.calls import Call
from ring_backends.ring.ring import Traffic
from ring_backends.ring.transfer import Transfer
from ring_backends.schedule.rank_plan import Message, RankPlan

RingPass = Callable[[Mapping[int, Tensor], Mapping[int, Tensor], int], Transfer]
"""(outgoing, incoming, tag) -> Transfer: posts one hop, with at most one buffer per ring rank in either direction."""

POST_SPAN, WAIT_SPAN = "ring_backends::post_hop", "ring_backends::wait_hop"
"""The names under which torch.profiler shows the posting of a hop, and the wait for one."""

Result = TypeVar("Result")
ByHops = Generator[None, None, Result]
"""A computation that pauses once before each hop that it posts."""


def finish(by_hops: ByHops[Result]) -> Result:
    """Run a computation to its end without a pause."""
    while True:
        try:
            next(by_hops)
        except StopIteration as end:
            result: Result = end.value
            return result


class Arrival(Protocol):
    """A posted hop. ``wait`` is called once. It returns None if this rank receives nothing."""

    def wait(self) -> WireBuffer | None: ...


class _Nothing:
    def wait(self) -> None:
        return None


NOTHING: Arrival = _Nothing()


@dataclass(frozen=True, eq=False)
class _Posted:
    """A posted hop. It keeps the outgoing buffers alive until they are sent."""

    transfer: Transfer
    outgoing: Mapping[int, Tensor]
    incoming: WireBuffer
    description: str
    hops: Hops

    def wait(self) -> WireBuffer:
        started = time.perf_counter()
        self.hops.posted.remove(self)
        try:
            with record_function(WAIT_SPAN), self.hops.agreement.waiting(self.hops.call):
                hop = self.transfer.wait(self.hops.call.time_left())
        except Exception as error:
            self.hops.agreement.fail(self.hops.call, self.description, error)
        self.hops.agreement.follow(self.hops.call, self.description, hop)
        self.hops.traffic.wait_seconds += time.perf_counter() - started
        return self.incoming


@dataclass(frozen=True)
class Hops:
    """Posts the hops of one forward or backward, tags them, counts their bytes, and describes them in errors.

    Attributes:
        posted: the hops that are posted and not waited for.
    """

    rank: int
    ring_pass: RingPass
    call: Call
    agreement: Agreement
    traffic: Traffic
    posted: list[_Posted] = field(default_factory=list)

    def post(
        self, index: int, name: str, outgoing: Mapping[int, Tensor], sends: tuple[Message, ...], incoming: WireBuffer
    ) -> ByHops[Arrival]:
        if not outgoing and not incoming.by_peer:
            return NOTHING
        yield
        self.agreement.check()
        description = (
            f"rank {self.rank} waited in step {index // 2} of {self.call.direction} for {name} "
            f"from rank {[*incoming.by_peer]} and to rank {[*outgoing]}"
        )
        try:
            with record_function(POST_SPAN), self.agreement.waiting(self.call):
                transfer = self.ring_pass(outgoing, incoming.by_peer, self.call.tag(index))
                self.posted.append(_Posted(transfer, outgoing, incoming, description, self))
        except Exception as error:
            self.agreement.fail(self.call, description, error)
        self.traffic.messages += len(outgoing)
        self.traffic.bytes += sum(incoming.row_format.payload_bytes(message.parcels) for message in sends)
        return self.posted[-1]

    def abandon(self) -> None:
        """Abandon the hops that nobody will wait for."""
        while self.posted:
            self.posted.pop().transfer.abandon()


Start = Callable[[str], "Hops | None"]
"""direction -> Hops: waits until the ranks agree on a forward or backward. Returns None in a ring of one."""


def no_hops(direction: str) -> None:
    """The :data:`Start` of a ring of one."""


@contextlib.contextmanager
def report_failure(hops: Hops | None) -> Iterator[None]:
    """After an exception on this rank, abandon the hops that are posted, and report it to the other ranks."""
    if hops is None:
        yield
        return
    with hops.agreement.report_errors(hops.call):
        try:
            yield
        except BaseException:
            hops.abandon()
            raise


def post_keys(
    plan: RankPlan, index: int, rows: LocalRows, arrived: WireBuffer | None, hops: Hops | None
) -> ByHops[Arrival]:
    """Post the hop of K and V that step ``index`` waits for.

    It forwards parcels of ``arrived``, the buffer of the previous hop, or sends this rank's own rows.
    """
    if hops is None or index == len(plan.steps):
        return NOTHING
    block, step = plan.steps[index]
    own = rows.block(block)
    marks = None if own.key_marks is None else own.key_marks.dtype
    row_format = RowFormat(own.key.shape[0], own.key.shape[-1], own.key.dtype, marks)
    if arrived is not None and all(parcel in arrived for message in step.sends for parcel in message.parcels):
        outgoing = {message.peer: arrived.stretch(message.parcels) for message in step.sends}
    else:
        buffer = WireBuffer(row_format, step.sends, own.key.device)
        gather_many(
            [
                Rows(tensor, parcel.source, destination)
                for parcel in buffer.parcels
                for destination, tensor in zip(buffer.slices(parcel), (own.key, own.value, own.key_marks), strict=True)
                if destination is not None and tensor is not None
            ]
        )
        outgoing = buffer.by_peer
    incoming = WireBuffer(row_format, step.receives, own.key.device)
    return (yield from hops.post(2 * index, "K and V", outgoing, step.sends, incoming))
