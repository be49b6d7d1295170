"""The errors of ranks that differ: the fields in which they do, and every rank's value."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import cast

from ring_backends.errors import RingMismatchError, RingPeerError
from ring_backends.ring.store import REFUSED, Report
from ring_backends.ring.stream_hops import HeaderMismatchError

_MAX_DIFFERENCES, _MAX_LIST_CHARACTERS = 8, 400


def all_equal(fields_of_ranks: Iterable[Mapping[str, object]]) -> bool:
    """Whether all ranks have equal fields in the same order. A comparison of dicts would ignore the order."""
    return len({json.dumps(fields) for fields in fields_of_ranks}) <= 1


def describe_differences(fields_of: Mapping[int, Mapping[str, object]]) -> str:
    """The text of an error: each field that differs, with every rank's value."""
    differing = []
    for name in dict.fromkeys(name for fields in fields_of.values() for name in fields):
        values = {rank: fields.get(name, "absent") for rank, fields in fields_of.items()}
        if len({json.dumps(value) for value in values.values()}) > 1:
            if all(isinstance(value, list) for value in values.values()) and len(str(values)) > _MAX_LIST_CHARACTERS:
                values = _differing_items(cast(dict[int, list[object]], values))
            differing.append(f"{name} (" + ", ".join(f"rank {rank}: {value}" for rank, value in values.items()) + ")")
    if not differing:  # only the order differs
        orders = zip(*fields_of.values(), strict=True)
        place, names = next((place, names) for place, names in enumerate(orders) if len(set(names)) > 1)
        by_rank = ", ".join(f"rank {rank}: {name}" for rank, name in zip(fields_of, names, strict=True))
        differing.append(f"the order of their fields, at place {place} ({by_rank})")
    shown = "; ".join(differing[:_MAX_DIFFERENCES])
    more = f"; and {len(differing) - _MAX_DIFFERENCES} more" if len(differing) > _MAX_DIFFERENCES else ""
    return (
        f"the ranks differ in {shown}{more}. Every rank must make the same calls in the same order with the same "
        "arguments, each on its own shard."
    )


def _differing_items(lists: Mapping[int, list[object]]) -> dict[int, object]:
    """The items that not all lists have; if there are none, the first place at which the lists differ."""
    texts = {rank: [json.dumps(item) for item in items] for rank, items in lists.items()}
    common = set.intersection(*map(set, texts.values()))
    own = {
        rank: [item for item, text in zip(lists[rank], texts[rank], strict=True) if text not in common]
        for rank in lists
    }
    if any(own.values()):
        return {rank: items[:_MAX_DIFFERENCES] for rank, items in own.items()}
    for place, items in enumerate(itertools.zip_longest(*lists.values(), fillvalue="nothing")):
        if any(item != items[0] for item in items):
            return {rank: f"{item} at place {place}" for rank, item in zip(lists, items, strict=True)}
    raise AssertionError("the lists are equal")


def error_of_reports(
    reports: Mapping[int, Report], rank: int, size: int, what: str, timeout: timedelta, cause: BaseException
) -> RingMismatchError | RingPeerError:
    """The error that explains a failed wait.

    Args:
        reports: by ring rank; those of lost ranks are missing.
        rank, size: ring rank, whose report is there, and ring size.
        what, timeout, cause: the wait that failed, its timeout, and how it failed.
    """
    for number in reports[rank]["calls"]:
        positions = {other: end["calls"][number] for other, end in sorted(reports.items()) if number in end["calls"]}
        if not all_equal(positions.values()):
            return RingMismatchError(f"in call {number} of the ring " + describe_differences(positions))
    made = {other: {*end["calls"]} for other, end in reports.items()}
    refusals = [
        f"rank {refusing} {text}"
        for refusing, end in sorted(reports.items())
        for number, text in end[REFUSED].items()
        if any(number in calls for other, calls in made.items() if other != refusing)
    ]
    if refusals:
        return RingMismatchError(
            f"{'; '.join(refusals)}. The other ranks made the call; all ranks must make it. The ring is closed; "
            "make a new one with initialize()."
        )
    raised = [f"rank {other} raised {end['raised']}" for other, end in sorted(reports.items()) if end["raised"]]
    if raised:
        return RingPeerError(f"{what}, but {'; '.join(raised)}. Look at its log.")
    if isinstance(cause, HeaderMismatchError):
        return RingMismatchError(
            f"{what}, but {cause}. Every rank must make the same calls in the same order with the same arguments."
        )
    places = [f"rank {other} waits in {end['place']}" for other, end in sorted(reports.items()) if "place" in end]
    if places and len(reports) == size:
        return RingPeerError(
            f"{what}, but {' and '.join(places)} of another ring. Every rank must make the calls of all its rings in "
            "the same order. If they do, a rank of the other ring has died or stalled; look at its log."
        )
    return RingPeerError(
        f"{what}, and the wait failed within the ring's timeout of {timeout.total_seconds():g} s: {cause}. A rank has "
        "died, stalled or left; look at its log, or raise the timeout of initialize() if it is only slow."
    )
