"""Exceptions for missing frameworks and for faults between ranks. Invalid arguments are ValueError and TypeError."""

from __future__ import annotations


class AdapterUnavailableError(ImportError):
    """An adapter's framework is not installed, or cannot run here. The message says why, and what to install."""


class RingMismatchError(RuntimeError):
    """The ranks of a ring made different calls, made them in a different order, or a rank refused its arguments.

    Every rank that made the call raises this error. The message names each field that differs, with every rank's value,
    or the rank that refused and its error.
    """


class RingPeerError(RuntimeError):
    """A rank of the ring died, stalled past the timeout, or left.

    For a hop of attention, the message names the step, and the ranks from which and to which this rank was
    transferring.
    """
