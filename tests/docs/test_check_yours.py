"""docs/check_yours.py: its definition, and its verdicts on the packages that docs/check-yours.md shows."""

from __future__ import annotations

import os
import re
import runpy
from importlib.util import find_spec

import pytest
import torch
from command_line import ROOT, output_of

from ring_backends import dilated_attention

DOCS = ROOT / "docs"
PROGRAM = DOCS / "check_yours.py"
PACKAGES = ("torchscale", "dilated_attention_pytorch")

pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="this tree has no docs/")


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("seq_len", [32, 29])
def test_the_definition(is_causal, seq_len):
    """It agrees with this package, also for uncovered positions, uneven segments, offsets and pads."""
    program = runpy.run_path(str(PROGRAM))
    branches = [(6, 4), (16, 2)]
    is_pad = (torch.arange(seq_len) % 5 == 3).expand(2, -1)

    def theirs(*tensors):
        return program["definition"](*tensors, branches, lambda head, rate: head // -(-4 // rate), is_causal, is_pad)

    def ours(*tensors):
        options = {"offset": "block", "is_causal": is_causal, "key_padding_mask": is_pad}
        return dilated_attention(*tensors, *zip(*branches, strict=True), **options)

    results = []
    for function in (theirs, ours):
        tensors = program["inputs"](seq_len)
        out = function(*tensors)
        grad = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
        results.append([out.detach(), *torch.autograd.grad(out, tensors, grad)])
    assert program["largest_difference"](*results) < 1e-12


def verdicts(text: str) -> list[str]:
    """The lines of the program, without the measured differences and without torch's release."""
    lines = re.findall(r"^(?:torchscale: .*|dilated-attention.*|torch context|  (?:right|WRONG|raises) .*)", text, re.M)
    return [line.partition(": off by")[0] for line in lines]


@pytest.mark.matrix(reason="starts processes, and needs packages of others")
def test_the_verdicts_of_the_page(tmp_path):
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing and "RING_BACKENDS_NEEDS_PEERS" in os.environ:
        pytest.fail(f"RING_BACKENDS_NEEDS_PEERS is set, but {missing[0]} is not installed")
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    shown = verdicts((DOCS / "check-yours.md").read_text(encoding="utf-8"))
    assert len(shown) == 16
    assert verdicts(output_of([str(PROGRAM)], tmp_path, timeout=280)) == shown
