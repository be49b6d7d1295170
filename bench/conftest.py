"""Ranks that the tests of the benchmarks share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Worlds

pytest_plugins = ["ring_backends.testing.plugin"]  # defines the markers


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    with Worlds() as ranks:
        yield ranks
