"""A baseline: ring attention that sends all rows, and masks keys outside of a query's segments and dilation.

This is ring attention (arXiv 2310.01889) with a dilated mask:

- All rows of K and V travel round the ring. dK and dV follow them, in fp32.
- The next hop is posted before the current chunk is computed. At most two received buffers are in memory.
- The fused kernel takes the mask as a bias, block by block. No n × n matrix exists. Blocks without visible pairs are
  skipped.
- A key that a query sees in m branches counts m times. Its bias is log m. So the results are exact.

The arguments and results have the shape [batch, seq, heads, head_dim], and the tensors inside of this module [batch,
heads, seq, head_dim]. This module runs only on the CPU.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ring_backends import DilatedPattern, Ring
from ring_backends.ring.members import flat_bytes

BLOCK = 512  # rows; the bias of 8 heads is then 8 MiB

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def dense_ring_attention(
    query: Tensor, key: Tensor, value: Tensor, pattern: DilatedPattern, ring: Ring, *, is_causal: bool, seq_len: int
) -> Tensor:
    """Compute dilated attention over a sequence that is sharded over ``ring``. Arguments as in RingDilatedAttention.

    Returns:
        out, with the shape and dtype of query. It is differentiable.
    """
    mask = _Mask(pattern, ring, query.shape[2], seq_len, is_causal, _sum_dtype(query))
    out: Tensor = _DenseRing.apply(query, key, value, mask)
    return out


@dataclass(frozen=True)
class _Mask:
    """The mask between local query rows and the key rows of another rank, block by block."""

    pattern: DilatedPattern
    ring: Ring
    num_heads: int
    seq_len: int
    is_causal: bool
    dtype: torch.dtype

    def blocks(self, source: int) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield (query rows, key rows, bias [1, heads, query rows, key rows]) for the keys of rank ``source``."""
        layout = self.ring.layout(self.seq_len)
        query_positions, key_positions = layout.positions(self.ring.rank), layout.positions(source)
        query_segments, key_segments = self._segments(query_positions), self._segments(key_positions)
        for q in _slices(len(query_positions)):
            t = query_positions[q]
            for k in _slices(len(key_positions)):
                u = key_positions[k]
                if self.is_causal and u.min() > t.max():
                    continue
                bias = _bias([x[:, q] for x in query_segments], [x[:, k] for x in key_segments], self.dtype)
                if bias is None:
                    continue
                if self.is_causal and u.max() > t.min():
                    bias.masked_fill_(u > t[:, None], -math.inf)
                yield q, k, bias.unsqueeze(0)

    def _segments(self, positions: Tensor) -> list[Tensor]:
        """For each branch, return the number of the segment that covers a position, or −1: int32 [heads, positions]."""
        found = []
        for index, rate in enumerate(self.pattern.dilation_rates):
            length = self.pattern.segment_length(index, self.seq_len)
            segments = torch.full((self.num_heads, len(positions)), -1, dtype=torch.int32)
            for head in self.pattern.heads(index, self.num_heads):
                (offset,) = self.pattern.head_offsets(index, head, self.num_heads, self.seq_len)
                covered = positions % length % rate == offset
                segments[head, covered] = (positions // length)[covered].int()
            found.append(segments)
        return found


def _bias(query_segments: list[Tensor], key_segments: list[Tensor], dtype: torch.dtype) -> Tensor | None:
    """Compute the log of the number of branches in which a query sees a key: [heads, queries, keys].

    Returns None if no pair is visible. The number is a product of two matrices, with one column for each segment that
    has both queries and keys. Comparing segment numbers pair by pair would take longer than the attention.
    """
    query_columns, key_columns = [], []
    for queries, keys in zip(query_segments, key_segments, strict=True):
        for segment in set(queries.unique().tolist()) & set(keys.unique().tolist()) - {-1}:
            query_columns.append(queries == segment)
            key_columns.append(keys == segment)
    if not query_columns:
        return None
    times_seen = torch.stack(query_columns, -1).to(dtype) @ torch.stack(key_columns, 1).to(dtype)
    # log is slow at 0. So 0 is replaced by 0.5, and log 0.5 by −inf.
    return F.threshold_(times_seen.clamp_(min=0.5).log_(), -0.1, -math.inf)


def _slices(length: int) -> Iterator[slice]:
    return (slice(start, min(start + BLOCK, length)) for start in range(0, length, BLOCK))


class _DenseRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: _Mask) -> Tensor:
        ring, queries = mask.ring, query.transpose(1, 2)
        out = torch.zeros(queries.shape, dtype=_sum_dtype(query))
        lse = torch.full(queries.shape[:3], -math.inf, dtype=out.dtype)
        for step, chunk in enumerate(_chunks(key, value, mask)):
            for q, k, bias in mask.blocks((ring.rank - step) % ring.size):
                _merge(out[:, :, q], lse[:, :, q], *_attend(queries[:, :, q], *chunk[:, :, :, k], bias))
        result = out.transpose(1, 2).to(query.dtype, memory_format=torch.contiguous_format)
        ctx.save_for_backward(query, key, value, result, lse)
        ctx.mask = mask
        return result

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        mask, ring = ctx.mask, ctx.mask.ring
        grad_query = torch.zeros_like(query.transpose(1, 2), dtype=_sum_dtype(query))
        lse = lse.masked_fill(lse == -math.inf, math.inf)  # rows without visible keys then have weights exp(-inf) = 0
        queries, outs, grad_outs = (x.transpose(1, 2) for x in (query, out, grad_out))
        arriving: Callable[[], Tensor] | None = None
        for step, chunk in enumerate(_chunks(key, value, mask)):
            sums = torch.zeros_like(chunk, dtype=grad_query.dtype)
            for q, k, bias in mask.blocks((ring.rank - step) % ring.size):
                dq, dk, dv = _backward(
                    grad_outs[:, :, q], queries[:, :, q], *chunk[:, :, :, k], outs[:, :, q], lse[:, :, q],
                    0.0, False, attn_mask=bias,
                )  # fmt: skip
                grad_query[:, :, q] += dq
                sums[0, :, :, k] += dk
                sums[1, :, :, k] += dv
            if arriving is not None:
                sums += arriving()
            if ring.size > 1:
                # The next rank adds to the sums of this chunk. After the last step, the next rank owns the chunk.
                arriving = _post(sums, mask, (ring.rank - step - 1) % ring.size, tag=2 * step + 1)
        if arriving is not None:
            sums = arriving()
        grad_key, grad_value = (x.transpose(1, 2).to(key.dtype) for x in sums)
        return grad_query.transpose(1, 2).to(query.dtype), grad_key, grad_value, None


