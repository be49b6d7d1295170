"""Adapters: one module or folder per distributed framework, with its ring pass and its training.

Nothing here is shared by two adapters. The directory is installed as ``ring_backends.adapters``, and any other name is
refused: a top-level ``adapters`` belongs to another distribution, and a module imported under two names would exist
twice. Importing this package imports no framework.
"""

from __future__ import annotations

if __name__ != "ring_backends.adapters":
    raise ImportError(
        f"adapters/ was imported as {__name__!r}: it is the package ring_backends.adapters and works under "
        "that name only; write `from ring_backends.adapters import native`, with ring_backends installed "
        "(`pip install -e .`) or the root of its checkout on sys.path.",
        name=__name__,
    )
