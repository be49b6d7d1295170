"""The cost of checking that all ranks of a ring make the same call."""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ring_backends import Ring
from ring_backends.adapters.native import RingDilatedAttention
from ring_backends.engine.call import AttentionInputs
from ring_backends.ring.agreement import Agreement


def bench_agreed_call(benchmark: Any) -> None:
    """Time the agreement of one forward and one backward: from the checked arguments to the tag of the first hop."""
    agreement = Agreement(HashStore(), 0, 1, timedelta(seconds=60), lambda: None)
    attention = RingDilatedAttention(
        (2048, 8192, 65536), (1, 4, 16), ring=dataclasses.replace(Ring(), agreement=agreement)
    )
    query, key, value = (torch.zeros(1, 64, 8, 64, requires_grad=True) for _ in range(3))
    binding = attention.binding
    inputs, call = binding.check(AttentionInputs(query, key, value, is_causal=True))

    def agree() -> int:
        hops = [binding.begin(call, inputs, direction, needs_gradients=True) for direction in ("forward", "backward")]
        return sum(of_direction.call.tag(0) for of_direction in hops if of_direction is not None)

    benchmark.group = "agreement"
    benchmark(agree)
