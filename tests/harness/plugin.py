"""The harness as a pytest plugin: ``pytest_plugins = ["ring_backends.testing.plugin"]`` in conftest.py."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import lru_cache

import pytest

from ring_backends.testing.capabilities import AdapterSuite, why_unavailable
from ring_backends.testing.marks import MORE_CASES, needs_gpu
from ring_backends.testing.world import PRELOADED, World

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


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the server from which ranks are forked import the modules that ``PRELOAD`` of a test module names."""
    modules = {item.module for item in session.items if isinstance(item, pytest.Function)}
    PRELOADED.update(name for module in modules for name in getattr(module, "PRELOAD", ()))


def _is_chosen(item: pytest.Item) -> bool:
    """Mark for the matrix what the quick command leaves out of a suite. Returns whether the matrix runs the test."""
    suite = item.cls if isinstance(item, pytest.Function) else None
    if suite is None or not issubclass(suite, AdapterSuite):
        return True
    is_core = suite.core_in_matrix and item.get_closest_marker("core") is not None
    if (is_core or not suite.more_cases) and MORE_CASES.mark in item.iter_markers("matrix"):
        return False
    if is_core or not (suite.quick is None or {item.name, item.name.partition("[")[0]} & {*suite.quick, *vars(suite)}):
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
def worlds(adapters: list[str]) -> Iterator[Callable[[int], World]]:
    """The worlds of the session, by their numbers of gloo ranks. The first call of a world starts its ranks."""
    with contextlib.ExitStack() as stack:
        yield lru_cache(lambda size: stack.enter_context(World(size, preload=[*adapters, _SUITES])))


@pytest.fixture(scope="session")
def world(worlds: Callable[[int], World]) -> World:
    """The world of four ranks."""
    return worlds(4)


@pytest.fixture(scope="session")
def pair(worlds: Callable[[int], World]) -> World:
    """The world of two ranks."""
    return worlds(2)
