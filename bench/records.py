"""Reads pytest-benchmark's JSON: one record per call, with its forward and its backward."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from case import ADAPTERS, ALL_GATHER, BARE_KERNELS, DENSE_RING, ON_ONE_RANK, ONE_DEVICE, SDPA

# The order of the contestants in tables and pictures.
ORDER = (*ADAPTERS, DENSE_RING, ALL_GATHER, ONE_DEVICE, SDPA, BARE_KERNELS)


@dataclass
class Record:
    """One call of one contestant.

    Attributes:
        seconds: median seconds of the slowest rank, by direction.
        bytes: bytes that the busiest rank sends, by direction.
        wait_share: largest share of a rank's time that it waits for hops, by direction.
        peak_bytes: peak memory of the rank that needs most, including its inputs. None: not measured.
    """

    contestant: str
    seq_len: int
    ring_size: int
    dtype: str
    peak_bytes: int | None
    seconds: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    wait_share: dict[str, float] = field(default_factory=dict)

    @property
    def total_seconds(self) -> float | None:
        return sum(self.seconds.values()) if len(self.seconds) == 2 else None


def read_records(path: Path) -> list[Record]:
    """Read the calls from a JSON file of pytest-benchmark, ordered by length, ring size and contestant.

    Raises:
        ValueError: the file has no benchmarks.
    """
    records: dict[tuple[Any, ...], Record] = {}
    for benchmark in json.loads(path.read_text()).get("benchmarks", []):
        found = benchmark["extra_info"]
        at = tuple(found[name] for name in ("contestant", "seq_len", "ring_size", "dtype"))
        record = records.setdefault(at, Record(*at, peak_bytes=max(found.get("peak_bytes", [0])) or None))
        direction = found["direction"]
        record.seconds[direction] = benchmark["stats"]["median"]
        record.bytes[direction] = max(found["bytes"])
        record.wait_share[direction] = max(found["wait_share"])
    if not records:
        raise ValueError(f"{path}: has no benchmarks; write it with pytest bench --benchmark-json={path}.")
    return sorted(records.values(), key=lambda x: (x.seq_len, x.ring_size, ORDER.index(x.contestant)))


def by_contestant(records: Iterable[Record], chosen: Callable[[Record], bool]) -> dict[str, list[Record]]:
    """Group the records that ``chosen`` accepts by contestant, in :data:`ORDER`."""
    lines: dict[str, list[Record]] = {}
    for record in sorted(filter(chosen, records), key=lambda record: ORDER.index(record.contestant)):
        lines.setdefault(record.contestant, []).append(record)
    return lines


def is_on_one_rank(record: Record) -> bool:
    return record.contestant in ON_ONE_RANK
