"""Starts the ranks of one method after another, and summarizes their measurements. This module imports no torch.

Every method runs in its own processes (:mod:`ring_backends.comparison.rank`). So the memory and the libraries of one
method do not affect the measurement of another.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ring_backends.ring.launch import Failure, RankFailedError, launch, refuse_launcher
from ring_backends.schedule.pattern import DilatedPattern

if TYPE_CHECKING:
    from ring_backends.schedule.layout import LayoutKind

ALL_GATHER = "all-gather"
ONE_RANK = "one rank"
TENSORS = ("out", "dq", "dk", "dv")


@dataclass(frozen=True)
class Setup:
    """One attention call with batch 1, and how to measure it.

    Attributes:
        seq_len: length of the global sequence.
        ring_size: ranks of the ring, all on this machine.
        pattern: the dilated pattern, with head mode "all", offset "mod" and masked padding.
        num_heads, num_kv_heads, head_dim: sizes of the inputs.
        dtype: ``"auto"``, ``"fp32"``, ``"bf16"``, ``"fp16"`` or ``"fp64"``.
        layout: ``"contiguous"`` or ``"zigzag"``.
        is_causal: whether a query sees only keys up to its position.
        repeats: number of timed calls. The first call, which measures the memory, is not timed.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        timeline: whether to record when each rank computes and waits, in one more call.
    """

    seq_len: int
    ring_size: int
    pattern: DilatedPattern
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    layout: LayoutKind
    is_causal: bool
    repeats: int
    device: str
    timeline: bool = False


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
    return cast(dict[str, Any], getattr(import_module("ring_backends.comparison.rank"), function)(*arguments))


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
