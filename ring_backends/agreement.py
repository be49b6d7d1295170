"""Do the ranks of a ring call alike? Checked in full once per configuration, and told apart from a lost peer later.

The first time a rank uses a configuration it publishes it in the ring's store and compares it with the others'. After
that a call costs nothing but a number: call number and configuration make up the tag of every hop, so that ranks whose
calls differ wait for each other instead of reading each other's bytes. When such a wait fails, every rank publishes its
latest calls, which tells ranks that went different ways from ranks that are gone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from ring_backends.errors import RingMismatchError, RingPeerError

REFUSED = "refused"
"""The field under which a rank publishes, instead of a configuration, why it does not make the call."""

GRACE = timedelta(seconds=3)
"""How long a rank whose wait failed listens for where the others are."""

_PATIENCE = 0.5
"""Seconds for one question to the store of a ring that has failed."""

Answer = TypeVar("Answer")


@dataclass(frozen=True, eq=False)
class Configuration:
    """What all ranks of a ring must have in common in one call: field name to a value that JSON can hold."""

    fields: Mapping[str, object]

    @cached_property
    def text(self) -> str:
        return json.dumps(self.fields)

    @cached_property
    def digest(self) -> bytes:
        """Stands for the text where many are remembered."""
        return hashlib.blake2b(self.text.encode(), digest_size=16).digest()


@dataclass(frozen=True)
class Call:
    """One walk of a ring by attention: its number among the ring's calls, what it computes, and when it has to end."""

    number: int
    configuration: Configuration
    direction: str
    deadline: float

    @cached_property
    def _tag(self) -> int:
        return zlib.crc32(f"{self.number}:{self.direction}:{self.configuration.text}".encode()) & 0x7FFF_0000

    def tag(self, index: int) -> int:
        """The tag of hop ``index``: 31 bits, of which the upper 15 stand for the call and its configuration."""
        return self._tag | (index & 0xFFFF)

    def time_left(self) -> timedelta:
        """Until the deadline; never zero, which some transports take for no limit."""
        return timedelta(seconds=max(0.001, self.deadline - time.monotonic()))

    @property
    def position(self) -> dict[str, object]:
        return {"direction": self.direction, **self.configuration.fields}


