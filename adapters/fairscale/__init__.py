"""FairScale: hops are ``PipeMessage``s on a ``Transport``, training is by OSS and ShardedDataParallel, or by its FSDP.

The ring is the context- or pipeline-parallel group of ``fairscale.nn.model_parallel`` where that is initialised. Its
ranks get a group of their own for the hops, which then never queue behind FairScale's collectives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ring_backends.attention import RingDilatedAttention as _RingDilatedAttention
from ring_backends.cost.arrangement import AutoOptions, RingSize, arrange, refuse_arrangement
from ring_backends.errors import AdapterUnavailableError
from ring_backends.joining import check_options
from ring_backends.ring.rendezvous import (
    connect,
    ring_ranks,
    start_world,
    start_world_of_one,
    world_ring,
)
from ring_backends.ring.ring import Ring
from ring_backends.ring.topology import RingOrder
from ring_backends.ring.transfer import Transfer, post_works
from ring_backends.schedule.layout import LayoutKind
from ring_backends.training.state import MakeOptimizer, TrainingState

try:
    from fairscale.nn.model_parallel import initialize as model_parallel
    from fairscale.nn.pipe.messages import Transport
    from fairscale.nn.pipe.types import ACTIVATIONS_GRADS_QUEUE, PipeMessage

    from ring_backends.adapters.fairscale.training import (
        FairScaleTraining,
        FullyShardedTraining,
        ShardedTraining,
    )
except ImportError as error:
    raise AdapterUnavailableError(
        f"the fairscale adapter cannot import FairScale ({error}); install it with "
        "pip install 'ring-backends[fairscale]'."
    ) from error

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["FairScaleRingDilatedAttention", "RingDilatedAttention", "initialize", "parallelize"]


def initialize(
    ring_size: RingSize = None,
    layout: LayoutKind = "contiguous",
    group: DeviceMesh | dist.ProcessGroup | None = None,
    timeout: timedelta = timedelta(seconds=300),
    *,
    ring_order: RingOrder = "rank",
    **auto: Unpack[AutoOptions],
) -> Ring:
    """Join a ring; every one of its ranks makes this call.

    Args:
        ring_size: ranks per ring. Where ``fairscale.nn.model_parallel`` is initialised its context-parallel group, if
            that has several ranks, or else its pipeline-parallel group is the ring, and this may be left out.
            Otherwise the world is cut into rings of neighbouring ranks; None means the whole world, ``"auto"`` chooses.
        layout: how a sequence lies over the ring, ``"contiguous"`` or ``"zigzag"``.
        group: an existing process group, or one axis of a DeviceMesh, whose ranks become the ring.
        timeout: the longest that one call may take to end or to raise, from its first wait for a peer on. Starting up
            has at least 300 s.
        ring_order, auto: as of the native adapter: ``"topology"`` makes neighbours of ranks on one host, and what the
            attention will be called with is for ``ring_size="auto"``. Neither with ``group``,
            nor where ``fairscale.nn.model_parallel`` is initialised.

    Raises:
        ValueError, TypeError: an argument breaks its rule, or no ring fits into the memory.
        RingMismatchError, RingPeerError: where ranks decide together, one asks for something else, or does not come.
    """
    check_options(ring_size, layout, timeout, group, ring_order, auto)
    world_size = start_world(timeout)
    if group is None and model_parallel.model_parallel_is_initialized():
        refuse_arrangement("fairscale.nn.model_parallel has chosen and ordered the ring's ranks", ring_size, ring_order)
        group = _model_parallel_ring()
        if ring_size not in (None, group.size()):
            raise ValueError(
                f"ring_size = {ring_size}: fairscale.nn.model_parallel is initialised with a ring of {group.size()} "
                "ranks, its context- or pipeline-parallel group; leave ring_size out, initialise it with this length, "
                "or pass a group of your own."
            )
    size, order = arrange(ring_size, layout, world_size, ring_order, auto)
    ranks = ring_ranks(size, group, world_size, order)
    return connect(ranks, layout, timeout, adapter="fairscale", order=order if group is None else None)


def _model_parallel_ring() -> dist.ProcessGroup:
    """FairScale's context-parallel group, which 0.4.13 does not have and later sources have always, or pipeline's."""
    if hasattr(model_parallel, "get_context_parallel_group"):
        group: dist.ProcessGroup = model_parallel.get_context_parallel_group()
        if group.size() > 1:
            return group
    pipeline: dist.ProcessGroup = model_parallel.get_pipeline_parallel_group()
    return pipeline


@dataclass(frozen=True)
class RingTransport(Transport):  # type: ignore[misc]
    """The messages of one hop, posted together as ``isend`` and ``irecv`` of one group.

    No message has a header: what comes from whom, and how large, stands in the schedule of both ends.
    """

    group: dist.ProcessGroup
    _operations: list[dist.P2POp] = field(default_factory=list)

    def recv_message_tensors(self, message: PipeMessage) -> PipeMessage:
        """Receive into the tensors that the message has; they are filled when the works of ``post`` are over."""
        for tensor in message.tensors:
            self._operations.append(dist.P2POp(dist.irecv, tensor, message.src, self.group, message.tag))
        return message

    def send_message(self, message: PipeMessage, sync: bool = False, skip_header: bool = False) -> None:
        """Send the tensors of a message; they have to stay unchanged until the works of ``post`` are over."""
        assert skip_header
        assert not sync
        for tensor in message.tensors:
            self._operations.append(dist.P2POp(dist.isend, tensor, message.dest, self.group, message.tag))

    def post(self) -> list[dist.Work]:
        return dist.batch_isend_irecv(self._operations)


class FairScaleRingDilatedAttention(_RingDilatedAttention):
    """Ring dilated attention whose hops are made of ``PipeMessage`` objects, carried by :class:`RingTransport`."""

    def ring_pass(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], tag: int) -> Transfer:
        ring, group = self.ring, self.ring.group
        assert group is not None
        device = next(iter([*outgoing.values(), *incoming.values()])).device

        def post(outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> list[dist.Work]:
            transport = RingTransport(None, device, group)
            here = ring.ranks[ring.rank]
            for peer, buffer in incoming.items():
                transport.recv_message_tensors(_message(ring.ranks[peer], here, buffer, tag))
            for peer, buffer in outgoing.items():
                transport.send_message(_message(here, ring.ranks[peer], buffer, tag), skip_header=True)
            return transport.post()

        return post_works(group, post, outgoing, incoming)


RingDilatedAttention = FairScaleRingDilatedAttention


def _message(source: int, destination: int, buffer: Tensor, tag: int) -> PipeMessage:
    """A message between two global ranks."""
    message = PipeMessage(source, destination, ACTIVATIONS_GRADS_QUEUE, tensors=(buffer,))
    message.tag = tag  # its own counts the messages made by this process, which other ranks do not know
    return message


def parallelize(
    model: nn.Module,
    make_optimizer: MakeOptimizer,
    ring: Ring,
    *,
    max_grad_norm: float | None = None,
    accumulation_steps: int = 1,
    strategy: Literal["sharded_ddp", "fsdp"] = "sharded_ddp",
    mixed_precision: torch.dtype | None = None,
    **framework_options: Any,
) -> TrainingState:
    """Shard optimizer and gradients over data × ring by OSS and ShardedDataParallel, or parameters too by its FSDP.

    OSS wants an optimizer's class, not an optimizer. ``make_optimizer`` is called once, and OSS is given the class of
    what it returns, its parameter groups with all their values, and for every argument of the class's constructor the
    value in its ``defaults``. An optimizer with an argument that is not among its defaults cannot be built again and is
    refused. Schedulers and hooks belong on ``state.optimizer``.

    Args:
        model: any module, on its device already. For FSDP its blocks may be wrapped in FullyShardedDataParallel
            already; the whole is wrapped here.
        make_optimizer: called once with the parameters to train; with FSDP, with each rank's flat shards of them.
        ring: the ring its attention uses.
        max_grad_norm: clip the gradient's global norm to this before each step.
        accumulation_steps: backward calls per step.
        strategy: ``"fsdp"`` needs a GPU.
        mixed_precision: torch.bfloat16 runs the forward under autocast; parameters and gradients keep their dtype.
        framework_options: for OSS and ShardedDataParallel, by their names, or for FullyShardedDataParallel.

    Raises:
        ValueError, TypeError: an argument breaks its rule, data size × ring size is not the world, FairScale splits
            the model over ranks as well, or the strategy cannot run here.
        RuntimeError: the reducer leaves the replicas with different parameters.
    """
    strategies: dict[str, type[FairScaleTraining]] = {"sharded_ddp": ShardedTraining, "fsdp": FullyShardedTraining}
    with world_ring(ring).report_refusals():
        if strategy not in strategies:
            raise ValueError(f"strategy = {strategy!r}: must be one of {', '.join(map(repr, strategies))}.")
        _check_model_parallel(ring)
    start_world_of_one()  # OSS and FSDP need a process group
    return strategies[strategy](
        model, make_optimizer, ring, max_grad_norm, accumulation_steps, mixed_precision, framework_options
    )


def _check_model_parallel(ring: Ring) -> None:
    if not model_parallel.model_parallel_is_initialized():
        return
    size = model_parallel.get_model_parallel_world_size()
    stages = tuple(model_parallel.get_pipeline_parallel_ranks())
    if size > 1 or (len(stages) > 1 and stages != ring.ranks):
        raise ValueError(
            f"fairscale.nn.model_parallel is initialised with {size} ranks per layer and {len(stages)} pipeline "
            "stages: ranks that hold different parts of a model would be averaged as replicas; initialise it with one "
            "rank per layer, and with no pipeline but the ring."
        )
