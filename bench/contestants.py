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
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from bare_kernels import BareKernels
from case import ALL_GATHER, BARE_KERNELS, DENSE_RING, FLEX, MASKED_SDPA, ONE_DEVICE, SDPA, SYNCHRONOUS, Case
from dense_ring import dense_ring_attention
from gpu_replay import Finished
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from ring_backends import available_adapters, dilated_attention, score_mods
from ring_backends.adapters.native import NativeRingDilatedAttention
from ring_backends.comparison.all_gather import AllGatherExecutor, all_gather_attention
from ring_backends.comparison.rank import local_inputs
from ring_backends.engine.call import AttentionInputs
from ring_backends.kernels import resolve_dtype
from ring_backends.registry import load_adapter
from ring_backends.ring.ring import Ring
from ring_backends.ring.transfer import Transfer

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Call:
    """A contestant with its inputs. ``backward`` takes the result of ``forward``.

    Attributes:
        attention: the attention module of a contestant that uses an adapter's ring, else None.
        computed_bytes: bytes that this rank sends, by direction. None: ``ring.traffic`` counts them.
    """

    ring: Ring
    forward: Callable[[], Any]
    backward: Callable[[Any], Any]
    attention: Any = None
    computed_bytes: Mapping[str, int] | None = None


def unusable(case: Case) -> str | None:
    """Return the reason why a case cannot run on this machine. None: it can."""
    if case.contestant == DENSE_RING and case.device != "cpu":
        return "the dense ring runs only on the CPU"
    return available_adapters().get(case.contestant)


def inputs(case: Case, ring: Ring, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Make this rank's rows of query, key, value and the gradient of out."""
    dtype = resolve_dtype(case.dtype, device)
    return local_inputs(ring, case.seq_len, case.num_heads, case.kv_heads, case.head_dim, dtype, device)


def prepare(case: Case, ring: Ring, device: torch.device) -> Call:
    """Make the contestant of ``case``, with this rank's inputs."""
    if case.contestant == BARE_KERNELS:
        kernels = BareKernels.of(case, resolve_dtype(case.dtype, device), device)
        return Call(ring, kernels.forward, kernels.backward)
    query, key, value, grad_out = inputs(case, ring, device)
    attend, attention = _attend(case, ring)
    computed_bytes = None
    if case.contestant == ALL_GATHER:
        call = AttentionInputs(query, key, value, is_causal=case.causal, seq_len=case.seq_len)
        computed_bytes = AllGatherExecutor(call, case.pattern, ring).wire_bytes(key)
    return Call(
        ring,
        lambda: attend(query, key, value),
        lambda out: torch.autograd.grad(out, (query, key, value), grad_out),
        attention,
        computed_bytes,
    )


def _attend(case: Case, ring: Ring) -> tuple[Attend, Any]:
    pattern, score_mod = dataclasses.asdict(case.pattern), _score_mod(case)
    sharded: dict[str, Any] = {"is_causal": case.causal, "seq_len": case.seq_len}
    if case.contestant == ONE_DEVICE:
        return partial(dilated_attention, **pattern, is_causal=case.causal, score_mod=score_mod), None
    if case.contestant == SDPA:
        return _sdpa(case.causal), None
    if case.contestant == MASKED_SDPA:
        return _sdpa(False, _window_mask(case)), None
    if case.contestant == FLEX:
        return _flex(case), None
    if case.contestant == ALL_GATHER:
        return partial(all_gather_attention, pattern=case.pattern, ring=ring, **sharded), None
    if case.contestant == DENSE_RING:
        return partial(dense_ring_attention, pattern=case.pattern, ring=ring, **sharded), None
    if case.contestant == SYNCHRONOUS:
        attention: Any = SynchronousRingDilatedAttention(**pattern, ring=ring)
    else:
        attention = load_adapter(case.contestant).RingDilatedAttention(**pattern, ring=ring)
    return partial(attention, **sharded, score_mod=score_mod), attention


def _score_mod(case: Case) -> Any:
    """The function of scores of the case; None without."""
    if case.score_mod is None:
        return None
    if case.score_mod == "softcap":
        return score_mods.softcap(30.0)
    if case.score_mod == "alibi":
        return score_mods.alibi(case.num_heads, device=case.device)
    assert case.score_mod == "distance", case.score_mod
    side = math.isqrt(case.seq_len) + 1
    tiles = torch.arange(case.seq_len, device=case.device)
    coords = torch.stack([tiles // side, tiles % side], 1).float()[None]
    return score_mods.distance(coords, torch.linspace(0.5, 0.01, case.num_heads, device=case.device))


def _sdpa(is_causal: bool, mask: Tensor | None = None) -> Attend:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads = (x.transpose(1, 2) for x in (query, key, value))
        options: dict[str, Any] = {"attn_mask": mask, "is_causal": is_causal, "enable_gqa": True}
        return F.scaled_dot_product_attention(*heads, **options).transpose(1, 2)

    return attend


def _is_in_window(case: Case, query: Tensor, key: Tensor) -> Tensor:
    """Whether a query sees a key through a window, where one segment of rate 1 is the whole sequence."""
    distance = query - key
    assert case.window is not None
    assert case.branches == ((case.seq_len, 1),)
    return (distance < case.window) & (distance >= 0 if case.causal else distance > -case.window)


def _window_mask(case: Case) -> Tensor:
    positions = torch.arange(case.seq_len)
    return _is_in_window(case, positions[:, None], positions[None, :])


def _flex(case: Case) -> Attend:
    """Compiled ``flex_attention`` with a block mask, which is made here. On CPUs, it has no backward."""
    sizes = (1, 1, case.seq_len, case.seq_len)
    mask = create_block_mask(lambda b, h, query, key: _is_in_window(case, query, key), *sizes, device=case.device)
    flex: Any = torch.compile(flex_attention)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads = ((x.detach() if case.device == "cpu" else x).transpose(1, 2) for x in (query, key, value))
        out: Tensor = flex(*heads, block_mask=mask, enable_gqa=True)
        return out.transpose(1, 2)

    return attend


class SynchronousRingDilatedAttention(NativeRingDilatedAttention):
    """The native adapter without overlap. It waits for each hop directly after posting it."""

    def ring_pass(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], tag: int) -> Transfer:
        started = time.perf_counter()
        super().ring_pass(outgoing, incoming, tag).wait(self.ring.timeout)
        self.ring.traffic.wait_seconds += time.perf_counter() - started
        return Finished()
