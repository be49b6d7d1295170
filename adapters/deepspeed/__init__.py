"""DeepSpeed: hops by ``deepspeed.comm``, training by ``deepspeed.initialize`` with ZeRO 0 to 3.

Hops go through ``deepspeed.comm.batch_isend_irecv``, so that DeepSpeed's backend carries them and its comms_logger sees
them: one ``batch_isend_irecv`` per hop, its size that of the buffers sent and received together. (On a GPU the logger
waits for every operation it sees, so that hops and tiles overlap only without it.) Sharding, reduction, clipping and
checkpoint files are DeepSpeed's own; its configuration passes through, but for what the arguments here say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ring_backends.attention import RingDilatedAttention as _RingDilatedAttention
from ring_backends.cost.arrangement import AutoOptions, RingSize, arrange, refuse_arrangement
from ring_backends.errors import AdapterUnavailableError
from ring_backends.joining import check_options
from ring_backends.ring.rendezvous import connect, ring_ranks, start_world, world_ring
from ring_backends.ring.ring import Ring
from ring_backends.ring.topology import RingOrder
from ring_backends.ring.transfer import Transfer, post_works
from ring_backends.schedule.layout import LayoutKind
from ring_backends.training.state import TrainingState

try:
    import deepspeed.comm as comm

    from ring_backends.adapters.deepspeed.training import DeepSpeedTraining, engine_settings, start_deepspeed
    from ring_backends.adapters.deepspeed.ulysses import (
        UlyssesAttention,
        UlyssesRing,
        check_ulysses_size,
        connect_ulysses,
    )
except ImportError as error:
    raise AdapterUnavailableError(
        f"the deepspeed adapter cannot import DeepSpeed ({error}); install it with "
        "pip install 'ring-backends[deepspeed]'."
    ) from error

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["DeepSpeedRingDilatedAttention", "RingDilatedAttention", "initialize", "parallelize"]


def initialize(
    ring_size: RingSize = None,
    layout: LayoutKind = "contiguous",
    group: DeviceMesh | dist.ProcessGroup | None = None,
    timeout: timedelta = timedelta(seconds=300),
    *,
    mpu: Any = None,
    ulysses_size: int = 1,
    ring_order: RingOrder = "rank",
    **auto: Unpack[AutoOptions],
) -> Ring:
    """Join a ring; every one of its ranks makes this call. Starts ``deepspeed.comm`` unless it runs already.

    Args:
        ring_size: ranks per ring; the world is cut into rings of neighbouring ranks. None means the whole world;
            ``"auto"`` chooses.
        layout: how a sequence lies over the ring, ``"contiguous"`` or ``"zigzag"``.
        group: an existing process group, or one axis of a DeviceMesh, whose ranks become the ring.
        timeout: the longest that one call may take to end or to raise, from its first wait for a peer on. Starting up
            has at least 300 s.
        ring_order, auto: as of the native adapter: ``"topology"`` makes neighbours of ranks on one host, and what the
            attention will be called with is for ``ring_size="auto"``. Neither with ``group`` or ``mpu``; no ``"auto"``
            with ``ulysses_size``.
        mpu: instead of ``group``, an object whose ``get_sequence_parallel_group()`` gives the ring's ranks, such as
            ``deepspeed.runtime.sequence_parallel.parallel_state_sp`` once initialised; or that group itself.
        ulysses_size: how many neighbours of the ring trade heads for rows (see ``deepspeed_ulysses``); it divides the
            ring. ``ring_size`` stays the number of ranks that a sequence lies over.

    Raises:
        ValueError, TypeError: an argument breaks its rule, or no ring fits into the memory.
        RingMismatchError, RingPeerError: where ranks decide together, one asks for something else, or does not come.
    """
    check_options(ring_size, layout, timeout, group, ring_order, auto)
    check_ulysses_size(ulysses_size)
    if mpu is not None:
        refuse_arrangement("mpu is given, which has chosen and ordered the ring's ranks", ring_size, ring_order)
    if ulysses_size > 1:
        refuse_arrangement(
            f"ulysses_size = {ulysses_size} trades heads, which the estimate does not know of", ring_size, "rank"
        )
    world_size = start_world(timeout)
    if dist.is_initialized():
        start_deepspeed()
    size, order = arrange(ring_size, layout, world_size, ring_order, auto)
    group = _ring_group(group, mpu)
    ranks = ring_ranks(size, group, world_size, order)
    rings = order if group is None else None
    if ulysses_size == 1:
        return connect(ranks, layout, timeout, adapter="deepspeed", order=rings)
    return connect_ulysses(ranks, layout, timeout, ulysses_size, order=rings)


def _ring_group(group: DeviceMesh | dist.ProcessGroup | None, mpu: Any) -> DeviceMesh | dist.ProcessGroup | None:
    if mpu is None:
        return group
    if group is not None:
        raise ValueError(f"group = {group!r} and mpu = {mpu!r}: both name the ring's ranks; pass one of them.")
    if isinstance(mpu, dist.ProcessGroup):
        return mpu
    if not hasattr(mpu, "get_sequence_parallel_group"):
        raise TypeError(
            f"mpu = {mpu!r}: expected a ProcessGroup or an object with get_sequence_parallel_group(), such as "
            "deepspeed.runtime.sequence_parallel.parallel_state_sp."
        )
    sequence_group: dist.ProcessGroup = mpu.get_sequence_parallel_group()
    return sequence_group


class DeepSpeedRingDilatedAttention(_RingDilatedAttention):
    """Ring dilated attention whose hops are deepspeed.comm's point-to-point operations."""

    _trades: UlyssesAttention | None = None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_trades": None}

    def ring_pass(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor], tag: int) -> Transfer:
        group, ranks = self.ring.group, self.ring.ranks
        assert group is not None

        def post(outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> list[dist.Work]:
            # deepspeed.comm knows global ranks only.
            receives = [
                comm.P2POp(comm.irecv, buffer, ranks[peer], group=group, tag=tag) for peer, buffer in incoming.items()
            ]
            sends = [
                comm.P2POp(comm.isend, buffer, ranks[peer], group=group, tag=tag) for peer, buffer in outgoing.items()
            ]
            works: list[dist.Work] = comm.batch_isend_irecv([*receives, *sends])
            return works

        return post_works(group, post, outgoing, incoming)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool = False,
        seq_len: int | None = None,
        key_padding_mask: Tensor | None = None,
        document_ids: Tensor | None = None,
        dropout_seed: int | None = None,
        return_lse: bool = False,
    ) -> Any:
        attend = super().forward
        if isinstance(self.ring, UlyssesRing):
            # Made at the first call, and again where another ring has been assigned, as after unpickling.
            if self._trades is None or self._trades.ring is not self.ring:
                self._trades = UlyssesAttention.of(self)
            attend = self._trades
        return attend(
            query,
            key,
            value,
            is_causal=is_causal,
            seq_len=seq_len,
            key_padding_mask=key_padding_mask,
            document_ids=document_ids,
            dropout_seed=dropout_seed,
            return_lse=return_lse,
        )


