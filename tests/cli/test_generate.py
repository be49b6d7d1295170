"""``ring-backends generate`` continues a text with what ``train`` has saved, on any number of ranks alike."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command_line import ROOT, check_refusal, output_of, run
from native_ranks import on_ring

from ring_backends import Ring, available_adapters
from ring_backends.adapters import native
from ring_backends.cli.generator import draw, generate, read_options
from ring_backends.cli.language_model import LongNetLM
from ring_backends.cli.train import TrainOptions
from ring_backends.testing.marks import matrix_but
from ring_backends.testing.world import World

PROMPT = b"a prompt of thirty bytes or so."


def make_model(ring: Ring) -> LongNetLM:
    torch.manual_seed(0)
    options = TrainOptions(embed_dim=32, segment_lengths=(8, 64), dilation_rates=(1, 3))
    return LongNetLM(options, native, ring).double().eval()


def continued(ring: Ring, text: bytes = PROMPT, **options: Any) -> list[int]:
    given: Any = SimpleNamespace(**{"max_new_tokens": 12, "temperature": 0.9, "top_p": 0.9, "seed": 3, **options})
    return [*generate(make_model(ring), ring, text, given, torch.device("cpu"))]


@pytest.mark.parametrize("layout", matrix_but("zigzag", of=("contiguous", "zigzag")))
@pytest.mark.parametrize("text", matrix_but(PROMPT, of=(PROMPT, b"a")))
def test_two_ranks_draw_what_one_draws(pair: World, layout: str, text: bytes) -> None:
    expected = continued(Ring(), text)
    assert len(expected) == 12
    assert pair.run(on_ring, continued, text, layout=layout) == [expected] * 2


def test_the_likeliest_byte_is_that_of_whole_calls() -> None:
    model, text = make_model(Ring()), [*PROMPT]
    with torch.no_grad():
        for _ in range(12):
            text.append(int(model(torch.tensor([text]), len(text))[0, -1].argmax()))
    assert continued(Ring(), temperature=0.0) == text[len(PROMPT) :]


def test_top_p_leaves_out_the_unlikely() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    random = torch.Generator().manual_seed(0)
    drawn = [draw(logits, 1.0, 0.7, random) for _ in range(400)]
    assert set(drawn) == {0, 1}
    assert abs(drawn.count(0) / 400 - 0.5 / 0.8) < 0.1


SIZES = "--seq-len 512 --steps 2 --embed-dim 16 --heads 2"


def train(arguments: str, cwd: Path) -> None:
    output_of(f"-m ring_backends train {SIZES} {arguments}".split(), cwd)


@pytest.mark.matrix(reason="starts four processes, one after another")
def test_a_checkpoint_of_train(tmp_path: Path) -> None:
    train("--save model.pt --window-lengths none,64,none", tmp_path)
    texts = []
    for ranks in (1, 2):
        arguments = f"generate model.pt --prompt import --max-new-tokens 9 --nproc-per-node {ranks} --json out.json"
        done = run(["-m", "ring_backends", *arguments.split()], tmp_path)
        assert done.returncode == 0, done.stderr
        assert "9 bytes, " in done.stderr
        result = json.loads((tmp_path / "out.json").read_text())
        assert result["ring_size"] == ranks
        assert done.stdout == result["text"] + "\n"
        texts.append(result["bytes"])
    assert texts[0] == texts[1]


LOADED = """
import torch
from pathlib import Path
from ring_backends.adapters import native
from ring_backends.cli.generator import load_model, read_options
from ring_backends.cli.training_run import parameters_sha256

path = Path("model")
model = load_model(path, read_options(path), native, native.initialize(), torch.device("cpu"))
print(parameters_sha256(model.state_dict()))
"""


@pytest.mark.matrix(reason="trains with every adapter")
@pytest.mark.parametrize("backend", ["fsdp", "deepspeed", "fairscale"])
def test_checkpoints_of_other_adapters(tmp_path: Path, backend: str) -> None:
    """One rank reads the parameters that two ranks have written."""
    if reason := available_adapters()[backend]:
        pytest.skip(reason)
    pytest.importorskip("numpy", reason="FSDP saves with NumPy")
    train(f"--nproc-per-node 2 --backend {backend} --save model --json train.json", tmp_path)
    trained = json.loads((tmp_path / "train.json").read_text())
    assert output_of(["-c", LOADED], tmp_path).split()[-1] == trained["parameters_sha256"]


@pytest.mark.matrix(reason="trains until the model knows a document")
def test_the_commands_of_the_documentation(tmp_path: Path) -> None:
    page = ROOT / "docs" / "decoding.md"
    if not page.exists():
        pytest.skip("this tree has no docs/")
    block = page.read_text().partition("```console\n")[2].partition("```")[0]
    lines = block.splitlines()
    commands = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    for command in commands:
        command = command.replace("ring-backends", "python -m ring_backends").replace("python ", f"{sys.executable} ")
        done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == lines[len(commands) :]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("none.pt --prompt a", "checkpoint = 'none.pt': does not exist"),
        ("model.pt", "--prompt: give either --prompt TEXT or --prompt-file FILE"),
        ("model.pt --prompt a --prompt-file b", "--prompt: give either"),
        ("model.pt --prompt=", "--prompt: is empty"),
        ("model.pt --prompt-file absent", "--prompt-file: prompt_file = 'absent': No such file"),
        ("model.pt --prompt a --temperature -1", "--temperature: temperature = -1.0: must be at least 0"),
        ("model.pt --prompt a --top-p 0", "--top-p: top_p = 0.0: must be above 0"),
    ],
)
def test_invalid_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.pt").write_text("")
    check_refusal(message, f"generate {arguments}")


def test_a_checkpoint_without_options(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model.pt.options.json is missing, so `train` did not write this checkpoint"):
        read_options(tmp_path / "model.pt")
