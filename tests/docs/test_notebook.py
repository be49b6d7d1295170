"""Runs the code cells of the example notebook in order, in one process and without Jupyter."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from command_line import ROOT, environment, output_of

NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"


@pytest.mark.matrix(reason="starts three processes")
@pytest.mark.skipif(find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_the_cells_of_the_notebook_run(tmp_path: Path) -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    codes = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] for cell in cells if cell["cell_type"] == "code")
    (tmp_path / "cells.py").write_text("\n".join(codes), encoding="utf-8")
    printed = output_of(["cells.py"], tmp_path, environment(MPLBACKEND="agg"))
    assert "rank 0 of 2 sent" in printed
    assert "rank 1 of 2 sent 0 bytes, and the outputs agree" in printed
    first, last = map(float, re.findall(r"loss (\S+) in the first step, (\S+) in the last", printed)[0])
    assert last < 0.8 * first
    (accuracy,) = re.findall(r"(\d+)% of the tiles have the right class", printed)
    assert int(accuracy) > 90  # by its own embedding alone, a tile gets the right class with probability 84 %
    for name in ("pattern", "predicted", "looks"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
