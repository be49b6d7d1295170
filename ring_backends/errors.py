"""Exceptions for missing frameworks and for faults between ranks. Invalid arguments are ValueError and TypeError."""

from __future__ import annotations


class AdapterUnavailableError(ImportError):
    """An adapter's framework is not installed, or cannot run here. The message says why, and what to install."""


class RingMismatchError(RuntimeError):
    """The ranks of a ring called attention with different configurations, or in a different order.

    Every rank of the ring raises it. The message names each field that differs, and every rank's value.
    """


class RingPeerError(RuntimeError):
    """A rank of the ring died, stalled past the timeout, or left. The message names step, source and destination."""
