"""What the ranks of a training run compare, and how an error on one rank reaches the others.

A gradient reducer assumes that all ranks make the same calls in the same order. The ranks check this assumption: before
every collective of the framework they compare the call, the step and all arguments that must be equal. If they differ,
every rank raises RingMismatchError.
"""

from __future__ import annotations

import contextlib
from abc import ABC
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from ring_backends.errors import RingMismatchError
from ring_backends.ring.collectives import agree, broadcast, framework_collectives
from ring_backends.ring.rendezvous import world_ring
from ring_backends.ring.ring import Ring
from ring_backends.training.describe import Buffers
from ring_backends.training.reducer import is_eager_forward


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

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self._world = world_ring(ring)
        self.step_count = self.skipped_steps = 0
        self._backward_calls = 0
        self._failure: str | None = None
        self._buffers: Buffers = []

    def _agree(self, name: str, fields: Mapping[str, object], *, after_hops: bool = False) -> None:
        """Make sure that all ranks make the call ``name`` with these fields, at the same point of the training.

        A hop of the ring that is known to have failed is an error on all ranks of the world. With ``after_hops``, this
        rank first waits until its GPU has finished all hops.
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
        point = {"step": self.step_count + self.skipped_steps, "backward calls": self._backward_calls}
        agree(self._world, name, {**point, **fields})

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise RuntimeError(
                f"{self._failure}, which may have left an incomplete gradient: this state cannot be used any more; "
                "restart the processes from the last checkpoint."
            )

    @contextlib.contextmanager
    def _framework_collectives(self, name: str) -> Iterator[None]:
        """Wraps collectives of the framework. An error in them reaches the other ranks and ends the training."""
        try:
            with framework_collectives(self._world, name):
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

    def _check_calls_of(self, parts: Iterable[tuple[str, nn.Module]]) -> None:
        """Make sure, before each call of one of these modules, that all ranks call it.

        Some frameworks gather a module's parameters when the module is called. If ranks called different modules, each
        rank would compute with parameters of several modules, or collectives of different sizes would end the process.
        """
        for name, part in parts:
            part.register_forward_pre_hook(partial(self._check_call, name), prepend=True)

    def _check_call(self, name: str, *_: object) -> None:
        if not is_eager_forward():
            return
        try:
            agree(self._world, "forward of the model", {"part": name or "all of it"})
        except RingMismatchError as error:
            raise RingMismatchError(
                f"{error} The framework gathers a module's parameters from all ranks when the module is called: let "
                "every rank call the same modules, on zero rows if necessary; or shard them together with the module "
                "that contains them (fsdp: leave them out of blocks=; deepspeed: zero_stage=2)."
            ) from error
