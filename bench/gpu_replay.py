"""Runs one rank's part of a ring on one device, with hops that reach no other rank.

The values of a replayed call mean nothing. Its launches, copies and memory are those of the rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
from case import Case
from torch import Tensor
from torch.distributed import HashStore

from ring_backends import RingSchedule, SequenceLayout
from ring_backends.cost.work import work_of
from ring_backends.engine.binding import Binding
from ring_backends.engine.call import AttentionCall, AttentionInputs, check_call
from ring_backends.engine.operators import RingExecutor, execute
from ring_backends.engine.wire import RingPass
from ring_backends.kernels import resolve_dtype
from ring_backends.ring.agreement import Agreement
from ring_backends.ring.ring import Ring
from ring_backends.ring.transfer import Transfer

_TIMEOUT = timedelta(hours=1)


class Finished(Transfer):
    """A transfer that has nothing to wait for."""

    def wait(self, timeout: timedelta) -> None:
        pass


def no_pass(outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], tag: int) -> Transfer:
    """A ring pass that moves nothing."""
    return Finished()


def local_copies(outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], tag: int) -> Transfer:
    """A ring pass that fills the incoming buffers from the outgoing ones, as far as these go, and else with zeros."""
    sent = iter([*outgoing.values()])
    for buffer in incoming.values():
        source = next(sent, buffer[:0])[: buffer.numel()]
        buffer[: source.numel()].copy_(source)
        buffer[source.numel() :].zero_()
    return Finished()


@dataclass(frozen=True)
class Replay:
    """One rank's call. ``backward`` takes the result of ``forward``.

    Attributes:
        binding: begins a forward or a backward without other ranks.
        grad_out: the gradient of out.
    """

    call: AttentionCall
    inputs: AttentionInputs
    ring: Ring
    binding: Binding
    grad_out: Tensor

    @classmethod
    def of(
        cls, case: Case, device: torch.device, *, rank: int = 0, kernel: str = "auto", ring_pass: RingPass = no_pass
    ) -> Replay:
        """Make the call of ``rank``, with inputs on ``device``."""
        ring = Ring(case.ring_size, rank, ranks=tuple(range(case.ring_size)), layout_kind=case.layout)  # type: ignore[arg-type]
        rows, dtype = ring.layout(case.seq_len).local_len(rank), resolve_dtype(case.dtype, device)
        query, key, value, grad_out = (
            torch.randn(1, rows, heads, case.head_dim, device=device, dtype=dtype)
            for heads in (case.num_heads, case.kv_heads, case.kv_heads, case.num_heads)
        )
        tensors = (x.requires_grad_() for x in (query, key, value))
        given = AttentionInputs(*tensors, is_causal=case.causal, seq_len=case.seq_len)
        inputs, call = check_call(given, case.pattern, ring, None, kernel)
        agreement = Agreement(HashStore(), 0, 1, _TIMEOUT, lambda: None) if ring.size > 1 else None
        alone = Binding(case.pattern, replace(ring, agreement=agreement), None, kernel, ring_pass=ring_pass)
        return cls(call, inputs, ring, alone, grad_out)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.inputs.query, self.inputs.key, self.inputs.value

    def forward(self) -> Tensor:
        out: Tensor = execute(self.inputs, RingExecutor(self.binding, self.call, needs_gradients=True))
        return out

    def backward(self, out: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, self.tensors, self.grad_out)

    def num_tiles(self, *, backward: bool) -> int:
        steps = self.call.plan(self.inputs, backward=backward).steps
        return sum(len(step.all_tiles) for _, step in steps)

    def flops(self, *, backward: bool) -> int:
        """FLOPs of the visible pairs of query and key. A forward has two matrix products, a backward five."""
        forward = self.call.schedule.tile_flops(self.call.rank, batch=1, head_dim=self.inputs.query.shape[3])
        return forward * 5 // 2 if backward else forward


def busiest_rank(case: Case) -> int:
    """The rank with the most visible pairs of query and key, and of these the one with the most tiles before cuts."""
    layout = SequenceLayout(case.seq_len, case.ring_size, case.layout)  # type: ignore[arg-type]
    schedule = RingSchedule(case.pattern, layout, case.num_heads, case.kv_heads, case.causal)
    travel = schedule.travel(itemsize={"fp64": 8, "fp32": 4}.get(case.dtype, 2))

    def num_tiles(rank: int) -> int:
        work = work_of(schedule, travel, rank)
        return work.own_tiles + work.other_tiles + work.chained_tiles

    return max(range(case.ring_size), key=lambda rank: (schedule.pairs[rank], num_tiles(rank)))
