"""The harness as a pytest plugin: ``pytest_plugins = ["ring_backends.testing.plugin"]`` in conftest.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ring_backends.testing.capabilities import AdapterSuite, why_unavailable
from ring_backends.testing.marks import MORE_CASES, needs_gpu
from ring_backends.testing.world import World

_SUITES = "ring_backends.testing.suite"
"""The module whose imports the ranks need. Otherwise each rank imports torch's compiler by itself."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="run only the tests that need a CUDA device")
    parser.addoption(
        "--soak",
        type=int,
        default=1,
        metavar="N",
        help="N times as many steps and runs in the tests of leaks; from 2 on, also the loss of a rank at every hop",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "matrix(reason): runs in the matrix of environments, not in the quick command")
    config.addinivalue_line("markers", "requires(capabilities): skipped if the adapter lacks one of these capabilities")
    config.addinivalue_line("markers", "core: set by ring_backends.testing.capabilities.core")


@pytest.hookimpl(tryfirst=True)  # before pytest selects by -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = [item for item in items if _is_chosen(item)]
    if config.getoption("gpu"):
        chosen = [item for item in chosen if needs_gpu.mark in item.iter_markers("skipif")]
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = chosen


def _is_chosen(item: pytest.Item) -> bool:
    """Mark for the matrix what the quick command leaves out of a suite. Returns whether the matrix runs the test."""
    suite = item.cls if isinstance(item, pytest.Function) else None
    if suite is None or not issubclass(suite, AdapterSuite):
        return True
    is_core = suite.core_in_matrix and item.get_closest_marker("core") is not None
    is_other = suite.quick is not None and item.name not in suite.quick
    if is_core or is_other:
        if MORE_CASES.mark in item.iter_markers("matrix"):
            return False
        item.add_marker(pytest.mark.matrix(reason="the quick command tests this with another adapter or strategy"))
    return True


@pytest.fixture(scope="session")
def soak(pytestconfig: pytest.Config) -> int:
    """The factor by which the tests of leaks are longer."""
    factor: int = pytestconfig.getoption("soak")
    return factor


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
