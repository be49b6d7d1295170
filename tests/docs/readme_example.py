"""Run the first example of README.md, on 131,072 tokens, and compare the output with one device.

``python -m torch.distributed.run --standalone --nproc-per-node 4 tests/docs/readme_example.py``
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from ring_backends import dilated_attention

README = Path(__file__).resolve().parents[2] / "README.md"


def main() -> None:
    example = re.search(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert example is not None
    torch.manual_seed(0)
    tensors = torch.randn(3, 1, 131_072, 2, 16)
    names: dict[str, Any] = dict(zip(("query", "key", "value"), tensors, strict=True))
    exec(compile(example[1], str(README), "exec"), names)
    ring, pattern = names["ring"], names["attention"].pattern
    expected = dilated_attention(*tensors, pattern.segment_lengths, pattern.dilation_rates, is_causal=True)
    torch.testing.assert_close(names["whole"], expected)
    if ring.rank == 0:
        print(f"README.md: the output of {ring.size} ranks equals that of one, with torch {torch.__version__}")


if __name__ == "__main__":
    main()
