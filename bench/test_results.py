"""tables.py and plot.py read the JSON of a real run of one small case."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tables
import typer.testing
from records import read_records

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small table.json."""
    folder = tmp_path_factory.mktemp("results")
    options = ["--smoke", "--seq-lens=256,512", "--contestants=one device", f"--benchmark-json={folder / 'table.json'}"]
    # The marks that select this test must not select its benchmarks.
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(HERE / "bench_one_device.py"), *options, "--rounds=2", "--no-memory"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_statistics_come_from_the_slowest_rank(results: Path) -> None:
    found: list[dict[str, Any]] = json.loads((results / "table.json").read_text())["benchmarks"]
    assert [benchmark["group"] for benchmark in found][:2] == [
        f"{direction}, 256 tokens, fp32, 1 rank" for direction in ("forward", "backward")
    ]
    for benchmark in found:
        assert benchmark["options"]["timer"] == "slowest_rank"
        assert benchmark["extra_info"]["threads"] == 1
        assert benchmark["extra_info"]["bytes"] == [0]
        assert benchmark["extra_info"]["versions"]["torch"]
        assert 0 < benchmark["stats"]["min"] <= benchmark["stats"]["median"]


def test_tables_show_every_call(results: Path) -> None:
    application = typer.Typer()
    application.command()(tables.main)
    shown = typer.testing.CliRunner().invoke(application, [str(results / "table.json")])
    assert shown.exit_code == 0, shown.output
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in shown.output.splitlines() if "one dev" in line
    ]
    assert [line[:3] for line in lines] == [["256", "1", "one device"], ["512", "1", "one device"]]
    first = read_records(results / "table.json")[0]
    assert float(lines[0][3]) == pytest.approx(first.seconds["forward"], rel=0.01)
    refused = typer.testing.CliRunner().invoke(application, [str(results / "table.json"), "--dtype=bf16"])
    assert refused.exit_code == 2


def test_pictures(results: Path) -> None:
    pytest.importorskip("matplotlib")
    import plot

    application = typer.Typer()
    application.command()(plot.main)
    shown = typer.testing.CliRunner().invoke(application, [str(results / "table.json")])
    assert shown.exit_code == 0, shown.output
    drawn = {path.name: path.read_text() for path in results.glob("*.svg")}
    assert set(drawn) == {"by-length-fp32.svg", "by-ring-size-fp32.svg"}
    for text in ("one device", "seconds, forward + backward"):
        assert f"<!-- {text} -->" in drawn["by-length-fp32.svg"]


def test_a_file_without_benchmarks_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text("{}")
    with pytest.raises(ValueError, match="has no benchmarks"):
        read_records(tmp_path / "table.json")