def _chunks(key: Tensor, value: Tensor, mask: _Mask) -> Iterator[Tensor]:
    """Yield this rank's K and V, then those of the ranks before it: [2, batch, heads, seq, head_dim]."""
    ring = mask.ring
    chunk = torch.stack([key, value]).transpose(2, 3).contiguous()
    for step in range(ring.size):
        last = step == ring.size - 1
        arriving = None if last else _post(chunk, mask, (ring.rank - step - 1) % ring.size, tag=2 * step)
        yield chunk
        if arriving is not None:
            chunk = arriving()


def _post(chunk: Tensor, mask: _Mask, incoming_from: int, tag: int) -> Callable[[], Tensor]:
    """Send a chunk to the next rank, and return a function that waits for the one of the previous rank.

    Args:
        incoming_from: the rank that owns the rows that arrive. They come from the previous rank.
    """
    ring = mask.ring
    kind, batch, heads, _, head_dim = chunk.shape
    incoming = chunk.new_empty((kind, batch, heads, ring.layout(mask.seq_len).local_len(incoming_from), head_dim))
    before, after = (ring.rank - 1) % ring.size, (ring.rank + 1) % ring.size
    transfer = ring.post({after: flat_bytes(chunk)}, {before: flat_bytes(incoming)}, 1 + tag)
    ring.traffic.messages += 1
    ring.traffic.bytes += chunk.nbytes

    def wait() -> Tensor:
        started = time.perf_counter()
        transfer.wait(ring.timeout)
        ring.traffic.wait_seconds += time.perf_counter() - started
        return incoming

    return wait


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = _forward(query, key, value, 0.0, False, attn_mask=bias)
    # For rows without visible keys, the kernel returns the LSE 0.
    masked = (bias.amax(-1) == -math.inf).expand(lse.shape)
    return out.masked_fill(masked.unsqueeze(-1), 0.0), lse.masked_fill(masked, -math.inf)


def _merge(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Merge two partial results with online softmax, in place. Two LSEs of −inf merge to −inf."""
    merged = torch.logaddexp(lse, other_lse)
    weight, other_weight = ((x - merged).exp().masked_fill(merged == -math.inf, 0.0) for x in (lse, other_lse))
    out.mul_(weight.unsqueeze(-1)).add_(other_out * other_weight.unsqueeze(-1))
    lse.copy_(merged)


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
