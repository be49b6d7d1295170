"""Hugging Face's Trainer on rings equals the Trainer on one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import trainer_cases as cases
from native_ranks import assert_near, world_of
from trainer_cases import CASES, assert_equal, run

from ring_backends.testing.marks import THOROUGH, matrix_but
from ring_backends.testing.rings import LAYOUTS
from ring_backends.testing.world import World

PRELOAD = ["transformers.trainer", "transformers.models.llama.modeling_llama", "ring_backends.integrations.trainer"]


two, three, four = (world_of(size) for size in (2, 3, 4))


LONG = pytest.mark.matrix(reason="trains four models")


def test_a_ring_of_two(two: World) -> None:
    assert_equal(two.run(run, "qwen3-packed", 2, "zigzag"), run("qwen3-packed", None))


@LONG
@pytest.mark.parametrize(
    "name", sorted(CASES.keys() - {"llama", "lora", "qwen3-packed", "hybrid-packed", "hybrid-rows"})
)
def test_two_ranks(two: World, name: str) -> None:
    """In one of the layouts. Other tests run those that are left out."""
    assert_equal(two.run(run, name, 2, LAYOUTS[len(name) % 2]), run(name, None))


@LONG
def test_packed_documents_of_a_model_with_recurrent_layers(two: World) -> None:
    """They equal those in rows of their own. One process would mix them up without kernels of other packages."""
    expected = run("hybrid-rows", None)
    for name in ("flops", "predictions", "evaluation loss"):  # of other batches
        expected.pop(name)
    found = two.run(run, "hybrid-packed", 2, "zigzag")
    assert_equal([{name: results[name] for name in expected} for results in found], expected)


@LONG
@pytest.mark.parametrize("name", ["accumulation", "embedding"])
def test_rings_of_one(two: World, name: str) -> None:
    assert_equal(two.run(run, name, 1), run(name, None))


@LONG
@pytest.mark.parametrize("name", ["accumulation", "classifier-lora", "gemma2", "label-smoothing", "loss-function"])
def test_two_by_two(four: World, name: str) -> None:
    expected = run(name, None)
    assert_equal(four.run(run, name, 2, "zigzag"), expected)


@LONG
@pytest.mark.parametrize("name", ["gpt-oss-lora", "mistral-packed", "modernbert"])
def test_three_ranks(three: World, name: str) -> None:
    assert_equal(three.run(run, name, 3, "zigzag"), run(name, None))


@LONG
def test_groups_of_ranks(four: World) -> None:
    """On a ring of four, pairs exchange rows for heads. The heads have sinks, and half of the layers a window."""
    assert_equal(four.run(run, "gpt-oss-lora", 4, "zigzag", ulysses_size=2), run("gpt-oss-lora", None))


@LONG
def test_two_by_two_on_the_axes_of_accelerate(four: World) -> None:
    """Rings on the cp axis, and FSDP2 over the dp_shard and cp axes."""
    assert_equal(four.run(run, "llama", 2, "contiguous", "cp"), run("llama", None))


@LONG
@pytest.mark.parametrize(("strategy", "name"), [("fsdp2", "llama"), ("cp", "router-loss")])
def test_fsdp2(two: World, strategy: str, name: str) -> None:
    """FSDP2 of Accelerate, and its cp axis as the ring."""
    assert_equal(two.run(run, name, 2, "zigzag", strategy), run(name, None))


@THOROUGH
def test_resume(two: World, tmp_path: Path) -> None:
    """A run that is resumed from a training checkpoint goes on as the run that wrote it."""
    expected, _ = cases.resume(str(tmp_path / "one process"), None)
    for uninterrupted, resumed in two.run(cases.resume, str(tmp_path / "rings"), 2):
        assert_equal([uninterrupted, resumed], expected)


@LONG
def test_bf16(two: World) -> None:
    """Rounding of bf16 differs, but by less than the first steps change the loss."""
    expected = cases.bf16_losses(None)
    for found in two.run(cases.bf16_losses, 2):
        assert_near(found, expected, 3e-3)


EVALUATIONS: tuple[tuple[cases.Kind, bool, bool], ...] = (
    ("gpt2", False, False),
    ("gpt2", True, True),
    ("llama", False, True),
    ("llama", True, False),
)


@pytest.mark.parametrize("case", matrix_but(EVALUATIONS[0], of=EVALUATIONS), ids=str)
def test_evaluations_with_short_last_batches(two: World, case: tuple[cases.Kind, bool, bool]) -> None:
    """Repeated sequences do not count, and a ring without labels of its own has the loss of all rings."""
    expected = torch.tensor(cases.evaluations(None, *case))
    for found in two.run(cases.evaluations, 1, *case):
        assert_near(torch.tensor(found), expected, 1e-5)


def test_evaluation_of_packed_rows_with_a_short_last_batch(two: World) -> None:
    """No row of one ring repeats another."""
    loss, num_labels = cases.evaluation_of_packed_rows(None)
    for found in two.run(cases.evaluation_of_packed_rows, 2):
        assert found == (pytest.approx(loss, abs=1e-5), num_labels)


@pytest.mark.parametrize("ring_size", matrix_but(2, of=(2, 1)))
def test_ranks_with_other_weights_have_those_of_rank_0(two: World, ring_size: int) -> None:
    wanted = cases.evaluation_of_other_weights(None)
    assert two.run(cases.evaluation_of_other_weights, ring_size) == [pytest.approx(wanted, abs=1e-5)] * 2


@LONG
def test_evaluation_of_embeddings_with_a_short_last_batch(two: World) -> None:
    """Labels of whole sequences stay as they are."""
    losses = two.run(cases.evaluation_of_embeddings, 1)
    assert losses[0] == losses[1] > 0


@LONG
def test_a_classifier_without_labels(two: World) -> None:
    for ended in two.run(cases.loss_without_labels, 2):
        ended.check(ValueError, "the batch has input_ids, attention_mask, and no labels: there is no loss; add labels.")
