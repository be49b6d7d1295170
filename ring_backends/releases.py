"""The releases of Python, torch and the frameworks: those installed here, and those of the recorded test runs.

``tests/packaging/record_run.py`` writes the record, ``tested_runs.json``.
"""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Any

from ring_backends import __version__

TESTED = ("torch", "deepspeed", "fairscale", "transformers")
"""The distributions whose releases a test run records."""


def versions() -> dict[str, str | None]:
    """Return the versions of Python, torch, CUDA, this package and the frameworks. None: not installed."""
    import torch

    found = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "ring_backends": __version__,
    }
    for name in TESTED[1:]:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def recorded_runs() -> list[dict[str, Any]]:
    """The recorded runs of the test suite, oldest releases of torch first."""
    runs: list[dict[str, Any]] = json.loads(files("ring_backends").joinpath("tested_runs.json").read_text("utf-8"))
    return runs


def untested(installed: dict[str, str | None]) -> dict[str, str]:
    """Map each installed release that no recorded run lists to a sentence that says so and names the tested ones.

    Args:
        installed: the result of :func:`versions`.
    """
    runs, sentences = recorded_runs(), {}
    for name in TESTED:
        found = installed.get(name)
        # The part after "+" names the build, such as "2.13.0+cpu".
        tested = list(dict.fromkeys(str(run[name]).partition("+")[0] for run in runs if run[name]))
        if found is not None and found.partition("+")[0] not in tested:
            sentences[name] = f"the tests have not run with {found}; they ran with {', '.join(tested)}"
    return sentences
