"""How the ranks of the world are arranged into rings, where that depends on the machine and on the work.

``ring_size="auto"`` takes the smallest ring that fits and pays by the cost model (:mod:`ring_backends.cost.model`). All
ranks measure its constants together at that moment. ``ring_order="topology"`` makes nearby ranks neighbours. All ranks
must arrive at the same rings, so rank 0 decides and the others read its decision from the store.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, TypedDict, get_args

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from ring_backends.cost.hardware import Hardware
from ring_backends.cost.model import Workload
from ring_backends.cost.probe import RankProbe, available_memory_bytes, device_of_this_rank, slowest
from ring_backends.errors import RingMismatchError, RingPeerError
from ring_backends.kernels import resolve_dtype
from ring_backends.ring.topology import Place, RingOrder, topology_order
from ring_backends.schedule.checks import check_integer
from ring_backends.schedule.layout import LayoutKind, SequenceLayout
from ring_backends.schedule.pattern import DilatedPattern, HeadMode, Offset, Padding
from ring_backends.schedule.ring_schedule import RingSchedule

RingSize = int | Literal["auto"] | None

PROBE_SECONDS = 0.05
"""For which each kind of tile is computed; with hops, and with calls that warm up, measuring takes a second or two."""

MEETING_TIMEOUT = timedelta(seconds=300)
_DECISION_GRACE = timedelta(seconds=30)


class AutoOptions(TypedDict, total=False):
    """What ``initialize(ring_size="auto")`` has to know of the attention: as its calls will have it.

    Required: seq_len (of the global sequence), segment_lengths, dilation_rates, num_heads, head_dim.

    Optional: num_kv_heads (None: num_heads), batch (1), dtype (``"auto"``: what suits the device), is_causal (False),
    head_mode, offset and padding (as of :class:`~ring_backends.DilatedPattern`), and memory_bytes: what one rank may
    use for one call with its gradients (None: what is free now of its GPU, or of its host shared by the ranks there).
    """

    seq_len: int
    segment_lengths: Sequence[int]
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
    memory_bytes: int | None


_REQUIRED = ("seq_len", "segment_lengths", "dilation_rates", "num_heads", "head_dim")


def check_arrangement(ring_size: object, layout: LayoutKind, ring_order: object, auto: Mapping[str, Any]) -> None:
    """Refuse options of ``initialize`` that contradict each other, before any communication.

    Raises:
        ValueError, TypeError: naming the option.
    """
    if ring_order not in get_args(RingOrder):
        raise ValueError(f"ring_order = {ring_order!r}: unknown option; choose 'rank' or 'topology'.")
    unknown = sorted(set(auto) - set(AutoOptions.__annotations__))
    if unknown:
        raise TypeError(f"{unknown[0]} = {auto[unknown[0]]!r}: initialize() has no such argument; leave it out.")
    if ring_size != "auto":
        if auto:
            name = next(iter(auto))
            raise ValueError(
                f"{name} = {auto[name]!r}: says what to choose a ring size for, and ring_size = {ring_size!r}; leave "
                f"{name} out, or pass ring_size='auto'."
            )
        return
    missing = [name for name in _REQUIRED if name not in auto]
    if missing:
        raise ValueError(
            f"ring_size = 'auto': chosen by what the attention needs, and {' and '.join(missing)} is not given; pass "
            f"{', '.join(_REQUIRED)}, or a number."
        )
    _workload(layout, auto, torch.device("cpu"))
    if auto.get("memory_bytes") is not None:
        check_integer("memory_bytes", auto["memory_bytes"], 1, advice="leave it out for what the device has")


def refuse_arrangement(because: str, ring_size: object, ring_order: object) -> None:
    """Refuse to choose or to order ranks that something else has chosen and ordered.

    Raises:
        ValueError: ``because`` says what.
    """
    for name, value, is_asked in (
        ("ring_size", ring_size, ring_size == "auto"),
        ("ring_order", ring_order, ring_order != "rank"),
    ):
        if is_asked:
            raise ValueError(f"{name} = {value!r}: {because}; leave one of the two out.")


def _workload(layout: LayoutKind, auto: Mapping[str, Any], device: torch.device) -> Workload:
    """The call of attention that the options describe.

    Raises:
        ValueError, TypeError: an option breaks its rule.
    """
    names = ("segment_lengths", "dilation_rates", "head_mode", "offset", "padding")
    pattern = DilatedPattern(**{name: auto[name] for name in names if name in auto})
    schedule = RingSchedule(
        pattern,
        SequenceLayout(auto["seq_len"], 1, layout),
        auto["num_heads"],
        auto.get("num_kv_heads"),
        auto.get("is_causal", False),
    )
    made = Workload(schedule, auto.get("batch", 1), auto["head_dim"], _dtype(auto, device).itemsize)
    made.on_ring(1)  # which checks batch and head_dim
    return made


def _dtype(auto: Mapping[str, Any], device: torch.device) -> torch.dtype:
    return resolve_dtype(auto.get("dtype", "auto"), device)


def arrange(
    ring_size: RingSize, layout: LayoutKind, world_size: int, ring_order: RingOrder, auto: Mapping[str, Any]
) -> tuple[int | None, tuple[int, ...]]:
    """The size of the rings, and the order of the world's ranks that they are cut from.

    Where something has to be measured or compared, all ranks of the world make this call, with checked options.

    Raises:
        ValueError: no ring that divides the world fits into the memory.
        RingMismatchError: the ranks ask for different things.
        RingPeerError: a rank did not come in time.
    """
    order = tuple(range(world_size))
    if ring_size != "auto" and (ring_order == "rank" or world_size == 1):
        return ring_size, order
    device, given = device_of_this_rank(), auto.get("memory_bytes")
    memory = available_memory_bytes(device) if given is None else given
    if world_size == 1:
        return _choose(_workload(layout, auto, device), world_size, memory, None), order
    asked: dict[str, object] = {"ring_size": ring_size, "layout": layout, "ring_order": ring_order}
    asked |= {name: _plain(value) for name, value in auto.items() if name != "memory_bytes"}
    place = Place.here()
    said = {"asked": asked, "place": dataclasses.asdict(place)}
    order = tuple(decide_on_rank0(said, _order, MEETING_TIMEOUT))
    if ring_size != "auto":
        return ring_size, order
    found = RankProbe(device, _dtype(auto, device), auto["head_dim"], PROBE_SECONDS, order).measure()
    measured = {
        "hardware": dataclasses.asdict(found),
        "memory": memory,
        "shared": None if given is not None else [place.host, place.device if device.type == "cuda" else "cpu"],
    }

    def choose(said: list[dict[str, Any]]) -> int:
        sharing = Counter(str(rank["shared"]) for rank in said)
        memory = min(r["memory"] // (sharing[str(r["shared"])] if r["shared"] else 1) for r in said)
        hardware = slowest([Hardware.of(rank["hardware"]) for rank in said])
        return _choose(_workload(layout, auto, device), world_size, memory, hardware)

    return int(decide_on_rank0(measured, choose, MEETING_TIMEOUT)), order


def _choose(wanted: Workload, world_size: int, memory: int, hardware: Hardware | None) -> int:
    """The smallest ring that fits and pays; where none pays, the smallest that fits."""
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    choice = wanted.smallest_rings(memory, hardware, sizes=sizes)
    if choice.fits is None:
        raise ValueError(
            f"ring_size = 'auto': one call of attention over {wanted.schedule.layout.seq_len:,} tokens needs "
            f"{wanted.memory_bytes(world_size):,} bytes per rank on a ring of all {world_size} ranks, and a rank has "
            f"{memory:,}; start more ranks, pass another memory_bytes, or a ring_size if you know better."
        )
    return choice.fits_and_pays or choice.fits


def _order(said: list[dict[str, Any]]) -> list[int]:
    asked = [rank["asked"] for rank in said]
    for name in dict.fromkeys(name for options in asked for name in options):
        values = [options.get(name, "not given") for options in asked]
        if any(value != values[0] for value in values):
            told = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
            raise RingMismatchError(f"the ranks call initialize() with different {name} ({told}); give all the same.")
    places = [Place(**{**rank["place"], "links": tuple(rank["place"]["links"])}) for rank in said]
    return list(topology_order(places) if asked[0]["ring_order"] == "topology" else range(len(said)))


def _plain(value: object) -> object:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else _text(value)


def _text(value: object) -> object:
    return str(value) if isinstance(value, torch.dtype) else value


_meetings = itertools.count()
_ERRORS: dict[str, type[Exception]] = {"ValueError": ValueError, "RingMismatchError": RingMismatchError}


def decide_on_rank0(said: Mapping[str, Any], decide: Callable[[list[dict[str, Any]]], Any], timeout: timedelta) -> Any:
    """Let rank 0 of the world decide something from what every rank has to say, and return that on every rank.

    All ranks make these calls in the same order; what is said and decided is such as JSON can hold. It goes through the
    world's store, of which collectives of Python objects, which need NumPy, have no need.

    Raises:
        ValueError, RingMismatchError: what ``decide`` raised on rank 0, on every rank.
        RingPeerError: a rank did not come within ``timeout``.
    """
    world = dist.group.WORLD
    assert world is not None
    rank, size = dist.get_rank(), dist.get_world_size()
    store = PrefixStore(f"ring_backends/meeting/{next(_meetings)}", world.get_group_store())
    keys = [str(other) for other in range(size)]
    store.set(keys[rank], json.dumps(said))
    if rank == 0:
        try:
            store.wait(keys, timeout)
            decision: dict[str, Any] = {"decision": decide([json.loads(text) for text in store.multi_get(keys)])}
        except dist.DistError:
            absent = [other for other in range(size) if not store.check([keys[other]])]
            decision = {
                "error": "RingPeerError",
                "message": f"rank {', '.join(map(str, absent))} did not call initialize() with ring_size='auto' or "
                f"ring_order='topology' within {timeout.total_seconds():g} s; every rank of the world has to.",
            }
        except (ValueError, RingMismatchError) as error:
            decision = {"error": type(error).__name__, "message": str(error)}
        store.set("decision", json.dumps(decision))
    else:
        try:
            store.wait(["decision"], timeout + _DECISION_GRACE)
        except dist.DistError as error:
            raise RingPeerError(
                f"rank {rank} waited for rank 0 to decide on the rings, in initialize(), and that did not come within "
                f"{timeout.total_seconds():g} s: {error}. Look at the log of rank 0."
            ) from error
        decision = json.loads(store.get("decision"))
    if "error" in decision:
        raise _ERRORS.get(decision["error"], RingPeerError)(decision["message"])
    return decision["decision"]
