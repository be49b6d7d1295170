"""The calls of a training, which all ranks make in the same order: compared, and watched for lost ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn

from ring_backends.errors import RingMismatchError
from ring_backends.ring.calls import NOTHING, Configuration
from ring_backends.ring.collectives import agree, agree_if_new, event_of, framework_collectives
from ring_backends.ring.rendezvous import world_ring
from ring_backends.ring.ring import Ring
from ring_backends.torch_internals import internal
from ring_backends.training.reducer import is_eager_forward

PART = "part of the model"
PARTS_BEHIND_LOSS = "parts of the model behind the loss"
ORDER = "parameters in the order of their gradients"

_FORWARD = "forward of the model"
_ADVICE = {
    PART: "The framework gathers a module's parameters from all ranks when the module is called: let every rank "
    "call the same modules, on zero rows if necessary; or shard them together with the module that contains them "
    "(fsdp: leave them out of blocks=; deepspeed: zero_stage=2).",
    PARTS_BEHIND_LOSS: "The framework reduces gradients in the order in which they arrive: let the losses of all ranks "
    "depend on the same parts of the model; add 0 * output.sum() of a part that a rank does not use.",
    ORDER: "ZeRO reduces gradients in the order in which they arrive: let every rank use the same parameters in the "
    "same order; add 0 * output.sum() of a part that a rank does not use; or use zero_stage=0.",
}
"""What to do about a field that differs between the ranks."""


class Events:
    """The calls of one training state.

    Attributes:
        ring: the ring of the attention.
        world: the ring of all ranks.
    """

    def __init__(self, ring: Ring) -> None:
        self.ring, self.world = ring, world_ring(ring)
        agreement = self.world.agreement
        self._number = 0 if agreement is None else agreement.number_module()
        self._failure: str | None = None
        self._is_in_forward = False

    def agree(
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
        self.check_usable()
        try:
            if after_hops:
                self.ring.synchronize()
            else:
                self.ring.check()
        except RuntimeError as error:
            if self.world.agreement is not None:
                self.world.agreement.report_error(name, error)
            raise
        event = self.event(name, fields)
        with self._mismatches_explained():
            if if_new:
                agree_if_new(self.world, event, values)
            else:
                agree(self.world, name, event.fields, values=values)

    def event(self, name: str, fields: Mapping[str, object]) -> Configuration:
        return event_of(name, {"training state": self._number, **fields})

    def check_usable(self) -> None:
        """Refuse every call after an error in a collective of the framework."""
        if self._failure is not None:
            raise RuntimeError(
                f"{self._failure}, which may have left an incomplete gradient: this state cannot be used any more; "
                "restart the processes from the last checkpoint."
            )

    @contextlib.contextmanager
    def framework_collectives(self, name: str, step: int) -> Iterator[None]:
        """Wraps collectives of the framework. An error in them reaches the other ranks and ends the training.

        Args:
            step: the number of the step, for later errors.
        """
        try:
            with self._mismatches_explained(), framework_collectives(self.world, name, self.ring):
                yield
        except BaseException as error:
            if self.ring.agreement is not None:  # a rank of the same ring may be waiting for a hop
                self.ring.agreement.report_error(name, error)
            self._failure = f"{name}() raised {type(error).__name__} in step {step}"
            raise

    def watch_calls(self, model: nn.Module, parts: Iterable[tuple[str, nn.Module]]) -> None:
        """Make sure, before each call of one of these modules, that all ranks call it.

        Some frameworks gather a module's parameters when the module is called. If ranks called different modules, each
        rank would compute with parameters of several modules, or collectives of different sizes would end the process.

        Args:
            model: the module that the user calls. Within its calls, waits for the framework are watched.
        """
        if self.world.size == 1:
            return
        for name, part in parts:
            event = self.event(_FORWARD, {PART: name or "all of it"})
            part.register_forward_pre_hook(partial(self._check_call, event), prepend=True)
        call = internal(model, "_call_impl", "watching the calls of a sharded model")

        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._is_in_forward or not is_eager_forward():
                return call(*args, **kwargs)
            self._is_in_forward = True
            try:
                with (
                    self._mismatches_explained(),
                    framework_collectives(self.world, _FORWARD, self.ring, reports_errors=False),
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
            agree_if_new(self.world, event)
        else:  # a part that the user calls directly, in which no wait is watched
            with self._mismatches_explained():
                agree(self.world, _FORWARD, event.fields)

    @contextlib.contextmanager
    def _mismatches_explained(self) -> Iterator[None]:
        """Wraps calls that compare. Their mismatches then say what to do, and close the ring if they close the world.

        A rank of the same ring may be waiting for a hop.
        """
        world, ring = self.world.agreement, self.ring.agreement
        try:
            yield
        except RuntimeError as error:
            if world is not None and ring is not None and world.has_failed:
                ring.report_error("training", error)
            advice = {_ADVICE[field]: None for field in _ADVICE if f"{field} (" in str(error)}
            if isinstance(error, RingMismatchError) and advice:
                raise RingMismatchError(" ".join([str(error), *advice])) from error
            raise
