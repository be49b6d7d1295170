"""Records with torch.profiler when a rank computes tiles, posts hops, and waits for hops."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ring_backends.cost.machine import synchronize, synchronize_ranks
from ring_backends.engine.hops import POST_SPAN, WAIT_SPAN
from ring_backends.engine.tiles import TILE_SPAN

Result = TypeVar("Result")

Span = tuple[str, str, float, float]
"""(part of the call, kind of span, start, end). Times are seconds of the monotonic clock of the host."""

_WHAT = {TILE_SPAN: "tile", POST_SPAN: "post", WAIT_SPAN: "wait"}
_START = "ring_backends::start"
_PART = "ring_backends::part "


def record_spans(
    forward: Callable[[], Result], backward: Callable[[Result], object], device: torch.device
) -> list[Span]:
    """Run the forward and the backward of a call under torch.profiler. All ranks begin each of the two together.

    Args:
        backward: takes the result of ``forward``.
        device: the device of this rank.

    Returns:
        Spans in order of time. The part of a span is ``"forward"`` or ``"backward"``. Its kind is ``"call"`` for a
        whole part, ``"tile"`` for computing a tile, ``"post"`` for posting a hop, and ``"wait"`` for waiting for a hop.
        On a GPU, the spans show when the host enqueued the work.
    """
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        started = time.monotonic()
        with record_function(_START):
            pass
        synchronize_ranks(device)
        with record_function(f"{_PART}forward"):
            result = forward()
            synchronize(device)
        synchronize_ranks(device)
        with record_function(f"{_PART}backward"):
            backward(result)
            synchronize(device)
    events = profiler.events() or []
    (start,) = (event for event in events if event.name == _START)

    def seconds(microseconds: float) -> float:
        return started + (microseconds - float(start.time_range.start)) / 1e6

    found = []
    for part in (event for event in events if event.name.startswith(_PART)):
        for event in events:
            what = "call" if event is part else _WHAT.get(event.name)
            span = event.time_range
            if what is not None and part.time_range.start <= span.start < part.time_range.end:
                found.append((part.name.removeprefix(_PART), what, seconds(span.start), seconds(span.end)))
    return sorted(found, key=lambda span: span[2:])
