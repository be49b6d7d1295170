"""Parses lists of integers, sizes in bytes and lists of hosts. This module imports no torch."""

from __future__ import annotations

import itertools
import re
from typing import Any

from typer.core import TyperCommand

_LISTS = ("--segment-lengths", "--dilation-rates")
_UNITS = {
    "": 1,
    **{f"{prefix}b": 1000**power for power, prefix in enumerate(("", "k", "m", "g", "t"))},
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate(("k", "m", "g", "t"), 1)},
}

Branches = tuple[tuple[int, ...], tuple[int, ...]]
"""The segment lengths and the dilation rates of the branches."""


class BranchesCommand(TyperCommand):
    """A command that accepts lists with commas, lists with spaces and repeated options.

    ``--segment-lengths 2048,8192``, ``--segment-lengths 2048 8192`` and ``--segment-lengths 2048 --segment-lengths
    8192`` are equivalent.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        joined: list[str] = []
        rest = list(args)
        while rest:
            joined.append(rest.pop(0))
            if joined[-1] in _LISTS:
                numbers = list(itertools.takewhile(re.compile(r"-?\d[\d,\s]*").fullmatch, rest))
                del rest[: len(numbers)]
                joined += [",".join(numbers)] if numbers else []
        return super().parse_args(ctx, joined)


def parse_branches(segment_lengths: list[str] | None, dilation_rates: list[str] | None) -> Branches | None:
    """Parse ``--segment-lengths`` and ``--dilation-rates``. Returns None if neither is given.

    Raises:
        ValueError: only one of them is given, or a value is not an integer.
    """
    lengths = _integers("segment_lengths", segment_lengths)
    rates = _integers("dilation_rates", dilation_rates)
    if lengths is None and rates is None:
        return None
    if lengths is None or rates is None:
        name, other = ("dilation_rates", "segment_lengths")[:: 1 if rates is None else -1]
        raise ValueError(f"{name} is missing beside {other}: each branch needs both; give both options, or neither.")
    return lengths, rates


def describe_branches(segment_lengths: tuple[int, ...], dilation_rates: tuple[int, ...]) -> str:
    return ", ".join(f"({w}, {r})" for w, r in zip(segment_lengths, dilation_rates, strict=True))


def _integers(name: str, values: list[str] | None) -> tuple[int, ...] | None:
    """Parse ``["2048,8192", "16384"]`` into ``(2048, 8192, 16384)``."""
    if values is None:
        return None
    parts = re.split(r"[,\s]+", ",".join(values).strip(", "))
    for part in parts:
        if not re.fullmatch(r"-?\d+", part):
            raise ValueError(f"{name} = {','.join(values)!r}: {part!r} is no integer; write for example 2048,8192.")
    return tuple(map(int, parts))


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
