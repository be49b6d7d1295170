"""The connections of a rank to the other ranks of its ring: posts of hops, and the end of all of them by a failure."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ring_backends.ring.calls import Call
from ring_backends.ring.store import Notices, Report
from ring_backends.ring.stream_hops import FollowedHops

_LONGEST_POST = 0.5
"""Seconds after which a post counts as waiting for a peer. Others take less than a millisecond."""


@dataclass(eq=False)
class Connections:
    """One rank's connections to its peers. A failure of any rank closes them, and with them the ring.

    Attributes:
        notices: tells the other ranks why this rank closes the ring.
        abort: closes the connections, which ends the waits of peers for this rank. Over NCCL it also ends hops on
            streams.
        followed: the hops that a stream waits for.
        latest: the latest calls of this rank.
        failure: when the ring was closed, for messages; None if it is open.
    """

    notices: Notices
    abort: Callable[[], None]
    followed: FollowedHops
    latest: deque[Call] = field(default_factory=lambda: deque(maxlen=64))
    failure: str | None = None
    _report: Report | None = None
    _posting: Any = field(default_factory=threading.Lock)
    _closing: Any = field(default_factory=threading.Lock)

    @contextlib.contextmanager
    def posting(self) -> Iterator[None]:
        """Wraps the post of a hop. Another thread closes the connections before it or after it, if possible.

        NCCL's abort frees a communicator even while a post uses it. After an abort, NCCL refuses a message in the
        middle of a batch, and the thread's group of NCCL calls stays open.

        Raises:
            RuntimeError: the connections are closed.
        """
        with self._posting:
            if self.failure is not None or self.followed.are_aborted:
                raise RuntimeError("the connections of the ring are closed")
            yield

    def end(self) -> None:
        """Close the connections, if possible between two posts."""
        self.followed.are_aborted = True  # first: an aborted hop ends with anything in its headers
        is_between_posts = self._posting.acquire(timeout=_LONGEST_POST)
        try:
            self.abort()  # a post that waits for a peer ends in no other way
        finally:
            if is_between_posts:
                self._posting.release()

    def close(self, what: str, call: Call | None = None, raised: str | None = None) -> Report:
        """Publish a report of this rank's latest calls, and close the ring. A closed ring keeps its first report.

        Any thread may make this call.

        Args:
            what: when the ring is closed, for messages.
            call: the call that failed, which may no longer be among the latest ones.
            raised: the error that this rank raised itself.
        """
        with self._closing:
            if self._report is None:
                self.failure = what
                self.followed.close()
                # A copy: the thread of a failed hop on a stream is not the thread that makes calls.
                calls = {made.number: made.position for made in [*([call] if call else []), *self.latest]}
                self._report = self.notices.close(calls, raised)
                self.end()
            return self._report
