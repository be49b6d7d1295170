"""The cost of packed documents and of dropout: forward and backward, on one device with one thread."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from case import Branches

from ring_backends import dilated_attention
from ring_backends.data import document_ids

LENGTH, SHRUNK = 8192, 512
MARKS = {
    "none": {},
    "none, math kernel": {"kernel": "math"},
    "dropout": {"dropout_p": 0.1},
    "8 documents": {"documents": 8},
    "64 documents": {"documents": 64},
}


@pytest.mark.parametrize("marks", MARKS)
def bench_marks(benchmark: Any, request: pytest.FixtureRequest, branches: Branches, marks: str) -> None:
    """Time one forward and backward. Dropout needs the math kernel. Tiles without visible pairs are skipped."""
    seq_len = SHRUNK if request.config.option.smoke else LENGTH
    options: dict[str, Any] = dict(MARKS[marks])
    if "documents" in options:
        count = options.pop("documents")
        shift = seq_len // count // 8  # so that documents do not begin where segments begin
        bounds = [seq_len * number // count + shift * (0 < number < count) for number in range(count + 1)]
        options["document_ids"] = document_ids(bounds, seq_len)
    query, key, value = (torch.randn(1, seq_len, 8, 64, requires_grad=True) for _ in range(3))
    grad_out = torch.randn(1, seq_len, 8, 64)

    def call() -> None:
        out = dilated_attention(query, key, value, *zip(*branches, strict=True), is_causal=True, **options)
        torch.autograd.grad(out, [query, key, value], grad_out)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        benchmark.group = f"marks, forward and backward, {seq_len:,} tokens, one thread"
        benchmark.pedantic(call, rounds=1 if request.config.option.smoke else 5, warmup_rounds=1)
    finally:
        torch.set_num_threads(threads)