@dataclass
class Agreement:
    """One rank's side of the checks.

    Args:
        store: shared by the ranks of this ring and by nobody else.
        rank, size: in the ring.
        timeout: the most that one call may wait for its peers.
        abort: closes the ring's connections, so that peers that wait for this rank learn at once.
    """

    store: Store
    rank: int
    size: int
    timeout: timedelta
    abort: Callable[[], None]
    _agreed: set[bytes] = field(default_factory=set)
    _num_calls: int = 0
    _num_modules: int = 0
    _latest: deque[Call] = field(default_factory=lambda: deque(maxlen=16))
    _published: deque[str] = field(default_factory=deque)
    _failure: str | None = None

    @property
    def has_failed(self) -> bool:
        """Whether the ring is closed, because a call of it has failed."""
        return self._failure is not None

    def begin(self, configuration: Configuration, *, direction: str = "forward", check_again: bool = False) -> Call:
        """Number a call, after making sure that all ranks mean the same by it.

        Args:
            configuration: what they have to have in common.
            direction: which of the walks it is.
            check_again: whether to ask the others although they have agreed on this configuration before.

        Raises:
            RingMismatchError: on every rank, naming each field that differs and every rank's value.
            RingPeerError: a rank did not come to the check in time, or an earlier call of this ring failed.
        """
        if self._failure is not None:
            raise RingPeerError(f"this ring was closed when {self._failure}; make a new one with initialize().")
        call = Call(self._num_calls, configuration, direction, time.monotonic() + self.timeout.total_seconds())
        self._num_calls += 1
        self._latest.append(call)
        if check_again or configuration.digest not in self._agreed:
            self._check(call)
            self._agreed.add(configuration.digest)
        return call

    def number_module(self) -> int:
        """Number an attention module, so that two alike whose calls are swapped on one rank are told apart."""
        self._num_modules += 1
        return self._num_modules

    def refuse(self, error: Exception) -> None:
        """Tell ranks that come to a check that this one refused its arguments, so that they need not wait for it."""
        refusal = json.dumps({REFUSED: f"refused its arguments with {type(error).__name__}: {error}"})
        key = f"check/{self._num_calls}/{self.rank}"
        self._num_calls += 1  # it was one, and the next call is the others' next call too
        _within(_PATIENCE, lambda: self.store.set(key, refusal), otherwise=None)
        self._published.append(key)

    def _check(self, call: Call) -> None:
        keys = [f"check/{call.number}/{rank}" for rank in range(self.size)]
        self._published.append(keys[self.rank])

        def compare() -> dict[int, dict[str, Any]]:
            self.store.set(keys[self.rank], call.configuration.text)
            self.store.wait(keys, call.time_left())
            published = {rank: json.loads(self.store.get(key)) for rank, key in enumerate(keys)}
            # All ranks are here, so none still reads a check before; a run of many lengths would fill the store.
            while len(self._published) > 1:
                self.store.delete_key(self._published.popleft())
            return published

        nobody: dict[int, dict[str, Any]] = {}
        published = _within(call.time_left().total_seconds() + _PATIENCE, compare, otherwise=nobody)
        if not published:
            everybody = [*range(self.size)]
            absent = _within(
                _PATIENCE, lambda: [r for r in everybody if not self.store.check([keys[r]])], otherwise=everybody
            )
            cause = TimeoutError("they have not all come")
            self.fail(call, f"rank {self.rank} waited for {absent} to compare configurations", cause)
        refusals = [f"rank {rank} {fields[REFUSED]}" for rank, fields in published.items() if REFUSED in fields]
        if refusals:
            raise RingMismatchError(f"{'; '.join(refusals)}. The other ranks of the ring made the call; all have to.")
        if any(fields != published[0] for fields in published.values()):
            raise RingMismatchError(_describe(published))

    def fail(self, call: Call, what: str, cause: BaseException) -> NoReturn:
        """Close the ring and raise what a failed wait means, after hearing from the other ranks where they are.

        Raises:
            RingMismatchError: another rank made a different call under the same number.
            RingPeerError: otherwise; ``what`` names what was waited for.
        """
        heard = {self.rank: self._close(what)}
        seconds = GRACE.total_seconds()
        _within(seconds, lambda: self._hear(heard, time.monotonic() + seconds), otherwise=None)
        ends = dict(heard)  # which a store that does not answer any more may still be adding to
        for number in ends[self.rank]["calls"]:
            positions = {rank: end["calls"][number] for rank, end in sorted(ends.items()) if number in end["calls"]}
            if any(position != positions[self.rank] for position in positions.values()):
                raise RingMismatchError(f"in call {number} of the ring " + _describe(positions)) from cause
        raised = [f"rank {rank} raised {end['raised']}" for rank, end in sorted(ends.items()) if end["raised"]]
        if raised:
            raise RingPeerError(f"{what}, but {'; '.join(raised)}. Look at its log.") from cause
        raise RingPeerError(
            f"{what}, and the wait ended within the ring's timeout of {self.timeout.total_seconds():g} s: {cause}. A "
            "rank has died, stalled or left; look at its log, or raise the timeout of initialize() if it is only slow."
        ) from cause

    def _hear(self, ends: dict[int, dict[str, Any]], deadline: float) -> None:
        """Add how other ranks ended, as they publish it, until all have or ``deadline``."""
        while len(ends) < self.size and time.monotonic() < deadline:
            for rank in set(range(self.size)) - set(ends):
                if self.store.check([f"failed/{rank}"]):
                    ends[rank] = json.loads(self.store.get(f"failed/{rank}"))
            time.sleep(0.02)

    @contextlib.contextmanager
    def told(self, call: Call) -> Iterator[None]:
        """Close the ring where an exception ends this rank's part in ``call``, and tell the others which it was."""
        try:
            yield
        except GeneratorExit:  # nobody goes on with the walk
            raise
        except BaseException as error:
            if self._failure is None:
                self._close(f"rank {self.rank} raised in {call.direction}", f"{type(error).__name__}: {error}")
            raise

    def _close(self, what: str, raised: str | None = None) -> dict[str, Any]:
        """Publish this rank's latest calls and what it raised, close the ring, and return what was published."""
        self._failure = what
        end = json.dumps({"calls": {latest.number: latest.position for latest in self._latest}, "raised": raised})
        _within(_PATIENCE, lambda: self.store.set(f"failed/{self.rank}", end), otherwise=None)
        self.abort()
        published: dict[str, Any] = json.loads(end)
        return published


def _within(seconds: float, ask: Callable[[], Answer], *, otherwise: Answer) -> Answer:
    """What ``ask`` answers within some seconds; ``otherwise`` if it fails or does not.

    A store goes with the process that hosts it, which is an error, or with the network, which torch may not notice.
    """
    answers = []

    def listen() -> None:
        with contextlib.suppress(dist.DistError):
            answers.append(ask())

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    listener.join(seconds)
    return answers[0] if answers else otherwise


def _describe(fields_of: Mapping[int, Mapping[str, object]]) -> str:
    """Each field that differs, with every rank's value."""
    differing = []
    for name in dict.fromkeys(name for fields in fields_of.values() for name in fields):
        values = {rank: fields.get(name, "absent") for rank, fields in fields_of.items()}
        if len({json.dumps(value) for value in values.values()}) > 1:
            differing.append(f"{name} (" + ", ".join(f"rank {rank}: {value}" for rank, value in values.items()) + ")")
    return (
        f"the ranks differ in {'; '.join(differing)}. Every rank has to make the same calls in the same order with "
        "the same "
        "arguments, each on its own shard."
    )
