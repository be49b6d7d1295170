"""The installed package has all modules of the tree, under the documented names.

Three directories become one package (setup.cfg, package_dir). A module could therefore be missing in the wheel, or be
in it twice. These tests build the sdist and the wheel from a copy of the tree, and compare them with the tree.
"""

from __future__ import annotations

import ast
import configparser
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import distributions, entry_points
from pathlib import Path
from typing import Any

import pytest
from command_line import ROOT, output_of, run
from packaging.requirements import Requirement

import ring_backends
from ring_backends.testing.marks import THOROUGH

PACKAGE_DIRS = {
    "ring_backends": "ring_backends",
    "adapters": "ring_backends/adapters",
    "tests/harness": "ring_backends/testing",
}
ONE_IS_ENOUGH = pytest.mark.matrix(reason="another process that imports torch")
INSTALLED = pytest.mark.skipif(
    not list(distributions(name="ring-backends")), reason="the checkout is on PYTHONPATH, and nothing is installed"
)
NOT_SOURCE = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")


def tree_files() -> dict[str, Path]:
    """The path in the tree for each installed name of a module and of package data. Symlinks are not followed."""
    return {
        (Path(installed) / path.relative_to(ROOT / source)).as_posix(): path
        for source, installed in PACKAGE_DIRS.items()
        for folder, _, names in os.walk(ROOT / source)
        for path in (Path(folder, name) for name in names)
        if path.suffix == ".py" or path.name in ("py.typed", "tested_runs.json")
    }


def build(kind: str, source: Path, out: Path) -> Path:
    """Build ``source`` with setuptools' PEP 517 hook build_sdist or build_wheel, like pip and tox."""
    out.mkdir()
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    output_of(["-c", code, str(out)], source, {**os.environ})
    (built,) = out.iterdir()
    return built


def built_from_a_copy(kind: str) -> Any:
    """A fixture: the sdist or the wheel of a copy of the tree."""

    @pytest.fixture(scope="module")
    def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
        work = tmp_path_factory.mktemp(kind)
        shutil.copytree(ROOT, work / "tree", symlinks=True, ignore=NOT_SOURCE)
        return build(kind, work / "tree", work / "out")

    return built


sdist, wheel = built_from_a_copy("sdist"), built_from_a_copy("wheel")


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def dist_info(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (entry,) = (n for n in archive.namelist() if n.endswith(f".dist-info/{name}"))
        return archive.read(entry).decode()


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    return Parser().parsestr(dist_info(wheel, "METADATA"))


def requirements(metadata: Message) -> list[Requirement]:
    return [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]


def test_the_wheel_holds_every_module_of_the_tree_and_nothing_else(wheel: Path) -> None:
    packaged = {name for name in names_in(wheel) if ".dist-info/" not in name}
    assert packaged == set(tree_files())


def test_the_tree_files_cover_the_three_directories() -> None:
    expected = {"__init__.py", "py.typed", "adapters/__init__.py", "adapters/native.py", "testing/__init__.py"}
    assert {f"ring_backends/{name}" for name in expected} <= set(tree_files())


@THOROUGH
def test_the_sdist_builds_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    # The sdist has no symlinks, so the build must not need them.
    with tarfile.open(sdist) as archive:
        assert not [member.name for member in archive if member.issym() or member.islnk()]
        # Use the safe filter if Python has it: 3.10.12, 3.11.4, 3.12 and later.
        archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, path: member)
        archive.extractall(tmp_path)
    (tree,) = tmp_path.iterdir()
    assert (tree / Path(__file__).relative_to(ROOT)).is_file()
    assert names_in(build("wheel", tree, tmp_path / "out")) == names_in(wheel)


def imports_of(source: str, modules: set[str]) -> set[str]:
    """The modules that a module imports anywhere, also in a function or for annotations only."""
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            imported |= names if names <= modules else {*names, str(node.module)}
    return imported & modules


