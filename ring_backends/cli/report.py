"""Reports the error of a command: one message on stderr and an exit status.

The status is 2 if an argument or the installation cannot work, 1 if the command failed while it ran, and 130 after
Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Iterator

import typer

from ring_backends.ring.launch import RankFailedError, describe

INTERRUPTED = 130


@contextlib.contextmanager
def reported_errors(command: str, options: Iterable[str] = ()) -> Iterator[None]:
    """Turn an exception in the ``with`` block into a message on stderr and a ``typer.Exit``.

    Args:
        command: name of the command, for the message.
        options: Python names of the command's parameters. If the message of the exception begins with one of them, the
            report begins with the option: ``--seq-len`` for ``seq_len``.
    """
    try:
        yield
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        _print_error("ring-backends: interrupted.")
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        if isinstance(error, RankFailedError):
            failure, is_named, rank = error.failure, error.failure.status != 2, str(error.rank)
        else:
            failure, rank = describe(error), os.environ.get("RANK", "0")
            is_named = rank != "0"
        prefix = f"rank {rank}: " if is_named else ""
        _print_error(f"ring-backends {command}: error: {prefix}{_with_option(failure.text, options)}")
        raise typer.Exit(failure.status) from None


def _print_error(text: str) -> None:
    sys.stdout.flush()
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h\r\x1b[K")  # an interrupted progress bar leaves the cursor hidden
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _with_option(text: str, options: Iterable[str]) -> str:
    name = re.split(r"\W", text, maxsplit=1)[0]
    if name not in set(options):
        return text
    return f"--{name.replace('_', '-')}: {text.removeprefix(name + ': ')}"
