"""Capabilities select the tests of the shared suites. A misspelled capability is an error."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable

import pytest

from ring_backends.testing.across_hosts import HostTests
from ring_backends.testing.capabilities import CAPABILITIES, AdapterSuite, requires
from ring_backends.testing.suite import AdapterTests


def test_an_unknown_capability_raises_when_the_class_is_defined():
    with pytest.raises(ValueError, match="unknown capabilities \\['fly'\\]: choose from 'several rings per world'"):
        type("TestFlying", (AdapterSuite,), {"without": {"fly": "it has no wings"}})
    with pytest.raises(ValueError, match="unknown capabilities"):
        requires("fly")


def capabilities_of(test: Callable[..., object]) -> set[str | None]:
    """The capabilities that a test or one of its parameters requires."""
    marks = getattr(test, "pytestmark", ())
    parameters = [values for mark in marks if mark.name == "parametrize" for values in mark.args[1]]
    values = [value for values in parameters for value in getattr(values, "values", (values,))]
    required = [capability for mark in marks if mark.name == "requires" for capability in mark.args]
    return {getattr(value, "capability", None) for value in values}.union(required)


def test_every_capability_is_required_by_a_test() -> None:
    tests = [test for suite in (AdapterTests, HostTests) for name, test in inspect.getmembers(suite) if "test_" in name]
    required = set().union(*map(capabilities_of, tests))
    # For adapters without these, tests expect an error. They are not skipped.
    assert set(CAPABILITIES) == required - {None} | {"parameters of some ranks", "another order of parameters"}


def test_ranks_get_the_settings_of_a_test_class() -> None:
    settings = {"adapter": "flying.backend", "without": {"training": "too high"}, "framework_options": {"wings": 2}}
    suite = pickle.loads(pickle.dumps(type("TestFlying", (AdapterTests,), settings)()))
    assert type(suite) is AdapterTests
    assert vars(suite) == settings


SUITE = """
    import pytest
    from ring_backends.testing.capabilities import AdapterSuite, core, requires
    from ring_backends.testing.marks import matrix_but
    from ring_backends.testing.rings import every_ring

    class SomeTests(AdapterSuite):
        @requires("save and load")
        def test_saves(self):
            assert False

        @every_ring
        def test_rings(self, rings):
            pass

        @core
        def test_core(self):
            pass

        @core
        @pytest.mark.parametrize("number", matrix_but(1, of=(1, 2)))
        def test_more_core(self, number):
            pass

    class TestWhole(SomeTests):
        adapter = "ring_backends.adapters.native"
        without = {"save and load": "it forgets", "device mesh axis": "it has no mesh"}

    class TestCoreInMatrix(TestWhole):
        core_in_matrix = True

    class TestStrategy(TestWhole):
        quick, more_cases = ("test_core", "test_saves"), False

    class TestSome(TestWhole):
        quick = ("test_core", "test_rings[4]")
"""


def test_the_quick_command_leaves_out_what_another_class_tests_or_the_adapter_lacks(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SUITE)
    options = ("-v", "-rs", "-m", "not matrix")
    result = pytester.runpytest_inprocess("-p", "ring_backends.testing.plugin", *options)
    result.stdout.fnmatch_lines(["*without save and load: it forgets", "*without device mesh axis: it has no mesh"])
    result.stdout.fnmatch_lines(["*TestWhole::test_core PASSED*", "*TestStrategy::test_core PASSED*"])
    for left_out in ("CoreInMatrix::test_core *", "CoreInMatrix::test_more*", "Strategy::test_rings*", "Some::test_m*"):
        result.stdout.no_fnmatch_line(f"*Test{left_out}")
    run = [line.split()[0].partition("TestSome::")[2] for line in result.outlines if "TestSome::" in line]
    assert run == ["test_rings[4]", "test_core"]
