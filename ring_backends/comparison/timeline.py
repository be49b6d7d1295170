"""Records with torch.profiler when a rank computes tiles, posts hops, and waits for hops."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from torch.profiler import ProfilerActivity, profile, record_function

from ring_backends.engine.hops import POST_SPAN, WAIT_SPAN
from ring_backends.engine.tiles import TILE_SPAN

Span = tuple[str, str, float, float]
"""(part of the call, kind of span, start, end). Times are seconds of the monotonic clock of the host."""

_WHAT = {TILE_SPAN: "tile", POST_SPAN: "post", WAIT_SPAN: "wait"}
_START = "ring_backends::start"
_PART = "ring_backends::part "


def record_spans(parts: Mapping[str, Callable[[], None]], meet: Callable[[], None]) -> list[Span]:
    """Run the parts of a call under torch.profiler.

    Args:
        parts: the functions to run, in order, by name. A name is for example "forward".
        meet: a function that is called before each part. It waits for the other ranks, so that all begin together.

    Returns:
        Spans in order of time. The kind of a span is ``"call"`` for a whole part, ``"tile"`` for computing a tile,
        ``"post"`` for posting a hop, and ``"wait"`` for waiting for a hop. On a GPU, the spans show when the host
        enqueued the work.
    """
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        started = time.monotonic()
        with record_function(_START):
            pass
        for name, part in parts.items():
            meet()
            with record_function(_PART + name):
                part()
    events = profiler.events() or []
    (start,) = (event for event in events if event.name == _START)

    def seconds(microseconds: float) -> float:
        return started + (microseconds - float(start.time_range.start)) / 1e6

    found = []
    for part in (event for event in events if event.name.startswith(_PART)):
        inside = [
            (_WHAT[event.name], event.time_range)
            for event in events
            if event.name in _WHAT and part.time_range.start <= event.time_range.start < part.time_range.end
        ]
        for what, stretch in [("call", part.time_range), *inside]:
            found.append((part.name.removeprefix(_PART), what, seconds(stretch.start), seconds(stretch.end)))
    return sorted(found, key=lambda span: span[2:])
