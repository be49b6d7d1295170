"""Units, hosts and ring sizes as the ``plan`` command takes them; no torch."""

from __future__ import annotations

import re

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