def test_no_modules_form_a_circle() -> None:
    """Also through the ``__init__`` of a package, which import-linter does not see."""
    sources = {
        ".".join(Path(name).with_suffix("").parts).removesuffix(".__init__"): path.read_text(encoding="utf-8")
        for name, path in tree_files().items()
        if path.suffix == ".py"
    }
    assert imports_of(sources["ring_backends.releases"], {*sources}) == {"ring_backends"}
    try:
        TopologicalSorter({name: imports_of(text, {*sources}) for name, text in sources.items()}).prepare()
    except CycleError as error:
        pytest.fail(f"a circle: {', imported by '.join(error.args[1])}")


@pytest.mark.skipif((ROOT / "PKG-INFO").exists(), reason="an unpacked sdist holds no symlinks")
def test_the_symlinks_lead_to_the_directories_that_are_installed() -> None:
    assert os.readlink(ROOT / "ring_backends/adapters") == "../adapters"
    assert os.readlink(ROOT / "ring_backends/testing") == "../tests/harness"


def test_entry_points(wheel: Path) -> None:
    written = configparser.ConfigParser()
    written.read_string(dist_info(wheel, "entry_points.txt"))
    assert dict(written["console_scripts"]) == {"ring-backends": "ring_backends.cli:main"}
    modules = pkgutil.iter_modules([str(ROOT / "adapters")])
    adapters = {module.name: f"ring_backends.adapters.{module.name}" for module in modules}
    assert dict(written["ring_backends.adapters"]) == adapters


@INSTALLED
def test_the_installed_entry_points_load() -> None:
    (native,) = entry_points(group="ring_backends.adapters", name="native")
    assert native.load().__name__ == "ring_backends.adapters.native"
    (script,) = entry_points(group="console_scripts", name="ring-backends")
    assert callable(script.load())


def test_hard_requirements_are_torch_typer_and_rich(metadata: Message) -> None:
    assert {req.name for req in requirements(metadata) if req.marker is None} == {"torch", "typer", "rich"}


def test_metadata(metadata: Message) -> None:
    assert metadata["Name"] == "ring-backends"
    assert set(metadata["Requires-Python"].split(",")) == {">=3.10", "<3.15"}
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]


