"""The forward of ring dilated attention on one rank: posts the next hop, computes the current tiles, merges."""

from __future__ import annotations

from torch import Tensor

from ring_backends.engine.call import AttentionCall, AttentionInputs, local_rows
from ring_backends.engine.sums import BlockOut, Result
from ring_backends.engine.wire import ArrivingKeys, Hops, key_format, report_failure
from ring_backends.kernels.base import by_kernel
from ring_backends.kernels.merge import merge_zero_value_, statistics_dtype
from ring_backends.kernels.rows import RowMemory


def forward(call: AttentionCall, inputs: AttentionInputs, hops: Hops | None) -> tuple[Tensor, Tensor]:
    """Attend from this rank's queries to all keys that they see.

    Returns:
        out [batch, local seq, heads, value_dim], and LSE [batch, local seq, heads] in the statistics dtype. A query
        that sees no key has out 0 and LSE −inf.
    """
    with report_failure(hops):
        query, plan = inputs.query, call.plan(inputs, backward=False)
        out = Result(query, width=inputs.value.shape[3])
        lse = query.new_empty(query.shape[:3], dtype=statistics_dtype(query.dtype))
        rows = local_rows(call, inputs)
        row_format, memory = key_format(rows), RowMemory()
        arriving = [ArrivingKeys(plan, delivery, rows, row_format, hops) for delivery in plan.deliveries]
        for index, (block, step) in enumerate(plan.steps):
            arrived = [keys.advance(index) for keys in arriving]
            if step is block.steps[0]:
                here, block_out = rows.block(block), BlockOut(out, lse, block)
            for of_delivery, parcels in zip(step.tiles, arrived, strict=True):
                for kernel, tiles in by_kernel(of_delivery, call.kernel, call.in_place):
                    kernel.forward_step(tiles, here, parcels, block_out, memory)
            for phantom in step.phantoms:
                block_out.merge_phantom(phantom)
            del arrived, parcels  # so that at most two received buffers exist when the next hop is posted
            if step is block.steps[-1]:
                block_out.finish()
        if inputs.sinks is not None:
            merge_zero_value_(out.tensor, lse, inputs.sinks)
        return out.tensor, lse
