"""Branches on a command line: a list of segment lengths and one of dilation rates, written as people write lists."""

from __future__ import annotations

import itertools
import re
from typing import Any

from typer.core import TyperCommand

_LISTS = ("--segment-lengths", "--dilation-rates")

Branches = tuple[tuple[int, ...], tuple[int, ...]]
"""Segment lengths and dilation rates, as many of each."""


class BranchesCommand(TyperCommand):
    """Accepts ``--segment-lengths 2048,8192``, ``--segment-lengths 2048 8192`` and the option repeated."""

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
    """What the two options say; None where neither is given.

    Raises:
        ValueError: only one of them is given, or something in them is no integer.
    """
    lengths = _integers("segment_lengths", segment_lengths)
    rates = _integers("dilation_rates", dilation_rates)
    if lengths is None and rates is None:
        return None
    if lengths is None or rates is None:
        name, other = ("dilation_rates", "segment_lengths")[:: 1 if rates is None else -1]
        raise ValueError(f"{name} is missing beside {other}: a branch is one pair; give both, or neither.")
    return lengths, rates


def describe_branches(branches: Branches) -> str:
    return ", ".join(f"({w}, {r})" for w, r in zip(*branches, strict=True))


def _integers(name: str, values: list[str] | None) -> tuple[int, ...] | None:
    """``["2048,8192", "16384"]`` as integers."""
    if values is None:
        return None
    parts = re.split(r"[,\s]+", ",".join(values).strip(", "))
    for part in parts:
        if not re.fullmatch(r"-?\d+", part):
            raise ValueError(f"{name} = {','.join(values)!r}: {part!r} is no integer; write for example 2048,8192.")
    return tuple(map(int, parts))
