"""The clock of all measurements. Contestants take turns, so background load affects all of them equally."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ring_backends.cost.machine import synchronize

CPU = torch.device("cpu")

Start = Callable[[], Callable[[], float]]
"""Makes a call, and returns a function that returns the seconds that the call took."""


def start(
    call: Callable[..., Any],
    device: torch.device = CPU,
    setup: Callable[[], Any] | None = None,
    *,
    at_once: int = 1,
    on_host: bool = False,
) -> Callable[[], float]:
    """Make ``at_once`` calls, which all ranks begin together. The time is that of one call.

    On a GPU, nobody waits for the calls before their seconds are read, as in training. So the host may be ahead of the
    GPU, and its time counts only where the GPU has to wait for it.

    Args:
        setup: the call takes its result, and its time does not count.
        on_host: measure the time until the call returns. A GPU, which is idle before, may only have begun by then.
    """
    arguments = () if setup is None else (setup(),)
    if device.type == "cuda" and not on_host:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(at_once):
            call(*arguments)
        end.record()
        return lambda: _seconds_between(begin, end) / at_once
    synchronize(device)
    if dist.is_initialized():
        dist.barrier()
    started = time.perf_counter()
    for _ in range(at_once):
        result = call(*arguments)
    seconds = (time.perf_counter() - started) / at_once
    del result  # it was kept, so that freeing its memory does not count
    return lambda: seconds


def _seconds_between(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def in_turns(starts: Sequence[Start], repeats: int, *, warm_up: int = 1) -> list[list[float]]:
    """The seconds of each contestant's calls."""
    rounds = [[begin() for begin in starts] for _ in range(warm_up + repeats)][warm_up:]
    return [[seconds() for seconds in calls] for calls in zip(*rounds, strict=True)]


def calls_in_turns(
    calls: Sequence[Callable[[], Any]], repeats: int, *, warm_up: int = 1, at_once: int = 1
) -> list[list[float]]:
    """The seconds of calls without arguments on the CPU of this rank."""
    return in_turns([partial(start, call, at_once=at_once) for call in calls], repeats, warm_up=warm_up)
