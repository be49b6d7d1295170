"""Times calls on one device, and measures their memory and the gaps between their kernels."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ring_backends.cost.machine import peak_memory_bytes, reset_peak_memory, synchronize

OUT_OF_MEMORY = "out of memory"


class Budget:
    """The time that a part may take. Cases that would begin later are left out."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes

    @property
    def is_spent(self) -> bool:
        return time.monotonic() > self._end


@dataclass(frozen=True)
class Clock:
    """Times calls on ``device``: by CUDA events on a GPU, else by the process's clock.

    Attributes:
        repeats: timed calls, after two warm-up calls.
    """

    device: torch.device
    repeats: int

    def seconds(self, call: Callable[..., Any], setup: Callable[[], Any] | None = None) -> float:
        """Median seconds of ``call``. With ``setup``, the call takes its result, and its time does not count.

        On a GPU, the calls are launched without a wait between them, as in training. So the host may be ahead of the
        GPU, and its time counts only where the GPU has to wait for it.
        """
        return self.median(lambda: self.once(call, setup))

    def median(self, start: Callable[[], Callable[[], float]]) -> float:
        """Median of what the functions return that ``start`` returns. It is called twice before, to warm up."""
        for _ in range(2):
            start()
        synchronize(self.device)
        return statistics.median([elapsed() for elapsed in [start() for _ in range(self.repeats)]])

    def once(self, call: Callable[..., Any], setup: Callable[[], Any] | None = None) -> Callable[[], float]:
        """Call once, and return a function that returns the seconds that the call took."""
        if self.device.type != "cuda":
            return self._once_on_host(call, setup)
        arguments = () if setup is None else (setup(),)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call(*arguments)
        end.record()
        return lambda: _seconds_between(begin, end)

    def host_seconds(self, call: Callable[..., Any], setup: Callable[[], Any] | None = None) -> float:
        """Median seconds until ``call`` returns. A GPU, which is idle before, may only have begun by then."""
        return self.median(lambda: self._once_on_host(call, setup))

    def _once_on_host(self, call: Callable[..., Any], setup: Callable[[], Any] | None) -> Callable[[], float]:
        arguments = () if setup is None else (setup(),)
        synchronize(self.device)
        started = time.perf_counter()
        call(*arguments)
        seconds = time.perf_counter() - started
        return lambda: seconds

    def peak_bytes(self, call: Callable[[], Any]) -> int:
        """The peak memory while ``call`` runs, including what exists before."""
        synchronize(self.device)
        reset_peak_memory(self.device)
        call()
        synchronize(self.device)
        return peak_memory_bytes(self.device)

    def idle_share(self, call: Callable[[], Any]) -> float | None:
        """The share of a call's time in which no kernel runs on the GPU. None on the CPU."""
        if self.device.type != "cuda":
            return None
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            call()
            synchronize(self.device)
        spans = [
            (event.time_range.start, event.time_range.end)
            for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
        ]
        return gaps_share(spans)


def _seconds_between(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def gaps_share(spans: Iterable[tuple[float, float]]) -> float | None:
    """The share of the time from the first span's start to the last one's end that lies in no span.

    None without spans.
    """
    ordered = sorted(spans)
    if not ordered:
        return None
    first = reached = ordered[0][0]
    busy = 0.0
    for start, end in ordered:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return 1 - busy / (reached - first)


def free() -> None:
    """Free the memory of earlier cases."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def or_note(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what ``measure`` returns, or only a note on why it failed, so that the cases after it still run."""
    try:
        return measure()
    except torch.cuda.OutOfMemoryError:
        return {"note": OUT_OF_MEMORY}
    except Exception as error:  # of a compiler, for example
        return {"note": f"{type(error).__name__}: {error}".splitlines()[0]}
    finally:
        free()