def test_the_version_is_the_same_everywhere(metadata: Message) -> None:
    assert metadata["Version"] == ring_backends.__version__
    assert f"\nversion: {ring_backends.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "installation.md").read_text(encoding="utf-8")
    assert set(re.findall(r"ring_backends-([\w.]+)-py3-none-any\.whl", page)) == {ring_backends.__version__}
    assert f"version {ring_backends.__version__}, not released" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"\n## [{ring_backends.__version__}] - " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_workflows_run_the_commands_of_the_readme_and_of_ci() -> None:
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))]
    commands = {line for text in texts for line in re.findall(r"\brun: *(.+)$", text, re.MULTILINE)}
    (test,) = re.findall(r"^python3 .* -m test$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert commands == {test, test.replace("-m test", "-e release"), ".ci/run"}
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_tox_list_shows_whole_descriptions() -> None:
    """With factors, tox takes each line for one of its own. A continued line would be shown for every factor."""
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    for section in tox.sections():
        text = tox[section].get("description", "")
        lines = text.split("\n")
        assert len(lines) == 1 or lines[0] == ""
        assert all(re.match(r"[a-z\d,]+: ", line) for line in lines[1:]), (section, text)
        assert all(len(line) <= 105 for line in lines), (section, text)


def test_tox_pins_releases_the_package_accepts_and_the_tools_that_dev_installs(metadata: Message) -> None:
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    deps = [
        Requirement(line.rpartition(": ")[2])  # without the factors before the colon
        for section in tox.sections()
        for line in tox[section].get("deps", "").split("\n")
        if line and not line.startswith("{")
    ]
    accepted = {req.name: req.specifier for req in requirements(metadata) if req.name != "ring-backends"}
    for pinned in (req for req in deps if req.specifier and req.name != "numpy"):  # NumPy of Triton's interpreter
        for pin in pinned.specifier:
            if pin.operator == "==":
                assert accepted[pinned.name].contains(pin.version.replace("*", "0")), pinned
            else:  # a tool, with the range of the extra "dev"
                assert pinned.specifier == accepted[pinned.name], pinned
    pinned_names = "torch accelerate deepspeed transformers ruff mypy import-linter numpy"
    assert {req.name for req in deps if req.specifier} == set(pinned_names.split())


def test_a_build_refuses_an_environment_whose_torch_is_too_old(tmp_path: Path) -> None:
    code = (
        f"import sys, sysconfig, runpy; sysconfig.get_path = lambda name: {str(tmp_path)!r}; "
        "script, sys.argv = sys.argv[1], ['setup.py', '--version']; runpy.run_path(script)"
    )
    metadata = tmp_path / "torch-2.8.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    for release, status in (("2.8.0+cu126", 1), ("2.11.0", 0)):
        metadata.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {release}\n")
        done = run(["-c", code, str(ROOT / "setup.py")], ROOT, {**os.environ})
        assert done.returncode == status, done.stderr
        refusal = f"torch {release} is installed, but ring_backends needs torch 2.11 or newer"
        assert (refusal in done.stderr) == (status == 1)


@pytest.mark.skipif("TOX_ENV_NAME" not in os.environ, reason="only tox installs a wheel for the tests")
def test_tox_tests_the_wheel_and_not_the_checkout() -> None:
    installed = Path(ring_backends.__file__).resolve().parent
    assert installed != ROOT / "ring_backends"
    assert installed.parent.name == "site-packages"
    held = {path.relative_to(installed.parent).as_posix() for path in installed.rglob("*") if path.is_file()}
    files = tree_files()
    assert {name for name in held if not name.endswith(".pyc")} == set(files)
    # This detects a wheel that was built before the last edit. record_run.py may have edited the record since.
    copies = {name: installed.parent / name for name in files if name.endswith(".py")}
    assert [name for name, copy in copies.items() if files[name].read_bytes() != copy.read_bytes()] == []


@pytest.mark.parametrize("statement", ["import adapters", "import adapters.native"])
def test_adapters_is_not_a_top_level_package(statement: str) -> None:
    done = run(["-c", statement], ROOT, {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"})
    assert done.returncode != 0
    (error,) = (line for line in done.stderr.splitlines() if line.startswith("ImportError: "))
    assert "from ring_backends.adapters import native" in error


OTHER_MODULES = [pytest.param(f"ring_backends.{name}", marks=ONE_IS_ENOUGH) for name in ("adapters", "testing")]


@pytest.mark.parametrize("module", ["ring_backends", *OTHER_MODULES])
def test_importing_imports_no_framework(module: str, tmp_path: Path) -> None:
    code = (
        "import sys, torch; before = set(sys.modules); "
        "__import__(sys.argv[1]); print(*sorted(set(sys.modules) - before), sep='\\n')"
    )
    done = run(["-c", code, module], tmp_path, {**os.environ})
    assert done.returncode == 0, done.stderr
    added = done.stdout.split()
    assert module in added
    frameworks = ("deepspeed.", "fairscale.", "torch.distributed.fsdp.", "numpy.")
    assert [name for name in added if f"{name}.".startswith(frameworks)] == []


@pytest.mark.parametrize(
    "command",
    [
        pytest.param([sys.executable, "-m", "ring_backends"], marks=ONE_IS_ENOUGH),
        pytest.param(["ring-backends"], marks=INSTALLED),
    ],
)
def test_both_ways_to_call_the_command_line(command: list[str], tmp_path: Path) -> None:
    scripts = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PATH": scripts}
    done = subprocess.run([*command, "--help"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    for subcommand in ("train", "info"):
        assert subcommand in done.stdout
