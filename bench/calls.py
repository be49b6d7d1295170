"""The price of a call besides its arithmetic: tiny calls on one device and on a ring of two, and hops with a latency.

`tiny-calls` compares a call of 64 tokens with the same written by hand, and a tiny call on two ranks with a bare hop
and the same call on one rank. `latency` delays every hop of a ring of 8, as a slow network would.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Annotated, Any

import by_hand
import torch
import torch.distributed as dist
import typer
from options import Repeats
from report import Row, compared
from torch import Tensor

from ring_backends.adapters import native
from ring_backends.engine.call import AttentionCall, AttentionInputs
from ring_backends.engine.operators import RingExecutor, execute
from ring_backends.ring.transfer import Transfer
from ring_backends.testing.world import World

TOKENS, RATE, HEAD_DIM = 64, 4, 32
CALLS_AT_ONCE = 200

SPARSE = ((256, 4096, 131072), (1, 8, 64))
"""The segment lengths and dilation rates that `train` chooses for 131,072 tokens."""


def tiny_calls(repeats: Repeats = 11) -> list[Row]:
    """Measure calls of 64 tokens: two branches on one device, and one branch on two ranks.

    The forward on two ranks is relative to a bare hop and the same call on one rank. On two cores, threads of gloo wait
    for a core while a rank computes. A hop therefore takes longer in a loop that also computes than in a loop of its
    own. The sums are measured in both ways.
    """
    with World(1, call_timeout=3600.0) as world:
        found = world.run(measure_one_device, repeats)[0]
    rows = [_row(f"one device, {direction}", ours, "by hand", hand) for direction, (ours, hand) in found.items()]
    with World(2, call_timeout=3600.0) as world:
        ours, hop, alone, both = world.run(measure_ring, repeats)[0]
    sums = {"apart": [sum(pair) for pair in zip(hop, alone, strict=True)], "in one loop": both}
    return rows + [_row("ring of two, forward", ours, f"hop + one rank, {how}", x) for how, x in sums.items()]


def _row(call: str, ours: Sequence[float], other: str, others: Sequence[float]) -> Row:
    times = compared(us=[1e6 * seconds for seconds in ours], its_us=[1e6 * seconds for seconds in others])
    return {"call": call, "relative_to": other, **times}


def measure_one_device(repeats: int) -> dict[str, list[list[float]]]:
    """Seconds per call, ours and by hand, which take turns."""
    torch.set_num_threads(1)
    attention = native.RingDilatedAttention([TOKENS // RATE, TOKENS], [1, RATE])
    query, key, value, grad_out = torch.randn(4, 1, TOKENS, RATE, HEAD_DIM).unbind()
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]

    def both(attend: Callable[..., Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(attend(*leaves), leaves, grad_out)

    def ours(*tensors: Tensor) -> Any:
        return attention(*tensors, is_causal=True)

    def hand(*tensors: Tensor) -> Any:
        return by_hand.TwoBranches.apply(*tensors, TOKENS // RATE)  # type: ignore[no-untyped-call]

    torch.testing.assert_close(ours(query, key, value), hand(query, key, value))
    contestants = {
        "forward": (lambda: ours(query, key, value), lambda: by_hand.attend(query, key, value, TOKENS // RATE)),
        "forward and backward": (both(ours), both(hand)),
    }
    return {name: in_turns(calls, repeats, at_once=CALLS_AT_ONCE) for name, calls in contestants.items()}


def measure_ring(repeats: int) -> list[list[float]]:
    """Seconds of a call on the ring, of a bare hop with the same bytes, of the call on one rank, and of these two."""
    torch.set_num_threads(1)
    ring = native.initialize()
    attention = native.RingDilatedAttention([TOKENS], [1], ring=ring)
    alone = native.RingDilatedAttention([TOKENS], [1])
    query, key, value = torch.randn(3, 1, TOKENS, RATE, HEAD_DIM).unbind()
    local = [ring.shard(x) for x in (query, key, value)]
    sent, received = (torch.zeros(2 * local[1].nbytes, dtype=torch.uint8) for _ in range(2))
    peer = 1 - ring.rank

    def hop() -> None:
        operations = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    def hop_and_call() -> None:
        hop()
        alone(query, key, value)

    calls = (lambda: attention(*local), hop, lambda: alone(query, key, value), hop_and_call)
    return in_turns(calls, repeats, at_once=CALLS_AT_ONCE)


def in_turns(
    calls: Sequence[Callable[[], Any]], repeats: int, *, warm_up: int = 1, at_once: int = 1
) -> list[list[float]]:
    """Seconds per call of each, which take turns. All ranks begin a turn of ``at_once`` calls together."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(warm_up + repeats):
        for call, of_call in zip(calls, seconds, strict=True):
            if dist.is_initialized():
                dist.barrier()
            started = time.perf_counter()
            for _ in range(at_once):
                call()
            of_call.append((time.perf_counter() - started) / at_once)
    return [of_call[warm_up:] for of_call in seconds]


