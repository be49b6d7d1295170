"""Ulysses × ring: neighbouring ranks exchange heads for rows, and K and V travel among fewer, larger shards.

Outside of a call nothing changes: the sequence is distributed over all ranks of the ring, and ``shard``, ``unshard``,
``positions``, the data size and the loss are the same. Within a call, each group of ``ulysses_size`` neighbouring ranks
runs DeepSpeed's ``DistributedAttention`` (arXiv 2309.14509), whose all-to-all gives every rank the rows of its whole
group for its share of the heads. K and V then travel in a smaller ring of every ``ulysses_size``-th rank. The rows of a
group are a shard of the smaller ring only if all ranks hold equally many rows. Therefore the ring size must divide
``seq_len``; with the zigzag layout, twice the ring size must.

``traffic`` counts hops only. If a rank is lost during an exchange, the others raise within the ring's timeout: a
RingPeerError in the forward, torch's own error in the backward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any, cast

import deepspeed.comm as comm
import torch
import torch.distributed as dist
from deepspeed.sequence.layer import DistributedAttention, single_all_to_all
from torch import Tensor

from ring_backends.attention import RingDilatedAttention
from ring_backends.engine.call import AttentionInputs
from ring_backends.engine.operators import attend
from ring_backends.errors import RingMismatchError, RingPeerError
from ring_backends.kernels.score_mod import ScoreMod
from ring_backends.ring.rendezvous import connect
from ring_backends.ring.ring import Ring
from ring_backends.schedule.layout import LayoutKind
from ring_backends.schedule.pattern import DilatedPattern


@dataclass(frozen=True)
class UlyssesRing(Ring):
    """A ring whose neighbouring ranks exchange heads for rows.

    Attributes:
        hop_ring: the ring of every ``ulysses_size``-th rank, in which K and V travel. It shares ``traffic``.
        ulysses_group: the process group of this rank and the neighbours with which it exchanges heads for rows.
        ulysses_size, ulysses_rank: size of that group, and this rank's rank in it.
    """

    hop_ring: Ring = dataclasses.field(default_factory=Ring)
    ulysses_group: dist.ProcessGroup | None = None
    ulysses_size: int = 1
    ulysses_rank: int = 0

    def with_layout(self, kind: LayoutKind) -> Ring:
        return dataclasses.replace(self, layout_kind=kind, hop_ring=self.hop_ring.with_layout(kind))

    def check(self) -> None:
        super().check()
        self.hop_ring.check()

    def synchronize(self) -> None:
        super().synchronize()
        self.hop_ring.synchronize()

    _connections = (*Ring._connections, "ulysses_group")


def connect_ulysses(
    ranks: Sequence[int],
    layout: LayoutKind,
    timeout: timedelta,
    adapter: str,
    order: Sequence[int] | None,
    *,
    ulysses_size: int,
) -> UlyssesRing:
    """Join the ring of these global ranks. Each group of ``ulysses_size`` neighbours exchanges heads for rows.

    Args:
        ranks, layout, timeout, adapter, order: as in :func:`~ring_backends.ring.rendezvous.connect`.

    Raises:
        ValueError: ``ulysses_size`` does not divide the ring.
    """
    if len(ranks) % ulysses_size:
        raise ValueError(
            f"ulysses_size = {ulysses_size}: must divide the {len(ranks)} ranks of the ring, which are cut into groups "
            "of that size; choose a divisor."
        )
    ring = connect(ranks, layout, timeout, adapter, order)
    first = ring.rank - ring.rank % ulysses_size
    neighbours = connect(ranks[first : first + ulysses_size], layout, timeout, adapter)
    hop_ring = connect(ranks[neighbours.rank :: ulysses_size], layout, timeout, adapter)
    return UlyssesRing(
        **vars(ring),
        hop_ring=dataclasses.replace(hop_ring, traffic=ring.traffic),
        ulysses_group=neighbours.group,
        ulysses_size=ulysses_size,
        ulysses_rank=neighbours.rank,
    )


@dataclass(frozen=True)
class _ShareOfHeads(DilatedPattern):
    """The pattern of one Ulysses rank's heads. Each head keeps the branch and the offset of its global index."""

    ulysses_size: int = 1
    ulysses_rank: int = 0

    def heads(self, branch: int, num_heads: int) -> range:
        first = self.ulysses_rank * num_heads
        whole = super().heads(branch, num_heads * self.ulysses_size)
        start = min(max(whole.start - first, 0), num_heads)
        return range(start, max(start, min(whole.stop - first, num_heads)))

    def head_offsets(self, branch: int, head: int, num_heads: int, seq_len: int) -> range:
        head += self.ulysses_rank * num_heads
        return super().head_offsets(branch, head, num_heads * self.ulysses_size, seq_len)

    def check(self, *, seq_len: int, num_heads: int) -> None:
        super().check(seq_len=seq_len, num_heads=num_heads * self.ulysses_size)


@lru_cache(maxsize=64)
def _share_of_heads(pattern: DilatedPattern, size: int, rank: int) -> DilatedPattern:
    return _ShareOfHeads(**asdict(pattern), ulysses_size=size, ulysses_rank=rank)


