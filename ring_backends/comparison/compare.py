"""Starts the ranks of all methods, lets the methods take turns, and summarizes the measurements. Imports no torch.

Every method runs in its own processes (:mod:`ring_backends.comparison.rank`). So the memory and the libraries of one
method do not affect the measurement of another. The timed calls are interleaved: in each round, every method makes one.
So background load affects all methods alike.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ring_backends.comparison.setup import ALL_GATHER, ONE_RANK, TENSORS, Setup
from ring_backends.ring.launch import Failure, RankFailedError, Ranks, launch, refuse_launcher, start


@dataclass(frozen=True)
class Comparison:
    """The result of :func:`compare`.

    Attributes:
        setup: the setup. ``"auto"`` is replaced by the device and dtype that were used.
        device: name of the device that computed the fp64 values.
        versions: versions of Python, torch, CUDA, this package and the frameworks.
        rows: one row per method. Each row has ``name``, and the reason in ``unusable`` or ``failed``, which are None
            otherwise. A row of a method that ran also has the measurements.
        failures: the errors of the methods that failed.
    """

    setup: Setup
    device: str
    versions: dict[str, str | None]
    rows: list[dict[str, Any]]
    failures: list[RankFailedError]

    @property
    def measured(self) -> list[dict[str, Any]]:
        """The rows of the methods that ran."""
        return [row for row in self.rows if not row["unusable"] and not row["failed"]]

    @property
    def fastest(self) -> list[str]:
        """The methods of which any may be the fastest, that with the lowest median first.

        They are those with a call, forward and backward, that took no longer than the longest call of the method with
        the lowest median. With one call per method, the spread is unknown, and all methods are listed.
        """
        rows = sorted(self.measured, key=lambda row: float(row["both_seconds"]))
        return [
            row["name"] for row in rows if self.setup.repeats == 1 or row["both_range"][0] <= rows[0]["both_range"][1]
        ]


def compare(setup: Setup, on_step: Callable[[str, int, int], None] = lambda what, done, steps: None) -> Comparison:
    """Measure every adapter, the all-gather method and one rank on the same inputs.

    The fp64 values are computed first. Temporary files hold them, with 8 bytes per number.

    Args:
        setup: the attention call.
        on_step: called before each step with its description, the number of steps that are done, and that of all.

    Raises:
        ValueError: a launcher such as torchrun started this process.
        RankFailedError: the fp64 values could not be computed, or the setup cannot work on this machine. The failure of
            a method is recorded and raises nothing.
    """
    refuse_launcher("the comparison")
    with contextlib.ExitStack() as started:
        directory = Path(started.enter_context(tempfile.TemporaryDirectory()))
        on_step("computing the fp64 values", 0, 1)
        found = launch(_prepare, (setup, directory), 1)[0]
        adapters: dict[str, str | None] = found["adapters"]
        rows = {
            name: {"name": name, "unusable": adapters.get(name), "failed": None}
            for name in (*adapters, ALL_GATHER, ONE_RANK)
        }
        usable = [name for name, row in rows.items() if row["unusable"] is None]
        methods: dict[str, Ranks] = {}
        results: dict[str, list[list[Any]]] = {name: [] for name in usable}
        failures: list[RankFailedError] = []
        steps = list(_steps(usable, setup))
        for done, (what, name) in enumerate(steps, start=1):
            if rows[name]["failed"]:
                continue
            on_step(f"{what}: {name}", done, 1 + len(steps))
            try:
                if name not in methods:
                    num_ranks = 1 if name == ONE_RANK else setup.ring_size
                    methods[name] = started.enter_context(start(_measure, (found["setup"], name, directory), num_ranks))
                results[name].append(methods[name].step())
            except RankFailedError as error:
                failure = Failure(error.failure.status, f"{name}: {error.failure.text}")
                failures.append(RankFailedError(error.rank, failure))
                rows[name]["failed"] = error.failure.text
        for ranks in methods.values():
            ranks.resume()  # to their ends, all at the same time
    for name, row in rows.items():
        if not row["unusable"] and not row["failed"]:
            row |= _summarize(results[name], setup.repeats)
    return Comparison(found["setup"], found["device"], found["versions"], list(rows.values()), failures)


def _steps(methods: Sequence[str], setup: Setup) -> Iterator[tuple[str, str]]:
    """Yield a description and the method of every step. The method that begins changes from round to round."""
    yield from (("measuring memory and error", name) for name in methods)
    for index in range(setup.repeats):
        first = index % len(methods)
        what = f"timing, round {index + 1} of {setup.repeats}"
        yield from ((what, name) for name in (*methods[first:], *methods[:first]))
    if setup.timeline:
        yield from (("recording the timeline", name) for name in methods if name not in (ALL_GATHER, ONE_RANK))


# These run in a rank. They import torch.


def _prepare(setup: Setup, directory: Path) -> dict[str, Any]:
    from ring_backends.comparison import rank

    return rank.prepare(setup, directory)


def _measure(setup: Setup, name: str, directory: Path) -> Iterator[Any]:
    from ring_backends.comparison import rank

    yield from rank.measure(setup, name, directory)


def _summarize(steps: Sequence[list[Any]], repeats: int) -> dict[str, Any]:
    """Make one row from the measurements of all ranks.

    The time of a call is that of its slowest rank. The row has the median over the calls, the least and the most.
    """
    ranks, *calls = steps[: 1 + repeats]
    forward = [max(forward for forward, _ in call) for call in calls]
    backward = [max(backward for _, backward in call) for call in calls]
    seconds = {"forward": forward, "backward": backward, "both": [*map(sum, zip(forward, backward, strict=True))]}

    def error(name: str) -> float:
        largest = max(rank["largest"][name] for rank in ranks)
        return float(max(rank["largest_error"][name] for rank in ranks) / largest) if largest else 0.0

    return {
        "ranks": len(ranks),
        "device": ranks[0]["device"],
        **{f"{part}_seconds": statistics.median(of_calls) for part, of_calls in seconds.items()},
        **{f"{part}_range": [min(of_calls), max(of_calls)] for part, of_calls in seconds.items()},
        "peak_memory_bytes": [rank["peak_memory_bytes"] for rank in ranks],
        "bytes_sent": {
            direction: [rank["bytes_sent"][direction] for rank in ranks] for direction in ("forward", "backward")
        },
        "bytes_are_computed": ranks[0]["bytes_are_computed"],
        "errors": {name: error(name) for name in TENSORS},
        "calls": {
            f"{part}_seconds": [[call[rank][index] for call in calls] for rank in range(len(ranks))]
            for index, part in enumerate(("forward", "backward"))
        },
        "spans": steps[1 + repeats] if len(steps) > 1 + repeats else [],
    }
