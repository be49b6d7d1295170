"""Adapters: one module per distributed framework, with a ring pass and the framework's training rules.

The directory is installed as ``ring_backends.adapters`` and has no other name. A top-level ``adapters`` is
another distribution's package, and a module imported under two names is two modules with two registries, so
any other name is refused. Importing this package imports no framework.
"""

from __future__ import annotations

if __name__ != "ring_backends.adapters":
    raise ImportError(
        f"adapters/ was imported as {__name__!r}: it is the package ring_backends.adapters and works under "
        "that name only; write `from ring_backends.adapters import native`, with ring_backends installed "
        "(`pip install -e .`) or the root of its checkout on sys.path.",
        name=__name__,
    )
