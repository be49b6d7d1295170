"""Adapters: one module or package per distributed framework, with its ring pass and its training.

An adapter holds what is special about its framework. It imports ``attention``, ``joining``, ``training`` and the
packages below them, but no other adapter: code that two adapters share belongs to the library.

This directory is installed as ``ring_backends.adapters``, and importing it under another name raises ImportError. A
top-level ``adapters`` belongs to another distribution on PyPI, and a module imported under two names would exist twice.
Importing this package imports no framework.
"""

from __future__ import annotations

if __name__ != "ring_backends.adapters":
    raise ImportError(
        f"adapters/ was imported as {__name__!r}: it is the package ring_backends.adapters and works under "
        "that name only; write `from ring_backends.adapters import native`, with ring_backends installed "
        "(`pip install -e .`) or the root of its checkout on sys.path.",
        name=__name__,
    )
