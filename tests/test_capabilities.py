"""Capabilities: what switches the tests of the shared suites, and what a typing error in one does."""

from __future__ import annotations

import textwrap

import pytest

from ring_backends.testing.capabilities import CAPABILITIES, AdapterSuite, requires


def test_a_capability_that_does_not_exist_is_an_error_when_the_class_is_made():
    with pytest.raises(ValueError, match="unknown capability \\['fly'\\]: choose from 'several rings per world'"):
        type("TestFlying", (AdapterSuite,), {"without": {"fly": "it has no wings"}})
    with pytest.raises(ValueError, match="unknown capability"):
        requires("fly")


def test_every_capability_says_what_it_means():
    for capability, meaning in CAPABILITIES.items():
        assert len(meaning.split()) > 4, capability


def test_tests_are_skipped_with_the_reason(tmp_path):
    import subprocess
    import sys

    (tmp_path / "test_some.py").write_text(
        textwrap.dedent(
            """
            import pytest
            from ring_backends.testing.capabilities import AdapterSuite, requires
            from ring_backends.testing.rings import every_ring

            class SomeTests(AdapterSuite):
                @requires("save and load")
                def test_saves(self):
                    assert False

                @every_ring
                def test_rings(self, rings):
                    pass

            class TestWhole(SomeTests):
                adapter = "ring_backends.adapters.native"
                without = {"save and load": "it forgets", "device mesh axis": "it has no mesh"}
            """
        )
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", "-q", "."]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120).stdout
    assert "6 passed, 3 skipped" in told, told
    assert "without save and load: it forgets" in told
    assert "without device mesh axis: it has no mesh" in told
