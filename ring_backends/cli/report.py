"""How a command ends badly: one message on stderr and an exit status, a traceback only for what is our fault.

Status 2: the command line, or what it asks for, cannot work. 1: it went wrong while running. 130: Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import typer

from ring_backends.errors import AdapterUnavailableError, RingMismatchError, RingPeerError

INTERRUPTED = 130
TRACEBACK_VARIABLE = "RING_BACKENDS_TRACEBACK"


@dataclass(frozen=True, order=True)
class Failure:
    """What the user reads of an error. ``is_echo``: only how this rank noticed that another one failed."""

    status: int
    text: str
    is_echo: bool = False


class RankFailedError(Exception):
    """A rank that this process started failed."""

    def __init__(self, rank: int, failure: Failure) -> None:
        super().__init__(f"rank {rank}: {failure.text}")
        self.rank = rank
        self.failure = failure


def describe(error: BaseException) -> Failure:
    """The message and exit status of ``error``; with a traceback where no rule of the project foresees it."""
    if isinstance(error, KeyboardInterrupt):
        return Failure(INTERRUPTED, "interrupted.")
    foreseen = isinstance(error, (ValueError, AdapterUnavailableError, RingMismatchError, RingPeerError, OSError))
    if not foreseen or os.environ.get(TRACEBACK_VARIABLE):
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()
    elif isinstance(error, (ValueError, AdapterUnavailableError)):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}"
    usage = isinstance(error, (ValueError, AdapterUnavailableError))
    return Failure(2 if usage else 1, text, is_echo=isinstance(error, RingPeerError))


@contextlib.contextmanager
def reported_errors(command: str, options: Iterable[str] = ()) -> Iterator[None]:
    """Turn what the body raises into a message and ``typer.Exit``.

    Args:
        command: name of the command, for the message.
        options: the command's parameters by their Python names; a message that begins with one of them is
            prefixed with the option's name.
    """
    try:
        yield
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        tell_interrupted()
        raise typer.Exit(INTERRUPTED) from None
    except RankFailedError as error:
        prefix = "" if error.failure.status == 2 else f"rank {error.rank}: "
        _tell(f"ring-backends {command}: error: {prefix}{_with_option(error.failure.text, options)}")
        raise typer.Exit(error.failure.status) from None
    except Exception as error:
        failure = describe(error)
        rank = os.environ.get("RANK", "0")
        prefix = "" if rank == "0" else f"rank {rank}: "
        _tell(f"ring-backends {command}: error: {prefix}{_with_option(failure.text, options)}")
        raise typer.Exit(failure.status) from None


def tell_interrupted() -> None:
    _tell("ring-backends: interrupted.")


def _tell(text: str) -> None:
    sys.stdout.flush()
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h\r\x1b[K")  # a progress bar cut off in mid-line leaves the cursor hidden
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _with_option(text: str, options: Iterable[str]) -> str:
    name = re.split(r"\W", text, maxsplit=1)[0]
    if name not in set(options):
        return text
    return f"--{name.replace('_', '-')}: {text.removeprefix(name + ': ')}"
