"""Implements ``ring_size="auto"`` and ``ring_order="topology"`` of ``initialize``.

``ring_size="auto"`` chooses the smallest ring that fits into memory and is faster than one device. The cost model
(:mod:`ring_backends.cost.model`) estimates both. All ranks measure the constants of the model during the call.
``ring_order="topology"`` makes the ranks of one host neighbours. All ranks must agree on the rings, so rank 0 decides
(:mod:`ring_backends.ring.decision`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, TypedDict, get_args

import torch

from ring_backends.cost.hardware import Hardware
from ring_backends.cost.machine import available_memory_bytes, device_of_this_rank
from ring_backends.cost.model import RingCost, smallest_rings
from ring_backends.cost.probe import RankProbe, slowest, with_host_links
from ring_backends.errors import RingMismatchError
from ring_backends.kernels import resolve_dtype
from ring_backends.ring.decision import decide_on_rank0
from ring_backends.ring.differences import describe_differences
from ring_backends.ring.topology import RingOrder, UlyssesSize, host_name, ranks_of_one_host, topology_order
from ring_backends.schedule.checks import check_group_size, check_integer
from ring_backends.schedule.layout import LayoutKind, SequenceLayout
from ring_backends.schedule.pattern import DilatedPattern, HeadMode, Offset, Padding
from ring_backends.schedule.ring_schedule import RingSchedule

RingSize = int | Literal["auto"] | None

PROBE_SECONDS = 0.05
"""Seconds for which each kind of tile is measured. With hops and warm-up, the measurement takes a second or two."""

_DECISION_TIMEOUT = timedelta(seconds=300)


class AutoOptions(TypedDict, total=False):
    """The attention call for which ``initialize(ring_size="auto")`` chooses a ring size.

    Required: seq_len (length of the global sequence), segment_lengths, dilation_rates, num_heads, head_dim.

    Optional: num_kv_heads (default: num_heads), batch (default: 1), dtype (default: ``"auto"``, the dtype recommended
    for the device), is_causal (default: False). head_mode, offset, padding and window_lengths are those of
    :class:`~ring_backends.DilatedPattern`. memory_bytes is the number of bytes that one rank may use for one call and
    its gradients. The default is the free memory of the rank's GPU, or of the host on a CPU. Ranks that share this
    memory get equal parts.
    """

    seq_len: int
    segment_lengths: Sequence[int | None]
    dilation_rates: Sequence[int]
    num_heads: int
    head_dim: int
    num_kv_heads: int | None
    batch: int
    dtype: str | torch.dtype
    is_causal: bool
    head_mode: HeadMode
    offset: Offset | None
    padding: Padding
    window_lengths: Sequence[int | None] | None
    memory_bytes: int | None


_REQUIRED = ("seq_len", "segment_lengths", "dilation_rates", "num_heads", "head_dim")


def check_arrangement(ring_size: object, layout: LayoutKind, ring_order: object, auto: Mapping[str, Any]) -> None:
    """Check the options of ``initialize`` that choose rings. This does not communicate.

    Raises:
        ValueError, TypeError: an option is unknown, missing or invalid. The message names it.
    """
    if ring_order not in get_args(RingOrder):
        raise ValueError(f"ring_order = {ring_order!r}: unknown value; choose 'rank' or 'topology'.")
    unknown = sorted(set(auto) - set(AutoOptions.__annotations__))
    if unknown:
        raise TypeError(f"{unknown[0]} = {auto[unknown[0]]!r}: initialize() has no such argument; leave it out.")
    if ring_size != "auto":
        if auto:
            name = next(iter(auto))
            raise ValueError(
                f"{name} = {auto[name]!r}: has no effect with ring_size = {ring_size!r}; leave {name} out, or pass "
                "ring_size='auto'."
            )
        return
    missing = [name for name in _REQUIRED if name not in auto]
    if missing:
        raise ValueError(
            f"ring_size = 'auto': the choice needs {' and '.join(missing)}; pass {', '.join(_REQUIRED)}, or a number "
            "as ring_size."
        )
    _cost(layout, auto, torch.device("cpu"), None)
    if auto.get("memory_bytes") is not None:
        check_integer("memory_bytes", auto["memory_bytes"], 1, advice="leave it out to use the free memory")


def refuse_arrangement(because: str, ring_size: object, ring_order: object) -> None:
    """Refuse ``ring_size="auto"`` and ``ring_order="topology"``, where another argument excludes them.

    Args:
        because: the argument that excludes them and why, for the error.

    Raises:
        ValueError: one of the two options is given.
    """
    if ring_size == "auto":
        raise ValueError(f"ring_size = {ring_size!r}: {because}; leave one of the two out.")
    if ring_order != "rank":
        raise ValueError(f"ring_order = {ring_order!r}: {because}; leave one of the two out.")


def _cost(layout: LayoutKind, auto: Mapping[str, Any], device: torch.device, buffer_bytes: int | None) -> RingCost:
    """Return the cost of the attention call that the options describe, on one device.

    Raises:
        ValueError, TypeError: an option is invalid.
    """
    schedule = RingSchedule(
        _pattern(auto),
        SequenceLayout(auto["seq_len"], 1, layout),
        auto["num_heads"],
        auto.get("num_kv_heads"),
        auto.get("is_causal", False),
    )
    itemsize = resolve_dtype(auto.get("dtype", "auto"), device).itemsize
    return RingCost(schedule, auto.get("batch", 1), auto["head_dim"], itemsize, device.type, buffer_bytes)


def _pattern(auto: Mapping[str, Any]) -> DilatedPattern:
    names = [field.name for field in dataclasses.fields(DilatedPattern)]
    return DilatedPattern(**{name: auto[name] for name in names if name in auto})


def arrange(
    ring_size: RingSize,
    layout: LayoutKind,
    world_size: int,
    ring_order: RingOrder,
    buffer_bytes: int | None,
    ulysses_size: UlyssesSize,
    auto: Mapping[str, Any],
) -> tuple[int | None, tuple[int, ...]]:
    """Choose the ring size, and the order of the world's ranks. Rings are cut from this order.

    ``ring_size="auto"`` and ``ring_order="topology"`` communicate. All ranks of the world must make this call.

    Args:
        buffer_bytes, ulysses_size: as in ``initialize``.
        auto: options, which :func:`check_arrangement` has checked.

    Returns:
        The ring size (None if the caller gave None) and the order.

    Raises:
        ValueError: no ring that divides the world fits into the memory, or ``ulysses_size`` does not divide the world.
        RingMismatchError: the ranks pass different arguments.
        RingPeerError: a rank did not make this call in time.
    """
    order = tuple(range(world_size))
    if ring_size != "auto" and (ring_order == "rank" or world_size == 1):
        return ring_size, order
    if ring_size == "auto" and ulysses_size != "auto":
        check_group_size(ulysses_size, world_size)
    device, given = device_of_this_rank(), auto.get("memory_bytes")
    memory = available_memory_bytes(device) if given is None else given
    if world_size == 1:
        return _choose(_cost(layout, auto, device, buffer_bytes), [1], memory, None), order
    asked: dict[str, object] = {
        "ring_size": ring_size,
        "layout": layout,
        "ring_order": ring_order,
        "buffer_bytes": buffer_bytes,
        "ulysses_size": ulysses_size,
    }
    for name, value in {**auto, **(dataclasses.asdict(_pattern(auto)) if auto else {})}.items():
        if name != "memory_bytes":
            asked[name] = str(value) if name == "dtype" else value
    host = host_name()
    order = tuple(decide_on_rank0({"asked": asked, "host": host}, _decide_order, _DECISION_TIMEOUT))
    if ring_size != "auto":
        return ring_size, order
    dtype = resolve_dtype(auto.get("dtype", "auto"), device)
    found = RankProbe(device, dtype, auto["head_dim"], PROBE_SECONDS, order).measure()
    memory_name = f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else "cpu"
    # Ranks with the same pool share it. A number of bytes that the user gave is each rank's own.
    pool = None if given is not None else f"{host} {memory_name}"
    measured = {"hardware": dataclasses.asdict(found), "memory": memory, "memory_pool": pool, "host": host}

    def choose(reports: list[dict[str, Any]]) -> int:
        ranks_of = Counter(report["memory_pool"] for report in reports)
        shares = [r["memory"] // (ranks_of[r["memory_pool"]] if r["memory_pool"] else 1) for r in reports]
        hosts = [reports[rank]["host"] for rank in order]
        sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
        group_size = of_one_host = ranks_of_one_host(hosts)
        if ulysses_size != "auto":
            sizes, group_size = [size for size in sizes if size % ulysses_size == 0], ulysses_size
        of_ranks = [Hardware.of(reports[rank]["hardware"]) for rank in order]
        hardware = slowest(of_ranks) if of_one_host % group_size else with_host_links(of_ranks, hosts)
        cost = dataclasses.replace(_cost(layout, auto, device, buffer_bytes), ulysses_size=group_size)
        return _choose(cost, sizes, min(shares), hardware)

    return int(decide_on_rank0(measured, choose, _DECISION_TIMEOUT)), order


def _choose(cost: RingCost, sizes: list[int], memory: int, hardware: Hardware | None) -> int:
    """Return the smallest ring that fits and is faster than one device, or else the smallest ring that fits.

    Args:
        sizes: the ring sizes to choose from, in ascending order.
    """
    choice = smallest_rings(cost, memory, hardware, sizes=sizes)
    if choice.fits is None:
        needed = int(cost.on_ring(sizes[-1]).memory_bytes.max())
        raise ValueError(
            f"ring_size = 'auto': one attention call over {cost.schedule.layout.seq_len:,} tokens needs "
            f"{needed:,} bytes per rank on a ring of all {sizes[-1]} ranks, but each rank "
            f"has only {memory:,} bytes; start more ranks, pass a larger memory_bytes, or pass a number as ring_size."
        )
    return choice.fits_and_pays or choice.fits


def _decide_order(reports: list[dict[str, Any]]) -> list[int]:
    """Check that all ranks pass the same arguments, and return the order of the ranks."""
    asked = {rank: report["asked"] for rank, report in enumerate(reports)}
    if any(options != asked[0] for options in asked.values()):
        raise RingMismatchError(f"in initialize(), {describe_differences(asked)}")
    if asked[0]["ring_order"] == "topology":
        return list(topology_order([report["host"] for report in reports]))
    return list(range(len(reports)))
