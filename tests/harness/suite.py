"""All suites in one class. The test file of an adapter needs only

>>> class TestNative(AdapterTests):
...     adapter = "ring_backends.adapters.native"
"""

from __future__ import annotations

from ring_backends.testing.activation_checkpointing import ActivationCheckpointTests
from ring_backends.testing.arrangement import ArrangementTests
from ring_backends.testing.bad_arguments import BadArgumentTests
from ring_backends.testing.compiled import CompileTests
from ring_backends.testing.contiguity import ContiguityTests
from ring_backends.testing.copies import CopyTests, ModelCopyTests
from ring_backends.testing.correctness import CorrectnessTests, EdgeCaseTests
from ring_backends.testing.faults import FaultTests, LostPeerTests
from ring_backends.testing.layouts import LayoutTests
from ring_backends.testing.messages import MessageTests
from ring_backends.testing.mismatches import MismatchTests
from ring_backends.testing.passing_on import PassingOnTests
from ring_backends.testing.process_exit import ProcessExitTests
from ring_backends.testing.soak import SoakTests
from ring_backends.testing.special_values import SpecialValueTests
from ring_backends.testing.traffic import TrafficTests
from ring_backends.testing.train_command import TrainCommandTests
from ring_backends.testing.training import TrainingTests
from ring_backends.testing.training_checkpoints import CheckpointErrorTests, TrainingCheckpointTests
from ring_backends.testing.training_mismatches import TrainingMismatchTests
from ring_backends.testing.training_steps import EarlyStepTests, TrainingStepTests
from ring_backends.testing.unequal_ranks import UnequalRankTests, UnusedParameterTests


class TransportTests(
    CompileTests,
    CopyTests,
    FaultTests,
    BadArgumentTests,
    MismatchTests,
    LostPeerTests,
    MessageTests,
    TrafficTests,
    ArrangementTests,
    LayoutTests,
    PassingOnTests,
    ContiguityTests,
    SpecialValueTests,
    ActivationCheckpointTests,
    EdgeCaseTests,
    CorrectnessTests,
):
    """All suites of ``initialize`` and ``ring_pass``: results, traffic and errors of calls. None trains."""


class AllTrainingTests(
    TrainingTests,
    UnequalRankTests,
    TrainingMismatchTests,
    TrainingStepTests,
    EarlyStepTests,
    UnusedParameterTests,
    ModelCopyTests,
    TrainingCheckpointTests,
    CheckpointErrorTests,
):
    """All suites of ``parallelize``. Inherit them once more for each further strategy of a framework."""


EVERY_ADAPTER = (
    "test_a_message_of_another_hop_is_not_delivered",
    "test_a_message_waits_for_a_late_rank",
    "test_a_wait_ends_at_its_timeout",
    "test_every_byte_of_a_message_arrives",
    "test_gradients_are_those_of_the_whole_batch",
    "test_hops",
    "test_hops_counted_by_hand",
    "test_micro_batches_add_up_to_one_batch",
    "test_options_reach_the_ring",
    "test_parameters_in_another_order_get_their_own_states[groups]",
    "test_parts_that_are_frozen_in_some_steps[bf16-evaluated]",
    "test_positions_and_states_are_passed_on",
    "test_replicas_stay_the_same",
    "test_ring_and_data_ranks",
    "test_some_edge_cases_match_the_definition",
    "test_the_checkpoint_of_another_model_is_refused_by_name",
    "test_the_norm_of_the_whole_gradient_is_clipped",
    "test_training_resumes_from_a_checkpoint",
)
"""The tests that the quick command runs with fsdp, deepspeed and fairscale. With native, it runs all suites."""

A_GRADIENT = ("test_gradients_are_those_of_the_whole_batch[zigzag-2x2-torch.float32]",)
"""The test that the quick command runs with every further strategy."""


class AdapterTests(ProcessExitTests, TrainCommandTests, SoakTests, AllTrainingTests, TransportTests):
    """All tests of an adapter. They need the fixtures of :mod:`ring_backends.testing.plugin`."""