RingDilatedAttention = DeepSpeedRingDilatedAttention


def parallelize(
    model: nn.Module,
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    ring: Ring,
    *,
    max_grad_norm: float | None = None,
    accumulation_steps: int = 1,
    zero_stage: int | None = None,
    config: Mapping[str, Any] | None = None,
    mpu: Any = None,
    mixed_precision: torch.dtype | None = None,
    **framework_options: Any,
) -> TrainingState:
    """Hand a model to ``deepspeed.initialize``, which replicates or shards it over data × ring by the ZeRO stage.

    Args:
        model: any module whose parameters are all of fp32, or all of bf16, which DeepSpeed trains over fp32 masters.
            DeepSpeed moves it to its accelerator. ZeRO 3 shards it in place.
        make_optimizer: called once with the parameters to train.
        ring: the ring its attention uses.
        max_grad_norm: clip the gradient's global norm to this before each step; None does not clip.
        accumulation_steps: backward calls per step.
        zero_stage: 0 to 3; None means what ``config`` says, or else 0.
        config: DeepSpeed's configuration, for whatever these arguments do not say. Batch sizes there count every rank,
            ring ranks as well, so that train_batch_size is left to DeepSpeed.
        mpu: a sequence-parallel mpu, for DeepSpeed to shard and reduce by.
        mixed_precision: torch.bfloat16 runs the forward under autocast and keeps parameters and reduction in fp32. To
            have DeepSpeed turn the parameters into bf16 over fp32 masters pass ``config={"bf16": {"enabled": True}}``.
        framework_options: for ``deepspeed.initialize``.

    Raises:
        ValueError, TypeError: an argument breaks its rule, ``config`` contradicts another one, or data size × ring size
            is not the world.
        RuntimeError: the reducer leaves the replicas with different gradients.
    """
    with world_ring(ring).report_refusals():
        settings = engine_settings(model, config, zero_stage, accumulation_steps, max_grad_norm, mixed_precision)
    return DeepSpeedTraining(
        model,
        make_optimizer,
        ring,
        max_grad_norm,
        accumulation_steps,
        settings,
        mpu,
        framework_options,
        mixed_precision,
    )
