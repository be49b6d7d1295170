"""Every text model of transformers equals one process on a ring of two ranks, or is refused by name."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from command_line import ROOT
from native_ranks import world_of
from small_models import transformers
from tiny_models import Kind, TinyModel, models
from transformers_checks import FIRST, alone, compare, make_batch, on_ring
from transformers_checks import PRELOAD as PRELOAD
from transformers_sweep import COMMAND, counts, section, sections_of, sweep_models, table

from ring_backends.testing.world import World

PAGE = ROOT / "docs" / "hugging-face-models.md"
PARTS: dict[Kind, int] = {"causal": 8, "masked": 2, "token": 2, "sequence": 2, "base": 4}
"""The number of tests per kind, which pytest-xdist distributes."""

LEAST_EQUAL = 0.3
MOST_UNTESTED: dict[Kind, float] = {"causal": 0.1, "masked": 0.1, "token": 0.1, "sequence": 0.1, "base": 0.3}
MOST_UNCHECKED = 0.05
"""Fractions of the classes of a part, and of the further checks. A sweep that builds nothing must not pass.

The page says of each class whether it is equal. Models without a head need images or sound more often.
"""


two = world_of(2)


@pytest.mark.matrix(reason="runs over two hundred model classes")
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("kind", "part"), [(kind, part) for kind, number in PARTS.items() for part in range(number)])
def test_classes(two: World, kind: Kind, part: int, soak: int) -> None:
    """Most classifiers and models without a head have the layers of a language model."""
    if soak == 1 and (kind not in ("causal", "masked") or part):
        pytest.skip("most causal models, classifiers and models without a head take minutes; use --soak 2")
    rows = sweep_models(two, models(kind)[part :: PARTS[kind]])
    print(f"{table(rows)}\n\n{counts(rows)}")
    defects = [row for row in rows if row.defects]
    if defects:
        pytest.fail(f"{len(defects)} classes are neither equal nor refused:\n{table(defects)}", pytrace=False)
    found = Counter(section(row) for row in rows)
    assert found["Equal"] >= LEAST_EQUAL * len(rows), counts(rows)
    assert found["Not tested"] <= MOST_UNTESTED[kind] * len(rows), counts(rows)
    checks = [verdict.status for row in rows for verdict in row.checks.values()]
    assert checks.count("NOT BUILT") <= MOST_UNCHECKED * len(checks), counts(rows)
    if is_of_this_release():
        written = sections_of(PAGE.read_text(encoding="utf-8"))
        # A slow machine may not build a class in time.
        tested = [row for row in rows if "Not tested" not in (section(row), written.get(row.model.name))]
        differ = {row.model.name: section(row) for row in tested if written.get(row.model.name) != section(row)}
        assert not differ, f"{PAGE.name} is out of date; run {COMMAND}"


@pytest.mark.matrix(reason="starts two ranks")
def test_a_wrong_result_is_found(two: World) -> None:
    """With shorter segments, logits, gradients and loss differ."""
    model = TinyModel("LlamaForCausalLM", "llama", "causal")
    (wanted,) = two.run(alone, model, FIRST, ranks=[0])[:1]
    rows = make_batch(FIRST).rows
    for segment_length, status in ((FIRST.seq_len, "EQUAL"), (FIRST.seq_len // 2, "WRONG")):
        by_rank = two.run(on_ring, model, replace(FIRST, segment_length=segment_length))
        assert compare(by_rank, wanted, rows).status == status
    for computed in by_rank:
        computed.logits = wanted.logits
    assert "gradient" in compare(by_rank, wanted, rows).why
    for computed in by_rank:
        computed.gradients = {name: gradient / 2 for name, gradient in wanted.gradients.items()}
    assert compare(by_rank, wanted, rows).why.startswith("loss")


def test_the_page_lists_every_class() -> None:
    if not is_of_this_release():
        pytest.skip(f"{PAGE.name} is of another release of transformers")
    written = sections_of(PAGE.read_text(encoding="utf-8"))
    kinds: tuple[Kind, ...] = ("causal", "masked", "token", "sequence")
    missing = [model for kind in kinds for model in models(kind) if model.name not in written]
    assert not [model.name for model in missing if model.is_for_text()], f"run {COMMAND}"


def is_of_this_release() -> bool:
    return f"Transformers {transformers.__version__} and" in PAGE.read_text(encoding="utf-8")
