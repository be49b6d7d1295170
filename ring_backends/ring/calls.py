"""The calls that all ranks of a ring make: number, configuration, deadline, and the tags of their hops."""

from __future__ import annotations

import hashlib
import json
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from types import MappingProxyType

NOTHING: Mapping[str, object] = MappingProxyType({})


def grace(timeout: timedelta) -> float:
    """The last seconds before a call's deadline, in which a rank whose wait failed collects the others' reports."""
    return min(3.0, timeout.total_seconds() / 4)


@dataclass(frozen=True, eq=False)
class Configuration:
    """The fields of a call that must be equal on all ranks, as JSON-serializable values by name."""

    fields: Mapping[str, object]

    @cached_property
    def text(self) -> str:
        return json.dumps(self.fields)

    @cached_property
    def digest(self) -> bytes:
        """A hash of the text, short enough to store one for every configuration."""
        return hashlib.blake2b(self.text.encode(), digest_size=16).digest()


def backward_of(call_number: int) -> str:
    """The direction of a backward. It contains the call's number, since two calls may be equal otherwise."""
    return f"backward of call {call_number}"


@dataclass(frozen=True)
class Call:
    """One call that all ranks of a ring make: its number, its configuration and its deadline.

    Attributes:
        end: the deadline of the call, by ``time.monotonic``.
        timeout: the time from the beginning of the call to ``end``.
        details: further fields that must be equal on all ranks. They are not part of the tags.
        context: fields of the ring, such as the batch of a model, that must be equal on all ranks. They are part of the
            tags.
    """

    number: int
    configuration: Configuration
    direction: str
    end: float
    timeout: timedelta
    details: Mapping[str, object] = field(default_factory=dict)
    context: Mapping[str, object] = field(default_factory=dict)

    @cached_property
    def _tag(self) -> int:
        context = json.dumps(self.context) if self.context else ""
        return zlib.crc32(f"{self.number}:{self.direction}:{self.configuration.text}{context}".encode()) & 0x7FFF_0000

    def tag(self, index: int) -> int:
        """The 31-bit tag of hop ``index``. The upper 15 bits are a hash of the call and its configuration."""
        return self._tag | (index & 0xFFFF)

    @property
    def longest_wait(self) -> float:
        """How many seconds a wait for a peer may take from the beginning of the call."""
        return self.timeout.total_seconds() - grace(self.timeout)

    def time_left(self) -> timedelta:
        """How long a wait for a peer may still take. Never zero, which some transports read as no limit."""
        return timedelta(seconds=max(0.001, self.end - grace(self.timeout) - time.monotonic()))

    @property
    def position(self) -> dict[str, object]:
        own = {"direction": self.direction, **self.configuration.fields, **self.details}
        return {**own, **self.context, **own}

    @property
    def digest(self) -> str:
        """A hash of the position, to compare calls of the same number. Made anew each time: only long waits need it."""
        return hashlib.blake2b(json.dumps(self.position).encode(), digest_size=6).hexdigest()
