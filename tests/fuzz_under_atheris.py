"""The properties of test_fuzz.py, fed by atheris, which looks for inputs that reach code not reached before.

`pip install atheris`, then for example `python tests/fuzz_under_atheris.py -atheris_runs=20000`; libFuzzer's options
may follow, and a folder for the inputs that it finds worth keeping. It stops at the first property that fails.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["ring_backends"]):
    import test_fuzz

TARGETS = (
    test_fuzz.test_attention,
    test_fuzz.test_patterns,
    test_fuzz.test_layouts_and_schedules,
    test_fuzz.test_rings_of_one,
)


def one_input(data: bytes) -> None:
    """The first byte chooses the property; Hypothesis makes its arguments of the others."""
    if data:
        TARGETS[data[0] % len(TARGETS)].hypothesis.fuzz_one_input(data[1:])  # type: ignore[attr-defined]


if __name__ == "__main__":
    # Hypothesis needs more bytes for one example than libFuzzer, left alone, tries within hours.
    folder = Path(tempfile.mkdtemp(prefix="seeds-"))
    for seed in range(128):
        folder.joinpath(str(seed)).write_bytes(random.Random(seed).randbytes(2048))
    atheris.Setup([*sys.argv, "-len_control=0", "-max_len=4096", str(folder)], one_input)
    atheris.Fuzz()
