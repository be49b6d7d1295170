"""The rows of spread branches (:mod:`ring_backends.schedule.spread`) in one forward or backward of one rank.

K and V of all ranks that this rank needs arrive in a few hops at the beginning, and stay until the last tile has used
them. In a backward, their dK and dV then go back on the same tree: each rank adds up what comes from further on, and
sends the sums to the rank that it had the rows from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ring_backends.engine.around import grad_format, key_format, own_rows
from ring_backends.engine.hops import Hop, Hops
from ring_backends.engine.sums import BlockGrads
from ring_backends.engine.wire_buffers import WireBuffer, parcels_of
from ring_backends.kernels.gather_rows import scatter_many
from ring_backends.kernels.steps import Grads, StepRows
from ring_backends.kernels.triton_rows_launch import Rows
from ring_backends.schedule.rank_plan import Parcel, RankPlan


class SpreadKeys:
    """K and V of spread branches: this rank's own, and those of other ranks as they arrive.

    Args:
        rows: this rank's rows of all heads.
    """

    def __init__(self, plan: RankPlan, rows: StepRows, hops: Hops) -> None:
        self._plan, self._hops = plan, hops
        received = [message for hop in plan.spread for message in hop.receives]
        parcels = *plan.own_spread, *parcels_of(received)
        self.buffer = WireBuffer(key_format(rows), parcels, rows.key.device)
        own_rows(self.buffer, rows, plan.own_spread)
        self._arriving = self._post(1)

    def advance(self, step: int) -> None:
        """Wait for the hop that arrives before ``step``, and post the one after it."""
        if 0 < step <= len(self._plan.spread):
            if self._arriving is not None:
                self._arriving.wait()
            self._arriving = self._post(step + 1)

    def _post(self, number: int) -> Hop | None:
        if number > len(self._plan.spread):
            return None
        hop, buffer = self._plan.spread[number - 1], self.buffer
        outgoing, incoming = buffer.by_peer(hop.sends), buffer.by_peer(hop.receives)
        return self._hops.post(number, outgoing, hop.sends, incoming, buffer.row_format, spread=True)


class SpreadGrads:
    """dK and dV of the keys that :class:`SpreadKeys` has received.

    Args:
        rows: this rank's rows of all heads.
        sum_dtype: the dtype in which dK and dV are added.
        wire_dtype: the dtype in which they travel.
    """

    def __init__(
        self, plan: RankPlan, rows: StepRows, hops: Hops, *, sum_dtype: torch.dtype, wire_dtype: torch.dtype
    ) -> None:
        self._plan, self._hops = plan, hops
        self._sum_format, self._wire_format = grad_format(rows, sum_dtype), grad_format(rows, wire_dtype)
        received = [message for hop in plan.spread for message in hop.receives]
        self.buffer = WireBuffer.of(self._sum_format, received, rows.key.device, zeroed=True)
        self._number, self._has_one_block = len(plan.spread), len(plan.blocks) == 1
        self._arriving: tuple[Hop, list[WireBuffer]] | None = None
        self._own: dict[Parcel, tuple[Tensor, Tensor]] = {}

    def advance(self, step: int, grads: BlockGrads) -> None:
        """After the tiles of ``step``: add what has arrived to what is sent next, and post the next hop.

        Args:
            grads: the gradients of the block of heads. If it is the only one, what has come home is added to its sums.
        """
        if step >= self._plan.last_spread_step and self._number:
            self._post_next(grads.sums if self._has_one_block else None)

    def _post_next(self, sums: Grads | None) -> None:
        self._add(sums)
        hop = self._plan.spread[self._number - 1]
        arriving = {
            message.peer: WireBuffer(self._wire_format, message.parcels, self.buffer.buffer.device)
            for message in hop.sends
        }
        on_wire = self.buffer.to(self._wire_format.dtype, parcels_of(hop.receives))
        posted = self._hops.post(
            self._number,
            on_wire.by_peer(hop.receives),
            hop.receives,
            {peer: buffer.buffer for peer, buffer in arriving.items()},
            self._wire_format,
            grads=True,
            spread=True,
        )
        self._number -= 1
        self._arriving = None if posted is None else (posted, [*arriving.values()])

    def finish(self, grads: Grads) -> None:
        """Post the hops that are left, and add what has come home.

        Args:
            grads: the gradients of this rank's rows, of all heads. With one block of heads, its sums.
        """
        sums = grads if self._has_one_block else None
        while self._number:
            self._post_next(sums)
        self._add(sums)
        for parcel, own in self._own.items():
            _add_to(grads, parcel, own)

    def _add(self, sums: Grads | None) -> None:
        """Wait for dK and dV from the ranks that this rank sent keys to, and add them up.

        Args:
            sums: where to add those of this rank's own rows. None: in memory of their own, until :meth:`finish`.
        """
        if self._arriving is None:
            return
        posted, buffers = self._arriving
        self._arriving = None
        posted.wait()
        for buffer in buffers:
            for parcel in buffer.parcels:
                arrived = buffer.slices(parcel)[:2]
                if parcel in self.buffer:
                    torch._foreach_add_(list(self.buffer.slices(parcel)[:2]), list(arrived))
                elif sums is not None:
                    _add_to(sums, parcel, arrived)
                elif parcel in self._own:
                    torch._foreach_add_(list(self._own[parcel]), list(arrived))
                else:
                    key, value = (grad.to(self._sum_format.dtype, copy=True) for grad in arrived)  # frees the buffer
                    self._own[parcel] = key, value


def _add_to(grads: Grads, parcel: Parcel, arrived: tuple[Tensor, Tensor]) -> None:
    """Add dK and dV of one parcel. Those of another branch may hold the same rows, so each is added by itself."""
    key, value = arrived
    scatter_many(added=[Rows(grads.key, parcel.source, key), Rows(grads.value, parcel.source, value)])
