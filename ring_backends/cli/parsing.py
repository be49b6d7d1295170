"""Parses branches, sizes in bytes and lists of hosts. This module imports no torch."""

from __future__ import annotations

import itertools
import re
from typing import Any

from typer.core import TyperCommand

from ring_backends.schedule.pattern import DilatedPattern

_LISTS = ("--segment-lengths", "--dilation-rates", "--window-lengths")
_ENTRY = r"(?:-?\d+|none)"
_UNITS = {
    "": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate(("", "k", "m", "g", "t"))},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate(("k", "m", "g", "t"), 1)},
}

Branches = tuple[tuple[int | None, ...], tuple[int, ...]]
"""The segment lengths and the dilation rates of the branches."""


class BranchesCommand(TyperCommand):
    """A command that accepts lists with commas, lists with spaces and repeated options.

    ``--segment-lengths 2048,8192``, ``--segment-lengths 2048 8192`` and ``--segment-lengths 2048 --segment-lengths
    8192`` are equivalent. An entry may be ``none``.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        joined: list[str] = []
        rest = list(args)
        while rest:
            joined.append(rest.pop(0))
            if joined[-1] in _LISTS:
                numbers = list(itertools.takewhile(re.compile(rf"{_ENTRY}(?:[,\s]+{_ENTRY})*[,\s]*").fullmatch, rest))
                del rest[: len(numbers)]
                joined += [",".join(numbers)] if numbers else []
        return super().parse_args(ctx, joined)


def parse_branches(segment_lengths: list[str] | None, dilation_rates: list[str] | None) -> Branches | None:
    """Parse ``--segment-lengths`` and ``--dilation-rates``. Returns None if neither is given.

    Raises:
        ValueError: only one of them is given, or a value is neither an integer nor ``none``.
    """
    lengths = parse_lengths("segment_lengths", segment_lengths)
    rates = None if dilation_rates is None else _integers("dilation_rates", dilation_rates)
    if lengths is None and rates is None:
        return None
    if lengths is None or rates is None:
        name, other = ("dilation_rates", "segment_lengths")[:: 1 if rates is None else -1]
        raise ValueError(f"{name} is missing beside {other}: each branch needs both; give both options, or neither.")
    return lengths, rates


def parse_lengths(name: str, values: list[str] | None) -> tuple[int | None, ...] | None:
    """Parse ``--segment-lengths`` or ``--window-lengths``, whose entries may be ``none``.

    Raises:
        ValueError: an entry is neither an integer nor ``none``. The message names the option.
    """
    return None if values is None else _integers(name, values, may_be_none=True)


def describe_branches(pattern: DilatedPattern) -> str:
    windows = pattern.window_lengths or (None,) * pattern.num_branches
    return ", ".join(
        f"({w or 'whole sequence'}, {r}{f', window {window}' if window else ''})"
        for w, r, window in zip(pattern.segment_lengths, pattern.dilation_rates, windows, strict=True)
    )


def _integers(name: str, values: list[str], *, may_be_none: bool = False) -> tuple[Any, ...]:
    """Parse ``["2048,8192", "16384"]`` into ``(2048, 8192, 16384)``."""
    parts = re.split(r"[,\s]+", ",".join(values).strip(", "))
    for part in parts:
        if not re.fullmatch(_ENTRY if may_be_none else r"-?\d+", part):
            expected, example = ("an integer or none", "2048,none") if may_be_none else ("an integer", "2048,8192")
            raise ValueError(f"{name} = {','.join(values)!r}: {part!r} is not {expected}; write for example {example}.")
    return tuple(None if part == "none" else int(part) for part in parts)


def parse_bytes(name: str, text: str | None) -> int | None:
    """Parse ``"80GB"``, ``"40 GiB"`` or ``"1000000"`` into a number of bytes.

    Raises:
        ValueError: the text is not a size of at least one byte. The message names the option.
    """
    if text is None:
        return None
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2].lower() not in _UNITS:
        raise ValueError(
            f"{name} = {text!r}: not a size in bytes; write a number and a unit, for example 80GB or 40GiB."
        )
    size = int(float(found[1]) * _UNITS[found[2].lower()])
    if size < 1:
        raise ValueError(f"{name} = {text!r}: must be at least one byte; give a larger size.")
    return size


def parse_hosts(hosts: str | None, ranks_per_host: int | None, ring_size: int) -> tuple[str, ...] | None:
    """Return the host of every rank, or None if neither option is given.

    ``hosts`` may name the hosts of several rings. ``ranks_per_host`` describes one ring.

    Raises:
        ValueError: both options are given, or the number of hosts is not a multiple of the ring size.
    """
    if hosts is not None and ranks_per_host is not None:
        raise ValueError("hosts: ranks_per_host is given too; give only one of the two options.")
    if hosts is None:
        if ranks_per_host is None:
            return None
        return tuple(str(rank // ranks_per_host) for rank in range(ring_size))
    names = tuple(name for name in re.split(r"[,\s]+", hosts.strip()) if name)
    if not names or len(names) % ring_size:
        raise ValueError(
            f"hosts = {hosts!r}: has {len(names)} names, and a ring has {ring_size} ranks; name one host per rank, for "
            "one ring or for several whole rings."
        )
    return names