def latency(
    milliseconds: Annotated[float, typer.Option(help="Latency of a hop.")] = 2.0,
    tokens: Annotated[int, typer.Option(help="Length of the sequence.")] = 131072,
    repeats: Repeats = 5,
) -> list[Row]:
    """Measure forward and backward of a sparse pattern on 8 ranks whose hops have a latency.

    The rows of the last branch are spread in few hops, or go around. Both take turns.
    """
    with World(8, call_timeout=3600.0) as world:
        by_rank = world.run(measure_latency, milliseconds / 1e3, tokens, repeats)
    rows = []
    for direction in ("forward", "backward"):
        ways = {
            way: [max(call) for call in zip(*(found[way][direction] for found in by_rank), strict=True)]
            for way in by_rank[0]
        }
        row = _row(f"8 ranks, {direction}", ways["spread"], "around", ways["around"])
        hops = {way: max(found[way][f"{direction} hops"] for found in by_rank) for way in ways}
        rows.append(row | {"hops": hops})
    return rows


@dataclass(frozen=True)
class _Late(Transfer):
    """A transfer that arrives not before ``due``."""

    transfer: Transfer
    due: float

    def wait(self, timeout: timedelta) -> Any:
        found = self.transfer.wait(timeout)
        time.sleep(max(0.0, self.due - time.monotonic()))
        return found


def measure_latency(seconds: float, tokens: int, repeats: int) -> dict[str, dict[str, Any]]:
    """The seconds of forwards and backwards on this rank, and their hops, spread and around."""
    torch.set_num_threads(1)
    ring = native.initialize()
    lengths, rates = SPARSE
    lengths = tuple(min(length, tokens) for length in lengths)
    query, key, value, grad_out = torch.randn(4, 1, tokens // ring.size, 4, 64).unbind()
    leaves = [x.requires_grad_() for x in (query, key, value)]
    hops = 0

    class LateAttention(native.NativeRingDilatedAttention):
        def ring_pass(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], tag: int) -> Transfer:
            nonlocal hops
            hops += 1
            return _Late(super().ring_pass(outgoing, incoming, tag), time.monotonic() + seconds)

    class AroundAttention(LateAttention):
        call: AttentionCall | None = None

        def _attend(self, inputs: AttentionInputs) -> Any:
            inputs, call = self.binding.check(inputs)
            self.call = self.call or replace(call, few_hops=False)
            return execute(inputs, RingExecutor(self.binding, self.call, needs_gradients=True))

    ways = {"spread": LateAttention, "around": AroundAttention}
    attentions = {way: attention(lengths, rates, ring=ring) for way, attention in ways.items()}
    found: dict[str, dict[str, Any]] = {way: {"forward": [], "backward": []} for way in ways}
    for repeat in range(1 + repeats):
        for way, attention in attentions.items():
            for direction in ("forward", "backward"):
                dist.barrier()
                hops, started = 0, time.perf_counter()
                if direction == "forward":
                    out = attention(*leaves, is_causal=True)
                else:
                    torch.autograd.grad(out, leaves, grad_out)
                if repeat:  # the first is a warm-up
                    found[way][direction].append(time.perf_counter() - started)
                    found[way][f"{direction} hops"] = hops
    return found
