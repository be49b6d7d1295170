"""What goes wrong between ranks, and what is missing on a machine.

Bad arguments are plain ValueError and TypeError; these classes are for the faults that only a distributed
run can have.
"""

from __future__ import annotations


class AdapterUnavailableError(ImportError):
    """An adapter's framework is not installed, or cannot run here. The message has the reason and the way out."""


class RingMismatchError(RuntimeError):
    """The ranks of a ring called attention with different configurations, or in a different order.

    Raised on every rank of the ring; the message names each field that differs and every rank's value.
    """


class RingPeerError(RuntimeError):
    """A rank of the ring died, stalled past the timeout, or left. The message names step, source and destination."""
