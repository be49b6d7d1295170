"""The cost of checking that all ranks of a ring make the same call."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ring_backends import Ring
from ring_backends.adapters.native import RingDilatedAttention
from ring_backends.engine.inputs import AttentionInputs
from ring_backends.ring.agreement import Agreement


def bench_agreed_call(benchmark: Any) -> None:
    """Time the agreement of one forward and one backward: from the checked arguments to the tag of the first hop."""
    agreement = Agreement(HashStore(), 0, 1, timedelta(seconds=60), lambda: None)
    attention = RingDilatedAttention(
        (2048, 8192, 65536), (1, 4, 16), ring=dataclasses.replace(Ring(), agreement=agreement)
    )
    query, key, value = (torch.zeros(1, 64, 8, 64, requires_grad=True) for _ in range(3))
    inputs, call = attention._check_call(AttentionInputs(query, key, value, is_causal=True))

    def agree() -> int:
        start = attention._start(call, inputs, needs_gradients=inputs.needs_gradients)
        tags = [start(direction, inputs).call.tag(0) for direction in ("forward", "backward")]
        return sum(tags)

    benchmark.group = "agreement"
    benchmark(agree)
