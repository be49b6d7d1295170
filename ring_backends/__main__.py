"""`python -m ring_backends` is the console script `ring-backends`."""

from __future__ import annotations

from ring_backends.cli import main

if __name__ == "__main__":
    main()
