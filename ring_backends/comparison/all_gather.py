"""The all-gather method: every rank collects the K and V that it needs, and then computes without communication.

``compare`` compares the ring with this method. For a fair comparison, the method collects only dilated rows of branches
that cross shards, in one collective, and computes the same tiles as the ring. Like the ring, it keeps no collected rows
between forward and backward. The backward collects K and V again. One reduce-scatter sums the ranks' dK and dV.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from ring_backends.engine.call import AttentionInputs, check_call, local_rows
from ring_backends.engine.operators import execute
from ring_backends.engine.results import BlockGrads, BlockOut, Result, results_for
from ring_backends.engine.wire_buffers import RowFormat, WireBuffer
from ring_backends.kernels.base import by_kernel
from ring_backends.kernels.merge import statistics_dtype
from ring_backends.kernels.rows import RowMemory, Rows, gather_many, scatter_many
from ring_backends.kernels.steps import SavedRows, StepRows
from ring_backends.ring.ring import Ring
from ring_backends.ring.wire_memory import CallMemory
from ring_backends.schedule.pattern import DilatedPattern
from ring_backends.schedule.rank_plan import HeadBlock, Parcel, RankPlan, Tile


class _Contributions(WireBuffer):
    """One wire buffer with the contributions of all ranks. It offers the parcels that this rank sends and uses.

    Attributes:
        of_ranks: the buffer as uint8 [ring size, bytes of a contribution].
    """

    def __init__(self, row_format: RowFormat, plans: Sequence[RankPlan], rank: int, device: torch.device) -> None:
        super().__init__(row_format, (), CallMemory(device))
        used = {
            (index, parcel.key): parcel
            for index, block in enumerate(plans[rank].blocks)
            for tile in _tiles(block)
            for parcel in tile.parcels
        }
        offered = used | {(index, parcel.key): parcel for index, parcel in _starting_at(plans[rank])}
        size = _contribution_bytes(row_format, plans)
        self.of_ranks = torch.zeros(len(plans), size, dtype=torch.uint8, device=device)
        self.buffer, self.starts = self.of_ranks.flatten(), {}
        for source, plan in enumerate(plans):
            offset = source * size
            for index, parcel in _starting_at(plan):
                if (index, parcel.key) in offered:
                    self.starts[offered[index, parcel.key]] = offset
                offset += row_format.buffer_bytes([parcel])


class AllGatherExecutor:
    """Computes a call from the collected rows of all ranks, with the same tiles as the ring.

    Attributes:
        call: the attention call of this rank.
        ring: the ring. Its process group runs the collectives.
        forward_plans, backward_plans: the plans of all ranks. They determine the rows that each rank contributes.
    """

    def __init__(self, inputs: AttentionInputs, pattern: DilatedPattern, ring: Ring) -> None:
        inputs, self.call = check_call(inputs, pattern, ring, None, "auto")
        self.ring, calls = ring, [replace(self.call, rank=rank, few_hops=False) for rank in range(ring.size)]
        self.forward_plans = [call.plan(inputs, backward=False) for call in calls]
        self.backward_plans = [call.plan(inputs, backward=True) for call in calls]

    def wire_bytes(self, key: Tensor) -> dict[str, int]:
        """Compute the bytes that each rank sends in the collectives, for the ring algorithms of gloo and NCCL.

        In an all-gather, each rank sends the size of its contribution once for each other rank. A reduce-scatter sends
        as many rows of gradients. gloo implements a reduce-scatter on the CPU as an all-reduce, which sends twice as
        much.
        """
        others = self.ring.size - 1
        row_format, grad_format = self._formats(key)
        gathered = others * _contribution_bytes(row_format, self.forward_plans)
        reduced = others * _contribution_bytes(grad_format, self.backward_plans)
        return {"forward": gathered, "backward": gathered + reduced * (2 if key.device.type == "cpu" else 1)}

    def forward(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor, int, AttentionInputs]:
        """Compute out (shaped as query), the LSE [batch, local seq, heads], a call number and the inputs."""
        out, lse = results_for(inputs.query, inputs.value)
        rows, memory = local_rows(self.call, inputs), RowMemory()
        collected = self._collect(rows, self.forward_plans)
        for block in self.forward_plans[self.ring.rank].blocks:
            here, block_out = rows.block(block), BlockOut(out, lse, block)
            for step in block.steps:
                for kernel, tiles in by_kernel(step.all_tiles, self.call.kernel, self.call.in_place):
                    kernel.forward_step(tiles, here, collected, block_out, memory)
            block_out.finish()
        return out.tensor, lse.tensor, 0, inputs

    def backward(
        self, inputs: AttentionInputs, out: Tensor, lse: Tensor, grad_out: Tensor, call_number: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of query, key and value."""
        query, key, value = inputs.query, inputs.key, inputs.value
        dtype = statistics_dtype(query.dtype)
        grads = Result(query), Result(key, dtype=dtype), Result(value, dtype=dtype)
        rows, memory = local_rows(self.call, inputs), RowMemory()
        collected, saved = self._collect(rows, self.backward_plans), SavedRows(out, lse, grad_out)
        remote = _Contributions(self._formats(key)[1], self.backward_plans, self.ring.rank, key.device)
        for block in self.backward_plans[self.ring.rank].blocks:
            here, its_saved, block_grads = rows.block(block), saved.block(block), BlockGrads(*grads, block)
            for step in block.steps:
                for kernel, tiles in by_kernel(step.all_tiles, self.call.kernel, self.call.in_place):
                    kernel.backward_step(tiles, here, collected, its_saved, block_grads, remote, memory)
            block_grads.finish()
        del collected  # frees memory for the buffers of the reduce-scatter
        grad_query, grad_key, grad_value = (grad.tensor for grad in grads)
        self._reduce_grads(remote, grad_key, grad_value)
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)

    def _collect(self, rows: StepRows, plans: Sequence[RankPlan]) -> WireBuffer:
        """Collect the K and V rows of all ranks with one all-gather."""
        rank, plan = self.ring.rank, plans[self.ring.rank]
        collected = _Contributions(self._formats(rows.key)[0], plans, rank, rows.key.device)
        for index, parcel in _starting_at(plan):
            here = rows.block(plan.blocks[index])
            key, value = collected.slices(parcel)
            gather_many([Rows(here.key, parcel.source, key), Rows(here.value, parcel.source, value)])
        if collected.buffer.numel():
            # all_gather takes a list. The name of the function that takes one tensor depends on the torch release.
            dist.all_gather([*collected.of_ranks], collected.of_ranks[rank].clone(), group=self.ring.group)
        return collected

    def _reduce_grads(self, remote: _Contributions, grad_key: Tensor, grad_value: Tensor) -> None:
        """Sum dK and dV of this rank's rows over all ranks with one reduce-scatter. Add the sums to the gradients."""
        if not remote.buffer.numel():
            return
        parts, plan = remote.of_ranks.view(remote.row_format.dtype), self.backward_plans[self.ring.rank]
        sums = torch.empty_like(parts[0])
        dist.reduce_scatter(sums, [*parts], group=self.ring.group)
        parts[self.ring.rank] = sums
        for index, parcel in _starting_at(plan):
            heads, values = plan.blocks[index].kv_heads, remote.slices(parcel)
            grads = grad_key[:, :, heads], grad_value[:, :, heads]
            scatter_many(added=[Rows(x, parcel.source, y) for x, y in zip(grads, values, strict=True)])

    def _formats(self, key: Tensor) -> tuple[RowFormat, RowFormat]:
        """Return the row formats of K and V, and of dK and dV."""
        row_format = RowFormat(key.shape[0], key.shape[3], key.shape[3], key.dtype)
        return row_format, replace(row_format, dtype=statistics_dtype(key.dtype))


