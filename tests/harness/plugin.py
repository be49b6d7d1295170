"""The harness as a pytest plugin: ``pytest_plugins = ["ring_backends.testing.plugin"]`` in conftest.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ring_backends.testing.capabilities import AdapterSuite, why_unavailable
from ring_backends.testing.world import World

_SUITES = "ring_backends.testing.suite"
"""The module whose imports the ranks need. Otherwise each rank imports torch's compiler by itself."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device")
    config.addinivalue_line("markers", "core: depends only on code that all adapters share")
    config.addinivalue_line("markers", "matrix(reason): runs in the matrix of environments, not in the quick command")
    config.addinivalue_line("markers", "slow: one of many similar cases; run it by hand with -m slow")
    config.addinivalue_line("markers", "soak: takes minutes; run it by hand with -m soak")


@pytest.hookimpl(tryfirst=True)  # before pytest selects by -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        suite = item.cls if isinstance(item, pytest.Function) else None
        if (
            suite is not None
            and issubclass(suite, AdapterSuite)
            and suite.core_in_matrix
            and item.get_closest_marker("core")
        ):
            item.add_marker(pytest.mark.matrix(reason="core behaviour; the quick command tests it with one adapter"))


@pytest.fixture(scope="session")
def adapters(request: pytest.FixtureRequest) -> list[str]:
    """The available adapters of the test classes in this session."""
    suites = {item.cls for item in request.session.items if isinstance(item, pytest.Function) and item.cls is not None}
    found = {suite.adapter for suite in suites if issubclass(suite, AdapterSuite)}
    return sorted(adapter for adapter in found if why_unavailable(adapter) is None)


@pytest.fixture(scope="session")
def world(adapters: list[str]) -> Iterator[World]:
    """A world of four gloo ranks for the session. The first call starts the ranks."""
    with World(4, preload=[*adapters, _SUITES]) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def pair(adapters: list[str]) -> Iterator[World]:
    """A world of two gloo ranks for the session."""
    with World(2, preload=[*adapters, _SUITES]) as ranks:
        yield ranks
