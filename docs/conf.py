"""Configures Sphinx: pages in Markdown (MyST), and the API reference from the docstrings.

A build needs no network and no framework other than torch. Every warning is an error. A page may include a whole file
of the repository, such as ADAPTERS.md. This module checks the links of an included file that lead into the repository,
and turns them into links to pages.
"""

from __future__ import annotations

import builtins
import re
import sys
from pathlib import Path

import typer
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

import ring_backends
from ring_backends.cli import app as command_line
from ring_backends.releases import TESTED, recorded_runs

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))

import draw_architecture  # noqa: E402
import draw_patterns  # noqa: E402
import draw_ring  # noqa: E402
import draw_ulysses  # noqa: E402

project = "ring_backends"
author = "the ring_backends contributors"
copyright = "the ring_backends contributors; Apache-2.0"
version = release = ring_backends.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
nitpicky = True

html_theme = "furo"
html_title = f"ring_backends {release}"
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["columns.css"]
myst_heading_anchors = 3
pygments_style = "friendly"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_use_type_comments = False
python_maximum_signature_line_length = 100
# The documentation builds without any framework installed.
autodoc_mock_imports = [
    *("deepspeed", "fairscale", "transformers", "matplotlib"),
    "ring_backends.adapters.fairscale.training",  # reads FairScale's signatures when it is imported
]
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Attributes", "params_style")]  # the default reads "size, rank" as a type

# References to names of other projects may stay unresolved: resolving them needs a network. References to names of this
# project must resolve.
# _pytest is the module in which pytest defines its public names.
_ELSEWHERE = r"(torch|collections|contextlib|datetime|types|os|pathlib|typing|typing_extensions|pytest|_pytest)\..*"
_LITERALS = "HeadMode LayoutKind Offset Padding RingOrder RingSize UlyssesSize"  # the docstrings list their values
_SHORT = {
    *dir(builtins),
    *("Any", "Callable", "ClassVar", "Iterable", "Literal", "Mapping", "Path", "Sequence", "timedelta", "Unpack"),
    *("Agreement", "Dataset", "DeviceMesh", "DistributedSampler", "ModuleType", "PathLike", "ProcessGroup", "Tensor"),
    *("WeakTensorKeyDictionary", "WireMemory"),
    *_LITERALS.split(),
}
_INTERNAL = (
    *("joining.AnyInitialize", "joining.Initialize"),
    *("longnet.model._Model", "ring.agreement.Agreement", "testing.capabilities.Test"),
    *("testing.world.Test", "testing.calls.LocalCall", "testing.rings.RingSpec", "testing.strategies.AttentionCase"),
    *("ring.stream_hops.Headers", "ring.stream_hops.StreamHop"),
    *(
        "schedule.branch.BranchSchedule",
        "schedule.exchange.HeadExchange",
        "schedule.travel.Travel",
        "schedule.pattern.Positions",
    ),
)
nitpick_ignore_regex = [
    ("py:.*", _ELSEWHERE),
    ("py:.*", rf"({'|'.join(map(re.escape, sorted(_SHORT)))})"),
    ("py:.*", r"(dist|nn|torch)\..*|(set|tuple)\[.*"),
    ("py:.*", rf"ring_backends\.({'|'.join(map(re.escape, _INTERNAL))})"),
    ("py:mod", r"ring_backends\..*"),
]

# Files of the repository that have a page.
PAGES = {
    "ADAPTERS.md": "adapters.md",
    "SECURITY.md": "security.md",
    "bench/README.md": "benchmarks.md",
    **{f"docs/{path.name}": path.name for path in (ROOT / "docs").glob("*.md")},
}
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>[^)#\s]+)\)")


def _adapt_links(app: Sphinx, path: Path, page: str, content: list[str]) -> None:
    """Turns links of an included file into links to pages. A link to a file without a page becomes the file's name."""
    folder = (Path(app.srcdir) / path).resolve().parent

    def adapt(link: re.Match[str]) -> str:
        text, target = link["text"], link["target"]
        if ":" in target:
            return link[0]
        place = (folder / target).resolve()
        if not place.exists():
            logging.getLogger(__name__).warning("%s links to %s, which does not exist", path, target)
        name = place.relative_to(ROOT).as_posix()
        if name in PAGES:
            return f"[{text}](/{PAGES[name]})"
        return f"`{name}`" if text.strip("`/") == name else f"{text} (`{name}`)"

    content[0] = _LINK.sub(adapt, content[0])


def _keep_summary(app: Sphinx, what: str, name: str, of: object, options: object, lines: list[str]) -> None:
    """Keeps napoleon from reading "rows that each rank sends: int64 [ring size]" as a type and a description."""
    if what in ("attribute", "data", "property") and lines:
        lines[0] = re.sub(r":(?= (?:int64|float64|\[))", ",", lines[0])


class CommandLineOptions(SphinxDirective):
    """Lists every command with its options, as the program defines them."""

    def run(self) -> list[nodes.Node]:
        lines = []
        group = typer.main.get_command(command_line)
        for name, command in sorted(group.commands.items()):
            lines += [f"## {name}", "", *(line.strip() for line in command.help.splitlines()), ""]
            lines += ["| option | default | |", "|---|---|---|"]
            for option in command.params:
                spelled = ", ".join(f"`{flag}`" for flag in (*option.opts, *option.secondary_opts))
                metavar = f" `{option.metavar.replace('|', ' or ')}`" if option.metavar else ""
                default = "" if option.default in (None, False) else f"`{option.default}`"
                required = "required" if option.required else default
                lines.append(f"| {spelled}{metavar} | {required} | {(option.help or '').replace('|', chr(92) + '|')} |")
            lines.append("")
        return self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True)


class TestedRuns(SphinxDirective):
    """The recorded runs of the test suite, as a table."""

    def run(self) -> list[nodes.Node]:
        columns = ("date", "python", *TESTED, "passed", "skipped")
        rows = [["-" if run[name] is None else str(run[name]) for name in columns] for run in recorded_runs()]
        lines = [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]
        return self.parse_text_to_nodes("\n".join(lines))


def _check_pictures(app: Sphinx) -> None:
    """Warns if a picture differs from the one that its module in docs/ would draw now."""
    for module in (draw_architecture, draw_patterns, draw_ring, draw_ulysses):
        if module.PICTURE.read_text(encoding="utf-8") != module.draw():
            message = "%s is out of date: run python docs/%s.py"
            logging.getLogger(__name__).warning(message, module.PICTURE.name, module.__name__)


def setup(app: Sphinx) -> None:
    app.connect("builder-inited", _check_pictures)
    app.add_directive("command-line-options", CommandLineOptions)
    app.add_directive("tested-runs", TestedRuns)
    app.connect("include-read", _adapt_links)
    app.connect("autodoc-process-docstring", _keep_summary, priority=400)  # before napoleon
