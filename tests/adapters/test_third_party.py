"""An adapter of another distribution is built, installed, found by its entry point, and tested with the harness.

The distribution is in third_party_adapter/. These tests do not import it from there. They install its wheel into a
folder that only the started processes have on their path.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from command_line import ROOT, environment, output_of

SOURCE = Path(__file__).with_name("third_party_adapter")

pytestmark = pytest.mark.matrix(reason="builds and installs a distribution, and runs a suite in it")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which pip installed the wheel."""
    folder = tmp_path_factory.mktemp("third_party")
    shutil.copytree(SOURCE, folder / "source", ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    run(folder, "-m", "pip", "wheel", *offline, "--wheel-dir", str(folder / "dist"), str(folder / "source"))
    (wheel,) = (folder / "dist").iterdir()
    assert wheel.name == "ring_backends_unbatched-1.0-py3-none-any.whl"
    run(folder, "-m", "pip", "install", *offline, "--target", str(folder / "site"), str(wheel))
    return folder / "site"


def run(cwd: Path, *arguments: str, site: Path | None = None) -> str:
    """Run Python in ``cwd`` with ``site`` and this package on its path. Returns its output."""
    return output_of(arguments, cwd, environment(*([] if site is None else [site])), timeout=1100)


def test_the_adapter_is_listed_and_loaded_by_name(installed: Path, tmp_path: Path) -> None:
    program = """
from ring_backends import available_adapters, create_attention
assert available_adapters()["unbatched"] is None, available_adapters()
attention = create_attention("unbatched", [8], [1])
assert type(attention).__name__ == "UnbatchedRingDilatedAttention"
import ring_backends_unbatched
print(ring_backends_unbatched.__file__)
"""
    output = run(tmp_path, "-c", program, site=installed)
    assert Path(output.splitlines()[-1]) == installed / "ring_backends_unbatched.py"


@pytest.mark.timeout(1200)
def test_the_adapter_passes_the_harness(installed: Path, tmp_path: Path, soak: int) -> None:
    for name in ("conftest.py", "test_unbatched.py"):
        shutil.copy(SOURCE / name, tmp_path / name)
    """The tests that depend on the code of an adapter. With ``--soak 2``, also those that all adapters share."""
    chosen = "not matrix and not core" if soak == 1 else "not matrix"
    pytest_options = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", chosen)
    output = run(tmp_path, *pytest_options, "test_unbatched.py", site=installed)
    passed = re.search(r"(\d+) passed", output)
    assert passed is not None, output
    assert int(passed[1]) >= 80, output
    assert not re.search(r"\d+ failed", output), output


def test_the_guide_shows_the_tested_adapter() -> None:
    guide = (ROOT / "ADAPTERS.md").read_text()
    for name in ("ring_backends_unbatched.py", "pyproject.toml", "conftest.py", "test_unbatched.py"):
        assert (SOURCE / name).read_text() in guide, f"ADAPTERS.md does not show {name} as it is"
    assert len((SOURCE / "ring_backends_unbatched.py").read_text().splitlines()) < 60
