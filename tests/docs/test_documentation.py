"""Runs the examples and programs of the documentation, and checks the options of its commands.

The examples of a page share one namespace. A program is a block whose first line has its name and its command. The test
runs it in a temporary folder. ``sphinx-build -W`` checks links, anchors and names of the API
(``tox run -e docs``, which ``tox run -e all`` includes).
"""

from __future__ import annotations

import configparser
import doctest
import itertools
import re
import shlex
import socket
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer
from command_line import ROOT, environment, output_of

import ring_backends
from ring_backends.cli import app

PACKAGE = Path(ring_backends.__file__).parent
_GUIDES = "README.md ADAPTERS.md CONTRIBUTING.md SECURITY.md bench/README.md bench/NOTES.md"
GUIDES = [ROOT / name for name in _GUIDES.split()]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAM = re.compile(r"# (?P<name>\w+\.py); run it as: (?P<command>[^\n]+)\n")
STAND_INS = [ROOT / "tests" / "integrations", ROOT / "tests" / "integrations" / "stand_ins"]
"""Folders in which gigapath and torchscale are the tests' stand-ins, which need no GPU and no network."""
DOCUMENTED = re.compile(r"^\.\. auto\w+:: (?P<name>ring_backends[\w.]*)$", re.MULTILINE)

pytestmark = pytest.mark.skipif(not PAGES, reason="this tree has no docs/")


def blocks(page: Path, *languages: str) -> list[tuple[int, str]]:
    """The code blocks in these languages, as (line number before the block, text)."""
    text = page.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, block.start("text")), block["text"])
        for block in BLOCK.finditer(text)
        if block["language"] in languages
    ]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def documented_modules() -> list[str]:
    """The modules whose docstrings the API reference shows."""
    named = [match["name"] for page in PAGES for match in DOCUMENTED.finditer(page.read_text(encoding="utf-8"))]
    modules = set()
    for name in named:
        parts = name.split(".")[1:]
        if parts[0] in ring_backends.__all__:
            modules.add(getattr(ring_backends, parts[0]).__module__)
            continue
        # Search for files instead of importing: an import may need a framework.
        while not (PACKAGE.joinpath(*parts).is_dir() or PACKAGE.joinpath(*parts).with_suffix(".py").is_file()):
            parts.pop()
        modules.add(".".join(["ring_backends", *parts]))
    return sorted(modules)


def programs() -> list[Any]:
    """The programs for torchrun. Several pages may show the same one. tests/ring/test_clusters.py runs the others."""
    found = {}
    for page in [*GUIDES, *PAGES]:
        for _, text in blocks(page, "python"):
            head = PROGRAM.match(text)
            if head and head["command"].startswith("torchrun") and text not in found:
                values = head["name"], head["command"], text
                found[text] = pytest.param(*values, id=f"{name_of(page)}-{head['name']}")
    return [*found.values()]


TORCHRUN = ("-m", "torch.distributed.run")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def check(test: doctest.DocTest) -> None:
    output: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runner.run(test, out=output.append)
    assert not runner.failures, "".join(output)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_examples_of_pages(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    lines: list[str] = []  # keeps the line numbers of the page
    for line, text in blocks(page, "python", "pycon"):
        if text.startswith(">>>"):
            lines += [""] * (line - len(lines)) + text.splitlines()
    test = doctest.DocTestParser().get_doctest("\n".join(lines) + "\n", {}, name_of(page), str(page), 0)
    if not test.examples:
        pytest.skip("the page has no examples")
    check(test)


@pytest.mark.parametrize("name", documented_modules())
def test_examples_of_docstrings(name: str) -> None:
    try:
        module = import_module(name)
    except ring_backends.AdapterUnavailableError as error:
        pytest.skip(str(error))
    tests = [test for test in doctest.DocTestFinder().find(module) if test.examples]
    if not tests:
        pytest.skip("the module has no examples")
    for test in tests:
        check(test)


@pytest.mark.matrix(reason="starts the processes of a program")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "command", "text"), programs())
def test_programs(name: str, command: str, text: str, tmp_path: Path) -> None:
    for library in ("transformers", "matplotlib"):
        if library in text and find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    path = STAND_INS if re.search("^from (gigapath|torchscale)", text, re.MULTILINE) else ()
    (tmp_path / name).write_text(text, encoding="utf-8")
    command_line = [*TORCHRUN, "--master-port", str(free_port()), *shlex.split(command)[1:]]
    printed = output_of(command_line, tmp_path, environment(*path, HF_HUB_OFFLINE="1"), timeout=280)
    for line in shown_below(text):
        assert without_rounding(line) in without_rounding(printed), f"{line}\nis not in\n{printed}"


