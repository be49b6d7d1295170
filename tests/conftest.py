"""The harness as a plugin, which test files a session collects, and how long each of them took."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

# Before the plugin is imported, so that the harness's own assertions explain themselves.
pytest.register_assert_rewrite("ring_backends.testing")

pytest_plugins = ["ring_backends.testing.plugin", "pytester"]

FRAMEWORKS = ("fsdp", "deepspeed", "fairscale")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--framework",
        choices=("none", *FRAMEWORKS),
        help="collect the files test_FRAMEWORK*.py alone; none: all files but these",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    chosen = config.getoption("--framework")
    if chosen is None or collection_path.is_dir():
        return None
    own = next((name for name in FRAMEWORKS if collection_path.name.startswith(f"test_{name}")), "none")
    return True if own != chosen else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line per file: how many tests passed, and the seconds of all of them, by one process after the other."""
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
