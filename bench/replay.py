"""Runs one rank's part of a ring on one device, with hops that reach no other rank.

The values of a replayed call mean nothing. Its launches, copies and memory are those of the rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from case import Case
from contestants import Call, Finished
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from ring_backends import Ring, RingDilatedAttention, RingSchedule, SequenceLayout, Transfer
from ring_backends.kernels import resolve_dtype
from ring_backends.ring.agreement import Agreement

_D128: dict[str, Any] = {"num_heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bf16"}
_D64: dict[str, Any] = {"num_heads": 16, "kv_heads": 16, "head_dim": 64, "dtype": "bf16"}
_RING: dict[str, Any] = {**_D128, "kv_heads": 32, "ring_size": 8, "layout": "zigzag"}
RING_SIZES = 2, 4, 8, 16, 32, 64
_SHORT, _LONG = ((2048, 1), (16384, 8), (131072, 64)), ((2048, 1), (16384, 8), (131072, 64), (1048576, 512))

ON_ONE_GPU = {
    "131k, 16 heads of 64": Case("", 131_072, branches=_SHORT, **_D64),
    "131k, 32 heads of 128, 8 K/V heads": Case(
        "", 131_072, branches=((2048, 1), (8192, 4), (32768, 16), (131072, 64)), **_D128
    ),
    "1M, 32 heads of 128, 8 K/V heads": Case("", 1_048_576, branches=_LONG, **_D128),
    "1M, 16 heads of 64": Case("", 1_048_576, branches=_LONG, **_D64),
}
OF_RINGS = {
    "131k": Case("", 131_072, branches=((2048, 1), (8192, 2), (32768, 4), (65536, 8), (131072, 16)), **_RING),
    "1M": Case("", 1_048_576, branches=((2048, 1), (8192, 2), (32768, 4), (131072, 8), (1048576, 64)), **_RING),
}


class ReplayedAttention(RingDilatedAttention):
    """Attention whose hops fill the incoming buffers from the outgoing ones, as far as these go, else with zeros.

    Attributes:
        num_hops: the hops so far.
        num_messages: their messages. Those that a rank sends and receives at a time count once.
    """

    num_hops = num_messages = 0

    def ring_pass(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], tag: int) -> Transfer:
        self.num_hops += 1
        self.num_messages += max(len(outgoing), len(incoming))
        sent = iter([*outgoing.values()])
        for buffer in (x for x in incoming.values() if not x.is_meta):
            source = next(sent, buffer[:0])[: buffer.numel()]
            buffer[: source.numel()].copy_(source)
            buffer[source.numel() :].zero_()
        return Finished()


def replay(case: Case, device: torch.device, kernel: str = "auto") -> Call:
    """Make the call of the rank with most work, with random inputs on ``device``."""
    size, rank, timeout = case.ring_size, busiest_rank(case), timedelta(hours=1)
    alone = Agreement(HashStore(), 0, 1, timeout, lambda: None) if size > 1 else None
    ring = Ring(size, rank, ranks=tuple(range(size)), layout_kind=case.layout, agreement=alone, timeout=timeout)
    attention = ReplayedAttention(**dataclasses.asdict(case.pattern), ring=ring, kernel=kernel)
    rows, dtype = ring.layout(case.seq_len).local_len(rank), resolve_dtype(case.dtype, device)
    *tensors, grad_out = (
        torch.randn(1, rows, heads, case.head_dim, device=device, dtype=dtype)
        for heads in (case.num_heads, case.kv_heads, case.kv_heads, case.num_heads)
    )
    tensors = [x.requires_grad_() for x in tensors]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return attention(query, key, value, is_causal=case.causal, seq_len=case.seq_len)

    return Call.of(attend, ring, *tensors, grad_out, attention=attention)


def schedule_of(case: Case) -> RingSchedule:
    layout = SequenceLayout(case.seq_len, case.ring_size, case.layout)
    return RingSchedule(case.pattern, layout, case.num_heads, case.kv_heads, case.causal)


def busiest_rank(case: Case) -> int:
    """The first rank with the most visible pairs of query and key."""
    return int(schedule_of(case).pairs.argmax())


def flops(case: Case, *, backward: bool) -> int:
    """FLOPs of the busiest rank's visible pairs. A forward has two matrix products, a backward five."""
    forward = schedule_of(case).tile_flops(busiest_rank(case), batch=1, head_dim=case.head_dim)
    return forward * 5 // 2 if backward else forward