def without_rounding(text: str) -> str:
    return re.sub(r"\de-\d\d", "small", text)  # the last bits depend on the machine


def shown_below(program: str) -> list[str]:
    """The lines of output that a page shows below a program."""
    for page in [*GUIDES, *PAGES]:
        _, found, below = page.read_text(encoding="utf-8").partition(program)
        if found and (shown := re.match(r"```\n\n[^\n]*The program prints:\n\n```text\n(.*?)```", below, re.DOTALL)):
            return shown[1].splitlines()
    return []


@pytest.mark.matrix(reason="starts the processes of a program")
@pytest.mark.timeout(300)
def test_two_hosts(tmp_path: Path) -> None:
    """Run the command for two hosts twice on this machine, once per host."""
    page = ROOT / "docs" / "getting-started.md"
    (command,) = {
        line.removeprefix("$ ")
        for _, text in blocks(page, "console")
        for line in text.splitlines()
        if "--nnodes 2" in line and line.endswith("ring.py")
    }
    (program,) = (text for _, text in blocks(page, "python") if text.startswith("# ring.py;"))
    (tmp_path / "ring.py").write_text(program, encoding="utf-8")
    here = command.replace("host0:29500", f"127.0.0.1:{free_port()}")
    here = here.replace("--nproc-per-node 4", "--nproc-per-node 1")
    assert "127.0.0.1" in here
    assert "--nproc-per-node 1 " in here
    arguments = [*TORCHRUN, "--local-addr", "127.0.0.1", *shlex.split(here)[1:]]
    with ThreadPoolExecutor(2) as hosts:
        output = "".join(hosts.map(lambda _: output_of(arguments, tmp_path), range(2)))
    assert "rank 0 of 2" in output
    assert "rank 1 of 2" in output


def test_shown_imports_are_short() -> None:
    """Pages and examples import from ``ring_backends`` or a module in it, or name an adapter or an integration."""
    pages = [*GUIDES, *PAGES, *(ROOT / "examples").glob("*.py")]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    shown = {name for text in texts for name in re.findall(r"(?:from|import) (ring_backends[\w.]*)", text)}
    of_folders = tuple(f"ring_backends.{folder}." for folder in ("adapters", "integrations", "testing"))
    assert [name for name in shown if name.count(".") > 1 + name.startswith(of_folders)] == []


def test_the_readme_is_short_and_shows_a_picture_and_an_example_first() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 130
    first = "\n".join(lines[:45])
    for shown in ("](docs/ring.svg)", "pip install .", "**Measured:**", "**Status:**", "The program prints:"):
        assert shown in first


def test_the_first_example_is_the_same_program_everywhere() -> None:
    """With its output. ``test_programs`` runs it, and compares the output."""
    pages = [ROOT / "README.md", *(ROOT / "docs" / name for name in ("index.md", "getting-started.md"))]
    shown = {re.search(r"^```python\n# ring\.py;.*?^```text\n.*?^```$", page.read_text(encoding="utf-8"), re.M | re.S)
             for page in pages}  # fmt: skip
    assert len({match and match[0] for match in shown}) == 1
    assert None not in shown


def test_the_rooms_are_those_of_the_import_contract() -> None:
    """docs/architecture.md lists the rooms in the order of the contract in setup.cfg."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("## The rooms")[2].partition("![")[0]
    listed = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    assert listed == re.findall(r"\w+", config["importlinter:contract:order"]["layers"])


@pytest.mark.parametrize("page", [*GUIDES, *PAGES], ids=name_of)
def test_named_source_files_exist(page: Path) -> None:
    """A path in backticks, such as ``engine/call.py``, is relative to the package, the repository or the page."""
    named = re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|md|json|cfg))`", page.read_text(encoding="utf-8"))
    missing = {path for path in named if not any((base / path).exists() for base in (PACKAGE, ROOT, page.parent))}
    assert not missing


@pytest.mark.parametrize("page", [*GUIDES, *PAGES], ids=name_of)
def test_shown_options_of_commands_exist(page: Path) -> None:
    group: Any = typer.main.get_command(app)
    for line, text in blocks(page, "console", "bash", "sh"):
        for command in text.replace("\\\n", " ").splitlines():
            words = re.split(r"\s+", command.partition(" # ")[0])
            for index, (program, name) in enumerate(itertools.pairwise(words[1:]), 2):
                if program in ("ring-backends", "ring_backends") and name in group.commands:
                    known = {flag for option in group.commands[name].params for flag in option.opts}
                    used = {word.partition("=")[0] for word in words[index:] if word.startswith("--")}
                    assert used <= known, f"{name_of(page)}, line {line}: {command}"
