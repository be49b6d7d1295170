"""What every adapter's ``initialize`` does: check the options, start the world, choose the rings, join one of them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ring_backends.cost.arrangement import RingSize, arrange, check_arrangement, refuse_arrangement
from ring_backends.ring.rendezvous import connect, ring_ranks, start_world
from ring_backends.ring.ring import Ring
from ring_backends.ring.topology import RingOrder
from ring_backends.schedule.layout import LayoutKind, SequenceLayout


def check_options(
    ring_size: object,
    layout: Any,
    timeout: object,
    group: object = None,
    ring_order: object = "rank",
    auto: Mapping[str, Any] | None = None,
) -> None:
    """Refuse what no ring can be made of, before any communication.

    Raises:
        ValueError, TypeError: an argument breaks its rule, or two contradict each other.
    """
    if ring_size not in (None, "auto"):
        SequenceLayout(1, ring_size)  # type: ignore[arg-type]
    SequenceLayout(1, 1, layout)
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout = {timeout!r}: expected a datetime.timedelta, such as timedelta(seconds=300).")
    if timeout <= timedelta(0):
        raise ValueError(f"timeout = {timeout}: must be positive; a hop takes time.")
    check_arrangement(ring_size, layout, ring_order, auto or {})
    if group is not None:
        refuse_arrangement("group is given, which has chosen and ordered the ring's ranks", ring_size, ring_order)


def join_ring(
    adapter: str,
    ring_size: RingSize,
    layout: LayoutKind,
    group: DeviceMesh | dist.ProcessGroup | None,
    timeout: timedelta,
    ring_order: RingOrder,
    auto: Mapping[str, Any],
) -> Ring:
    """``initialize`` of an adapter, by that name, whose rings want no more than torch.distributed.

    Raises:
        ValueError, TypeError: an argument breaks its rule, or no ring fits into the memory.
        RingMismatchError, RingPeerError: where ranks decide together, one asks for something else, or does not come.
    """
    check_options(ring_size, layout, timeout, group, ring_order, auto)
    world_size = start_world(timeout)
    size, order = arrange(ring_size, layout, world_size, ring_order, auto)
    ranks = ring_ranks(size, group, world_size, order)
    return connect(ranks, layout, timeout, adapter, order=order if group is None else None)
