"""The options of ``plan``, and how sizes and hosts are written in them. This module imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ring_backends.cli.options import check_choices, check_files
from ring_backends.plotting import check_plot
from ring_backends.schedule.pattern import DilatedPattern

_UNITS = {
    "": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate(("", "K", "M", "G", "T"))},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate(("K", "M", "G", "T"), 1)},
}


def parse_bytes(name: str, text: str | None) -> int | None:
    """``"80GB"``, ``"40 GiB"`` or ``"1000000"`` as a number of bytes.

    Raises:
        ValueError: naming the option.
    """
    if text is None:
        return None
    found = re.fullmatch(r"([\d.]+)\s*([A-Za-z]*)", text.strip())
    units = {unit.lower(): size for unit, size in _UNITS.items()}
    if found is None or found[2].lower() not in units or found[1].count(".") > 1 or not found[1].strip("."):
        raise ValueError(f"{name} = {text!r}: no size in bytes; write a number and a unit, such as 80GB or 40GiB.")
    size = int(float(found[1]) * units[found[2].lower()])
    if size < 1:
        raise ValueError(f"{name} = {text!r}: must be at least one byte; give more.")
    return size


def parse_hosts(hosts: str | None, ranks_per_host: int | None, ring_size: int) -> tuple[str, ...] | None:
    """The host of every rank of the world, which is one ring or several beside each other; None if nothing is said.

    Raises:
        ValueError: both are given, or the hosts are not those of whole rings.
    """
    if hosts is not None and ranks_per_host is not None:
        raise ValueError("hosts: ranks_per_host is given too, and says the same; leave one of them out.")
    if hosts is None:
        if ranks_per_host is None:
            return None
        return tuple(str(rank // ranks_per_host) for rank in range(ring_size))
    names = tuple(name for name in re.split(r"[,\s]+", hosts.strip()) if name)
    if not names or len(names) % ring_size:
        raise ValueError(
            f"hosts = {hosts!r}: names the hosts of {len(names)} ranks; name one per rank, of one ring of {ring_size} "
            "or of several."
        )
    return names


@dataclass(frozen=True)
class PlanOptions:
    """What the user asked for, by the options' names; plain values."""

    seq_len: int
    ring_size: int
    heads: int
    kv_heads: int | None
    head_dim: int
    batch: int
    dtype: str
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    head_mode: Any
    offset: Any
    padding: Any
    layout: Any
    causal: bool
    memory: int | None
    probe: Path | None
    nproc_per_node: int | None
    latency: float | None
    bandwidth: float | None
    flops: float | None
    hosts: tuple[str, ...] | None
    device: str
    json: Path | None
    plot: Path | None

    def check(self) -> None:
        """Refuse what cannot work, as far as that can be known without torch.

        Raises:
            ValueError: naming the option.
        """
        self.pattern().check(seq_len=self.seq_len, num_heads=self.heads)
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads = {self.kv_heads}: must divide the {self.heads} query heads; use a number that does."
            )
        check_choices(self)
        for name in ("latency", "bandwidth", "flops"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} = {value}: must be above 0; give a positive number.")
        if self.probe is not None and not self.probe.is_file():
            raise ValueError(
                f"probe = {str(self.probe)!r}: there is no such file; `ring-backends info --probe --json FILE` writes "
                "one."
            )
        if self.probe is not None and self.nproc_per_node is not None:
            raise ValueError("nproc_per_node: nothing is measured with --probe; leave one of them out.")
        check_files(json=self.json, plot=self.plot)
        if self.plot is not None:
            check_plot(self.plot)

    def pattern(self) -> DilatedPattern:
        return DilatedPattern(self.segment_lengths, self.dilation_rates, self.head_mode, self.offset, self.padding)
