"""The contestants. Each runs forward and backward of a case on this rank.

All contestants except the bare kernels and SDPA compute the same values. SDPA is ``scaled_dot_product_attention`` over
the whole sequence. It shows the cost without dilation.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from case import ALL_GATHER, BARE_KERNELS, DENSE_RING, ONE_DEVICE, SDPA, SYNCHRONOUS, Case
from dense_ring import dense_ring_attention
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ring_backends import Ring, Transfer, create_attention, dilated_attention, score_mods
from ring_backends.adapters.native import NativeRingDilatedAttention
from ring_backends.comparison.all_gather import all_gather_attention
from ring_backends.comparison.rank import local_inputs
from ring_backends.data import document_ids
from ring_backends.kernels import resolve_dtype

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Call:
    """A contestant with its inputs. ``backward`` takes the result of ``forward``.

    Attributes:
        tensors: query, key and value.
        attention: the attention module of a contestant that uses an adapter's ring, else None.
    """

    ring: Ring
    tensors: tuple[Tensor, ...]
    forward: Callable[[], Any]
    backward: Callable[[Any], Any]
    attention: Any = None

    @classmethod
    def of(cls, attend: Attend, ring: Ring, *inputs: Tensor, attention: Any = None) -> Call:
        *tensors, grad_out = inputs
        return cls(
            ring,
            tuple(tensors),
            lambda: attend(*tensors),
            lambda out: torch.autograd.grad(out, tensors, grad_out),
            attention,
        )


def inputs(case: Case, ring: Ring, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Make this rank's rows of query, key, value and the gradient of out."""
    dtype = resolve_dtype(case.dtype, device)
    return local_inputs(ring, case.seq_len, case.num_heads, case.kv_heads, case.head_dim, dtype, device)


def prepare(case: Case, ring: Ring, device: torch.device) -> Call:
    """Make the contestant of ``case``, with this rank's inputs."""
    if case.contestant == BARE_KERNELS:
        return bare_kernels(case, ring, device)
    attend, attention = _attend(case, ring)
    return Call.of(attend, ring, *inputs(case, ring, device), attention=attention)


def _attend(case: Case, ring: Ring) -> tuple[Attend, Any]:
    pattern = dataclasses.asdict(case.pattern)
    options: dict[str, Any] = {"is_causal": case.causal, "score_mod": _score_mod(case)}
    sharded: dict[str, Any] = {"is_causal": case.causal, "seq_len": case.seq_len}
    if case.contestant == ONE_DEVICE:
        if case.documents:
            options["document_ids"] = _documents(case)
        return partial(dilated_attention, **pattern, **options, kernel=case.kernel, dropout_p=case.dropout_p), None
    if case.contestant == SDPA:
        return partial(_sdpa, is_causal=case.causal), None
    if case.contestant in (ALL_GATHER, DENSE_RING):
        attend = all_gather_attention if case.contestant == ALL_GATHER else dense_ring_attention
        return partial(attend, pattern=case.pattern, ring=ring, **sharded), None
    if case.contestant == SYNCHRONOUS:
        attention: Any = SynchronousAttention(**pattern, ring=ring)
    else:
        attention = create_attention(case.contestant, **pattern, ring=ring)
    return partial(attention, **options, seq_len=case.seq_len), attention


def _score_mod(case: Case) -> Any:
    """The function of scores of the case; None without."""
    if case.score_mod is None:
        return None
    if case.score_mod == "softcap":
        return score_mods.softcap(30.0)
    if case.score_mod == "alibi":
        return score_mods.alibi(case.num_heads)
    assert case.score_mod == "distance", case.score_mod
    side = math.isqrt(case.seq_len) + 1
    tiles = torch.arange(case.seq_len)
    coords = torch.stack([tiles // side, tiles % side], 1).float()[None]
    return score_mods.distance(coords, torch.linspace(0.5, 0.01, case.num_heads))


def _documents(case: Case) -> Tensor:
    """Documents that do not begin where segments begin."""
    count = case.documents
    shift = case.seq_len // count // 8
    bounds = [case.seq_len * number // count + shift * (0 < number < count) for number in range(count + 1)]
    return document_ids(bounds, case.seq_len)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
    heads = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(*heads, is_causal=is_causal, enable_gqa=True).transpose(1, 2)


def bare_kernels(case: Case, ring: Ring, device: torch.device) -> Call:
    """A baseline: only the calls of the attention kernel, one per branch, over all segments and heads.

    Each call has as many contiguous rows as the dilated branch. The baseline does not gather rows, merge results or
    write them. The overhead of dilation is the additional time that dilated attention needs.

    Raises:
        ValueError: a segment length does not divide the sequence length, or a dilation rate does not divide its segment
            length. The tiles of such a branch would differ in size.
    """
    tiles, dtype = [], resolve_dtype(case.dtype, device)
    for length, rate in case.branches:
        if case.seq_len % length or length % rate:
            raise ValueError(
                f"branches: ({length}, {rate}) cuts {case.seq_len} tokens into unequal tiles; use a segment length "
                "that divides the sequence and is a multiple of its rate."
            )
        shape = case.seq_len // length, length // rate, case.head_dim
        for heads in (case.num_heads, case.kv_heads, case.kv_heads):
            tiles.append(torch.randn(shape[0], heads, *shape[1:], device=device).to(dtype).requires_grad_())

    def forward() -> list[Tensor]:
        outs = []
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
            for index in range(0, len(tiles), 3):
                query, key, value = tiles[index : index + 3]
                options = {"is_causal": case.causal, "enable_gqa": case.num_heads != case.kv_heads}
                outs.append(F.scaled_dot_product_attention(query, key, value, **options))
        return outs

    grad_outs = [torch.randn_like(query) for query in tiles[::3]]
    return Call(ring, tuple(tiles), forward, lambda outs: torch.autograd.grad(outs, tiles, grad_outs))


class Finished(Transfer):
    """A transfer that has nothing to wait for."""

    def wait(self, timeout: timedelta) -> None:
        pass


class SynchronousAttention(NativeRingDilatedAttention):
    """The native adapter without overlap. It waits for each hop directly after posting it."""

    def ring_pass(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], tag: int) -> Transfer:
        started = time.perf_counter()
        super().ring_pass(outgoing, incoming, tag).wait(self.ring.timeout)
        self.ring.traffic.wait_seconds += time.perf_counter() - started
        return Finished()
