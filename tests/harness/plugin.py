"""The harness as a pytest plugin: ``pytest_plugins = ["ring_backends.testing.plugin"]`` in conftest.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ring_backends.testing.world import World


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Four ranks on gloo for the whole session; started by the first test that runs something on them."""
    with World(4) as ranks:
        yield ranks
