"""The capabilities of an adapter, which of its tests are core behaviour, and the base class of all suites.

Tests are switched by capabilities, never by the name of an adapter. An adapter has every capability unless its test
class says otherwise, with one sentence that pytest shows as the reason for the skip:

>>> from ring_backends.testing.suite import AdapterTests
>>> class TestFlying(AdapterTests):
...     adapter = "flying_adapter.backend"
...     without = {"fp64 parameters": "its reducer packs gradients as fp32"}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib import import_module
from typing import Any, ClassVar, TypeVar

import pytest

from ring_backends.errors import AdapterUnavailableError

CAPABILITIES: Mapping[str, str] = {
    "several rings per world": "initialize(ring_size=...) cuts the world into rings beside each other",
    "rings over chosen ranks": "initialize(group=...) takes a process group of some ranks, rank 0 not needed",
    "device mesh axis": "initialize(group=...) takes one axis of a DeviceMesh",
    "rings by topology": "initialize(ring_order='topology') makes neighbours of ranks on one host",
    "automatic ring size": "initialize(ring_size='auto') chooses a ring for an attention call",
    "training": "parallelize() runs on this machine's processors",
    "gradient accumulation": "parallelize(accumulation_steps=...) adds up several micro-batches",
    "evaluation within a step": "the model may be called without gradients between backward() and step()",
    "mixed precision": "parallelize(mixed_precision=torch.bfloat16) computes in bf16, and steps in fp32",
    "copies of a wrapped model": "copy.deepcopy and torch.save take what parallelize() has wrapped",
    "gradient clipping": "parallelize(max_grad_norm=...) clips the norm of the whole gradient",
    "save and load": "a training state comes back from a checkpoint",
    "another ring size": "a checkpoint can be read by another number of ranks",
    "fp64 parameters": "parallelize() trains a model of fp64 parameters as such",
    "fp64 clipping": "parallelize(max_grad_norm=...) takes a model of fp64 parameters",
    "tied parameters": "parallelize() takes a model that uses one parameter in two places",
    "parameters of some ranks": "a rank may leave out parameters that another one uses in the same step",
    "frozen parameters": "parallelize() takes a model of which some parameters need no gradient",
    "a lost rank": "a rank that dies leaves the others alive to raise RingPeerError",
}
"""Every capability with its meaning."""

Test = TypeVar("Test", bound=Callable[..., Any])
TestOrSuite = TypeVar("TestOrSuite", bound=Callable[..., Any])


def requires(*capabilities: str) -> Callable[[Test], Test]:
    """Skip a test of a suite where the adapter lacks one of these."""
    _check_known(capabilities)

    def mark(test: Test) -> Test:
        test.required_capabilities = capabilities  # type: ignore[attr-defined]
        return test

    return mark


def core(test: TestOrSuite) -> TestOrSuite:
    """Mark a test, or every test that a suite defines, as core behaviour: code that all adapters share decides it.

    The quick command runs them by one adapter; a test class with ``core_in_matrix`` leaves them to the matrix.
    """
    if not isinstance(test, type):
        marked: TestOrSuite = pytest.mark.core(test)
        return marked
    for name, function in vars(test).items():
        if name.startswith("test_"):
            setattr(test, name, pytest.mark.core(function))
    return test


class AdapterSuite:
    """Base of the suites.

    Attributes:
        adapter: the adapter's module, by its dotted name.
        without: the capabilities that it lacks, each with one sentence that says why.
        framework_options: keyword arguments that every ``parallelize`` of the suite gets besides the common ones.
        core_in_matrix: True marks the tests of core behaviour ``matrix``, so that ``-m "not matrix"`` leaves them out.
            For an adapter beside which another one runs them.
    """

    adapter: ClassVar[str]
    without: ClassVar[Mapping[str, str]] = {}
    framework_options: ClassVar[Mapping[str, Any]] = {}
    core_in_matrix: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        _check_known(cls.without)

    @pytest.fixture(autouse=True)
    def _skip_what_the_adapter_lacks(self, request: pytest.FixtureRequest) -> None:
        reason = why_unavailable(self.adapter)
        if reason is not None:
            pytest.skip(reason)
        needed = set(getattr(request.function, "required_capabilities", ()))
        if hasattr(request.node, "callspec"):
            needed |= {getattr(value, "capability", None) for value in request.node.callspec.params.values()}
        for capability in CAPABILITIES:
            if capability in needed and capability in self.without:
                pytest.skip(f"without {capability}: {self.without[capability]}")


def _check_known(capabilities: Any) -> None:
    unknown = sorted(set(capabilities) - set(CAPABILITIES))
    if unknown:
        raise ValueError(f"unknown capability {unknown}: choose from {', '.join(map(repr, CAPABILITIES))}.")


@lru_cache
def why_unavailable(adapter: str) -> str | None:
    """Its own words, where its framework is not installed."""
    try:
        import_module(adapter)
    except AdapterUnavailableError as error:
        return str(error)
    return None
