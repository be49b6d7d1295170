"""Run the first example of README.md, and compare the output with one device.

``python -m torch.distributed.run --standalone --nproc-per-node 4 tests/docs/readme_example.py``
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

README = Path(__file__).resolve().parents[2] / "README.md"


def main() -> None:
    example = re.search(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert example is not None
    names: dict[str, Any] = {}
    exec(compile(example[1], str(README), "exec"), names)
    torch.testing.assert_close(names["whole"], names["alone"])
    ring = names["ring"]
    assert names["out"].shape[1] * ring.size == names["whole"].shape[1]
    if ring.rank == 0:
        print(f"README.md: the output of {ring.size} ranks equals that of one, with torch {torch.__version__}")


if __name__ == "__main__":
    main()
