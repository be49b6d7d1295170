"""Loads the harness as a plugin, selects test files by framework, and reports the duration of each file."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

# This has to precede the import of the plugin, so that pytest rewrites the assertions of the harness.
pytest.register_assert_rewrite("ring_backends.testing")

# pytest adds this folder to sys.path. With it, kernels/ and adapters/ would be importable, and a library that looks for
# an optional package of that name would find one. `pythonpath` in setup.cfg adds the folders of the tests themselves.
sys.path[:] = [folder for folder in sys.path if folder != str(Path(__file__).parent)]

pytest_plugins = ["ring_backends.testing.plugin", "pytester"]

FRAMEWORKS = ("fsdp", "deepspeed", "fairscale")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--framework",
        type=lambda text: text.split(","),
        metavar="NAMES",
        help=f"collect only the files test_NAME*.py of {', '.join(FRAMEWORKS)}; none: all other files",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    chosen = config.getoption("--framework")
    if chosen is None or collection_path.is_dir():
        return None
    own = next((name for name in FRAMEWORKS if collection_path.name.startswith(f"test_{name}")), "none")
    return True if own not in chosen else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print one line per file: the number of passed tests, and the sum of their durations over all workers."""
    passed: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                file = report.nodeid.partition("::")[0]
                passed[file] += report.when == "call" and report.passed
                seconds[file] += report.duration
    terminalreporter.section("tests by file")
    for file, duration in sorted(seconds.items()):
        terminalreporter.line(f"{file:40} {passed[file]:5} passed {duration:7.1f} s")
