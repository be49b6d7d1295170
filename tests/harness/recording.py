"""Record the hops, tiles and buffers of an attention call in their order, and forbid collectives.

The recording wraps the adapter's ``ring_pass`` and the kernels. Neither needs a change for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import ring_backends.engine.call
from ring_backends.engine.wire import TAGS_PER_STEP
from ring_backends.kernels import select_kernel
from ring_backends.ring.stream_hops import StreamHop
from ring_backends.ring.transfer import Transfer
from ring_backends.ring.wire_memory import BlockMemory
from ring_backends.schedule.planner import rank_plan
from ring_backends.schedule.rank_plan import RankPlan, Tile

_WORDS = ("gather", "reduce", "scatter", "alltoall", "all_to_all", "broadcast", "barrier")
COLLECTIVES = [name for name in dir(dist.ProcessGroup) if any(word in name for word in _WORDS)]


@dataclass(frozen=True)
class Event:
    """One recorded event.

    Attributes:
        what: ``"post"`` (a hop was posted), ``"wait"`` (for a hop), or ``"tile"`` (a tile was computed).
        tag: the tag of the hop.
        direction: the direction of the tile, ``"forward"`` or ``"backward"``.
        sent, received: bytes of the hop's buffers, by peer.
        buffers_alive: number of hops whose receive buffers for K and V are still in memory.
        tiles_before: number of tiles recorded before.
    """

    what: Literal["post", "wait", "tile"]
    tag: int = -1
    direction: str = ""
    sent: Mapping[int, int] = field(default_factory=dict)
    received: Mapping[int, int] = field(default_factory=dict)
    buffers_alive: int = 0
    tiles_before: int = 0

    @property
    def posts_keys(self) -> bool:
        """Whether the hop was posted for K and V on a chain."""
        return self.what == "post" and self.tag % TAGS_PER_STEP == 0

    @property
    def step(self) -> int:
        """The step of the schedule that waits for this hop of K and V."""
        return (self.tag & 0xFFFF) // TAGS_PER_STEP


@dataclass
class Recording:
    """Events in order, and the planned number of tiles per step for each direction."""

    events: list[Event] = field(default_factory=list)
    tiles_of_steps: dict[str, list[int]] = field(default_factory=dict)
    _received: dict[int, list[tuple[int, StorageWeakRef]]] = field(default_factory=dict)

    def post(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], tag: int) -> None:
        sent, received = ({peer: x.nbytes for peer, x in buffers.items()} for buffers in (outgoing, incoming))
        event = Event("post", tag, sent=sent, received=received)
        if event.posts_keys:
            buffers = incoming.values()
            self._received[tag] = [(buffer.data_ptr(), StorageWeakRef(buffer.untyped_storage())) for buffer in buffers]
        self.add(event)

    def give_back(self, buffer: Tensor) -> None:
        """The memory of a buffer is free again, without the end of its storage."""
        freed = range(buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes)
        for tag, received in self._received.items():
            self._received[tag] = [(pointer, ref) for pointer, ref in received if pointer not in freed]

    def add(self, event: Event) -> None:
        alive = sum(not all(ref.expired() for _, ref in received) for received in self._received.values())
        tiles = sum(earlier.what == "tile" for earlier in self.events)
        self.events.append(replace(event, buffers_alive=alive, tiles_before=tiles))


@dataclass(frozen=True)
class _RecordedTransfer(Transfer):
    transfer: Transfer
    recording: Recording
    tag: int

    def wait(self, timeout: timedelta) -> StreamHop | None:
        self.recording.add(Event("wait", self.tag))
        return self.transfer.wait(timeout)


@dataclass(frozen=True)
class _RecordedKernel:
    kernel: Any
    recording: Recording

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def forward_step(self, tiles: Sequence[Tile], *args: Any) -> None:
        self._record(tiles, "forward")
        self.kernel.forward_step(tiles, *args)

    def backward_step(self, tiles: Sequence[Tile], *args: Any) -> None:
        self._record(tiles, "backward")
        self.kernel.backward_step(tiles, *args)

    def _record(self, tiles: Sequence[Tile], direction: str) -> None:
        for _ in tiles:
            self.recording.add(Event("tile", direction=direction))


@contextlib.contextmanager
def recorded(attention_class: Any) -> Iterator[Recording]:
    """Record the hops and tiles of calls within this context, and of their backwards."""
    recording = Recording()
    ring_pass = attention_class.ring_pass

    def recorded_pass(self: Any, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], tag: int) -> Transfer:
        recording.post(outgoing, incoming, tag)
        return _RecordedTransfer(ring_pass(self, outgoing, incoming, tag), recording, tag)

    def recorded_kernel(*args: Any, **kwargs: Any) -> Any:
        return _RecordedKernel(select_kernel(*args, **kwargs), recording)

    def recorded_plan(*args: Any, **kwargs: Any) -> RankPlan:
        plan = rank_plan(*args, **kwargs)
        direction = "backward" if kwargs["backward"] else "forward"
        recording.tiles_of_steps[direction] = [len(step.all_tiles) for _, step in plan.steps]
        return plan

    def recorded_give_back(
        memory: BlockMemory, *buffers: Tensor, give_back: Callable[..., None] = BlockMemory.give_back
    ) -> None:
        for buffer in buffers:
            recording.give_back(buffer)
        give_back(memory, *buffers)

    ring_backends.engine.call.forget_calls()
    with (
        mock.patch.object(BlockMemory, "give_back", recorded_give_back),
        mock.patch.object(attention_class, "ring_pass", recorded_pass),
        mock.patch.object(ring_backends.engine.call, "rank_plan", recorded_plan),
        mock.patch.object(ring_backends.engine.call, "select_kernel", recorded_kernel),
    ):
        yield recording
    ring_backends.engine.call.forget_calls()


@contextlib.contextmanager
def no_collectives() -> Iterator[None]:
    """Make every collective of every process group raise."""

    errors = {name: AssertionError(f"{name} was called, but collectives are forbidden here") for name in COLLECTIVES}
    refusals = {name: mock.Mock(side_effect=error) for name, error in errors.items()}
    with mock.patch.multiple(dist.ProcessGroup, **refusals):
        yield
