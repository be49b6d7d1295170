"""What the ranks of a training run compare, and how an error on one rank reaches the others.

A gradient reducer assumes that all ranks make the same calls in the same order. The ranks check this assumption. Before
a rank calls a collective of the framework, it knows that all ranks call it: either this call followed the same one the
last time, or the rank compares it with the other ranks. So a rank that leaves the usual sequence waits for a
comparison, and the other ranks wait in the framework's collective. All of them then raise RingMismatchError.

Fields that change in each step, such as learning rates and numbers of tokens, are compared with the number of tokens
of the step: the one exchange that a step needs.
"""

from __future__ import annotations

import contextlib
from abc import ABC
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from ring_backends.errors import RingMismatchError
from ring_backends.ring.calls import NOTHING, Configuration
from ring_backends.ring.collectives import agree, agree_if_new, broadcast, event_of, framework_collectives
from ring_backends.ring.rendezvous import world_ring
from ring_backends.ring.ring import Ring
from ring_backends.torch_internals import internal
from ring_backends.training.describe import Buffers
from ring_backends.training.reducer import is_eager_forward

PART = "part of the model"
PARTS_BEHIND_LOSS = "parts of the model behind the loss"
ORDER = "parameters in the order of their gradients"

_FORWARD = "forward of the model"
_SAME_PARTS = (
    "The framework reduces gradients in the order in which they arrive: let the losses of all ranks depend on the same "
    "parts of the model; add 0 * output.sum() of a part that a rank does not use."
)


class ComparedTraining(ABC):
    """One rank's position in a training run, which the rank compares with the other ranks.

    Attributes:
        ring: the ring of the attention.
        step_count: optimizer steps taken so far; part of a checkpoint.
        skipped_steps: calls of ``step`` in which the framework left the parameters unchanged because the gradient was
            not finite. Only DeepSpeed's ZeRO 1 to 3 do so.
    """

    ring: Ring
    step_count: int
    skipped_steps: int

    _ADVICE: ClassVar[Mapping[str, str]] = {
        PART: "The framework gathers a module's parameters from all ranks when the module is called: let every rank "
        "call the same modules, on zero rows if necessary; or shard them together with the module that contains them "
        "(fsdp: leave them out of blocks=; deepspeed: zero_stage=2).",
        PARTS_BEHIND_LOSS: _SAME_PARTS,
        ORDER: _SAME_PARTS,
    }
    """What to do about a field that differs between the ranks."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self._world = world_ring(ring)
        agreement = self._world.agreement
        self._number = 0 if agreement is None else agreement.number_module()
        self.step_count = self.skipped_steps = 0
        self._backward_calls = 0
        self._failure: str | None = None
        self._buffers: Buffers = []
        self._is_in_forward = False

    def _agree(
        self,
        name: str,
        fields: Mapping[str, object],
        values: Mapping[str, object] = NOTHING,
        *,
        after_hops: bool = False,
        if_new: bool = False,
    ) -> None:
        """Make sure that all ranks make the call ``name`` with these fields, at the same point of the training.

        A hop of the ring that is known to have failed is an error on all ranks of the world.

        Args:
            values: fields that usually change in each step.
            after_hops: whether this rank first waits until its GPU has finished all hops.
            if_new: whether the usual call needs no communication.
        """
        self._check_usable()
        try:
            if after_hops:
                self.ring.synchronize()
            else:
                self.ring.check()
        except RuntimeError as error:
            if self._world.agreement is not None:
                self._world.agreement.report_error(name, error)
            raise
        fields = {"backward calls": self._backward_calls, **fields}
        with self._mismatches_explained():
            if if_new:
                agree_if_new(self._world, self._event(name, fields), values)
            else:
                agree(self._world, name, self._event(name, fields).fields, values=values)

    def _event(self, name: str, fields: Mapping[str, object]) -> Configuration:
        return event_of(name, {"training state": self._number, **fields})

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise RuntimeError(
                f"{self._failure}, which may have left an incomplete gradient: this state cannot be used any more; "
                "restart the processes from the last checkpoint."
            )

    @contextlib.contextmanager
    def _mismatches_explained(self) -> Iterator[None]:
        """Wraps calls that compare. Their mismatches then say what to do, and close the ring if they close the world.

        A rank of the same ring may be waiting for a hop.
        """
        world, ring = self._world.agreement, self.ring.agreement
        try:
            yield
        except RuntimeError as error:
            if world is not None and ring is not None and world.has_failed:
                ring.report_error("training", error)
            advice = {self._ADVICE[field]: None for field in self._ADVICE if f"{field} (" in str(error)}
            if isinstance(error, RingMismatchError) and advice:
                raise RingMismatchError(" ".join([str(error), *advice])) from error
            raise

    @contextlib.contextmanager
    def _framework_collectives(self, name: str) -> Iterator[None]:
        """Wraps collectives of the framework. An error in them reaches the other ranks and ends the training."""
        try:
            with self._mismatches_explained(), framework_collectives(self._world, name, self.ring):
                yield
        except BaseException as error:
            if self.ring.agreement is not None:  # a rank of the same ring may be waiting for a hop
                self.ring.agreement.report_error(name, error)
            self._failure = f"{name}() raised {type(error).__name__} in step {self.step_count + 1}"
            raise

    def _broadcast_buffers(self, name: str) -> None:
        """Give all ranks rank 0's persistent buffers: each rank has updated its own from different tokens."""
        if not self._buffers:
            return
        with self._world.report_refusals():
            buffers: list[Any] = [getattr(module, buffer, None) for module, buffer in self._buffers]
            for (module, buffer), found in zip(self._buffers, buffers, strict=True):
                if not isinstance(found, Tensor):
                    raise ValueError(
                        f"buffer {buffer} of a {type(module).__name__} is {found!r}, but was a tensor in "
                        "parallelize(): assign a tensor to it, since rank 0's value is copied to all ranks."
                    )
        broadcast(self._world, f"buffers in {name}", buffers)

    def _check_calls_of(self, model: nn.Module, parts: Iterable[tuple[str, nn.Module]]) -> None:
        """Make sure, before each call of one of these modules, that all ranks call it.

        Some frameworks gather a module's parameters when the module is called. If ranks called different modules, each
        rank would compute with parameters of several modules, or collectives of different sizes would end the process.

        Args:
            model: the module that the user calls. Within its calls, waits for the framework are watched.
        """
        if self._world.size == 1:
            return
        for name, part in parts:
            event = self._event(_FORWARD, {PART: name or "all of it"})
            part.register_forward_pre_hook(partial(self._check_call, event), prepend=True)
        call = internal(model, "_call_impl", "watching the calls of a sharded model")

        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._is_in_forward or not is_eager_forward():
                return call(*args, **kwargs)
            self._is_in_forward = True
            try:
                with (
                    self._mismatches_explained(),
                    framework_collectives(self._world, _FORWARD, self.ring, reports_errors=False),
                ):
                    return call(*args, **kwargs)
            finally:
                self._is_in_forward = False

        # The framework gathers in hooks that torch calls around forward(), so replacing forward() would not do.
        model._call_impl = watched  # type: ignore[method-assign]

    def _check_call(self, event: Configuration, *_: object) -> None:
        if not is_eager_forward():
            return
        if self._is_in_forward:
            agree_if_new(self._world, event)
        else:  # a part that the user calls directly, in which no wait is watched
            with self._mismatches_explained():
                agree(self._world, _FORWARD, event.fields)
