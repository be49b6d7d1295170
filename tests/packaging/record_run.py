"""Record a passed run of the tests in ring_backends/tested_runs.json: when it ran, on which releases, and how many.

``python tests/packaging/record_run.py FOLDER`` reads the JUnit files of pytest in FOLDER. The environments
``torch211``, ``torch213`` and ``torch-newest`` of tox.ini call it. A new run replaces the earlier run with the same
releases of torch and Python.
"""

from __future__ import annotations

import datetime
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from ring_backends.releases import TESTED, versions

RELEASES = ("torch", "python")
RECORD = Path(__file__).resolve().parents[2] / "ring_backends" / "tested_runs.json"


def count(folder: Path) -> Counter[str]:
    """Add up the numbers of tests in the JUnit files of ``folder``."""
    counts: Counter[str] = Counter()
    for file in sorted(folder.glob("*.xml")):
        for suite in ElementTree.parse(file).getroot().iter("testsuite"):
            counts.update({name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")})
    return counts


def place(run: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The releases of torch and Python, by which runs are ordered and replaced."""
    torch, python = ([int(part) for part in re.findall(r"\d+", run[name].partition("+")[0])[:3]] for name in RELEASES)
    return torch, python[:2]


def main(folder: Path) -> int:
    counts = count(folder)
    failed = counts["failures"] + counts["errors"]
    passed = counts["tests"] - failed - counts["skipped"]
    if failed or not passed:
        print(f"{folder}: {passed} tests passed and {failed} failed; only a passed run is recorded.", file=sys.stderr)
        return 1
    installed = versions()
    run: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "ring_backends": installed["ring_backends"],
        "python": installed["python"],
        **{name: installed[name] for name in TESTED},
        "passed": passed,
        "skipped": counts["skipped"],
    }
    # The file of the checkout: an installed package has the file from when its wheel was built.
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    runs = [other for other in recorded if place(other) != place(run)]
    RECORD.write_text(json.dumps(sorted([*runs, run], key=place), indent=2) + "\n", encoding="utf-8")
    print(f"{RECORD}: recorded {passed} passed tests with torch {run['torch']} on Python {run['python']}.")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
