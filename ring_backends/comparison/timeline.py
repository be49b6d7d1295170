"""When a rank computed, posted hops and waited for them: the walk's spans, as torch.profiler saw them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from torch.profiler import ProfilerActivity, profile, record_function

from ring_backends.engine.hops import POST_SPAN, WAIT_SPAN
from ring_backends.engine.tiles import TILE_SPAN

Span = tuple[str, str, float, float]
"""(part of the call, what, start, end): seconds on the clock that all processes of this machine share."""

_WHAT = {TILE_SPAN: "tile", POST_SPAN: "post", WAIT_SPAN: "wait"}
_START = "ring_backends::start"
_PART = "ring_backends::part "


def record_spans(parts: Mapping[str, Callable[[], None]], meet: Callable[[], None]) -> list[Span]:
    """Run a call under torch.profiler.

    Args:
        parts: the parts of the call by name, such as "forward", run in this order.
        meet: called before each of them, so that the ranks begin it together.

    Returns:
        In order of time, each part as a whole (what = ``"call"``) and the spans in it: ``"tile"``, where something was
        computed, ``"post"``, where a hop was, and ``"wait"``, where one was waited for. Of a GPU's stream they show
        when the host asked for it.
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
