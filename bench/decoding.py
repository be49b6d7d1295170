"""Measures one step of decoding after 8,192 to 1,000,000 tokens: `torchrun … bench/decoding.py --help`.

A step attends from one new token, in one layer. The earlier keys and values are random. A cache holds those that later
queries see: at most one segment of the longest branch. `SDPA` is scaled_dot_product_attention over all earlier tokens,
without dilation, on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from options import Json
from report import Row, report

from ring_backends.adapters import native
from ring_backends.cost.machine import median_seconds
from ring_backends.ring.collectives import agree
from ring_backends.ring.ring import Ring

HEADS, HEAD_DIM = 8, 64
BRANCHES = (2048, 16384, 131072), (1, 8, 64)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main(
    contexts: Annotated[str, typer.Option(help="Numbers of earlier tokens.")] = "8192,65536,1000000",
    dtype: Annotated[str, typer.Option(help="fp32 or bf16.")] = "bf16",
    steps: Annotated[int, typer.Option(min=1, help="Steps per measurement; the median counts.")] = 200,
    layout: Annotated[str, typer.Option(help="contiguous or zigzag.")] = "contiguous",
    json: Json = None,
) -> None:
    """Measure the time of a step and the memory of a cache."""
    torch.set_num_threads(1)
    ring = native.initialize(layout=layout)  # type: ignore[arg-type]
    rows: list[Row] = []
    for context in map(int, contexts.split(",")):
        rows.append(measure(ring, context, DTYPES[dtype], steps))
    if ring.rank == 0:
        given: dict[str, Any] = {"contexts": contexts, "dtype": dtype, "steps": steps, "layout": layout}
        report("decoding", {**given, "ring_size": ring.size}, rows, json)
    if dist.is_initialized():
        dist.destroy_process_group()


def measure(ring: Ring, context: int, dtype: torch.dtype, steps: int) -> Row:
    module = native.RingDilatedAttention(*BRANCHES, ring=ring)
    cache = module.new_cache(context + steps + 1)
    local_len = ring.layout(context).local_len(ring.rank)
    cache.fill(*(torch.randn(1, local_len, HEADS, HEAD_DIM, dtype=dtype) for _ in range(2)), None, context)
    new = [torch.randn(1, 1, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(0)).to(dtype) for _ in range(3)]
    seconds = timed(lambda: module.decode(*new, cache), steps)
    slowest, most_bytes = map(max, zip(*agree(ring, "decoding", None, [seconds, cache.nbytes]), strict=True))
    row: Row = {
        "context": context,
        "ring_size": ring.size,
        "ms_per_token": 1e3 * slowest,
        "tokens_per_second": 1 / slowest,
        "cache_mib_per_rank": most_bytes / 2**20,
    }
    if ring.size == 1:
        query = new[0].transpose(1, 2)
        attend = torch.nn.functional.scaled_dot_product_attention
        whole = [torch.randn(1, HEADS, context, HEAD_DIM, dtype=dtype) for _ in range(2)]
        row["sdpa_ms_per_token"] = 1e3 * timed(lambda: attend(query, *whole), max(3, steps // 10))
    return row


def timed(step: Callable[[], object], steps: int) -> float:
    """The median of the seconds of a step."""
    return median_seconds({"step": step}, torch.device("cpu"), rounds=steps, calls_on_gpu=1)["step"]


if __name__ == "__main__":
    typer.run(main)
