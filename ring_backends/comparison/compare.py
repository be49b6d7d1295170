"""Starts the ranks of one method after another, and summarizes their measurements. This module imports no torch.

Every method runs in its own processes (:mod:`ring_backends.comparison.rank`). So the memory and the libraries of one
method do not affect the measurement of another.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ring_backends.comparison.setup import ALL_GATHER, ONE_RANK, TENSORS, Setup
from ring_backends.ring.launch import Failure, RankFailedError, launch, refuse_launcher


@dataclass(frozen=True)
class Comparison:
    """The result of :func:`compare`.

    Attributes:
        setup: the setup. ``"auto"`` is replaced by the device and dtype that were used.
        device: name of the device that computed the fp64 values.
        versions: versions of Python, torch, CUDA, this package and the frameworks.
        rows: one row per method, in the order of measurement. Each row has ``name``, and the reason in ``unusable`` or
            ``failed``, which are None otherwise. A row of a method that ran also has the measurements.
        failures: the errors of the methods that failed.
    """

    setup: Setup
    device: str
    versions: dict[str, str | None]
    rows: list[dict[str, Any]]
    failures: list[RankFailedError]


def compare(setup: Setup, on_method: Callable[[str], None] = lambda name: None) -> Comparison:
    """Measure every adapter, the all-gather method and one rank on the same inputs.

    The fp64 values are computed first. Temporary files hold them, with 8 bytes per number.

    Args:
        setup: the attention call.
        on_method: called with the name of each method before it is measured.

    Raises:
        ValueError: a launcher such as torchrun started this process.
        RankFailedError: the fp64 values could not be computed, or the setup cannot work on this machine. The failure of
            a method is recorded and raises nothing.
    """
    refuse_launcher("the comparison")
    rows, failures = [], []
    with tempfile.TemporaryDirectory() as directory:
        found = launch(_on_rank, ("prepare", setup, Path(directory)), 1)[0]
        adapters: dict[str, str | None] = found["adapters"]
        for name in (*adapters, ALL_GATHER, ONE_RANK):
            row: dict[str, Any] = {"name": name, "unusable": adapters.get(name), "failed": None}
            if row["unusable"] is None:
                on_method(name)
                num_ranks = 1 if name == ONE_RANK else setup.ring_size
                try:
                    row |= _summarize(launch(_on_rank, ("measure", found["setup"], name, Path(directory)), num_ranks))
                except RankFailedError as error:
                    failure = Failure(error.failure.status, f"{name}: {error.failure.text}")
                    failures.append(RankFailedError(error.rank, failure))
                    row["failed"] = error.failure.text
            rows.append(row)
    return Comparison(found["setup"], found["device"], found["versions"], rows, failures)


def _on_rank(function: str, *arguments: Any) -> dict[str, Any]:
    """Call a function of :mod:`ring_backends.comparison.rank`, which imports torch, in a rank."""
    from ring_backends.comparison import rank

    return cast(dict[str, Any], getattr(rank, function)(*arguments))


def _summarize(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Make one row from the measurements of all ranks.

    The time of a call is that of its slowest rank. The row has the median over the calls.
    """

    def seconds(name: str) -> float:
        return float(statistics.median(max(calls) for calls in zip(*(rank[name] for rank in ranks), strict=True)))

    def error(name: str) -> float:
        largest = max(rank["largest"][name] for rank in ranks)
        return float(max(rank["largest_error"][name] for rank in ranks) / largest) if largest else 0.0

    return {
        "ranks": len(ranks),
        "device": ranks[0]["device"],
        "forward_seconds": seconds("forward_seconds"),
        "backward_seconds": seconds("backward_seconds"),
        "peak_memory_bytes": [rank["peak_memory_bytes"] for rank in ranks],
        "bytes_sent": {
            direction: [rank["bytes_sent"][direction] for rank in ranks] for direction in ("forward", "backward")
        },
        "bytes_are_computed": ranks[0]["bytes_are_computed"],
        "errors": {name: error(name) for name in TENSORS},
        "calls": {name: [rank[name] for rank in ranks] for name in ("forward_seconds", "backward_seconds")},
        "spans": [rank["spans"] for rank in ranks if rank["spans"]],
    }
