"""What travels between ranks in one forward or backward: hops, K and V that arrive, dK and dV that go home."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from torch import Tensor

from ring_backends.engine.results import BlockGrads
from ring_backends.engine.wire_buffers import Arrivals, RowFormat, WireBuffer, parcels_of, payload_bytes
from ring_backends.kernels.rows import Rows, gather_many, scatter_many
from ring_backends.kernels.steps import Grads, StepRows
from ring_backends.ring.agreement import Agreement
from ring_backends.ring.calls import Call
from ring_backends.ring.members import Traffic
from ring_backends.ring.transfer import Transfer
from ring_backends.ring.wire_memory import CallMemory
from ring_backends.schedule.rank_plan import Delivery, Hop, Parcel, RankPlan
from ring_backends.torch_internals import span

RingPass = Callable[[Mapping[int, Tensor], Mapping[int, Tensor], int], Transfer]
"""(outgoing, incoming, tag) -> Transfer: posts one hop, with at most one buffer per ring rank in either direction."""

POST_SPAN, WAIT_SPAN = "ring_backends::post_hop", "ring_backends::wait_hop"
"""The names under which torch.profiler shows the posting of a hop, and the wait for one."""


TAGS_PER_STEP = 128
"""The tag of a hop of K and V on chains is a multiple of this number."""


@dataclass(frozen=True, eq=False)
class PostedHop:
    """A hop on its way. It keeps the outgoing buffers alive until they are sent, and describes itself for errors."""

    transfer: Transfer
    outgoing: Mapping[int, Tensor]
    describe: Callable[[], str]
    hops: Hops

    def wait(self) -> None:
        """Wait until the incoming buffers have arrived, and the outgoing ones are sent. Called once."""
        hops, started = self.hops, time.perf_counter()
        hops.posted.remove(self)
        try:
            with span(WAIT_SPAN), hops.agreement.waiting(hops.call):
                on_stream = self.transfer.wait(hops.call.time_left())
        except Exception as error:
            hops.agreement.fail(hops.call, self.describe(), error)
        if on_stream is not None:
            hops.agreement.follow(hops.call, self.describe(), on_stream)
        hops.traffic.wait_seconds += time.perf_counter() - started


@dataclass(frozen=True)
class Hops:
    """Posts the hops of one forward or backward, tags them, counts their bytes, and describes them in errors.

    Attributes:
        memory: of the buffers that the hops send and receive.
        ring_ranks: the ring rank of each rank of the plan.
        posted: the hops that are posted and not waited for.
    """

    rank: int
    ring_pass: RingPass
    call: Call
    agreement: Agreement
    traffic: Traffic
    memory: CallMemory
    ring_ranks: Sequence[int]
    posted: list[PostedHop] = field(default_factory=list)

    def post(
        self,
        step: int,
        hop: Hop,
        outgoing: Mapping[int, Tensor],
        incoming: Mapping[int, Tensor],
        row_format: RowFormat,
        *,
        delivery: int,
        grads: bool = False,
    ) -> PostedHop:
        """Post a hop of K and V, or with ``grads`` of dK and dV.

        Args:
            step: the step that waits for K and V, or that has computed dK and dV.
            outgoing, incoming: the buffers by peer.
            row_format: the format of the parcels that are sent.
            delivery: number of the delivery.
        """
        outgoing, incoming = (
            {self.ring_ranks[peer]: buffer for peer, buffer in buffers.items()} for buffers in (outgoing, incoming)
        )
        what = f"in step {step} of {self.call.direction} for {'dK and dV' if grads else 'K and V'}"
        num_bytes = payload_bytes(row_format, hop.sends)
        return self._post(_tag(step, delivery, grads), outgoing, incoming, what, num_bytes)

    def post_exchange(
        self,
        number: int,
        outgoing: Mapping[int, Tensor],
        incoming: Mapping[int, Tensor],
        num_bytes: int,
        *,
        to_heads: bool,
    ) -> PostedHop:
        """Post an exchange with the other ranks of this rank's group. They are not among the peers of other hops.

        Args:
            number: distinguishes the exchanges of a call.
            outgoing, incoming: the buffers by ring rank.
            num_bytes: the bytes that are sent, without padding.
            to_heads: whether ranks get the rows of their heads, as at the beginning of a call.
        """
        wanted = "the rows of its heads" if to_heads else "the results of its rows"
        what = f"in an exchange of {self.call.direction} for {wanted}"
        return self._post(number, outgoing, incoming, what, num_bytes)

    def _post(
        self, tag: int, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], what: str, num_bytes: int
    ) -> PostedHop:
        self.agreement.check()
        describe = partial(self._describe, what, [*incoming], [*outgoing])
        try:
            with span(POST_SPAN), self.agreement.waiting(self.call), self.agreement.posting():
                transfer = self.ring_pass(outgoing, incoming, self.call.tag(tag))
                posted = PostedHop(transfer, outgoing, describe, self)
                self.posted.append(posted)
        except Exception as error:
            self.agreement.fail(self.call, describe(), error)
        self.traffic.messages += len(outgoing)
        self.traffic.bytes += num_bytes
        return posted

    def _describe(self, what: str, sources: list[int], destinations: list[int]) -> str:
        return f"rank {self.rank} waited {what} from rank {sources} and to rank {destinations}"

    def abandon(self) -> None:
        """Abandon the hops that nobody will wait for."""
        while self.posted:
            self.posted.pop().transfer.abandon()


def _tag(step: int, delivery: int, grads: bool) -> int:
    """The number of a hop within its call. A tag holds its lower 16 bits.

    Deliveries whose numbers differ by 64 share tags. This is safe, because both ranks post in the same order.
    """
    return TAGS_PER_STEP * step + (2 * delivery + grads) % TAGS_PER_STEP


@contextlib.contextmanager
def running(hops: Hops | None) -> Iterator[None]:
    """Wraps a forward or backward, and ends the use of its memory.

    After an exception on this rank, abandon the hops that are posted, and report it to the other ranks.
    """
    try:
        yield
        if hops is not None:
            hops.memory.end()
    except BaseException as error:
        if hops is not None:
            hops.abandon()
            hops.agreement.report_error(hops.call.direction, error)
        raise


class ArrivingKeys:
    """K and V of one delivery, as they arrive.

    A buffer on a chain is given back when the tiles have read it and, if it is sent on, after that hop's ``wait``. One
    with parcels that are kept is given back after the last step that uses them.

    Args:
        rows: this rank's rows of all heads.
        row_format: the format of K, V and their marks.
        hops: posts the hops; None if the delivery has none.
    """

    def __init__(
        self, plan: RankPlan, delivery: Delivery, rows: StepRows, row_format: RowFormat, hops: Hops | None
    ) -> None:
        self._plan, self._delivery, self._rows, self._format, self._hops = plan, delivery, rows, row_format, hops
        self._buffer: WireBuffer | None = None  # the parcels that are here or, after a post, that arrive next
        self._posted: PostedHop | None = None
        self._sent: list[Tensor] = []  # what is given back when the posted hop is over
        self._read: WireBuffer | None = None  # what is given back when the tiles of the step have read it

    def advance(self, step: int) -> WireBuffer | None:
        """Wait for the hop that arrives before ``step``, and post the next one. Return the parcels that are here."""
        delivery, here = self._delivery, self._buffer
        if self._posted is not None:
            self._posted.wait()
            self._posted.hops.memory.give_back(*self._sent)
            self._posted, self._sent = None, []
        if step + 1 < len(delivery.keys):
            self._post(step + 1)
        elif not delivery.is_kept:
            self._buffer = None
        if delivery.is_kept and step == delivery.last_step:
            assert self._posted is None
            self._buffer = None
        is_sent = here is not None and any(here.buffer is buffer for buffer in self._sent)
        self._read = None if is_sent or here is self._buffer else here
        return here

    def release(self) -> None:
        """Called after the tiles of a step."""
        if self._read is not None and self._hops is not None:
            self._hops.memory.give_back(self._read.buffer)
        self._read = None

    def _post(self, step: int) -> None:
        """Post the hop that ``step`` waits for: parcels that have arrived, or this rank's own rows."""
        hop, here, is_kept = self._delivery.keys[step], self._buffer, self._delivery.is_kept
        if not (hop.sends or hop.receives):
            self._buffer = here if is_kept else None
            return
        assert self._hops is not None
        memory = self._hops.memory
        sent, arriving = parcels_of(hop.sends), parcels_of(hop.receives)
        source = here if here is not None and here.starts.keys() >= {*sent} else self._own(step, sent, memory)
        self._buffer = source if is_kept else WireBuffer(self._format, arriving, memory)
        outgoing, incoming = source.parts(hop.sends, memory), self._buffer.parts(hop.receives, memory)
        assert not incoming.copies, "the parcels of a message are adjacent where it arrives"
        self._sent = outgoing.copies
        if not is_kept and (outgoing.has_views or source is not here):
            self._sent.append(source.buffer)
        number = self._delivery.number
        self._posted = self._hops.post(step, hop, outgoing.by_peer, incoming.by_peer, self._format, delivery=number)

    def _own(self, step: int, sent: tuple[Parcel, ...], memory: CallMemory) -> WireBuffer:
        """A buffer with this rank's own rows. If parcels are kept, it has room for all that arrive."""
        rows, own, arriving = self._rows, self._delivery.own, self._delivery.received
        if not self._delivery.is_kept:
            rows, own, arriving = rows.block(self._plan.steps[step][0]), sent, ()
        own = tuple(dict.fromkeys(own))
        buffer = WireBuffer(self._format, tuple(dict.fromkeys((*own, *arriving))), memory)
        tensors = [rows.key, rows.value]
        if rows.key_marks is not None:
            tensors.append(rows.key_marks)
        gathered: list[Rows] = []
        for parcel in own:
            places = zip(tensors, buffer.slices(parcel), strict=True)
            gathered += [Rows(tensor, parcel.source, place) for tensor, place in places]
        gather_many(gathered)
        return buffer


