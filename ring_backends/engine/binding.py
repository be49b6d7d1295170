"""An attention on its ring: checks calls, and begins them on all ranks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from ring_backends.engine.call import AttentionCall, AttentionInputs, look_up
from ring_backends.engine.wire import Hops, RingPass
from ring_backends.ring.ring import Ring
from ring_backends.schedule.pattern import DilatedPattern


@dataclass(frozen=True)
class Binding:
    """What all calls of one attention have in common on this rank.

    Attributes:
        pattern, ring, scale, kernel, grad_wire_dtype: as in RingDilatedAttention.
        ring_pass: posts a hop. None on one device, where no call has hops.
        name: distinguishes this attention from others on the ring, such as ``"2, layer 3"``; the same on all ranks.
    """

    pattern: DilatedPattern
    ring: Ring
    scale: float | None
    kernel: str
    grad_wire_dtype: torch.dtype | None = None
    ring_pass: RingPass | None = None
    name: str = "0"

    def check(self, inputs: AttentionInputs) -> tuple[AttentionInputs, AttentionCall]:
        """Check a call, and return its inputs, cast by autocast, with the checked call.

        Raises:
            ValueError, TypeError, RuntimeError: an argument is invalid, or the ring was unpickled. The error is also
                reported to the other ranks.
        """
        ring = self.ring
        try:
            if ring.agreement is None:
                ring.check_connected()
            inputs, call = look_up(inputs, self.pattern, ring, self.scale, self.kernel, self.grad_wire_dtype)
            if ring.size > 1:
                _refuse_tangents(inputs)
        except Exception:
            with ring.report_refusals():
                raise
        return inputs, call

    def begin(
        self, call: AttentionCall, inputs: AttentionInputs, direction: str, *, needs_gradients: bool
    ) -> Hops | None:
        """Wait until all ranks make this call, and return the hops of its forward or backward; None in a ring of one.

        Args:
            direction: as in :meth:`~ring_backends.ring.agreement.Agreement.begin`.
            needs_gradients: whether the call has a backward.
        """
        ring = self.ring
        if ring.agreement is None:
            return None
        assert self.ring_pass is not None
        configuration = call.configuration(inputs, self.name, needs_gradients=needs_gradients)
        begun = ring.agreement.begin(configuration, direction=direction)
        if ring.connected is not None:
            ring.connect(begun, call.pairs(inputs, needs_gradients=needs_gradients), inputs.query)
        memory = ring.wire_memory.of_call(inputs.query)
        return Hops(ring.rank, self.ring_pass, begun, ring.agreement, ring.traffic, memory, call.ring_ranks)


def _refuse_tangents(inputs: AttentionInputs) -> None:
    """Refuse forward-mode differentiation: a hop would drop the tangents.

    Raises:
        RuntimeError: a tensor has a tangent.
    """
    for name in ("query", "key", "value", "sinks"):
        tensor = getattr(inputs, name)
        if tensor is not None and unpack_dual(tensor).tangent is not None:
            raise RuntimeError(
                f"{name} has a tangent: forward-mode differentiation is not supported on a ring of several ranks; use "
                "the backward, or one device."
            )


class Bound(Protocol):
    """An attention module, or one call of it."""

    @property
    def binding(self) -> Binding: ...


_bound: WeakValueDictionary[int, Bound] = WeakValueDictionary()
_numbers = itertools.count()


def register(bound: Bound) -> Tensor:
    """Return a handle, int64 [1] on the CPU, by which operators find the binding as long as ``bound`` lives."""
    number = next(_numbers)
    _bound[number] = bound
    return torch.tensor([number], device="cpu")


def registered(number: int) -> Binding:
    """The binding of a handle.

    Raises:
        RuntimeError: its owner was deleted.
    """
    if number not in _bound:
        raise RuntimeError(
            "the attention module of a compiled call was deleted before the forward or backward of the call ran; keep "
            "a reference to the model until then."
        )
    return _bound[number].binding
