"""Posts the hops of one forward or backward, and waits for them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ring_backends.engine.wire_buffers import RowFormat
from ring_backends.ring.agreement import Agreement
from ring_backends.ring.calls import Call
from ring_backends.ring.ring import Traffic
from ring_backends.ring.transfer import Transfer
from ring_backends.schedule.rank_plan import Message
from ring_backends.torch_internals import span

RingPass = Callable[[Mapping[int, Tensor], Mapping[int, Tensor], int], Transfer]
"""(outgoing, incoming, tag) -> Transfer: posts one hop, with at most one buffer per ring rank in either direction."""

POST_SPAN, WAIT_SPAN = "ring_backends::post_hop", "ring_backends::wait_hop"
"""The names under which torch.profiler shows the posting of a hop, and the wait for one."""

SPREAD = 0x8000
"""Hops of spread branches have tags from here on."""


@dataclass(frozen=True, eq=False)
class Hop:
    """A posted hop. It keeps the outgoing buffers alive until they are sent."""

    transfer: Transfer
    outgoing: Mapping[int, Tensor]
    description: str
    hops: Hops

    def wait(self) -> None:
        """Wait until the incoming buffers have arrived, and the outgoing ones are sent. Called once."""
        hops, started = self.hops, time.perf_counter()
        hops.posted.remove(self)
        try:
            with span(WAIT_SPAN), hops.agreement.waiting(hops.call):
                on_stream = self.transfer.wait(hops.call.time_left())
        except Exception as error:
            hops.agreement.fail(hops.call, self.description, error)
        hops.agreement.follow(hops.call, self.description, on_stream)
        hops.traffic.wait_seconds += time.perf_counter() - started


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
    posted: list[Hop] = field(default_factory=list)

    def post(
        self,
        step: int,
        outgoing: Mapping[int, Tensor],
        sends: tuple[Message, ...],
        incoming: Mapping[int, Tensor],
        row_format: RowFormat,
        *,
        grads: bool = False,
        spread: bool = False,
    ) -> Hop | None:
        """Post a hop of K and V, or with ``grads`` of dK and dV. Return None if this rank does not take part.

        Args:
            step: the step that waits for K and V, or that has computed dK and dV; with ``spread``, the number of the
                hop.
            outgoing, incoming: the buffers by peer.
            sends: the messages in ``outgoing``.
            row_format: the format of the parcels that are sent.
        """
        if not outgoing and not incoming:
            return None
        self.agreement.check()
        description = (
            f"rank {self.rank} waited in {'spread hop' if spread else 'step'} {step} of {self.call.direction} for "
            f"{'dK and dV' if grads else 'K and V'} from rank {[*incoming]} and to rank {[*outgoing]}"
        )
        tag = self.call.tag(2 * step + grads + (SPREAD if spread else 0))
        try:
            with span(POST_SPAN), self.agreement.waiting(self.call), self.agreement.posting():
                hop = Hop(self.ring_pass(outgoing, incoming, tag), outgoing, description, self)
                self.posted.append(hop)
        except Exception as error:
            self.agreement.fail(self.call, description, error)
        self.traffic.messages += len(outgoing)
        self.traffic.bytes += sum(row_format.payload_bytes(message.parcels) for message in sends)
        return hop

    def abandon(self) -> None:
        """Abandon the hops that nobody will wait for."""
        while self.posted:
            self.posted.pop().transfer.abandon()


def report_failure(hops: Hops | None) -> contextlib.AbstractContextManager[None]:
    """After an exception on this rank, abandon the hops that are posted, and report it to the other ranks."""
    return contextlib.nullcontext() if hops is None else _report_failure(hops)


@contextlib.contextmanager
def _report_failure(hops: Hops) -> Iterator[None]:
    with hops.agreement.report_errors(hops.call):
        try:
            yield
        except BaseException:
            hops.abandon()
            raise
