"""The order of a rank's calls outside of attention, its *events*, which recur from step to step."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from ring_backends.ring.calls import Configuration


@dataclass(eq=False)
class Events:
    """The events of one rank since the ranks last had a difference."""

    _latest: Configuration | None = None
    _latest_of_another_name: bytes = b""
    _next: dict[bytes, bytes] = field(default_factory=dict)
    _history: bytes = b""
    _with_values: deque[tuple[int, str, Mapping[str, object]]] = field(default_factory=lambda: deque(maxlen=16))

    def is_expected(self, event: Configuration, values: Mapping[str, object], call_number: int) -> bool:
        """Note that this rank makes the next event. Return whether it came next at the same place the last time, too.

        The place is the event before, and the last one before it with another name. With several micro-batches, the
        same forward precedes several backwards.

        Args:
            event: the fields that all ranks must make alike, before they continue.
            values: further fields that must be equal on all ranks, but usually change each time. They do not decide
                whether the event is expected. A later comparison contains them.
            call_number: the number of the call that belongs to the event, for messages.
        """
        name, before = event.fields["order of calls"], self._latest
        place = self._latest_of_another_name + (b"" if before is None else before.digest)
        is_expected = self._next.get(place) == event.digest
        self._next[place] = event.digest
        if before is not None and before.fields["order of calls"] != name:
            self._latest_of_another_name = before.digest
        self._latest = event
        if values:
            self._with_values.append((call_number, str(name), values))
            text = self._history + event.digest + json.dumps(values).encode()
            self._history = hashlib.blake2b(text, digest_size=16).digest()
        return is_expected

    def summary(self, event: Configuration) -> int:
        """A 48-bit hash of an event and of the values of all events so far. A float represents it exactly."""
        return int.from_bytes(hashlib.blake2b(self._history + event.digest, digest_size=6).digest(), "big")

    def values(self) -> dict[str, object]:
        """The values of the latest events, by names for messages."""
        return {
            f"{field} of {name} (call {number})": value
            for number, name, values in self._with_values
            for field, value in values.items()
        }