def _contribution_bytes(row_format: RowFormat, plans: Sequence[RankPlan]) -> int:
    """Return the size of the largest contribution. Collectives need contributions of equal size."""
    return max(row_format.buffer_bytes(parcel for _, parcel in _starting_at(plan)) for plan in plans)


def _tiles(block: HeadBlock) -> Iterator[Tile]:
    for step in block.steps:
        assert not step.phantoms, "zero padding is not compared"
        yield from step.all_tiles


def _starting_at(plan: RankPlan) -> Iterator[tuple[int, Parcel]]:
    """Yield (index of the block, parcel) for each parcel that starts on the rank of ``plan``.

    Parcels that the rank receives and sends on are left out.
    """
    (chained,) = plan.deliveries  # without few_hops, there are no lots
    received, block_of_step = {*chained.received}, [index for index, x in enumerate(plan.blocks) for _ in x.steps]
    for index, hop in zip(block_of_step, chained.keys, strict=True):
        for message in hop.sends:
            yield from ((index, parcel) for parcel in message.parcels if parcel not in received)


def all_gather_attention(
    query: Tensor, key: Tensor, value: Tensor, pattern: DilatedPattern, ring: Ring, *, is_causal: bool, seq_len: int
) -> Tensor:
    """Compute dilated attention over a sequence that is sharded over ``ring``, with the all-gather method.

    Args:
        query: [batch, local seq, heads, head_dim].
        key, value: [batch, local seq, key/value heads, head_dim].
        pattern: the dilated pattern. Its padding must be ``"masked"``.
        ring, is_causal, seq_len: as in RingDilatedAttention.

    Returns:
        out, with the shape and dtype of query. It is differentiable.
    """
    assert value.shape == key.shape, "values of another width are not compared"
    inputs = AttentionInputs(query, key, value, is_causal=is_causal, seq_len=seq_len)
    out: Tensor = execute(inputs, AllGatherExecutor(inputs, pattern, ring))
    return out
