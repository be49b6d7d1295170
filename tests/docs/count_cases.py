"""Count the test cases of each file, for tables in the documentation.

``python tests/docs/count_cases.py tests/adapters/test_native.py -k "lost or late"`` accepts the arguments of
pytest. The table has a column for the cases of the quick command, and one for those of the matrix.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections import Counter, defaultdict

import pytest

SETS = ("quick", "matrix")


class CountCases:
    """A pytest plugin that counts the collected cases by file and set."""

    def __init__(self) -> None:
        self.by_file: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            chosen = "matrix" if item.get_closest_marker("matrix") else "quick"
            self.by_file[item.nodeid.partition("::")[0]][chosen] += 1


def main(arguments: list[str]) -> int:
    os.environ.pop("PYTEST_ADDOPTS", None)
    counts, output = CountCases(), io.StringIO()
    with contextlib.redirect_stdout(output):
        status = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *arguments], plugins=[counts])
    if status:
        print(*output.getvalue().splitlines()[-30:], sep="\n", file=sys.stderr)
        return int(status)
    print(f"| file | {' | '.join(SETS)} | all |\n|---|{'---:|' * (len(SETS) + 1)}")
    total = sum(counts.by_file.values(), Counter[str]())
    for file, cases in [*sorted(counts.by_file.items()), ("all", total)]:
        print(f"| {file} | {' | '.join(str(cases[name]) for name in SETS)} | {cases.total()} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
