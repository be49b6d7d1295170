"""Suites of hops over the strict stand-in for NCCL (:mod:`ring_backends.testing.nccl_stand_in`). No GPU runs here.

A test file imports the fixtures too, and inherits the suites for its adapter.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import lru_cache

import pytest

from ring_backends.testing import nccl_stand_in
from ring_backends.testing.activation_checkpointing import ActivationCheckpointTests
from ring_backends.testing.contiguity import ContiguityTests
from ring_backends.testing.correctness import CorrectnessTests, EdgeCaseTests
from ring_backends.testing.faults import FaultTests, LostPeerTests
from ring_backends.testing.layouts import LayoutTests
from ring_backends.testing.messages import MessageTests
from ring_backends.testing.mismatches import MismatchTests
from ring_backends.testing.passing_on import PassingOnTests
from ring_backends.testing.traffic import TrafficTests
from ring_backends.testing.world import World

Worlds = Callable[[int], World]

__all__ = ["BlockingHopTests", "HopTests", "RingPassTests", "blocking_worlds", "pair", "simulated_worlds", "world"]


def install_blocking() -> None:
    """Let the host wait for hops, which then raise their errors in the call that waits."""
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    nccl_stand_in.install()


@contextlib.contextmanager
def _worlds(adapters: list[str], prepare: Callable[[], None]) -> Iterator[Worlds]:
    with contextlib.ExitStack() as stack:
        yield lru_cache(lambda size: stack.enter_context(World(size, preload=adapters, prepare=prepare)))


@pytest.fixture(scope="module")
def simulated_worlds(adapters: list[str]) -> Iterator[Worlds]:
    """Worlds of ranks with a simulated GPU each."""
    with _worlds(adapters, nccl_stand_in.install) as worlds:
        yield worlds


@pytest.fixture(scope="module")
def blocking_worlds(adapters: list[str]) -> Iterator[Worlds]:
    """The same, with TORCH_NCCL_BLOCKING_WAIT."""
    with _worlds(adapters, install_blocking) as worlds:
        yield worlds


@pytest.fixture(scope="module")
def world(simulated_worlds: Worlds) -> World:
    return simulated_worlds(4)


@pytest.fixture(scope="module")
def pair(simulated_worlds: Worlds) -> World:
    return simulated_worlds(2)


class RingPassTests(MessageTests, TrafficTests):
    """The suites that an adapter's ring pass decides. NCCL has no tags, and a first message waits within the post."""

    more_cases = False
    quick = ()
    test_a_message_of_another_hop_is_not_delivered = None
    test_a_message_waits_for_a_late_rank = None
    test_a_wait_ends_at_its_timeout = None


class HopTests(
    RingPassTests,
    LayoutTests,
    PassingOnTests,
    ContiguityTests,
    ActivationCheckpointTests,
    EdgeCaseTests,
    CorrectnessTests,
):
    """The suites whose calls exchange messages.

    The simulated GPU cannot compile, and its kernels read no NaN. It loses results in bf16 if a second dispatch mode,
    such as that of selective checkpointing, is active.
    """

    test_gradients_in_bf16_on_the_wire_of_groups = None


class BlockingHopTests(FaultTests, LostPeerTests, MismatchTests):
    """The suites of errors that a call raises itself, which over NCCL needs TORCH_NCCL_BLOCKING_WAIT.

    Without it, the errors of calls are those in ``test_nccl.py``. The stand-in does not notice that a peer has died.
    """

    more_cases = False
    quick = ()
    test_a_rank_that_dies_is_reported_at_once = None

    @pytest.fixture
    def world(self, blocking_worlds: Worlds) -> World:
        return blocking_worlds(4)

    @pytest.fixture
    def pair(self, blocking_worlds: Worlds) -> World:
        return blocking_worlds(2)
