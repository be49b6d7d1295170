"""dK and dV that travel in bf16: half the bytes, and an error within the bound that the attention states."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ring_backends.schedule.layout import SequenceLayout
from ring_backends.schedule.pattern import DilatedPattern
from ring_backends.schedule.ring_schedule import RingSchedule
from ring_backends.testing.calls import call_here
from ring_backends.testing.capabilities import AdapterSuite, core
from ring_backends.testing.reference import reference_attention
from ring_backends.testing.rings import rows_of_ranks
from ring_backends.testing.strategies import AttentionCase
from ring_backends.testing.world import World

CASE = AttentionCase(
    seq_len=64,
    segment_lengths=(64, 16),
    dilation_rates=(1, 2),
    batch=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    dtype=torch.bfloat16,
)
ROUNDING = 2.0**-8
"""The largest relative error of rounding to bf16."""


class Sent(NamedTuple):
    """One rank's out and gradients, with the bytes that its backward sent."""

    out: Tensor
    grads: list[Tensor]
    backward_bytes: int


def both_ways(adapter: str) -> list[Sent]:
    """The same call with dK and dV in fp32 and in bf16 on the wire."""
    found = []
    for dtype in (None, torch.bfloat16):
        call = call_here(adapter, CASE, grad_wire_dtype=dtype)
        out, traffic = call(), call.attention.ring.traffic
        traffic.reset()
        found.append(Sent(out.detach(), call.gradients(out), traffic.bytes))
    return found


def disagree(adapter: str) -> None:
    """Rank 1 sends its gradients in another dtype than the other ranks."""
    call_here(adapter, CASE, grad_wire_dtype=torch.bfloat16 if dist.get_rank() == 1 else None)()


def shares_of_ranks() -> list[tuple[Tensor, Tensor]]:
    """The absolute values of dK and dV from the queries of each rank, in fp64, by the dense reference."""
    query, key, value, grad_out, _ = CASE.tensors()
    assert grad_out is not None
    query, key, value = (x.double().requires_grad_() for x in (query, key, value))
    out, _ = reference_attention(query, key, value, CASE.segment_lengths, CASE.dilation_rates, is_causal=CASE.is_causal)
    shares = []
    for rows in rows_of_ranks(CASE.seq_len, 4, "contiguous"):
        of_rank = torch.zeros_like(out)
        of_rank[:, rows] = grad_out.double()[:, rows]
        grad_key, grad_value = torch.autograd.grad(out, [key, value], of_rank, retain_graph=True)
        shares.append((grad_key.abs(), grad_value.abs()))
    return shares


class WireRoundingTests(AdapterSuite):
    @core
    def test_gradients_in_bf16_on_the_wire(self, world: World) -> None:
        by_rank = world.run(both_ways, self.adapter)
        pattern = DilatedPattern(CASE.segment_lengths, CASE.dilation_rates)
        schedule = RingSchedule(pattern, SequenceLayout(CASE.seq_len, 4), 4, 2)
        sizes: dict[str, Any] = {"batch": CASE.batch, "head_dim": CASE.head_dim, "itemsize": 2, "backward": True}
        for rank, (exact, rounded) in enumerate(by_rank):
            assert torch.equal(exact.out, rounded.out)
            assert torch.equal(exact.grads[0], rounded.grads[0])
            assert exact.backward_bytes == schedule.wire_bytes(rank, **sizes)
            assert rounded.backward_bytes == schedule.wire_bytes(rank, **sizes, grad_itemsize=2)
        for index, name in ((1, "dk"), (2, "dv")):
            exact_grad, rounded_grad = (
                torch.cat([answers[way].grads[index] for answers in by_rank], 1).double() for way in (0, 1)
            )
            share = sum(shares[index - 1] for shares in shares_of_ranks())
            # At most four hops round, and both gradients are rounded once more in the end. The shares are rounded too.
            bound = 1.05 * (4 + 2) * ROUNDING * share
            error = (exact_grad - rounded_grad).abs()
            assert bool((error <= bound).all()), f"{name}: {float((error - bound).max())}"
            assert bool((error > 0).any()), f"{name} was not rounded on the wire"

    @core
    def test_ranks_that_send_gradients_in_other_dtypes_are_reported(self, world: World) -> None:
        for outcome in world.run_collect(disagree, self.adapter):
            assert outcome.status == "raised", outcome
            assert "RingMismatchError" in str(outcome.error_types), outcome
            assert "grad_wire_dtype" in outcome.message, outcome
