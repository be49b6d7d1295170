"""The reports that ranks publish when they close a ring, and the error that the reports of all ranks show."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from ring_backends.errors import RingMismatchError, RingPeerError
from ring_backends.ring.differences import all_equal, describe_differences
from ring_backends.ring.stream_hops import HeaderMismatchError

REFUSED = "refused"
"""The field under which a rank publishes why it refuses a call, in place of a configuration."""

Report = dict[str, Any]
"""``calls``: positions of a rank's latest calls by number. ``raised``: its own error. ``refused``: refused calls."""


def error_of_reports(
    reports: Mapping[int, Report], rank: int, what: str, timeout: timedelta, cause: BaseException
) -> RingMismatchError | RingPeerError:
    """The error that explains a failed wait.

    Args:
        reports: by ring rank; those of lost ranks are missing.
        rank: this rank. Its report is there.
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
    return RingPeerError(
        f"{what}, and the wait failed within the ring's timeout of {timeout.total_seconds():g} s: {cause}. A rank has "
        "died, stalled or left; look at its log, or raise the timeout of initialize() if it is only slow."
    )
