"""Put one small fault after another into the package or into an adapter, and see whether the tests fail.

``python tests/mutants/run_mutants.py --jobs 2`` needs an environment with all frameworks, such as
``.tox/quick``, and Python 3.11 or newer. It works on copies of the checkout. ``mutants.toml`` lists faults of the
package, and ``adapter_mutants.toml`` faults of an adapter of another distribution. The tests that a list names for a
fault run as in ``tox run -m test``, and if they pass, those that only ``tox run -e all`` runs, until one fails. The run
ends with a table by room.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import tomllib

ROOT = Path(__file__).resolve().parents[2]
FURTHER_ADAPTER = re.compile("test_(fsdp|deepspeed|fairscale)")
SECONDS = 600
"""The longest time of a command. A command that takes longer counts as failed."""

Mutant = dict[str, Any]


def copy_checkout(folder: Path) -> Path:
    """Copy the files of the working tree that git does not ignore, and links as links."""
    list_files = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(list_files, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in names:
        if name and os.path.lexists(ROOT / name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def failing_test(tree: Path, arguments: str, mark: str, triton: str | None) -> str | None:
    """Run pytest on a copy until a test fails. Returns the name of this test, or None."""
    python = triton if "triton" in arguments and triton else sys.executable
    command = [python, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", mark, *shlex.split(arguments)]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"TRITON_INTERPRET": "1"} if python == triton else {}
    with tempfile.TemporaryFile("w+") as output:
        to_file: dict[str, Any] = {"stdout": output, "stderr": subprocess.STDOUT}
        try:
            status = subprocess.run(command, cwd=tree, env=environment, timeout=SECONDS, **to_file).returncode
        except subprocess.TimeoutExpired:
            return f"{arguments}: no end within {SECONDS} s"
        output.seek(0)
        text = output.read()
    if status in (0, 5):  # all passed, or none has this mark
        return None
    found = re.search(r"^(?:FAILED|ERROR) (\S+(?:\[[^\n]*?\])?)(?: - |$)", text, re.MULTILINE)
    return found[1] if found else f"{arguments}: exit status {status}: {text[-300:]}"


def read_mutants() -> list[Mutant]:
    """The faults of all lists. Keys at the top of a list hold for each of its faults."""
    mutants = []
    for name in ("mutants", "adapter_mutants"):
        of_all = tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text())
        mutants += [{**of_all, **mutant} for mutant in of_all.pop("mutant")]
    return mutants


def run_mutant(tree: Path, mutant: Mutant, triton: str | None) -> Mutant:
    """Put the fault into a copy, run its tests, and take it out again."""
    file, result = tree / mutant["file"], {name: mutant[name] for name in ("name", "file")}
    text = file.read_text()
    assert text.count(mutant["old"]) == 1, f"{mutant['file']} has changed: renew the mutant {mutant['name']!r}"
    file.write_text(text.replace(mutant["old"], mutant["new"]))
    try:
        for name, arguments in itertools.product(("quick", "rest"), mutant["tests"]):
            of_rest = "matrix and not core" if FURTHER_ADAPTER.search(arguments) else "matrix"
            test = failing_test(tree, arguments, "not matrix" if name == "quick" else of_rest, triton)
            if test is not None:
                return {**result, "found_by": name, "test": test}
    finally:
        file.write_text(text)
    return {**result, "found_by": "none", "test": None}


def table(results: list[Mutant]) -> str:
    """The number of faults in each room, and by what they were found."""
    rooms: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        path = Path(result["file"])
        room = path.parts[1] if path.parts[0] == "ring_backends" else f"adapters/{path.parts[1].removesuffix('.py')}"
        room = "another distribution" if path.parts[0] == "tests" else room
        rooms["public modules" if room.endswith(".py") else room][result["found_by"]] += 1
    rooms["all"] = sum(rooms.values(), Counter[str]())
    counts = (f"| {name} | {x.total()} | {x['quick']} | {x['rest']} | {x['none']} |" for name, x in rooms.items())
    return "\n".join(["| room | faults | found by quick | by rest | not found |", "|---|---:|---:|---:|---:|", *counts])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", default="", help="only faults whose name or file contains this text")
    parser.add_argument("--jobs", type=int, default=1, help="number of faults at a time")
    parser.add_argument("--triton", metavar="PYTHON", help="interpreter with Triton, as .tox/triton/bin/python")
    options = parser.parse_args()
    mutants = [mutant for mutant in read_mutants() if options.k in mutant["name"] or options.k in mutant["file"]]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.jobs):
            trees.put(copy_checkout(Path(folder, str(number))))

        def run(mutant: Mutant) -> Mutant:
            tree = trees.get()
            try:
                result = run_mutant(tree, mutant, options.triton)
            finally:
                trees.put(tree)
            print(*(result[name] for name in ("found_by", "file", "name", "test")), sep=": ", flush=True)
            return result

        results = list(pool.map(run, mutants))
    print(table(results))
    return int(any(result["found_by"] == "none" for result in results))


if __name__ == "__main__":
    sys.exit(main())
