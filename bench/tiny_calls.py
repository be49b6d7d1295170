"""The price of a call besides its arithmetic.

A call of 64 tokens is compared with the same written by hand, and a call of 64 tokens on two ranks with bare hops that
overlap with calls of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from clock import calls_in_turns
from report import Repeats, Row, compared
from torch import Tensor

from ring_backends.adapters import native
from ring_backends.testing.world import World

TOKENS, RATE, HEAD_DIM = 64, 4, 32
CALLS_AT_ONCE = 200

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def tiny_calls(repeats: Repeats = 11) -> Iterator[Row]:
    """Measure calls of 64 tokens: two branches on one device, and one branch on two ranks.

    On two ranks, each rank attends from its 32 rows to its own keys and to those of the other rank. By hand, a hop of
    as many bytes is posted, a call of one rank with 32 tokens is made, the hop is waited for, and the call is made
    again. In the backward another hop follows, in which dK and dV would go home.
    """
    with World(1, call_timeout=3600.0) as world:
        found = world.run(measure_one_device, repeats, CALLS_AT_ONCE)[0]
    for direction, (ours, hand) in found.items():
        yield _row(f"one device, {direction}", ours, "by hand", hand)
    with World(2, call_timeout=3600.0) as world:
        found = world.run(measure_ring, repeats, CALLS_AT_ONCE)[0]
    for direction, (ours, hand) in found.items():
        yield _row(f"ring of two, {direction}", ours, "hops under calls of one rank", hand)


def _row(call: str, ours: Sequence[float], other: str, others: Sequence[float]) -> Row:
    times = compared(us=[1e6 * seconds for seconds in ours], its_us=[1e6 * seconds for seconds in others])
    return {"call": call, "relative_to": other, **times}


def measure_one_device(repeats: int, at_once: int) -> dict[str, list[list[float]]]:
    """Seconds per call, ours and by hand, which take turns."""
    attention = native.RingDilatedAttention([TOKENS // RATE, TOKENS], [1, RATE])
    query, key, value, grad_out = torch.randn(4, 1, TOKENS, RATE, HEAD_DIM).unbind()
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]

    def both(attend: Callable[..., Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(attend(*leaves), leaves, grad_out)

    def ours(*tensors: Tensor) -> Any:
        return attention(*tensors, is_causal=True)

    def hand(*tensors: Tensor) -> Any:
        return TwoBranches.apply(*tensors, TOKENS // RATE)  # type: ignore[no-untyped-call]

    torch.testing.assert_close(both(ours)(), both(hand)())
    contestants = {
        "forward": (lambda: ours(query, key, value), lambda: attend(query, key, value, TOKENS // RATE)),
        "forward and backward": (both(ours), both(hand)),
    }
    return {name: calls_in_turns(calls, repeats, at_once=at_once) for name, calls in contestants.items()}


def measure_ring(repeats: int, at_once: int) -> dict[str, list[list[float]]]:
    """Seconds per call of a ring of two, and of hops with the same bytes under calls of one rank, which take turns."""
    ring = native.initialize()
    attention = native.RingDilatedAttention([TOKENS], [1], ring=ring)
    alone = native.RingDilatedAttention([TOKENS], [1])
    *local, grad_out = (ring.shard(x) for x in torch.randn(4, 1, TOKENS, RATE, HEAD_DIM).unbind())
    leaves = [x.clone().requires_grad_() for x in local]
    sent, received = (torch.zeros(2 * grad_out.nbytes, dtype=torch.uint8) for _ in range(2))
    peer = 1 - ring.rank

    def post() -> list[Any]:
        return [dist.irecv(received, peer), dist.isend(sent, peer)]

    def wait(works: list[Any]) -> None:
        for work in works:
            work.wait()

    def under_hop(first: Callable[[], Any], second: Callable[[], Any]) -> list[Any]:
        works = post()
        result = first()
        wait(works)
        return [result, second()]

    def backward(out: Tensor) -> Any:
        return torch.autograd.grad(out, leaves, grad_out)

    def by_hand() -> None:
        first, second = under_hop(lambda: alone(*leaves), lambda: alone(*leaves))
        under_hop(lambda: backward(first), lambda: backward(second))
        wait(post())  # dK and dV go home

    contestants = {
        "forward": (lambda: attention(*local), lambda: under_hop(lambda: alone(*local), lambda: alone(*local))),
        "forward and backward": (lambda: backward(attention(*leaves)), by_hand),
    }
    return {name: calls_in_turns(calls, repeats, at_once=at_once) for name, calls in contestants.items()}


class TwoBranches(torch.autograd.Function):
    """Dilated attention written by hand: views, two kernel calls, a merge.

    Attends causally through a branch of rate 1 and one of rate r over the whole sequence, for r heads and batch 1. Head
    j has the offset j. Query, key and value are [1, seq, r, head_dim].
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, length: int) -> Tensor:
        out, lse = attend(query, key, value, length)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.length = length
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        tensors = (grad_out, query, key, value, out)
        whole = [segments(x, ctx.length) for x in tensors]
        grads = _BACKWARD(*whole, segments(lse, ctx.length), 0.0, True)
        grads = [x.transpose(1, 2).reshape(query.shape) for x in grads]
        dilated = [every(x) for x in tensors]
        for grad, of_dilated in zip(grads, _BACKWARD(*dilated, every(lse), 0.0, True), strict=True):
            every(grad).add_(of_dilated)
        return *grads, None


def attend(query: Tensor, key: Tensor, value: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """out and LSE, [1, seq, r, …]."""
    out, lse = _FORWARD(*(segments(x, length) for x in (query, key, value)), 0.0, True)
    out, lse = out.transpose(1, 2).reshape(query.shape), lse.transpose(1, 2).reshape(query.shape[:3])
    dilated_out, dilated_lse = _FORWARD(*(every(x) for x in (query, key, value)), 0.0, True)
    merged = torch.logaddexp(every(lse), dilated_lse)
    every(out).lerp_(dilated_out, (dilated_lse - merged).exp_().unsqueeze(-1))
    every(lse).copy_(merged)
    return out, lse


def segments(x: Tensor, length: int) -> Tensor:
    """[1, seq, heads, …] as [segments, heads, length, …]."""
    return x.view(-1, length, *x.shape[2:]).transpose(1, 2)


def every(x: Tensor) -> Tensor:
    """Every r-th row from row j on of each head j, [1, r heads, rows, …] of [1, seq, r heads, …]."""
    rows = x.unflatten(1, (-1, x.shape[2])).diagonal(0, 2, 3)  # [1, rows, …, heads]
    return rows.movedim(-1, 1)
