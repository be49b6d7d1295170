"""The capabilities of an adapter, the mark of core behaviour, and the base class of all suites.

Tests depend on capabilities, never on the name of an adapter. An adapter has every capability that its test class does
not list in ``without``. Each entry gives a reason, which pytest shows for the skipped tests:

>>> from ring_backends.testing.suite import AdapterTests
>>> class TestFlying(AdapterTests):
...     adapter = "flying_adapter.backend"
...     without = {"fp64 parameters": "its reducer packs gradients as fp32"}
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, ClassVar, TypeVar

import pytest
from torch import nn

from ring_backends.errors import AdapterUnavailableError
from ring_backends.ring.ring import Ring
from ring_backends.schedule.layout import LayoutKind
from ring_backends.testing.calls import LocalCall, call_here, local_call
from ring_backends.testing.failing_calls import SMALL_CASE
from ring_backends.testing.models import OneParameter, unit_sgd
from ring_backends.testing.rings import FOUR, TWO, RingSpec, backend, new_ring, ring_of
from ring_backends.testing.strategies import AttentionCase

CAPABILITIES: Mapping[str, str] = {
    "several rings per world": "initialize(ring_size=...) divides the world into several rings",
    "rings over chosen ranks": "initialize(group=...) accepts a process group of any ranks, also without rank 0",
    "device mesh axis": "initialize(group=...) accepts one axis of a DeviceMesh",
    "rings by topology": "initialize(ring_order='topology') places ranks of one host next to each other",
    "automatic ring size": "initialize(ring_size='auto') chooses a ring for an attention call",
    "training": "parallelize() works with gloo on CPUs",
    "gradient accumulation": "parallelize(accumulation_steps=...) accumulates gradients over micro-batches",
    "early steps": "step() may come before the last micro-batch of a step",
    "evaluation within a step": "the model may be called without gradients between backward() and step()",
    "mixed precision": "parallelize(mixed_precision=torch.bfloat16) computes in bf16 and updates fp32 parameters",
    "loss scaling": "parallelize(mixed_precision=torch.float16) scales the loss, and leaves out steps that overflow",
    "copies of a wrapped model": "copy.deepcopy and torch.save accept the wrapped model, instead of a TypeError",
    "gradient clipping": "parallelize(max_grad_norm=...) clips the norm of the whole gradient",
    "save and load": "a training state can be saved and loaded",
    "another ring size": "another number of ranks can load a checkpoint",
    "another order of parameters": "a run with its parameters in another order, or frozen, can load a checkpoint",
    "fp64 parameters": "parallelize() trains fp64 parameters in fp64",
    "fp64 clipping": "parallelize(max_grad_norm=...) accepts a model with fp64 parameters",
    "tied parameters": "parallelize() accepts a model with one parameter in two places",
    "parameters of some ranks": "a rank need not use a parameter that other ranks use in the same step",
    "frozen parameters": "parallelize() accepts a model with frozen parameters",
    "a lost rank": "if a rank dies, the other ranks survive and raise RingPeerError",
}
"""Every capability and its meaning."""

Test = TypeVar("Test", bound=Callable[..., Any])


def requires(*capabilities: str) -> Callable[[Test], Test]:
    """Skip a test, or all tests of a suite, if the adapter lacks one of these capabilities.

    ``pytest.mark.requires`` does the same to a parameter of a test.
    """
    _check_known(capabilities)
    return partial(_mark_tests, pytest.mark.requires(*capabilities))


def core(test: Test) -> Test:
    """Mark a test, or all tests of a suite, as core behaviour, which depends only on code that all adapters share.

    The quick command runs these tests with one adapter (see ``core_in_matrix``). ``pytest.mark.core`` does the same to
    a parameter of a test whose other cases run with every adapter.
    """
    return _mark_tests(pytest.mark.core, test)


def _mark_tests(mark: pytest.MarkDecorator, test: Test) -> Test:
    """Mark a test, or each test of a suite. A mark of the class would also apply to tests of other suites."""
    members = vars(test) if isinstance(test, type) else {"test_": test}
    for name, function in members.items():
        if name.startswith("test_"):
            mark(function)
    return test


class AdapterSuite:
    """Base of the suites.

    Attributes:
        adapter: the adapter's module, by its dotted name.
        without: the capabilities that the adapter lacks. Each maps to one sentence with the reason.
        framework_options: keyword arguments for every ``parallelize`` of the suite, in addition to the common ones.
        core_in_matrix: True if another adapter runs the tests of core behaviour. They are then marked ``matrix``, and
            those that are already marked as more cases are left out.
        quick: the names of inherited tests that the quick command runs, with or without parameters; None means all.
            The others are marked ``matrix``.
        more_cases: False for a further strategy of an adapter, which runs no test that is marked as more cases.
    """

    adapter: ClassVar[str]
    without: ClassVar[Mapping[str, str]] = {}
    framework_options: ClassVar[Mapping[str, Any]] = {}
    core_in_matrix: ClassVar[bool] = False
    quick: ClassVar[Collection[str] | None] = None
    more_cases: ClassVar[bool] = True

    def __init_subclass__(cls) -> None:
        _check_known(cls.without)
        if "framework_options" in vars(cls):
            cls.framework_options = dict(cls.framework_options)  # ranks get a pickle, which a mapping proxy has not

    def __reduce__(self) -> Any:
        """Send the suite to a rank with the settings of the test class, which a rank may not find by its name."""
        suite = next(cls for cls in type(self).__mro__ if cls.__module__.startswith("ring_backends.testing."))
        settings = {"adapter": self.adapter, "without": dict(self.without)}
        return object.__new__, (suite,), settings | {"framework_options": dict(self.framework_options)}

    def call(
        self, case: AttentionCase, rings: RingSpec = FOUR, layout: LayoutKind = "contiguous", **options: Any
    ) -> LocalCall:
        """On a rank: its call on a cached ring, as of ``ring_backends.testing.calls.call_here``."""
        return call_here(self.adapter, case, rings, layout, **options)

    def new_call(
        self, rings: RingSpec = FOUR, seconds: float = 60.0, case: AttentionCase = SMALL_CASE, **options: Any
    ) -> LocalCall:
        """On a rank: its call on a new ring, for tests that break it."""
        return local_call(self.adapter, self.new_ring(rings, seconds), case, **options)

    def ring(self, rings: RingSpec = FOUR, layout: LayoutKind = "contiguous") -> Ring:
        return ring_of(self.adapter, rings, layout)

    def new_ring(self, rings: RingSpec = FOUR, seconds: float = 60.0, layout: LayoutKind = "contiguous") -> Ring:
        return new_ring(self.adapter, rings, seconds, layout)

    def parallelize(
        self, model: nn.Module | None = None, make_optimizer: Any = unit_sgd, ring: Ring | None = None, **options: Any
    ) -> Any:
        """On a rank: the training state of a model, by default of one parameter, on two rings of two."""
        model = OneParameter() if model is None else model
        ring = self.ring(TWO) if ring is None else ring
        return backend(self.adapter).parallelize(model, make_optimizer, ring, **{**self.framework_options, **options})

    @pytest.fixture(autouse=True)
    def _skip_what_the_adapter_lacks(self, request: pytest.FixtureRequest) -> None:
        reason = why_unavailable(self.adapter)
        if reason is not None:
            pytest.skip(reason)
        needed = {capability for mark in request.node.iter_markers("requires") for capability in mark.args}
        if hasattr(request.node, "callspec"):
            needed |= {getattr(value, "capability", None) for value in request.node.callspec.params.values()}
        for capability in CAPABILITIES:
            if capability in needed and capability in self.without:
                pytest.skip(f"without {capability}: {self.without[capability]}")


def _check_known(capabilities: Any) -> None:
    unknown = sorted(set(capabilities) - set(CAPABILITIES))
    if unknown:
        raise ValueError(f"unknown capabilities {unknown}: choose from {', '.join(map(repr, CAPABILITIES))}.")


@lru_cache
def why_unavailable(adapter: str) -> str | None:
    """The adapter's error message if its framework is not installed, else None."""
    try:
        import_module(adapter)
    except AdapterUnavailableError as error:
        return str(error)
    return None