class _GoingHome(NamedTuple):
    posted: PostedHop
    sent: list[Tensor]
    arrivals: Arrivals
    grads: BlockGrads
    is_last: bool


class ReturningGrads:
    """dK and dV of the parcels of one delivery, on their way home.

    Those of parcels that are kept come home from several ranks. They are added up before they are added to own rows.

    A buffer that is sent is given back after the hop's ``wait``, and one that arrives when it is added.

    Args:
        hops: posts the hops; None if the delivery has none.
        sums: the format in which dK and dV are added.
        on_wire: the format in which they travel.

    Attributes:
        going_home: the hop that is on its way, with the dK and dV that it brings; None if there is none.
    """

    def __init__(
        self, plan: RankPlan, delivery: Delivery, hops: Hops | None, *, sums: RowFormat, on_wire: RowFormat
    ) -> None:
        self._delivery, self._hops, self._sums, self._on_wire = delivery, hops, sums, on_wire
        self._buffer: WireBuffer | None = None
        self._spans_blocks = len(plan.blocks) > 1
        self.going_home: _GoingHome | None = None

    def of_step(self, step: int) -> WireBuffer | None:
        """The buffer for dK and dV of the parcels that the tiles of ``step`` read; None without parcels."""
        delivery = self._delivery
        if not delivery.is_kept and delivery.grads:
            self._buffer = self._new_sums(parcels_of(delivery.grads[step].sends))
        elif delivery.is_kept and step == delivery.first_step:
            self._buffer = self._new_sums((*delivery.received, *delivery.own))
        return self._buffer

    def _new_sums(self, parcels: tuple[Parcel, ...]) -> WireBuffer | None:
        if not parcels:
            return None
        assert self._hops is not None
        return WireBuffer(self._sums, parcels, self._hops.memory, zeroed=True)

    def advance(self, step: int, grads: BlockGrads) -> None:
        """After the tiles of ``step``: add what comes from further on to what is sent next, and post the next hop.

        Args:
            grads: the gradients of the step's block of heads. What comes home in this hop is added to its sums.
        """
        if self.going_home is not None:
            self.settle()
        if step >= len(self._delivery.grads):
            return
        hop = self._delivery.grads[step]
        if not hop:
            return
        assert self._hops is not None
        by_peer, sent = self._outgoing(hop, self._hops.memory)
        arrivals = Arrivals(self._on_wire, hop.receives, self._hops.memory)
        number = self._delivery.number
        posted = self._hops.post(step, hop, by_peer, arrivals.by_peer, self._on_wire, delivery=number, grads=True)
        is_last = not any(self._delivery.grads[step + 1 :])
        self.going_home = _GoingHome(posted, sent, arrivals, grads, is_last)

    def _outgoing(self, hop: Hop, memory: CallMemory) -> tuple[dict[int, Tensor], list[Tensor]]:
        """What a hop sends to each peer, and the buffers that are given back when it is over."""
        sums = self._buffer
        if sums is None:
            return {}, []
        source = sums.to(self._on_wire.dtype, parcels_of(hop.sends), memory)
        by_peer, sent, has_views = source.parts(hop.sends, memory)
        if not self._delivery.is_kept:
            self._buffer = None  # the next step has its own
        for buffer in {source, sums} - {self._buffer}:
            if buffer is source and has_views:
                sent.append(buffer.buffer)
            else:
                memory.give_back(buffer.buffer)
        return by_peer, sent

    def settle(self) -> None:
        """Wait for the hop that is on its way. Add what it brings to the parcels that are sent next, or to own rows."""
        if self.going_home is None:
            return
        posted, sent, arrivals, grads, is_last = self.going_home
        self.going_home = None
        posted.wait()
        posted.hops.memory.give_back(*sent)
        if self._buffer is not None:
            self._buffer.add_arrived(arrivals)
        if not self._delivery.is_kept:
            is_here = (self._buffer is not None and self._buffer.starts) or {}
            own = ((parcel, rows) for parcel, rows in arrivals.slices() if parcel not in is_here)
            _add_home(grads.sums, own)
        elif is_last and not self._spans_blocks:
            self.finish(grads.sums)
        posted.hops.memory.give_back(arrivals.buffer)

    def finish(self, grads: Grads) -> None:
        """Add what came home of parcels that were kept to the gradients of this rank's rows.

        Called for each delivery in the end. With several blocks of heads, the gradients are those of all heads.
        """
        if self._delivery.is_kept and self._buffer is not None and self._hops is not None:
            _add_home(grads, ((parcel, self._buffer.slices(parcel)) for parcel in self._delivery.own))
            self._hops.memory.give_back(self._buffer.buffer)
        self._buffer = None


def _add_home(grads: Grads, own: Iterable[tuple[Parcel, Sequence[Tensor]]]) -> None:
    """Add dK and dV of parcels to the gradients of the rank that holds their keys."""
    of_branch: defaultdict[int, list[Rows]] = defaultdict(list)
    for parcel, (key, value) in own:
        of_branch[parcel.branch] += Rows(grads.key, parcel.source, key), Rows(grads.value, parcel.source, value)
    for parts in of_branch.values():  # parcels of different branches may hold the same rows
        scatter_many(added=parts)


def key_format(rows: StepRows) -> RowFormat:
    """The format of K, V and their marks."""
    marks = None if rows.key_marks is None else rows.key_marks.dtype
    return RowFormat(rows.key.shape[0], rows.key.shape[3], rows.value.shape[3], rows.key.dtype, marks)