# A compiled graph cannot compare the ranks' calls.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend_in_groups(module: RingDilatedAttention, ring: UlyssesRing, inputs: AttentionInputs) -> Any:
    """Attend as :meth:`RingDilatedAttention._attend` does.

    Args:
        module: the user's attention module. Its ``ring_pass`` sends over ``ring.hop_ring``.
        ring: the ring of ``module``.

    Raises:
        ValueError: ``ulysses_size`` does not divide the heads or the key/value heads, the ranks do not hold equally
            many rows, or ``dropout_p`` is not 0.
    """
    binding = module.binding
    inputs, checked = binding.check(inputs)
    assert ring.agreement is not None
    seq_len = checked.layout.seq_len
    with ring.report_refusals():
        _check_trade(inputs, seq_len, ring)
    configuration = checked.configuration(inputs, binding.name, needs_gradients=inputs.needs_gradients)
    call = ring.agreement.begin(configuration)
    pattern = _share_of_heads(binding.pattern, ring.ulysses_size, ring.ulysses_rank)
    hop_ring = replace(ring.hop_ring, buffer_bytes=ring.buffer_bytes)
    share, order = replace(binding, pattern=pattern, ring=hop_ring), _order(ring, seq_len, inputs.query.device)
    statistics: list[Tensor] = []

    def attend_share(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend with this rank's share of the heads to all rows of its group, which are in the order of its ranks."""
        rows = [query, key, value, mask, documents]
        if order is not None:
            rows = [None if x is None else x[:, order] for x in rows]
        out, lse = attend(share, AttentionInputs.of([*rows, None, sinks], options))
        if order is not None:
            back = order.argsort()
            out, lse = out[:, back], lse[:, :, back]
        statistics.append(lse)
        return cast(Tensor, out.contiguous())

    try:
        mask, documents = (_of_group(ring, marks) for marks in (inputs.key_padding_mask, inputs.document_ids))
        sinks = None if inputs.sinks is None else inputs.sinks.chunk(ring.ulysses_size)[ring.ulysses_rank]
        options = inputs.options | {"seq_len": seq_len, "return_lse": True}
        if inputs.score_mod is not None:
            first_head = inputs.query.shape[2] // ring.ulysses_size * ring.ulysses_rank
            options["score_mod"] = partial(_of_share, inputs.score_mod, first_head)
        trade = DistributedAttention(attend_share, ring.ulysses_group, scatter_idx=2, gather_idx=1)
        out = trade(inputs.query, inputs.key, inputs.value, 0)
        if not inputs.return_lse:
            return out
        lse = single_all_to_all(statistics[0].transpose(1, 2).unsqueeze(-1), 1, 2, 0, ring.ulysses_group)
    except (RingMismatchError, RingPeerError, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:  # the exchange of heads for rows has failed, and the ring's call fails with it
        what = f"rank {ring.rank} waited for its Ulysses group to exchange heads for rows"
        ring.agreement.fail(call, what, error)
    return out, lse.squeeze(-1).transpose(1, 2)


def _order(ring: UlyssesRing, seq_len: int, device: torch.device) -> Tensor | None:
    """The permutation that takes the group's rows to the order of the hop ring's shard; None if they are equal."""
    if ring.layout_kind == "contiguous":
        return None
    layout, first = ring.layout(seq_len), ring.rank - ring.ulysses_rank
    positions = torch.cat([layout.positions(rank, device) for rank in range(first, first + ring.ulysses_size)])
    return positions.argsort()


def _of_group(ring: UlyssesRing, marks: Tensor | None) -> Tensor | None:
    """All-gather a mask or document ids over the group, in the order of its ranks."""
    if marks is None:
        return None
    own = marks.contiguous().view(torch.uint8)  # gloo does not gather bool
    gathered = [torch.empty_like(own) for _ in range(ring.ulysses_size)]
    comm.all_gather(gathered, own, group=ring.ulysses_group)
    return torch.cat([part.view(marks.dtype) for part in gathered], 1)


def _of_share(
    score_mod: ScoreMod, first: int, score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor
) -> Tensor:
    """A score_mod for the share of the heads that begins with head ``first``."""
    return score_mod(score, batch, head + first, q_idx, kv_idx)


def _check_trade(inputs: AttentionInputs, seq_len: int, ring: UlyssesRing) -> None:
    for name, heads in (("query", inputs.query.shape[2]), ("key", inputs.key.shape[2])):
        if heads % ring.ulysses_size:
            raise ValueError(
                f"{name} has {heads} heads with ulysses_size = {ring.ulysses_size}: every rank takes an equal share of "
                "them; use a ulysses_size that divides the numbers of query and key heads."
            )
    chunks = ring.size * (2 if ring.layout_kind == "zigzag" else 1)
    if seq_len % chunks:
        raise ValueError(
            f"seq_len = {seq_len} with ulysses_size = {ring.ulysses_size}: all ranks must hold equally many rows, "
            f"so a {ring.layout_kind} ring of {ring.size} needs a multiple of {chunks}; pad the sequence, and "
            "mask the padding with key_padding_mask."
        )
    if inputs.dropout_p:
        raise ValueError(
            f"dropout_p = {inputs.dropout_p} with ulysses_size > 1: dropout depends on the global index of a head, "
            "and a rank of a Ulysses group knows only local indices; use ulysses_size = 1, or dropout_p = 0."
        )
