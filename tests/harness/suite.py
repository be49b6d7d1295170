"""All suites in one class, for the test file of an adapter, which is

>>> class TestNative(AdapterTests):
...     adapter = "ring_backends.adapters.native"
"""

from __future__ import annotations

from ring_backends.testing.arrangement import ArrangementTests
from ring_backends.testing.checkpointing import CheckpointTests
from ring_backends.testing.command import CommandTests
from ring_backends.testing.compiled import CompileTests
from ring_backends.testing.contiguity import ContiguityTests
from ring_backends.testing.copies import CopyTests
from ring_backends.testing.correctness import CorrectnessTests
from ring_backends.testing.errors import ErrorTests
from ring_backends.testing.faults import FaultTests
from ring_backends.testing.gradients import GradientTests
from ring_backends.testing.layouts import LayoutTests
from ring_backends.testing.leaving import LeavingTests
from ring_backends.testing.numbers import NumberTests
from ring_backends.testing.saving import SavingTests
from ring_backends.testing.soak import SoakTests
from ring_backends.testing.stepping import SteppingTests
from ring_backends.testing.together import TogetherTests
from ring_backends.testing.traffic import TrafficTests
from ring_backends.testing.training import TrainingTests


class AdapterTests(
    LeavingTests,
    CommandTests,
    CompileTests,
    TrainingTests,
    TogetherTests,
    SteppingTests,
    SavingTests,
    CopyTests,
    SoakTests,
    FaultTests,
    ErrorTests,
    TrafficTests,
    ArrangementTests,
    LayoutTests,
    ContiguityTests,
    NumberTests,
    CheckpointTests,
    GradientTests,
    CorrectnessTests,
):
    """Everything that an adapter has to do. It needs the fixture ``world`` of :mod:`ring_backends.testing.plugin`."""
