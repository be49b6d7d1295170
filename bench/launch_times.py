"""How long the host takes for a launch of a Triton kernel, without a GPU.

A rank of a ring runs on tensors of device "meta", with stand-ins for the compiled kernels. These take their arguments
and return. So the times leave out what only a GPU needs, and are lower than on one: Triton's own launcher, the driver,
and the look-ups of the current device, the current stream and a capture of a CUDA graph.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from gpu_model import on_a_hopper_gpu, triton_launches
from ranks import DIRECTIONS
from replay import OF_RINGS, replay
from report import Repeats, Row

from ring_backends.engine import wire_buffers
from ring_backends.kernels import rows as dilated
from ring_backends.kernels.triton_launch import Launch


class HostTimes:
    """Counts launches, and notes the time of each call of a function that launches kernels, in seconds."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.launches = 0
        self.seconds: list[float] = []

    def count(self, name: str) -> None:
        self.launches += 1

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Measure the functions that launch kernels."""
        functions = (
            (Launch, "run"),
            (dilated, "_launch_moves"),
            (dilated, "_launch_merge"),
            (wire_buffers, "add_parts"),
        )
        with contextlib.ExitStack() as patches:
            for owner, name in functions:
                patches.enter_context(mock.patch.object(owner, name, self._timed(getattr(owner, name))))
            patches.enter_context(mock.patch.object(Launch, "of_step", self._timed_steps(Launch.of_step)))
            yield

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds.append(time.perf_counter() - begin)

        return run

    def _timed_steps(self, of_step: Callable[..., Iterator[Launch]]) -> Callable[..., Iterator[Launch]]:
        def run(*args: Any) -> Iterator[Launch]:
            step = self._timed(partial(next, of_step(*args), None))
            while (found := step()) is not None:
                yield found

        return run


def launches(repeats: Repeats = 20) -> Iterator[Row]:
    """Measure the host's time for a launch, with stand-ins for the compiled kernels: one rank of a ring of 8."""
    times = HostTimes()
    on_meta = mock.patch.object(dilated, "can_launch", lambda *tensors: all(x.is_meta for x in tensors))
    with on_a_hopper_gpu(), triton_launches(times), on_meta, times.watching():
        for name, case in OF_RINGS.items():
            call = replay(case, torch.device("meta"), "triton_dilated")
            found: dict[str, list[list[float]]] = {direction: [] for direction in DIRECTIONS}
            counts = {}
            for _ in range(1 + repeats):  # the first works out the plan
                out = None
                for direction in DIRECTIONS:
                    times.reset()
                    out = call.forward() if out is None else call.backward(out)
                    found[direction].append(times.seconds)
                    counts[direction] = times.launches
            for direction, (_, *seconds) in found.items():
                us = sum(map(min, zip(*seconds, strict=True))) / counts[direction] * 1e6
                yield {"call": name, "pass": direction, "launches": counts[direction], "us_per_launch": us}
