"""Every example trains with torch, and one with another framework, and reaches the losses of one rank."""

from __future__ import annotations

import re
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from command_line import ROOT, output_of

from ring_backends import available_adapters

EXAMPLES = ROOT / "examples"
IMPORT = "from ring_backends.adapters import native as backend\n"
WITH_OPTION = ("language_model",)
SIZES = {
    "language_model": (6, 256),
    "genome_encoder": (30, 512),
    "hugging_face": (4, 128),
    "generate": (4, 128),
    "slide_encoder": (12, 400),
}
"""Steps and sequence length of each example."""

RUNS = [*((example, "native") for example in SIZES), ("generate", "deepspeed")]
FP32_TOLERANCE = 1e-4

pytestmark = pytest.mark.matrix(reason="starts four processes per case; the harness tests training with every adapter")


def train(example: str, framework: str, num_ranks: int, folder: Path) -> tuple[list[float], int]:
    """Run an example, with the import line of ``framework`` unless the example has an option for it.

    Returns its losses, and the bytes that it reports for rank 0.
    """
    text = (EXAMPLES / f"{example}.py").read_text(encoding="utf-8")
    assert text.count(IMPORT) == (example not in WITH_OPTION)
    script = folder / f"{example}_{framework}_{num_ranks}.py"
    script.write_text(text.replace(IMPORT, IMPORT.replace("native", framework)), encoding="utf-8")
    steps, seq_len = SIZES[example]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    options = ["--steps", str(steps), "--seq-len", str(seq_len)]
    options += ["--backend", framework] if example in WITH_OPTION else []
    output = output_of([*(torchrun if num_ranks > 1 else []), str(script), *options], folder)
    losses = {int(step): float(loss) for step, loss in re.findall(r"^step (\d+): loss (\S+)$", output, re.M)}
    assert [*losses] == [*range(1, steps + 1)], output
    (sent,) = re.findall(rf"on {num_ranks} ranks; rank 0 sent ([\d,]+) bytes", output)
    return [*losses.values()], int(sent.replace(",", ""))


@cache
def train_alone(example: str) -> list[float]:
    """The losses of an example on one rank, without a launcher."""
    with tempfile.TemporaryDirectory() as folder:
        losses, sent = train(example, "native", 1, Path(folder))
    assert sent == 0
    return losses


@pytest.mark.parametrize(("example", "framework"), RUNS)
def test_two_ranks_have_the_losses_of_one_rank(example: str, framework: str, tmp_path: Path) -> None:
    if example == "hugging_face" and find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    if reason := available_adapters()[framework]:
        pytest.skip(f"{framework}: {reason}")
    losses, sent = train(example, framework, 2, tmp_path)
    assert losses[-1] < losses[0]
    assert losses == pytest.approx(train_alone(example), abs=FP32_TOLERANCE)
    assert sent > 0


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SIZES} == {example for example, _ in RUNS}
