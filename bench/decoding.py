"""One step of decoding after 8,192 to 1,000,000 tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from clock import calls_in_turns
from report import Dtype, Integers, Row, integers

from ring_backends.adapters import native
from ring_backends.kernels import resolve_dtype
from ring_backends.testing.world import World

HEADS, HEAD_DIM = 8, 64
BRANCHES = (2048, 16384, 131072), (1, 8, 64)


def decoding(
    contexts: Integers = "8192,65536,1000000",
    ring_size: Annotated[int, typer.Option(min=1, help="Number of ranks.")] = 2,
    dtype: Dtype = "bf16",
    steps: Annotated[int, typer.Option(min=1, help="Steps per measurement; the median counts.")] = 200,
) -> Iterator[Row]:
    """Measure the time of a step of decoding and the memory of a cache.

    A step attends from one new token, in one layer. The earlier keys and values are random. A cache holds those that
    later queries see: at most one segment of the longest branch. On one rank, a step is compared with
    `scaled_dot_product_attention` over all earlier tokens, without dilation.
    """
    with World(ring_size, call_timeout=3600.0) as world:
        for context in integers(contexts):
            ranks = world.run(measure, context, dtype, steps)
            seconds = sorted(map(max, zip(*(found["seconds"] for found in ranks), strict=True)))[steps // 2]
            yield {
                "context": context,
                "ring_size": ring_size,
                "ms_per_token": 1e3 * seconds,
                "tokens_per_second": 1 / seconds,
                "cache_mib_per_rank": max(found["cache_bytes"] for found in ranks) / 2**20,
                **ranks[0]["alone"],
            }


def measure(context: int, dtype_name: str, steps: int) -> dict[str, Any]:
    """The seconds of each step on this rank, the bytes of its cache, and on one rank the time of SDPA."""
    ring, dtype = native.initialize(), resolve_dtype(dtype_name, torch.device("cpu"))
    module = native.RingDilatedAttention(*BRANCHES, ring=ring)
    cache = module.new_cache(context + steps + 1)
    local_len = ring.layout(context).local_len(ring.rank)
    cache.fill(*(torch.randn(1, local_len, HEADS, HEAD_DIM, dtype=dtype) for _ in range(2)), None, context)
    new = [torch.randn(1, 1, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(0)).to(dtype) for _ in range(3)]
    (seconds,) = calls_in_turns([lambda: module.decode(*new, cache)], steps)
    alone: Row = {}
    if ring.size == 1:
        whole = [torch.randn(1, HEADS, context, HEAD_DIM, dtype=dtype) for _ in range(2)]
        query, repeats = new[0].transpose(1, 2), max(3, steps // 10)
        (times,) = calls_in_turns([lambda: F.scaled_dot_product_attention(query, *whole)], repeats)
        alone["sdpa_ms_per_token"] = 1e3 * sorted(times)[repeats // 2]
    return {"seconds": seconds, "cache_bytes": cache.nbytes, "alone": alone}
