"""Exceptions for missing frameworks and for faults between ranks. Invalid arguments are ValueError and TypeError."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class AdapterUnavailableError(ImportError):
    """A framework or library is not installed, cannot run here, or has an unsupported release. The message says why."""


class RingMismatchError(RuntimeError):
    """The ranks of a ring made different calls, made them in a different order, or a rank refused its arguments.

    Every rank that made the call raises this error. The message names each field that differs, with every rank's value,
    or the rank that refused and its error.
    """


class RingPeerError(RuntimeError):
    """A rank of the ring died, stalled past the timeout, left, or raised an error in the call.

    For a hop of attention, the message names the step, and the ranks from which and to which this rank was
    transferring.
    """


@contextlib.contextmanager
def importing(what: str, extra: str) -> Iterator[None]:
    """Wraps the imports of an optional package.

    Args:
        what: what cannot be imported without it, for the error.
        extra: the extra of this distribution that installs it.

    Raises:
        AdapterUnavailableError: an import fails.
    """
    try:
        yield
    except ImportError as error:
        install = f"install it with pip install 'ring-backends[{extra}]'"
        raise AdapterUnavailableError(f"{what} ({error}); {install}.") from error
